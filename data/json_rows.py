"""Rows of JSON arrays, JSONL files and hub datasets, each with its location for error messages."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any


class MalformedJson(ValueError):
    """A file or a line that is not JSON."""


def read_json_rows(path: Path) -> Iterator[tuple[str, Any]]:
    """("FILE, line N, row K", record) of a JSON array or a JSONL file; rows count from 0, lines from 1.

    For a malformed JSONL line the record is a MalformedJson. Nothing after a malformed row of an array can be read, so
    there MalformedJson is raised, as it is for an empty file.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise MalformedJson(f"{path} is not UTF-8 text ({error}); pass JSON or JSONL") from None
    if not text.strip():
        raise MalformedJson(f"{path} is empty; pass a file with at least one row")
    yield from _array_rows(path, text) if text.lstrip()[0] == "[" else _line_rows(path, text)


def hub_rows(source: str, split: str | None, config: str | None = None) -> Iterator[tuple[str, Any]]:
    """("SOURCE, split S, row K", record) of a dataset folder or hub id; split None takes `test`, else the first."""
    if Path(source).suffix in {".json", ".jsonl"}:
        raise FileNotFoundError(f"{source} does not exist; pass a JSON or JSONL file or a hub id")
    import datasets  # takes a second

    if (Path(source) / "dataset_info.json").is_file() or (Path(source) / "dataset_dict.json").is_file():
        loaded = datasets.load_from_disk(source)
    else:
        loaded = datasets.load_dataset(source, name=config)
    if isinstance(loaded, datasets.DatasetDict):
        split = split or ("test" if "test" in loaded else next(iter(loaded)))
        if split not in loaded:
            raise ValueError(f"{source} has no split {split!r}; it has: {', '.join(loaded)}")
        loaded = loaded[split]
    for row, record in enumerate(loaded):
        yield f"{source}, split {split}, row {row}", record


def _line_rows(path: Path, text: str) -> Iterator[tuple[str, Any]]:
    row = 0
    for line_number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            record = MalformedJson(f"malformed JSON: {error.msg} at column {error.colno}")
        yield f"{path}, line {line_number}, row {row}", record
        row += 1


def _array_rows(path: Path, text: str) -> Iterator[tuple[str, Any]]:
    decoder = json.JSONDecoder()
    position = _skip_space(text, text.index("[") + 1)
    line, counted, row = 1, 0, 0
    while position < len(text) and text[position] != "]":
        line += text.count("\n", counted, position)
        counted = position
        where = f"{path}, line {line}, row {row}"
        try:
            record, position = decoder.raw_decode(text, position)
        except json.JSONDecodeError as error:
            raise MalformedJson(
                f"{where}: malformed JSON: {error.msg} at line {error.lineno} column {error.colno}; a JSON array "
                "cannot be read past this point: repair it, or write one row a line (JSONL)"
            ) from None
        yield where, record
        row += 1
        position = _skip_space(text, position)
        if position < len(text) and text[position] == ",":
            position = _skip_space(text, position + 1)
        elif position < len(text) and text[position] != "]":
            raise MalformedJson(f"{where}: malformed JSON: no ',' or ']' after the row")
    if position >= len(text):
        raise MalformedJson(f"{path}: malformed JSON: the array is cut short after {row} rows, it has no ']'")
    if text[position + 1 :].strip():
        raise MalformedJson(f"{path}: malformed JSON: text after the end of the array")


def _skip_space(text: str, position: int) -> int:
    while position < len(text) and text[position].isspace():
        position += 1
    return position
