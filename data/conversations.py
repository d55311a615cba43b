"""Conversations from ShareGPT or messages JSON(L), or a hub id, as rows of `id` and `messages`.

    [{"id": "a", "conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello."}]}]
    {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello."}]}

A bad row stops the load with file, line, row and reason; with `skip_bad_rows` it is listed instead. How messages
become token ids is `data.rendering`'s job; its two functions are offered here too.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import datasets

from data.rendering import ConversationError, render_conversation, render_prompt

__all__ = [
    "BadRow",
    "ConversationError",
    "Conversations",
    "check_messages",
    "load_conversations",
    "read_conversations",
    "render_conversation",
    "render_prompt",
]

logger = logging.getLogger(__name__)

ROLES = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "chatgpt": "assistant",
    "bard": "assistant",
    "bing": "assistant",
}
FEATURES = datasets.Features(
    {
        "id": datasets.Value("string"),
        "messages": datasets.List({"role": datasets.Value("string"), "content": datasets.Value("string")}),
    }
)


@dataclass(frozen=True)
class BadRow:
    """A row that cannot be used: `row` counts from 0, `where` names file, line and row for people."""

    row: int
    where: str
    reason: str

    def __str__(self) -> str:
        return f"{self.where}: {self.reason}"


@dataclass
class Conversations:
    """What a source holds: `dataset` with columns `id` and `messages`, and the rows that could not be used."""

    dataset: datasets.Dataset
    bad_rows: list[BadRow] = field(default_factory=list)


def load_conversations(source: str, split: str = "train", skip_bad_rows: bool = False) -> datasets.Dataset:
    """The rows of a JSON or JSONL file, a dataset folder or a hub id; see `read_conversations` for the bad ones."""
    return read_conversations(source, split, skip_bad_rows).dataset


def read_conversations(source: str, split: str = "train", skip_bad_rows: bool = False) -> Conversations:
    """Read `source`; ConversationError at the first bad row, or every bad row listed with `skip_bad_rows`."""
    bad_rows: list[BadRow] = []
    ids: list[str] = []
    rows: list[list[dict[str, str]]] = []
    for row, (where, record) in enumerate(_records(source, split)):
        try:
            if isinstance(record, json.JSONDecodeError):
                raise ConversationError(f"malformed JSON: {record.msg} at column {record.colno}")
            row_id, messages = parse_record(record)
        except ConversationError as error:
            bad = BadRow(row, where, str(error))
            if not skip_bad_rows:
                raise ConversationError(f"{bad}; repair the row or pass --skip_bad_rows to list it") from None
            logger.warning("skipped %s", bad)
            bad_rows.append(bad)
            continue
        ids.append(row_id if row_id is not None else f"row-{row}")
        rows.append(messages)
    if not rows:
        found = f"all {len(bad_rows)} rows are bad, the first: {bad_rows[0]}" if bad_rows else "no rows"
        raise ConversationError(f"{source} holds no conversation: {found}; pass a file with at least one")
    dataset = datasets.Dataset.from_dict({"id": ids, "messages": rows}, features=FEATURES)
    return Conversations(dataset, bad_rows)


def parse_record(record: Any) -> tuple[str | None, list[dict[str, str]]]:
    """(id or None, messages) of one ShareGPT or messages record; ConversationError with the reason if it is bad."""
    if not isinstance(record, dict):
        raise ConversationError(f"a row is an object, received {type(record).__name__}")
    if "conversations" in record:
        turns, role_key, text_key = record["conversations"], "from", "value"
    elif "messages" in record:
        turns, role_key, text_key = record["messages"], "role", "content"
    else:
        keys = ", ".join(sorted(map(str, record))) or "none"
        raise ConversationError(f"a row has the key 'conversations' or 'messages', received the keys: {keys}")
    if not isinstance(turns, list):
        raise ConversationError(f"the turns are a list, received {type(turns).__name__}")
    messages = []
    for number, turn in enumerate(turns):
        if not isinstance(turn, dict):
            raise ConversationError(f"turn {number} is an object, received {type(turn).__name__}")
        for key in (role_key, text_key):
            if key not in turn:
                raise ConversationError(f"turn {number} has no key {key!r}")
        role, text = turn[role_key], turn[text_key]
        if not isinstance(role, str) or role not in ROLES:
            raise ConversationError(f"turn {number} has the unknown role {role!r}; known: {', '.join(ROLES)}")
        if not isinstance(text, str):
            raise ConversationError(f"turn {number} ({role}): text is a string, received {type(text).__name__}")
        messages.append({"role": ROLES[role], "content": text})
    check_messages(messages)
    row_id = record.get("id")
    return (str(row_id) if row_id is not None else None), messages


def check_messages(messages: list[dict[str, str]]) -> None:
    """ConversationError unless the roles are [system], user, assistant, user, … with at least one assistant turn."""
    if not messages:
        raise ConversationError("the conversation is empty")
    dialogue = messages[1:] if messages[0]["role"] == "system" else messages
    for number, (turn, expected) in enumerate(zip(dialogue, _alternating()), len(messages) - len(dialogue)):
        role = turn["role"]
        if role == expected:
            continue
        if role == "system":
            raise ConversationError(f"turn {number} is a system turn; only the first turn may be")
        if number == len(messages) - len(dialogue):
            raise ConversationError("the conversation starts with the assistant; the first turn is the user's")
        raise ConversationError(f"turns {number - 1} and {number} are both of the {role}; roles alternate")
    if all(turn["role"] != "assistant" for turn in messages):
        raise ConversationError("the conversation has no assistant turn")
    for number, turn in enumerate(messages):
        if turn["role"] == "assistant" and not turn["content"].strip():
            raise ConversationError(f"turn {number} (assistant) is blank")


def _alternating() -> Iterator[str]:
    while True:
        yield "user"
        yield "assistant"


def _records(source: str, split: str) -> Iterator[tuple[str, Any]]:
    """(where, record) per row; a malformed JSON line comes as its JSONDecodeError."""
    path = Path(source)
    if path.is_file():
        yield from read_json_rows(path)
        return
    if path.suffix in {".json", ".jsonl"}:
        raise FileNotFoundError(f"--dataset {source} does not exist; pass a JSON or JSONL file or a hub id")
    if (path / "dataset_info.json").is_file() or (path / "dataset_dict.json").is_file():
        loaded = datasets.load_from_disk(str(path))
        if isinstance(loaded, datasets.DatasetDict):
            if split not in loaded:
                raise ValueError(f"{source} has no split {split!r}; it has: {', '.join(loaded)}")
            loaded = loaded[split]
    else:
        loaded = datasets.load_dataset(source, split=split)
    for row, record in enumerate(loaded):
        yield f"{source}, split {split}, row {row}", record


def read_json_rows(path: Path) -> Iterator[tuple[str, Any]]:
    """("FILE, line N, row K", record) of a JSON array or a JSONL file, rows counted from 0 and lines from 1.

    In JSONL a malformed line yields its JSONDecodeError; in an array nothing after a malformed row can be read, so
    the error is raised. An empty file raises ConversationError.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConversationError(f"{path} is not UTF-8 text ({error}); pass JSON or JSONL") from None
    if not text.strip():
        raise ConversationError(f"{path} is empty; pass a file with at least one row")
    if text.lstrip()[0] == "[":
        yield from _array_rows(path, text)
        return
    row = 0
    for line_number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        where = f"{path}, line {line_number}, row {row}"
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            record = error
        yield where, record
        row += 1


def _array_rows(path: Path, text: str) -> Iterator[tuple[str, Any]]:
    decoder = json.JSONDecoder()
    position, line, row = _skip_space(text, text.index("[") + 1), 1, 0
    counted = 0
    while position < len(text) and text[position] != "]":
        line += text.count("\n", counted, position)
        counted = position
        where = f"{path}, line {line}, row {row}"
        try:
            record, position = decoder.raw_decode(text, position)
        except json.JSONDecodeError as error:
            raise ConversationError(
                f"{where}: malformed JSON: {error.msg} at line {error.lineno} column {error.colno}; a JSON array "
                "cannot be read past this point: repair it, or write one row a line (JSONL) to use --skip_bad_rows"
            ) from None
        yield where, record
        row += 1
        position = _skip_space(text, position)
        if position < len(text) and text[position] == ",":
            position = _skip_space(text, position + 1)
        elif position < len(text) and text[position] != "]":
            raise ConversationError(f"{where}: malformed JSON: expected ',' or ']' after the row")
    if position >= len(text):
        raise ConversationError(f"{path}: malformed JSON: the array is cut short after row {row - 1}, no ']'")
    if text[position + 1 :].strip():
        raise ConversationError(f"{path}: malformed JSON: text after the end of the array")


def _skip_space(text: str, position: int) -> int:
    while position < len(text) and text[position].isspace():
        position += 1
    return position
