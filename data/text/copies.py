"""Whether a text beside the turns of a row repeats them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from draft_heads.data.text.roles import ROLES

RENDERINGS = ("prompt", "text")
"""Keys of a row whose text may hold all turns at once, with the marks of a chat template between them."""

_MARK = re.compile(
    r"[\s#*:|=-]|<{1,2}(?![^<>]*(?:image|audio|video))[^<>\s]{1,40}>{1,2}|\[/?(?:INST|gMASK|BOS|EOS)\]"
    rf"|(?:{'|'.join(ROLES)}|model|bot|ai|instruction|input|question|prompt|response|answer|output)",
    re.IGNORECASE,
)
"""What chat templates write between texts: a role's name, a special token, a character of a heading."""


_SPACELESS = (
    "\u0e00-\u0fff\u1000-\u109f\u1780-\u17ff"  # Thai, Lao, Tibetan, Burmese, Khmer
    "\u1100-\u11ff\u3130-\u318f\uac00-\ud7af"  # Korean
    "\u3005-\u3007\u3040-\u30ff"  # Japanese
    "\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"  # Chinese
)
"""Letters of scripts without spaces between words, for a character class."""


def repeats(
    key: str,
    value: Any,
    texts: Sequence[str | None],
    sought: Sequence[str | None] | None = None,
    systems: Sequence[str] = (),
) -> bool:
    """Whether the text under a key is one of `sought` or of the `systems`, or stands in one, or is all of `sought` in
    their order; white space does not count.

    texts    of all turns, None of one without; a rendering of them all repeats them too, and may begin with one of the
             system texts. Example, of the turns `Hi` and `Salut`: `<|user|>Hi<|assistant|>Salut</s>` as `text`, and not
             `Rhyme. Hi Salut`
    sought   those of the texts that count; None: all
    """
    if not isinstance(value, str):
        return False
    value = _one_line(value)
    known = [_one_line(text) for text in (texts if sought is None else sought) if text is not None]
    rules, words = [_one_line(system) for system in systems], _as_words(value)
    if value in (*known, " ".join(known)) or (value and any(words.search(text) for text in (*known, *rules))):
        return True
    whole = [_one_line(text) for text in texts if text is not None]
    openings = [[], *([one] for one in rules)]
    return key in RENDERINGS and bool(whole) and any(_is_rendering(value, [*first, *whole]) for first in openings)


def _as_words(value: str) -> re.Pattern[str]:
    """Where a value stands in a text as words of their own: 4 in `\\boxed{4}` and in `是4个`, not in 14.

    Letters of scripts without spaces between words, and Korean ones, which join particles, stand by themselves.
    """
    before = "" if re.match(f"[{_SPACELESS}]", value) else rf"(?<![^\W{_SPACELESS}])"
    behind = "" if re.search(rf"[{_SPACELESS}]\Z", value) else rf"(?![^\W{_SPACELESS}])"
    return re.compile(before + re.escape(value) + behind)


def _is_rendering(value: str, texts: Sequence[str]) -> bool:
    """Whether a value is these texts in their order, with nothing but marks before, between and after them."""
    ends = _after_marks(value, {0})
    for text in texts:
        ends = _after_marks(value, {end + len(text) for end in ends if value.startswith(text, end)})
    return len(value) in ends


def _after_marks(value: str, starts: set[int]) -> set[int]:
    """The positions that are reached from `starts` over any number of marks."""
    found = set[int]()
    for position in starts:
        while position not in found:
            found.add(position)
            mark = _MARK.match(value, position)
            position = mark.end() if mark else position
    return found


def _one_line(text: str) -> str:
    return " ".join(text.split())
