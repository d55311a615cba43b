"""The roles of turns, under the names that datasets use, and lists of turns that are written as a text."""

from __future__ import annotations

import re
from ast import literal_eval
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from draft_heads.data.text.errors import ConversationError
from draft_heads.data.text.json_files import RepeatedKey, parse_json

ROLES = {
    **dict.fromkeys(("system", "developer"), "system"),
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "assistant", "chatgpt", "bard", "bing"), "assistant"),
    "tool": "tool",
}
ROLE_KEYS = ("from", "role")

_TURNS = re.compile(rf"""\s*\[\s*\{{(?s:.*?)["'](?:{"|".join(ROLE_KEYS)})["']\s*:\s*["'](?:{"|".join(ROLES)})["']""")
"""How a list of turns begins that is written as a text: with an object that has a role."""


def is_answer(turn: Any) -> bool:
    """Whether a turn of a row, sound or not, is the assistant's."""
    return isinstance(turn, Mapping) and any(ROLES.get(str(turn.get(key))) == "assistant" for key in ROLE_KEYS)


def parsed_turns(value: Any) -> Any:
    """A list of turns that is written as a text, as JSON or as Python writes it, and any other value as it is.

    ConversationError for one that is cut or has another form, as that of numpy.
    """
    if not isinstance(value, str) or not (_TURNS.match(value) and value.rstrip().endswith("]")):
        return value
    try:
        return parse_json(value)
    except RepeatedKey as error:
        raise ConversationError(f"turns that are a text are JSON in which {error}") from None
    except (ValueError, RecursionError):
        pass
    with suppress(ValueError, SyntaxError, RecursionError, MemoryError):
        return literal_eval(value)
    raise ConversationError(f"turns that are a text are a list in JSON: {value[:40]!r}")
