"""What a chat template makes of the texts of a conversation, found by rendering samples; its source is not interpreted.

A sample's texts are unlike any other, so that all else in its rendering is the template's own.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from functools import cached_property
from typing import Any, NamedTuple

import jinja2

from draft_heads.data.text.thoughts import MARKS

Messages = list[dict[str, Any]]
"""Messages as chat templates read them: `role`, `content`, and what else a template knows (`reasoning_content`,
`tool_calls`, `name`, …). An assistant message with `"trained": False` is rendered and its tokens are not trained; the
template does not see that key."""
Render = Callable[[Messages, bool], str]
"""(messages, whether with the generation prompt) → text; ValueError where the template refuses the messages."""
Encode = Callable[[str], tuple[list[int], list[tuple[int, int]]]]
"""text → (token ids [L], the characters [start, end) of each)."""

RULES = {"role": "system", "content": "SAMPLERULES"}
QUESTION = {"role": "user", "content": "SAMPLEQUESTION"}
ANSWER = {"role": "assistant", "content": "SAMPLEANSWER"}
CALL: dict[str, Any] = {"role": "assistant", "content": ""}
CALL |= {"tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {"a": "b"}}}]}
RESULT = {"role": "tool", "content": "SAMPLERESULT", "name": "f"}
FOLLOW_UP = {"role": "user", "content": "SAMPLEFOLLOWUP"}
THOUGHT = {"content": "SAMPLETHOUGHT"}
SAMPLE_TOOLS = (
    "{%- set tools = tools or [{'type': 'function', 'function': {'name': 'f', 'description': 'd', 'parameters': "
    "{'type': 'object', 'properties': {}, 'required': []}}}] -%}"
)
"""What stands before a template that may refuse conversations without tools."""
SOME = -1
"""In a scaffold: any few tokens."""


def as_parts(message: dict[str, Any]) -> dict[str, Any]:
    """The message with its text as content parts."""
    if not isinstance(message.get("content"), str):
        return message
    return {**message, "content": [{"type": "text", "text": message["content"]}]}


def with_json_arguments(message: dict[str, Any]) -> dict[str, Any]:
    """The message with the arguments of its calls as JSON texts, spaced as `tojson` spaces them."""

    def of(call: dict[str, Any]) -> dict[str, Any]:
        if "function" in call:
            return {**call, "function": of(call["function"])}
        if isinstance(call.get("arguments", ""), str):
            return call
        return {**call, "arguments": json.dumps(call["arguments"], ensure_ascii=False)}

    calls = message.get("tool_calls")
    return {**message, "tool_calls": [of(call) for call in calls]} if calls else message


class MessageForm(NamedTuple):
    """The form in which a chat template reads messages."""

    parts: frozenset[str] = frozenset()
    """The roles whose text it reads as content parts, not as a string."""
    json_arguments: bool = False
    """Whether it reads the arguments of calls as JSON texts, the form of OpenAI's API, not as objects."""

    def of(self, messages: Messages) -> Messages:
        """The messages, texts and objects, in this form."""
        formed = [as_parts(message) if message.get("role") in self.parts else message for message in messages]
        return [with_json_arguments(message) for message in formed] if self.json_arguments else formed


def message_form(render: Render) -> MessageForm:
    """The form that a template reads; ValueError as `roles_of_parts`."""
    form = MessageForm(roles_of_parts(render))
    as_they_are = writes_arguments_as_they_are(lambda some, asked: render(form.of(some), asked))
    return form._replace(json_arguments=as_they_are)


def writes_arguments_as_they_are(render: Render) -> bool:
    """Whether a template writes the arguments of a call as it gets them, so that they are to be JSON texts.

    It makes Python's form, `{'a': 'b'}`, of an object, or refuses it.
    """
    sample, own = {"name": "f", "arguments": {"a": "b"}}, {"id": "call00001"}  # some templates look for an id of 9
    for calls in ([{**own, "type": "function", "function": sample}], [{**own, **sample}]):
        for opening in ([], [RULES]):  # some templates refuse conversations without
            said = {**CALL, "tool_calls": calls}
            with suppress(ValueError):
                text = render([*opening, QUESTION, with_json_arguments(said)], False)
                if '{"a": "b"}' in text and """'{"a": "b"}""" not in text:
                    try:
                        return "{'a'" in render([*opening, QUESTION, said], False)
                    except ValueError:
                        return True
    return False


def roles_of_parts(render: Render) -> frozenset[str]:
    """The roles whose text a template reads as content parts, `[{"type": "text", "text": …}]`, not as a string.

    ValueError for a template that renders a user's text in neither form. One that refuses every sample is left to its
    own words.
    """

    def shows(role: str, messages: Messages, parts: frozenset[str]) -> bool | None:
        """Whether all texts of a role are in the rendering; None where the messages are refused."""
        for opening in ([], [RULES]):  # some templates refuse conversations without
            with suppress(ValueError):
                text = render(MessageForm(parts).of([*opening, *messages]), False)
                return all(message["content"] in text for message in messages if message["role"] == role)
        return None

    turns = [QUESTION, ANSWER, FOLLOW_UP]  # some templates show the first or the last question alone
    samples: dict[str, tuple[Messages, ...]] = {"user": ([QUESTION], turns), "assistant": (turns,)}
    samples |= {"system": ([RULES, *turns[:2]], [RULES, QUESTION]), "tool": ([QUESTION, CALL, RESULT],)}
    parts: frozenset[str] = frozenset()
    for role in samples:
        tries = [(sample, form) for sample in samples[role] for form in (parts, parts | {role})]
        shown = next((form for sample, form in tries if shows(role, sample, form)), None)
        if role == "user" and shown is None and any(shows(role, *one) is not None for one in tries):
            raise ValueError("it renders no user's text, neither from a string nor from content parts")
        parts = parts if shown is None else shown
    return parts


class TemplateProbe:
    """The tokens that one chat template adds to texts."""

    def __init__(
        self, source: str, render: Render, encode: Encode, special: frozenset[int], added: frozenset[int]
    ) -> None:
        """special: special tokens that are no text, end tokens included; added: also tokens that are never split."""
        self._source, self._rendering, self._encode, self._special, self._added = source, render, encode, special, added

    @cached_property
    def opening(self) -> Messages:
        """What stands before the samples: a system text where the template refuses conversations without."""
        for opening in ([], [RULES]):
            with suppress(ValueError):
                self._rendering([*opening, QUESTION, ANSWER], False)
                return opening
        return []

    def _render(self, messages: Messages, prompt: bool) -> str:
        return self._rendering(messages if messages[0] is RULES else [*self.opening, *messages], prompt)

    @cached_property
    def closing(self) -> frozenset[int] | None:
        """The added tokens with which the template closes an answer, the last one and those before.

        Example: `<|end|>` between turns and `<|return|>` at the last (gpt-oss). A token that opens the next user turn
        (GLM-4's `<|user|>`) follows an answer without closing it. None where the template refuses the sample.
        """
        try:
            self._render([QUESTION, ANSWER], False)
        except ValueError:
            return None
        last = self._marks([QUESTION, ANSWER], False, ANSWER)[:1]
        between = self._marks([QUESTION, ANSWER, FOLLOW_UP], True, ANSWER, FOLLOW_UP)[:1]
        if not between or between == last:
            return frozenset(last)
        opening = self._marks([QUESTION], True, None, QUESTION)
        if between[0] in opening:  # also of a default system text, whose end it may be
            others = (([QUESTION, ANSWER], ANSWER), ([QUESTION], QUESTION))
            ends = [self._marks(messages, True, after)[:1] for messages, after in others]
            if between == opening[:1] or between not in ends:
                return frozenset(last)
        return frozenset(last + between)

    @cached_property
    def ends_of_thoughts(self) -> frozenset[int]:
        """The added tokens that the template writes between a thought and its answer, and that end no answer.

        Example: `<|end|>`, `<|start|>`, `<|channel|>` and `<|message|>` (gpt-oss).
        """
        thinks = [QUESTION, {**ANSWER, "reasoning_content": THOUGHT["content"], "thinking": THOUGHT["content"]}]
        try:
            shown = THOUGHT["content"] in self._render(thinks, False)
        except ValueError:
            return frozenset()
        return frozenset(self._marks(thinks, False, THOUGHT, ANSWER) if shown else ())

    @cached_property
    def scaffold(self) -> tuple[int, ...]:
        """The tokens that the template puts between the generation prompt and an answer, if any of them is special.

        Those of an empty thought (Qwen3) are none: an answer that thinks does not begin with them. Where they are a
        header, a word between two special tokens, `SOME` further tokens may stand in it. Example: `<|channel|> final
        SOME <|message|>` (gpt-oss, which writes `final json` of an answer in JSON).
        """
        try:
            asked, answered = self._render([QUESTION], True), self._render([QUESTION, ANSWER], False)
        except ValueError:
            return ()
        stop = answered.find(ANSWER["content"])
        if not answered.startswith(asked):
            return ()
        ids, offsets = self._encode(answered)
        spans = [(token, *span) for token, span in zip(ids, offsets) if len(asked) <= span[0] and span[1] <= stop]
        written = answered[len(asked) : stop].lstrip()
        if any(written.startswith(begin) and end in written for begin, end in MARKS.items()):
            return ()
        added = [token for token, *_ in spans]
        if spans and self._special.issuperset((added[0], added[-1])) and answered[spans[0][2] : spans[-1][1]].strip():
            added.insert(-1, SOME)
        return tuple(added) if self._special & set(added) else ()

    @cached_property
    def behind_answers(self) -> tuple[int, ...]:
        """The tokens that the template puts behind the last answer; none where it refuses the sample."""
        try:
            text = self._render([QUESTION, ANSWER], False)
        except ValueError:
            return ()
        stop = text.rfind(ANSWER["content"]) + len(ANSWER["content"])
        return tuple(token for token, (first, _) in zip(*self._encode(text)) if first >= stop)

    @cached_property
    def marks(self) -> frozenset[int]:
        """The tokens of a conversation's rendering that mark its turns.

        Special ones anywhere; others (DeepSeek's `<｜User｜>`) where a turn begins or ends, not around thoughts.
        """
        turns = [QUESTION, ANSWER, FOLLOW_UP]
        samples = (([RULES, *turns], True), (turns, True), (turns[:2], False))
        found = {token for messages, asked in samples for token in self._marks(messages, asked)} & self._special
        found.update(self._marks([QUESTION], True, None, QUESTION), self._marks(turns, True, ANSWER, FOLLOW_UP))
        return frozenset(found.union(self._marks([QUESTION], True, QUESTION)[:1]))

    @cached_property
    def may_rewrite(self) -> bool:
        """Whether a later prompt may show an answer otherwise than it was written.

        That is so where a scaffold is cut from answers, or where an answer changes that holds the literals of the
        template's source, as `</think>`.
        """
        literals = {value[1:-1] for _, kind, value in jinja2.Environment().lex(self._source) if kind == "string"}
        answer = "SAMPLE ".join(["", *sorted(text for text in literals if "\\" not in text), ANSWER["content"]])
        try:
            text = self._render([QUESTION, {**ANSWER, "content": answer}, FOLLOW_UP], True)
        except ValueError:
            return True
        return bool(self.scaffold) or answer not in text

    def _marks(
        self,
        messages: Messages,
        prompt: bool,
        after: dict[str, str] | None = None,
        before: dict[str, str] | None = None,
    ) -> list[int]:
        """The added tokens between the texts of two messages; none where the template refuses the sample."""
        try:
            text = self._render(messages, prompt)
        except ValueError:
            return []
        start = 0 if after is None else text.rfind(after["content"]) + len(after["content"])
        stop = len(text) if before is None else text.rfind(before["content"])
        ids, offsets = self._encode(text)
        return [token for token, (first, _) in zip(ids, offsets) if start <= first < stop and token in self._added]
