"""The keys of rows, turns and messages that are known, and what becomes of each: one list for data and prompts.

A key reaches the chat template (a system text, `tools`, a turn's `reasoning_content`), or the mask (`weight: 0`), or it
is known to carry no meaning for the text (ids, sources, scores), or it is refused by name. None and empty values are
those of a key that is absent: Arrow fills the columns that a row lacks with None.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

from draft_heads.data.text.copies import repeats
from draft_heads.data.text.errors import ConversationError
from draft_heads.data.text.json_files import RepeatedKey, parse_json
from draft_heads.data.text.metadata_keys import METADATA, carries_no_meaning, holds_text, is_empty
from draft_heads.data.text.refused_keys import OF_THE_ANSWER, TEMPLATE_FLAGS, TRAINED, asks_nothing, flag, is_refused
from draft_heads.data.text.roles import ROLE_KEYS, ROLES, is_answer, parsed_turns

TEXT_KEYS = ("value", "content")

TURN_LISTS = ("conversations", "messages", "conversation")
"""Keys under which a row has its turns; `prompt` too, where it has none of them."""

SYSTEM = ("system", "system_prompt", "system_message")
"""Keys of a row that hold its system text."""

LISTS = ("tools", "functions", "documents")
"""Keys of a row that chat templates read as lists of objects; `functions` is the older name of `tools`."""

_OF_TOOLS = ("builtin_tools", "xml_tools", "python_tools")
ARGUMENTS = {*LISTS, *_OF_TOOLS, "chat_template_kwargs", "enable_thinking", "thinking", "reasoning_effort"}
ARGUMENTS |= {"tools_in_user_message", "date_string", "model_identity"}
"""Keys of a row that are arguments of its chat template; `chat_template_kwargs` holds several of any name."""

THOUGHTS = ("reasoning_content", "reasoning", "thinking")
TURN_TEXTS = (*THOUGHTS, "name", "tool_call_id")
MAY_BE_READ, _NAME = "metadata", re.compile(r"[\w.:/-]{1,80}")
TOOL_CALLS = "tool_calls"
"""Further keys of a turn that chat templates read: texts, GLM-4's name of a tool after the role, which is metadata to
others, and the calls of an assistant's turn."""

COPIES = {"prompt", "instruction", "input", "question", "query", "text", "context"}
COPIES |= {"output", "response", "answer", "completion"}
"""Texts of a row that are fine where its turns hold them too, and refused otherwise."""

ANSWERS = {"output", "response", "answer", "completion", "solution", "ground_truth", "chosen", "rejected"}
ANSWERS |= {"reasoning", "reasoning_content", "chain_of_thought", "generations", "finish_reason", "finish_reasons"}
"""Keys of a row that are not read where the target writes the answers."""

_PASSAGES = {"instruction", "instructions", "context", "passage", "passages", "persona", "text"}
_ASKED = {*_PASSAGES, "prompt", "input", "question", "query"} - {"text"}  # what the target is to read


class Further(NamedTuple):
    """What a row has beside its turns."""

    system: str | None
    extra: dict[str, Any]  # further arguments of the chat template, by name
    unknown: list[str]  # why keys are not used, a sentence each


def without_none(mapping: Mapping[str, Any]) -> dict[str, Any]:
    """The mapping without the keys that are None or not a number: Arrow and pandas fill in those that a row lacks."""
    return {key: value for key, value in mapping.items() if value is not None and value == value}


def further_of_row(
    row: Mapping[str, Any], turns: Sequence[Any], used: Collection[str], answers_anew: bool = False
) -> Further:
    """What a row has beside the keys that are `used`, among them that of its `turns`.

    ConversationError for keys whose value cannot be used and for those that nothing reads though they hold text. A
    question, an instruction or a passage is read where a turn before an answer holds it; with `answers_anew`, where the
    recorded answers are not read, so is what is called `text`.
    """
    texts = [_text_or_none(turn) for turn in turns]
    asked = [text for text, turn in zip(texts, turns) if not is_answer(turn)]

    def copied(key: str, value: Any) -> bool:
        if isinstance(value, list):
            return _is_part_of(turns, value)
        sought = asked if key in _ASKED or (answers_anew and key == "text") else texts
        return repeats(key, value, texts, sought, _systems_of(row))

    extra: dict[str, Any] = {}
    systems: dict[str, str] = {}
    unknown = []
    row = without_none(row)
    for key in sorted(ANSWERS & row.keys()) if answers_anew else ():
        _check_answer_alone(key, row[key], [*texts, *_systems_of(row)])
    for key, value in row.items():
        if key in used or is_empty(value):
            continue
        value = flag(key, value)
        if key in SYSTEM:
            systems.setdefault(text_of(value).strip(), text_of(value))
        elif key in ARGUMENTS:
            for name, argument in _arguments(key, value).items():
                if extra.setdefault(name, argument) is not argument and extra[name] != argument:
                    raise ConversationError(f"a row has one value of {name!r}, received two that differ")
        elif key in TRAINED:
            if value not in (True, 1):
                raise ConversationError(f"a row's {key!r} is 1 or true, received {value!r}: weights are those of turns")
        elif key in COPIES or holds_text(key, value):
            if not copied(key, value):
                listed = isinstance(value, list) and any(isinstance(one, Mapping) for one in value)
                what = "turns that are not the row's first or last" if listed else "text that no turn has"
                what += " before an answer" if not listed and repeats(key, value, texts) else ""
                raise ConversationError(f"the key {key!r} holds {what}: write it into the turns, or take the key out")
        elif asks_nothing(key, _of_the_answer(row, value, texts)):
            continue
        elif (named := _not_read(key, value, copied)) or (key == "turns" and isinstance(value, list)):
            raise ConversationError(f"the key {named or repr(key)} changes the text or the mask, and nothing reads it")
        elif not (carries_no_meaning(key, value) or _is_label(key, value, row) or copied(key, value)):
            unknown.append(f"the key {key!r} is unknown")
    systems.pop("", None)
    if len(systems) > 1:
        raise ConversationError("a row has one system text, received two that differ")
    return Further(next(iter(systems.values()), None), extra, unknown)


def message_of(turn: Any, names: tuple[str, str] = ("role", "content")) -> tuple[dict[str, Any], list[str]]:
    """(message, why keys are not used) of a turn in either form: `role`, `content`, what else templates read.

    An assistant message that is not to be trained on has `trained` False. The content is a text, "" of an assistant's
    turn that has none. ConversationError for a turn that is no message; `names` are the keys that its message names.
    """
    if not isinstance(turn, Mapping):
        raise ConversationError(f"a turn is an object, received {type(turn).__name__}")
    rest, unknown = without_none(turn), list[str]()
    roles, texts = ([key for key in keys if key in rest] for keys in (ROLE_KEYS, TEXT_KEYS))
    for found in (roles, texts):
        if len(found) > 1:
            raise ConversationError(f"a turn has one of the keys {found[0]!r} and {found[1]!r}, received both")
    if not roles:
        raise ConversationError(f"a turn has no key {names[0]!r}")
    name = rest.pop(roles[0])
    if not isinstance(name, str) or name not in ROLES:
        raise ConversationError(f"the role {name!r} is none of {', '.join(ROLES)}")
    role = ROLES[name]
    if not texts and role != "assistant":
        raise ConversationError(f"a turn has no key {names[1]!r}")
    message: dict[str, Any] = {"role": role, "content": text_of(rest.pop(texts[0])) if texts else ""}
    copied = partial(repeats, texts=[message["content"]])
    told = {key: bool(rest[key]) for key in TRAINED if rest.get(key) in (True, False)}
    if len({*told.values()}) > 1:
        keys = " and ".join(map(repr, told))
        raise ConversationError(f"a turn is trained on or it is not, and {keys} say otherwise of one")
    for key, value in rest.items():
        value = value if key in (*TRAINED, *TURN_TEXTS) else flag(key, value)
        if key in TRAINED:
            if value not in (True, False):  # 1, 1.0, 0 and 0.0 too
                raise ConversationError(f"{key!r} of a turn is true, false, 1 or 0, received {value!r}")
            if role == "assistant" and not value:
                message["trained"] = False
            elif role != "assistant" and value:
                unknown.append(f"the key {key!r} asks for a {role} turn to be trained on, and only answers are")
        elif is_empty(value) or asks_nothing(key, value) or (key in OF_THE_ANSWER and role != "assistant"):
            continue
        elif key in TURN_TEXTS:
            if not isinstance(value, str):
                raise ConversationError(f"{key!r} of a turn is a text, received {type(value).__name__}")
            message[key] = value
        elif key == MAY_BE_READ and isinstance(value, str) and _NAME.fullmatch(value):
            message[key] = value
        elif key == TOOL_CALLS:
            if calls := _tool_calls(value):
                message[key] = calls
        elif (named := _not_read(key, value, copied)) or key in SYSTEM or key in ARGUMENTS:
            what = f"{named or repr(key)} of a turn"
            raise ConversationError(f"the key {what} changes the text or the mask, and nothing reads it")
        elif (key in COPIES or holds_text(key, value)) and not copied(key, value):
            raise ConversationError(f"the key {key!r} holds text that the turn has not: write it into the turn")
        elif not (carries_no_meaning(key, value) or copied(key, value)):
            unknown.append(f"the key {key!r} is unknown")
    return message, unknown


def without_verdicts(turn: Any) -> Any:
    """A turn without what it says of its answer, which asks nothing of one that is not trained on."""
    return {key: turn[key] for key in turn if key not in OF_THE_ANSWER} if isinstance(turn, Mapping) else turn


def said(turn: Any) -> tuple[dict[str, Any], list[str]]:
    """`message_of` without a note: lists of the same turns may differ in it."""
    message, unknown = message_of(turn)
    return {key: value for key, value in message.items() if key != MAY_BE_READ}, unknown


def prompt_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The messages of a prompt as chat templates read them; ConversationError for a key that would be dropped."""
    found = []
    for message in messages:
        plain, unknown = message_of(without_verdicts(message))
        if any(key in message for key in TRAINED):
            unknown.append(f"the key {next(key for key in TRAINED if key in message)!r} is for training")
        if unknown:
            raise ConversationError(f"{unknown[0]}; leave it out")
        found.append(plain)
    return found


def text_of(content: Any) -> str:
    """A content that is a text, or the texts of its parts together, with nothing between them, as the templates that
    read parts write them; ConversationError for any other."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ConversationError(f"the text of a turn is a string, received {type(content).__name__}")
    texts = []
    for part in content:
        part = without_none(part) if isinstance(part, Mapping) else part
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            kind = part.get("type", "no type") if isinstance(part, dict) else type(part).__name__
            raise ConversationError(f"the parts of a turn are texts, received {kind}")
        if wrong := [key for key in part if key not in ("type", "text") and not carries_no_meaning(key, part[key])]:
            raise ConversationError(f"the key {wrong[0]!r} of a part is unknown")
        texts.append(part["text"])
    return "".join(texts)


def _check_answer_alone(key: str, value: Any, texts: Sequence[str | None]) -> None:
    """ConversationError for turns under a key of an answer that is passed over, as `chosen`, if the target would read
    them and the row's own turns lack them: a question before the last, a system text."""
    known = {"", *(text.strip() for text in texts if text is not None)}
    turns = parsed_turns(value)
    for turn in turns if isinstance(turns, list) else ():
        text = None if is_answer(turn) or not isinstance(turn, Mapping) else _text_or_none(turn)
        if text is not None and text.strip() not in known:
            raise ConversationError(
                f"the key {key!r} holds a turn before the answer that the row's turns lack: write the whole "
                "conversation into the turns, or take the key out"
            )


def _of_the_answer(row: Mapping[str, Any], value: Any, texts: Sequence[str | None]) -> Any:
    """Of a list with a value for each of the row's `generations` that of the one which its turns hold, if one does."""
    generations = row.get("generations")
    if isinstance(value, list) and isinstance(generations, list) and len(value) == len(generations):
        return next((one for one, text in zip(value, generations) if text in texts), value)
    return value


def _not_read(key: str, value: Any, copied: Callable[[str, Any], bool]) -> str | None:
    """The name of a key that changes the text or the mask and that nothing reads, itself or among metadata, or None."""
    if is_refused(key, value):
        return repr(key)
    inner = _inner_text(key, value, copied)
    return None if inner is None else f"{inner!r} in {key!r}"


def _inner_text(key: str, value: Any, copied: Callable[[str, Any], bool]) -> str | None:
    """The key among metadata, at any depth, that a row or a turn is read for, or that holds an instruction or a passage
    which does not repeat the turns, if one is there with a text or a list.

    Metadata may be written as JSON, as in columns of texts: `{"tools": [{"name": "add"}]}` has the key `tools`.
    """
    read = {*SYSTEM, *THOUGHTS, *LISTS, TOOL_CALLS, *_PASSAGES}
    inside = [value] if key in METADATA else []
    for value in inside:
        if isinstance(value, str) and value.lstrip().startswith(("{", "[")):
            with suppress(ValueError, RecursionError):  # a text of another kind
                value = parse_json(value)
        pairs = value.items() if isinstance(value, Mapping) else ()
        for one, text in pairs:
            if one in read and text and isinstance(text, str | list) and not (one in _PASSAGES and copied(one, text)):
                return str(one)
        inside.extend(value if isinstance(value, list) else (text for _, text in pairs))
    return None


def _is_label(key: str, value: Any, row: Mapping[str, Any]) -> bool:
    """Whether a key that can hold an instruction or a passage is the label that a published dataset has under it."""
    if key == "custom_instruction":  # OpenHermes' flag
        return isinstance(value, bool)
    if key == "reasoning":  # Nemotron's
        return value in ("on", "off")
    return key == "knowledge" and {"intent", "difficulty"} <= row.keys()  # Magpie tags a question with all three


def _is_part_of(turns: Sequence[Any], part: Sequence[Any]) -> bool:
    """Whether a list holds the first of the turns, or the last, in whatever form: all that is read of them."""
    for known in (turns[: len(part)], turns[-len(part) :]):
        with suppress(ConversationError):
            if [said(turn) for turn in part] == [said(turn) for turn in known]:
                return True
    return False


def _systems_of(row: Mapping[str, Any]) -> list[str]:
    """The system texts beside the turns."""
    return [text_of(row[key]) for key in SYSTEM if row.get(key)]


def _text_or_none(turn: Any) -> str | None:
    """The text of a turn, None where it has no sound one."""
    try:
        return turn if isinstance(turn, str) else message_of(without_verdicts(turn))[0]["content"]
    except ConversationError:
        return None


def _arguments(key: str, value: Any) -> dict[str, Any]:
    """A template's further arguments that a row's key stands for; none for an empty list."""
    if key in (*LISTS, *_OF_TOOLS, "chat_template_kwargs"):
        value = _parse_json(key, value)
        if value is None:  # JSON's null
            return {}
    if key in _OF_TOOLS and not isinstance(value, list):  # whose letters a template would take for its items
        raise ConversationError(f"{key!r} is a list, received {_kinds(value)}")
    if key in _OF_TOOLS and not value:
        return {}
    if key == "chat_template_kwargs":
        if not isinstance(value, dict):
            raise ConversationError(f"{key!r} is an object, received {type(value).__name__}")
        found: dict[str, Any] = {}
        for name, one in without_none(value).items():
            if one in ([], {}) or (one == "" and name in ARGUMENTS - {"date_string", "model_identity"}):
                continue
            if name in ("messages", "conversation", "chat_template", "tokenize", "add_generation_prompt"):
                raise ConversationError(f"{name!r} among {key!r} is not an argument of a row")
            if isinstance(one, str) and one.lower() in ("true", "false"):  # which a template takes for true
                raise ConversationError(f"{name!r} among {key!r} is a text, {one!r}; write true or false unquoted")
            found |= {name: one} if name == key else _arguments(name, one)
        return found
    if key in LISTS:
        if not isinstance(value, list) or not all(isinstance(one, dict) for one in value):
            raise ConversationError(f"{key!r} is a list of objects, received {_kinds(value)}")
        if not value:
            return {}
        if key != "documents":
            return {"tools": [_tool(key, one) for one in value]}
    if key in TEMPLATE_FLAGS and not isinstance(value, bool):
        raise ConversationError(f"{key!r} of a row is true or false, received {type(value).__name__}")
    return {key: value}


def _tool(key: str, tool: dict[str, Any]) -> dict[str, Any]:
    """A tool as templates read it: its parameters as an object, and a function of `functions` in today's form."""
    inner = tool.get("function")
    if isinstance(inner, dict):
        return {**tool, "function": _tool("tools", inner)}
    if isinstance(tool.get("parameters"), str):
        with suppress(ConversationError):  # a text of another form
            tool = {**tool, "parameters": _parse_json("parameters", tool["parameters"])}
    return {"type": "function", "function": tool} if key == "functions" else tool


def _kinds(value: Any) -> str:
    """What a value is that should be a list of objects, and of a list what is in it."""
    wrong = [one for one in value if not isinstance(one, dict)] if isinstance(value, list) else []
    return f"a list with {wrong[0]!r:.40}; write each as an object" if wrong else type(value).__name__


def _tool_calls(value: Any) -> list[dict[str, Any]]:
    """The calls of a turn, their arguments as objects: OpenAI's API writes JSON there, chat templates read objects."""
    calls = _parse_json(TOOL_CALLS, value)
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        raise ConversationError(f"{TOOL_CALLS!r} is a list of objects, received {_kinds(calls)}")
    found = []
    for call in calls:
        call = without_none(call)
        name, inner = ("function", call.get("function")) if "function" in call else (None, call)
        if not isinstance(inner, dict) or not isinstance(inner.get("name"), str):
            raise ConversationError(f"each of {TOOL_CALLS!r} has the name of a function, received {call!r:.60}")
        inner = without_none(inner)
        for other in ("parameters", "input", "args"):  # Llama 3's form, Anthropic's, LangChain's
            if other in inner and "arguments" not in inner:
                inner["arguments"] = inner.pop(other)
        if isinstance(inner.get("arguments"), str):
            inner["arguments"] = _parse_json("arguments", inner["arguments"] or "{}")
        inner.setdefault("arguments", {})
        known = {"function", "name", "arguments", "id", "type", "index"}
        if wrong := [key for key in (*inner, *(call if name else ())) if key not in known]:
            raise ConversationError(
                f"the key {wrong[0]!r} of one of {TOOL_CALLS!r} is unknown: it has a name and arguments; leave it out"
            )
        found.append({**call, name: inner} if name else inner)
    return found


def _parse_json(key: str, value: Any) -> Any:
    """A value that may be written as JSON."""
    if not isinstance(value, str):
        return value
    try:
        return parse_json(value)
    except RepeatedKey as error:
        raise ConversationError(f"{key!r} is JSON in which {error}") from None
    except (ValueError, RecursionError):
        raise ConversationError(f"{key!r} is text that is no JSON: {value[:40]!r}") from None
