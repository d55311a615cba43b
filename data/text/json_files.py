"""Rows of one JSON array or JSONL file, also as .gz, with their places; JSON in which no key comes twice."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO

BYTE_ORDER_MARK, GZIP, _LFS = b"\xef\xbb\xbf", b"\x1f\x8b", b"version https://git-lfs"


class MalformedJson(ValueError):
    """A file or a line that is not JSON."""


class RepeatedKey(MalformedJson):
    """JSON in which an object has a key twice: all values but the last would be lost."""


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The object of these keys and values; RepeatedKey for a key that comes twice."""
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        repeated = next(key for key in keys if keys.count(key) > 1)
        raise RepeatedKey(f"an object has a key twice: {repeated!r}; keep one of them")
    return found


_DECODER = json.JSONDecoder(object_pairs_hook=_unique_keys)  # one for all: `json.loads` with a hook makes one a call


def parse_json(text: str) -> Any:
    """The value of a JSON text; ValueError for malformed JSON, RepeatedKey among them."""
    return _DECODER.decode(text)


def local_rows(path: Path) -> Iterator[tuple[str, Any]]:
    try:
        with path.open("rb") as file:
            zipped = path.suffix.lower() == ".gz" or file.peek(len(GZIP)).startswith(GZIP)
            yield from file_rows(path, gzip.GzipFile(fileobj=file) if zipped else file)  # type: ignore[arg-type]
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise MalformedJson(f"{path} is damaged or cut short ({error}); copy it again") from None


def file_rows(path: Path | str, file: BinaryIO) -> Iterator[tuple[str, Any]]:
    lines = enumerate(file, start=1)
    start, first = next((one for one in lines if one[1].removeprefix(BYTE_ORDER_MARK).strip()), (0, b""))
    if not start:
        raise MalformedJson(f"{path} is empty; pass a file with at least one row")
    if first.startswith(_LFS):
        raise MalformedJson(f"{path} is a pointer of Git LFS in place of the file; run git lfs pull in its repository")
    if first.removeprefix(BYTE_ORDER_MARK).lstrip().startswith(b"["):
        try:
            yield from _array_rows(path, (first + file.read()).decode("utf-8-sig"))
        except UnicodeDecodeError as error:
            raise MalformedJson(f"{path} is not UTF-8 text ({error}); save it as UTF-8") from None
        return
    for number, line in chain([(start, first)], lines):
        if line.strip():
            yield f"line {number}", _parsed_line(line)


def _parsed_line(line: bytes) -> Any:
    try:
        return parse_json(line.decode("utf-8-sig"))
    except RepeatedKey as error:
        return error
    except UnicodeDecodeError as error:
        return MalformedJson(f"not UTF-8 text: {error.reason} at byte {error.start + 1}")
    except json.JSONDecodeError as error:
        indented = "; a file is a JSON array, or JSONL with a row on each line" if line.strip() == b"{" else ""
        return MalformedJson(f"malformed JSON: {error.msg} at column {error.colno}{indented}")
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, brackets a thousand deep
        return MalformedJson(f"JSON that cannot be read: {error}")


def _array_rows(path: Path | str, text: str) -> Iterator[tuple[str, Any]]:
    row, position = 0, _skip_space(text, text.index("[") + 1)
    try:
        while not text.startswith("]", position):
            row += 1
            record, position = _decode_at(text, position)
            yield f"row {row}", record
            position = _skip_space(text, position)
            if text.startswith(",", position):
                position = _skip_space(text, position + 1)
            elif not text.startswith("]", position):
                raise json.JSONDecodeError("no ',' or ']' after the row", text, position)
        if text[position + 1 :].strip():
            raise json.JSONDecodeError("text after the end of the array", text, position + 1)
    except json.JSONDecodeError as error:
        raise MalformedJson(
            f"{path}, row {row}: malformed JSON: {error.msg} at line {error.lineno} column {error.colno}; a JSON "
            "array cannot be read past this point: repair it, or write one row per line (JSONL)"
        ) from None
    except (ValueError, RecursionError) as error:
        raise MalformedJson(f"{path}, row {row}: JSON that cannot be read: {error}; repair the row") from None


def _decode_at(text: str, position: int) -> tuple[Any, int]:
    """(the value that begins there, where it ends); the value is a RepeatedKey if an object in it has a key twice."""
    try:
        return _DECODER.raw_decode(text, position)
    except RepeatedKey as error:
        return error, json.JSONDecoder().raw_decode(text, position)[1]


def _skip_space(text: str, position: int) -> int:
    while position < len(text) and text[position].isspace():
        position += 1
    return position
