"""What of its input a chat template renders: which texts have a place in a rendering, also texts that are nowhere else,
in place of those of the input; and which tokens a text has that mark turns."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

PLACEHOLDER = "PLACEHOLDERFORTHEANSWER"


def _mark(place: str, marks: dict[str, str]) -> str:
    """A text that is nowhere else, added to `marks` as that of a place."""
    mark = f"{PLACEHOLDER}{len(marks)}X"
    marks[mark] = place
    return mark


def marked(place: str, value: Any, marks: dict[str, str]) -> Any:
    """A value of JSON with a mark in place of each text in it."""
    if isinstance(value, Mapping):
        return {key: marked(f"{place}.{key}", one, marks) for key, one in value.items()}
    if isinstance(value, list):
        return [marked(f"{place}[{number}]", one, marks) for number, one in enumerate(value)]
    return _mark(place, marks) if isinstance(value, str) and value.strip() else value


def marked_names(place: str, functions: Sequence[Any], marks: dict[str, str]) -> list[Any]:
    """Tools with a mark in place of each name."""
    return [_marked_name(f"{place}[{number}]", one, marks) for number, one in enumerate(functions)]


def _marked_name(place: str, function: Any, marks: dict[str, str]) -> Any:
    if isinstance(function, Mapping) and isinstance(function.get("function"), Mapping):
        return {**function, "function": _marked_name(place, function["function"], marks)}
    named = isinstance(function, Mapping) and isinstance(function.get("name"), str)
    return {**function, "name": _mark(f"{place}.name", marks)} if named else function


def marked_calls(calls: Sequence[Any], marks: dict[str, str], names: bool = True) -> list[Any]:
    """The calls with a mark behind the arguments of each, and in place of their names.

    names: whether of those with arguments too
    """
    found = []
    for number, call in enumerate(calls):
        place, inner = f"tool_calls[{number}]", call.get("function", call)
        arguments = inner.get("arguments")
        has_arguments = isinstance(arguments, Mapping)
        changed = _marked_name(place, inner, marks) if names or not has_arguments else inner
        if has_arguments:
            mark = _mark(f"{place}.arguments", marks)
            changed = {**changed, "arguments": {**arguments, mark: mark}}
        found.append({**call, "function": changed} if "function" in call else changed)
    return found


def unread(name: str, marks: Mapping[str, str], texts: Iterable[str | None]) -> str | None:
    """Which of the marks, or all of `name`, is in none of the texts."""
    lost = dict(marks)
    for text in texts:  # whose letters a template may write small or large
        lost = {mark: place for mark, place in lost.items() if mark.lower() not in (text or "").lower()}
        if not lost:
            return None
    return repr(name if len(lost) == len(marks) else next(iter(lost.values())))


def without_a_place(text: str, parts: Mapping[int, str]) -> set[int]:
    """The keys of the `parts` that do not stand in `text`, beside each other."""
    missing = set()
    for number in sorted(parts, key=lambda number: len(parts[number]), reverse=True):
        before, found, after = text.partition(parts[number])
        text = f"{before}\0{after}"
        if not found:
            missing.add(number)
    return missing


def lost_word(text: str, part: str, source: str) -> str | None:
    """The first word of `part` that neither `text`, in small letters, has nor the `source` of the template, for which
    words may be commands (`/no_think`), as are tags."""
    words = re.findall(r"\w+", re.sub(r"<[^<>\s]+>", " ", part))
    return next((word for word in words if word.casefold() not in text and word not in source), None)


def texts_in(value: Any) -> Iterator[str]:
    """The texts in a value of JSON, keys too: tools and calls have names of parameters there."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, (Mapping, list, tuple)):
        for item in (*value, *value.values()) if isinstance(value, Mapping) else value:
            yield from texts_in(item)


def control_token(
    text: str, control: Collection[str], encode: Callable[[str], list[int]], respelled: Mapping[int, str]
) -> str | None:
    """A token of `control` that the tokenizer makes of a part of the text.

    respelled: the tokens of which a normaliser makes some of other spellings too, as of `<|USER|>`
    """
    found = next((token for token in control if token in text), None)
    if found is None and respelled:
        made = {respelled[token] for token in encode(text) if token in respelled}
        found = next(iter(made.intersection(control)), None)
    return found


def respelled_tokens(tokenizer: PreTrainedTokenizerBase) -> dict[int, str]:
    """The added tokens, by id, that the tokenizer looks for in normalised text; none without a normaliser."""
    normalizer = tokenizer.backend_tokenizer.normalizer
    if normalizer is None or b'"normalizers":[]' in normalizer.__getstate__():
        return {}
    return {token: one.content for token, one in tokenizer.added_tokens_decoder.items() if one.normalized}
