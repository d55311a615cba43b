"""Which messages of a conversation are its last question and its answers, and what an answer says."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from draft_heads.data.text.template_probe import Messages

_NO_PART = {"role", "name", "tool_call_id", "metadata"}  # keys of a message whose text is no part of what it says


def turn_name(messages: Messages, number: int) -> str:
    """A message among those of its role. Example: `assistant turn 2`, the second answer, whether the file has the
    system text as a turn or beside the turns."""
    role = messages[number].get("role")
    return f"{role} turn {sum(message.get('role') == role for message in messages[: number + 1])}"


def trained_answers(messages: Messages) -> list[int]:
    """The number of each message that is an answer to be trained on."""
    return [i for i, m in enumerate(messages) if m["role"] == "assistant" and m.get("trained") is not False]


def without_listed(system: str | None, extra: Mapping[str, Any]) -> dict[str, Any]:
    """A chat template's further arguments, without `tools` that the system text lists itself: it has `"name": "add"`
    of each and, as no call has, a schema's `"properties"` or `"type": "object"`, as JSON or Python write them."""
    tools = extra.get("tools", ())
    known = [tool.get("function", tool) for tool in tools if isinstance(tool, Mapping)]
    names = [one.get("name") for one in known if isinstance(one, Mapping)]
    quote = r"""\\*["']"""
    forms = [rf"{quote}name{quote}\s*:\s*{quote}{re.escape(str(name))}{quote}" for name in names]
    listed = 0 < len(names) == len(tools) and all(re.search(form, system or "") for form in forms)
    schema = rf"{quote}properties{quote}\s*:|{quote}type{quote}\s*:\s*{quote}object{quote}"
    if not (listed and re.search(schema, system or "")):
        return dict(extra)
    return {name: value for name, value in extra.items() if name != "tools"}


def texts_of(answer: dict[str, Any]) -> list[str]:
    """What an answer says: its words, its thought."""
    return [answer[key] for key in sorted(answer.keys() - _NO_PART) if isinstance(answer[key], str)]


def last_question(messages: Messages) -> int:
    """The number of the last message of a user; −1 without one."""
    return max((number for number, message in enumerate(messages) if message["role"] == "user"), default=-1)
