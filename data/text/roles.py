"""The roles of turns, under the names that datasets use."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

ROLES = {
    **dict.fromkeys(("system", "developer"), "system"),
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "assistant", "chatgpt", "bard", "bing"), "assistant"),
    "tool": "tool",
}
ROLE_KEYS = ("from", "role")


def is_answer(turn: Any) -> bool:
    """Whether a turn of a row, sound or not, is the assistant's."""
    return isinstance(turn, Mapping) and any(ROLES.get(str(turn.get(key))) == "assistant" for key in ROLE_KEYS)
