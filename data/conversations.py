"""Conversations from ShareGPT or messages JSON(L), or a hub id, as rows of `id` and `messages`.

    [{"id": "a", "conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello."}]}]
    {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello."}]}

A bad row stops the load with file, line, row and reason; with `skip_bad_rows` it is listed instead. `data.rendering`
turns messages into token ids.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import datasets

from draft_heads.data.json_rows import MalformedJson, hub_rows, read_json_rows
from draft_heads.data.rendering import ConversationError

logger = logging.getLogger(__name__)

ROLES = {
    "system": "system",
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "assistant", "chatgpt", "bard", "bing"), "assistant"),
}
FEATURES = datasets.Features(
    {
        "id": datasets.Value("string"),
        "messages": datasets.List({"role": datasets.Value("string"), "content": datasets.Value("string")}),
    }
)


@dataclass
class Conversations:
    """What a source holds, and the rows that could not be used."""

    dataset: datasets.Dataset  # columns `id` and `messages`
    bad_rows: list[str] = field(default_factory=list)  # "FILE, line N, row K: reason" of each
    repeated: int = 0  # rows left out as an earlier one has the same user turns (only when answers are generated)


def load_conversations(source: str, split: str = "train", skip_bad_rows: bool = False) -> datasets.Dataset:
    """The rows of a JSON or JSONL file, a dataset folder or a hub id; see `read_conversations` for the bad ones."""
    return read_conversations(source, split, skip_bad_rows).dataset


def read_conversations(source: str, split: str = "train", skip_bad_rows: bool = False) -> Conversations:
    """Read `source`; ConversationError at the first bad row, or every bad row listed with `skip_bad_rows`."""
    bad_rows: list[str] = []
    ids: list[str] = []
    rows: list[list[dict[str, str]]] = []
    records = read_json_rows(Path(source)) if Path(source).is_file() else hub_rows(source, split)
    for row, (where, record) in enumerate(records):
        try:
            if isinstance(record, MalformedJson):
                raise ConversationError(str(record))
            row_id, messages = parse_record(record)
        except ConversationError as error:
            bad = f"{where}: {error}"
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
    _check_roles(messages)
    row_id = record.get("id")
    return (str(row_id) if row_id is not None else None), messages


def _check_roles(messages: list[dict[str, str]]) -> None:
    """ConversationError unless the roles are [system], user, assistant, user, … with at least one assistant turn."""
    if not messages:
        raise ConversationError("the conversation is empty")
    roles = [message["role"] for message in messages]
    first = int(roles[0] == "system")
    for number, role in enumerate(roles[first:], start=first):
        if role == ("user", "assistant")[(number - first) % 2]:
            continue
        if role == "system":
            raise ConversationError(f"turn {number} is a system turn; only the first turn may be")
        if number == first:
            raise ConversationError("the conversation starts with the assistant; the first turn is the user's")
        raise ConversationError(f"turns {number - 1} and {number} are both of the {role}; roles must alternate")
    if "assistant" not in roles:
        raise ConversationError("the conversation has no assistant turn")
    for number, message in enumerate(messages):
        if message["role"] == "assistant" and not message["content"].strip():
            raise ConversationError(f"turn {number} (assistant) is blank")
