"""Positions in a rendered text and among its tokens."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from draft_heads.data.text.errors import ConversationError
from draft_heads.data.text.template_probe import SOME, Messages

MOST_OF_SOME = 8
"""Tokens that `SOME` in a scaffold stands for."""


class Turn(NamedTuple):
    """Character positions of one assistant turn in the rendered text."""

    start: int  # where the target would start to write
    aligned: bool  # whether `start` is the end of the generation prompt: tokens that begin before it are the prompt's
    content: int  # end of the content


class Rendering(NamedTuple):
    """A conversation, its text and its tokens."""

    messages: Messages
    extra: Mapping[str, Any] | None
    text: str
    ids: list[int]
    offsets: list[tuple[int, int]]


class AnswerForm(NamedTuple):
    """The tokens that a chat template puts around the text of each answer, which the target writes too."""

    scaffold: Sequence[int] = ()  # before it: `TemplateProbe.scaffold`
    closing: Sequence[int] = ()  # between it and the target's end token: `ChatText.form`


PLAIN = AnswerForm()  # nothing


def answer_tokens(answer: Sequence[int], end_token_ids: Collection[int], form: AnswerForm) -> list[int]:
    """The tokens of an answer that later turns have: without the ends, and after the scaffold.

    An answer that begins as the scaffold does is in several channels (gpt-oss); what it says follows the first one.
    Example, scaffold 7 8, closing 4 5 and end 2: 7 5 4 7 8 6 2 → 6; 3 7 8 6 4 5 2 and the unfinished 3 7 8 6 4 →
    3 7 8 6.
    """
    stop = len(answer)
    while stop and answer[stop - 1] in end_token_ids:
        stop -= 1
    kept = list(answer[: stop - begun(answer[:stop], form.closing)])
    if form.scaffold and kept[:1] == [form.scaffold[0]]:
        kept = kept[scaffold_end(kept, form.scaffold) :]
    return kept


def begun(tokens: Sequence[int], closing: Sequence[int]) -> int:
    """How many of the tokens at the end are the first of `closing`, at most all of it."""
    most = min(len(tokens), len(closing))
    return next((n for n in range(most, 0, -1) if list(tokens[-n:]) == list(closing[:n])), 0)


def scaffold_end(tokens: Sequence[int], scaffold: Sequence[int]) -> int:
    """The position after the first scaffold (`TemplateProbe.scaffold`) among tokens; 0 without one.

    Worked example, scaffold 7 8 SOME 9: 4 of 7 8 6 9 5, 3 of 7 8 9 5, 0 of 7 8 6 7 9 5.
    """
    begin, found = list(scaffold), list(tokens)
    at = begin.index(SOME) if SOME in begin else len(begin)
    begin, end = begin[:at], begin[at + 1 :]
    for first in range(len(found)):
        if found[first : first + at] != begin:
            continue
        for place in range(first + at, first + at + MOST_OF_SOME + 1):
            if found[place : place + len(end)] == end:
                return place + len(end)
            if found[place : place + 1] == begin[:1]:
                break
    return 0


def part_in_block(
    turn: Turn, first: int, last: int, text: str, offsets: list[tuple[int, int]], marked: list[bool]
) -> tuple[int, int]:
    """Of the tokens [first, last) of a turn those from the first to the last that a block encloses.

    A block that leaves out nothing but whitespace and what the template adds around the content encloses all of them.
    """
    inside = [i for i in range(first, last) if marked[i]]
    if not inside:
        return first, first
    begin, end = inside[0], inside[-1]
    from_start = not text[offsets[first][0] : offsets[begin][0]].strip()
    to_end = not text[offsets[end][1] : turn.content].strip()
    return first if from_start else begin, last if to_end else end + 1


def is_bare(text: str, ids: Sequence[int], offsets: Sequence[tuple[int, int]], ends: Collection[int]) -> bool:
    """Whether tokens are those of `ends` and of white space alone."""
    return not any(text[slice(*place)].strip() for token, place in zip(ids, offsets) if token not in ends)


def in_two(turn: str) -> ConversationError:
    """The error of a turn with another's text in its midst."""
    return ConversationError(
        f"a trained turn is one run of tokens, and the chat template writes {turn} on both sides of the result of its "
        "calls; leave its words out, or give it weight 0"
    )


def misplaced() -> ConversationError:
    """The error of a template whose blocks transformers finds around other texts than theirs."""
    return ConversationError(
        "a {% generation %} block stands in the chat template itself; this one has it in a macro, {% set %} block, "
        "filter, {% call %} or recursive loop, where transformers misplaces it; move it out, or remove it"
    )


def untrained(turn: str, answer: str) -> ConversationError:
    """The error of a turn to be trained on that has no tokens or, with an `answer`, none for that."""
    if answer:
        return ConversationError(
            f"an answer that is trained on has tokens, and {turn} has none but its end: the "
            f"tokenizer has none for {answer[:20]!r}; leave it out"
        )
    return ConversationError(
        f"an answer that is trained on has tokens, and {turn} has none: the chat "
        "template closes it with no end token of the target; name that token as eos_token_id in its "
        "generation_config.json, mark the turn with {% generation %}, or give it weight 0"
    )


def unlocated(turn: str) -> ConversationError:
    """The error of a turn to be trained on whose tokens neither its text nor a block shows."""
    return ConversationError(
        f"the chat template rewrites more than the text of {turn}, so its tokens cannot be located; "
        "mark each answer with one {% generation %} … {% endgeneration %} block in the template, or give it weight 0"
    )


def blocks_of(marked: Sequence[bool], ids: Sequence[int], ends: Collection[int]) -> list[tuple[int, int]]:
    """[first, last) of the tokens of each block that are not `ends`."""
    inside = [i for i, mark in enumerate(marked) if mark and ids[i] not in ends]
    firsts = [i for before, i in zip([-2, *inside], inside) if before + 1 < i]
    lasts = [i + 1 for i, after in zip(inside, [*inside[1:], -2]) if i + 1 != after]
    return list(zip(firsts, lasts, strict=True))


def between_blocks(first: int, last: int, text: str, offsets: list[tuple[int, int]], marked: list[bool]) -> set[int]:
    """Of the tokens [first, last) of a turn with several blocks those that stand between two of them, unless white
    space is all that does: the model writes that."""
    inside = [i for i in range(first, last) if marked[i]]
    apart = ((i, j) for i, j in pairwise(inside) if text[offsets[i][1] : offsets[j][0]].strip())
    return {token for i, j in apart for token in range(i + 1, j)}


def first_token(offsets: list[tuple[int, int]], start: int) -> int:
    """The first token that begins at or after character `start`."""
    return next((i for i, (begin, _) in enumerate(offsets) if begin >= start), len(offsets))


def end_between(
    first: int, own: int, ids: list[int], offsets: list[tuple[int, int]], ends: Collection[int]
) -> int | None:
    """The index after the first token of `ends` from token `first` on to the one at character `own`.

    That token counts whole: what follows a turn may have its first characters in common with another ending,
    such as `<|user|>` and `</s>`.
    """
    for i in range(first, len(ids)):
        if ids[i] in ends:
            return i + 1
        if offsets[i][1] > own:
            return None
    return None


def end_of_placeholder(text: str, placeholder: str) -> int:
    start = text.rfind(placeholder)
    if start < 0:
        raise ConversationError(f"the chat template leaves out the assistant's text (it renders {text[-60:]!r})")
    return start + len(placeholder)


def common_prefix(one: str, other: str) -> str:
    return one[: next((i for i, (a, b) in enumerate(zip(one, other)) if a != b), min(len(one), len(other)))]


def common_suffix(one: str, other: str) -> str:
    return common_prefix(one[::-1], other[::-1])[::-1]


def packed(text: str) -> str:
    """The text without white space."""
    return "".join(text.split())


def left_out(answer: str, shown: str) -> int:
    """How many characters at the start of an answer must go for the rest to be in `shown`; white space does not count.

    Example, `<think> a </think> b c` in `bc<|im_end|>`: 16.
    """
    words = packed(answer)
    return bisect_left(range(len(words) + 1), True, key=lambda count: words[count:] in shown)
