"""Which list of a row holds its turns, for conversations and benchmarks alike."""

from __future__ import annotations

from typing import Any

from draft_heads.data.text.errors import ConversationError
from draft_heads.data.text.roles import parsed_turns
from draft_heads.data.text.row_keys import TURN_LISTS, said, without_none


def turns_of(record: Any) -> tuple[list[Any], str]:
    """(turns, the key of the row that holds them); ConversationError for a record that has no turns, or two lists."""
    if not isinstance(record, dict):
        raise ConversationError(f"a row is an object, received {type(record).__name__}")
    row = without_none(record)
    row |= {key: parsed_turns(row[key]) for key in TURN_LISTS if key in row}
    lists = [key for key in TURN_LISTS if key in row]
    # an empty list is a column of the other form
    found = [key for key in lists if row[key] != []] or [key for key in ("prompt",) if key in row] or lists[:1]
    for other in found[1:]:
        if not _same_turns(row[found[0]], row[other]):
            raise ConversationError(f"a row has one list of turns, received {found[0]!r} and {other!r}, which differ")
    if not found:
        keys = ", ".join(sorted(map(str, row))) or "none"
        raise ConversationError(
            f"a row has the key 'conversations' or 'messages', received the keys {keys} (write rows of another form as "
            '{"messages": [{"role": "user", "content": "…"}, …]}, or for labels generate as {"prompt": "…"})'
        )
    turns = parsed_turns(row[found[0]])
    if found[0] == "prompt" and isinstance(turns, str):
        turns = [{"role": "user", "content": turns}]
    if not isinstance(turns, list):
        raise ConversationError(
            f"the turns are a list, received {type(turns).__name__}; write them as one, in JSONL for example"
        )
    return turns, found[0]


def _same_turns(one: Any, other: Any) -> bool:
    """Whether two lists hold the same turns, be it in two forms."""
    if one == other or not (isinstance(one, list) and isinstance(other, list)):
        return bool(one == other)
    return [said(turn) for turn in one] == [said(turn) for turn in other]
