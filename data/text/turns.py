"""Which messages of a conversation are its last question and its answers, and what an answer says."""

from __future__ import annotations

from typing import Any

from draft_heads.data.text.template_probe import Messages

_NO_PART = {"role", "name", "tool_call_id"}  # keys of a message whose text is no part of what it says


def trained_answers(messages: Messages) -> list[int]:
    """The number of each message that is an answer to be trained on."""
    return [i for i, m in enumerate(messages) if m["role"] == "assistant" and m.get("trained") is not False]


def texts_of(answer: dict[str, Any]) -> list[str]:
    """What an answer says: its words, its thought."""
    return [answer[key] for key in sorted(answer.keys() - _NO_PART) if isinstance(answer[key], str)]


def last_question(messages: Messages) -> int:
    """The number of the last message of a user; −1 without one."""
    return max((number for number, message in enumerate(messages) if message["role"] == "user"), default=-1)
