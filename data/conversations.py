"""Conversations from ShareGPT or messages JSON(L), or a hub id, as rows of `id`, `place` and `messages`.

    [{"id": "a", "conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello."}]}]
    {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello."}]}

The first bad row stops the load with file, row and reason. With `skip_bad_rows` its sound turns are kept: assistant
turns before the first user turn are left out, and the conversation ends before the first bad turn. A row without a
question and its answer is dropped. Every row that was trimmed or dropped is listed. `data.rendering` turns messages
into token ids.
"""

from __future__ import annotations

import json
import logging
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from draft_heads.data.json_rows import MalformedJson, read_rows
from draft_heads.data.rendering import ConversationError

if TYPE_CHECKING:  # decoding and benchmarks need no `datasets`
    import datasets

logger = logging.getLogger(__name__)

ROLES = {
    "system": "system",
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "assistant", "chatgpt", "bard", "bing"), "assistant"),
}
SKIP_BAD_ROWS_HELP = "keep the sound turns of bad rows, and list what is left out, instead of stopping"
_EARLY_ANSWER = "an assistant turn before the first user turn"


@dataclass(frozen=True)
class BadRow:
    """One fault of one row."""

    place: str  # "line 3" of a JSONL file, else "row 3"
    reason: str  # "an empty answer"
    detail: str = ""  # "turn 4", or what is wrong with the JSON
    kept_turns: int = 0  # 0: the row is dropped

    @property
    def outcome(self) -> str:
        return "trimmed" if self.kept_turns else "dropped"

    def __str__(self) -> str:
        return f"{self.place}: {self.reason}" + (f" ({self.detail})" if self.detail else "")


@dataclass
class Conversations:
    """What was read of a source, and what is wrong with its rows."""

    source: str
    dataset: datasets.Dataset  # columns id, messages, place: "line 3" or "row 3", where the row is in its file
    bad_rows: list[BadRow] = field(default_factory=list)  # in the order of the file
    repeated: int = 0  # rows left out because an earlier one has the same system and user turns (`distinct`)


def load_conversations(source: str, split: str = "train", skip_bad_rows: bool = False) -> datasets.Dataset:
    """The rows of a JSON or JSONL file, a dataset folder or a hub id; see `read_conversations` for the bad ones."""
    return read_conversations(source, split, skip_bad_rows).dataset


def read_conversations(
    source: str, split: str = "train", skip_bad_rows: bool = False, limit: int | None = None, distinct: bool = False
) -> Conversations:
    """Read `source` up to the `limit`th sound row; ConversationError at the first bad row unless `skip_bad_rows`.

    distinct: leave out rows whose system and user turns are those of an earlier row, and count them
    """
    import datasets

    found = Conversations(source, datasets.Dataset.from_dict({}))
    columns: dict[str, list[Any]] = {"id": [], "place": [], "messages": []}
    seen: set[str] = set()
    for place, record in read_rows(source, split):
        row_id, messages, faults = _sound_part(place, record)
        if faults and not skip_bad_rows:
            raise ConversationError(
                f"{source}, {faults[0]}; repair the row, or pass --skip_bad_rows to keep the sound turns of such rows "
                "and list what is left out"
            )
        found.bad_rows += faults
        if not messages:
            continue
        if distinct:
            asked = json.dumps([turn for turn in messages if turn["role"] != "assistant"], sort_keys=True)
            if asked in seen:
                found.repeated += 1
                continue
            seen.add(asked)
        for name, value in (("id", row_id), ("place", place), ("messages", messages)):
            columns[name].append(value)
        if len(columns["id"]) == limit:
            break
    for line in count_by_reason(found.bad_rows):
        logger.warning("%s: %s", source, line)
    if not columns["id"]:
        bad = found.bad_rows
        reason = f"all {len(bad)} rows are bad, the first: {bad[0]}" if bad else "no rows"
        raise ConversationError(f"{source} holds no conversation: {reason}; pass a file with at least one")
    text = datasets.Value("large_string")  # a column of "string" ends at 2 GiB
    features = {"id": text, "place": text, "messages": datasets.List({"role": text, "content": text})}
    found.dataset = datasets.Dataset.from_dict(columns, features=datasets.Features(features))
    return found


def count_by_reason(bad_rows: Sequence[BadRow]) -> list[str]:
    """`3 rows trimmed: an empty answer (line 4, line 9, …)` for each outcome and reason, the most frequent first."""
    places: dict[tuple[str, str], list[str]] = defaultdict(list)
    for bad in bad_rows:
        places[bad.outcome, bad.reason].append(bad.place)
    return [
        f"{len(rows):,} {'row' if len(rows) == 1 else 'rows'} {outcome}: {reason} ({', '.join(rows[:3])}"
        f"{', …' if len(rows) > 3 else ''})"
        for (outcome, reason), rows in sorted(places.items(), key=lambda item: -len(item[1]))
    ]


def parse_record(record: Any) -> tuple[str | None, list[dict[str, str]]]:
    """(id or None, messages) of one ShareGPT or messages record; ConversationError with the reason if it is bad."""
    _, messages, faults = _sound_part("row 1", record)
    if faults:
        raise ConversationError(str(faults[0]).removeprefix("row 1: "))
    return (None if record.get("id") is None else str(record["id"])), messages


def turns_of(record: Any) -> tuple[list[Any], str, str]:
    """(turns, the key of a turn's role, the key of its text); ConversationError for a record that has no turns."""
    if not isinstance(record, dict):
        raise ConversationError(f"a row is an object, received {type(record).__name__}")
    for key, role_key, text_key in (("conversations", "from", "value"), ("messages", "role", "content")):
        if key in record:
            if not isinstance(record[key], list):
                raise ConversationError(f"the turns are a list, received {type(record[key]).__name__}")
            return record[key], role_key, text_key
    keys = ", ".join(sorted(map(str, record))) or "none"
    raise ConversationError(f"a row has the key 'conversations' or 'messages', received the keys {keys}")


def _sound_part(place: str, record: Any) -> tuple[str, list[dict[str, str]], list[BadRow]]:
    """(id, sound messages, faults) of a record; no messages: it is dropped. A sound record has no faults."""
    messages: list[dict[str, str]] = []
    faults: dict[str, str] = {}  # reason → detail
    try:
        if isinstance(record, MalformedJson):
            raise ConversationError(str(record))
        turns, role_key, text_key = turns_of(record)
    except ConversationError as error:
        reason, _, detail = str(error).partition(": ")
        return "", [], [BadRow(place, reason, detail)]
    for number, turn in enumerate(turns, start=1):
        fault = _fault(turn, role_key, text_key, messages)
        if fault is not None:
            faults.setdefault(fault, f"turn {number}")
            if fault != _EARLY_ANSWER:
                break
        else:
            messages.append({"role": ROLES[turn[role_key]], "content": turn[text_key]})
    if all(message["role"] != "assistant" for message in messages):
        if not faults:
            faults["the conversation has no assistant turn" if messages else "the conversation is empty"] = ""
        messages = []
    row_id = record.get("id")
    name = f"row-{place.split()[1]}" if row_id is None else _encodable(str(row_id))
    return name, messages, [BadRow(place, *fault, len(messages)) for fault in faults.items()]


def _fault(turn: Any, role_key: str, text_key: str, before: list[dict[str, str]]) -> str | None:
    """Why a turn cannot follow the sound messages `before` it; None if it can."""
    if not isinstance(turn, dict):
        return f"a turn is an object, received {type(turn).__name__}"
    for key in (role_key, text_key):
        if key not in turn:
            return f"a turn has no key {key!r}"
    name, text = turn[role_key], turn[text_key]
    if not isinstance(name, str) or name not in ROLES:
        return f"the role {name!r} is none of {', '.join(ROLES)}"
    role, last = ROLES[name], before[-1]["role"] if before else "system"
    if role == "assistant" and last == "system":
        return _EARLY_ANSWER
    if role == "system" and before:
        return "a system turn that is not the first turn"
    if role == last != "system":
        return f"two {role} turns in a row"
    if role == "assistant" and (text is None or (isinstance(text, str) and not text.strip())):
        return "an empty answer"
    if not isinstance(text, str):
        return f"the text of a turn is a string, received {type(text).__name__}"
    if _encodable(text) != text:
        return "half a surrogate pair, which is no character"
    return None


def _encodable(text: str) -> str:
    """`text` with half surrogate pairs, which JSON escapes can hold and UTF-8 cannot, replaced by `?`."""
    return text.encode(errors="replace").decode()
