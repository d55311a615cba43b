"""Whether a chat template reads what a conversation has beside its roles and texts; if not, it is refused."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

_OF_A_RESULT = ("tool_call_id", "name")
"""Keys of a tool's turn that name the call which its text answers; templates may do without."""


def unread_key(
    template: str, text: Callable[..., str], messages: list[dict[str, Any]], extra: Mapping[str, Any] | None = None
) -> str | None:
    """What `template` does not read of a message's or `extra`'s keys, the first of them; None where it reads all.

    `text(messages, add_generation_prompt=…, extra=…)` renders. A key is read if the conversation, or its part that ends
    with the message, reads otherwise without it: templates may leave the thoughts of earlier turns out. A setting in
    `extra` (a boolean, a word) may be the template's default, so it is read if the template has its name.
    """
    extra = dict(extra or {})

    def rendered(some: list[dict[str, Any]], arguments: dict[str, Any], prompt: bool = False) -> str | None:
        try:
            return text(some, add_generation_prompt=prompt, extra=arguments)
        except ValueError:  # refused: without the key it is another conversation
            return None

    for name, value in extra.items():
        if isinstance(value, list | dict):
            asked, rest = _up_to_a_question(messages), {key: one for key, one in extra.items() if key != name}
            read = rendered(asked, extra, prompt=True) != rendered(asked, rest, prompt=True)
        else:
            read = re.search(rf"\b{re.escape(name)}\b", template) is not None
        if not read:
            return repr(name)
    for number, message in enumerate(messages):
        for name in sorted(message.keys() - {"role", "content", "trained"}):
            if message["role"] == "tool" and name in _OF_A_RESULT:
                continue
            without = list(messages)
            without[number] = {key: value for key, value in message.items() if key != name}
            ends = (number + 1, len(messages))
            if all(rendered(messages[:end], extra) == rendered(without[:end], extra) for end in ends):
                return repr(name)
        if message["role"] == "tool":
            other = [*messages[:number], {**message, "content": "SAMPLERESULT"}, *messages[number + 1 :]]
            if rendered(messages, extra) == rendered(other, extra):
                return "the text of a tool turn"
    return None


def _up_to_a_question(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages up to the user's last one: a prompt."""
    last = max((number for number, message in enumerate(messages) if message["role"] == "user"), default=len(messages))
    return messages[: last + 1]
