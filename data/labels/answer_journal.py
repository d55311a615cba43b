"""Answers of a shard that is not finished, in a file beside it: a run that is killed loses none that has ended."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Literal, NamedTuple

from draft_heads.data.common.files import names_path, sealed, unsealed, write_text
from draft_heads.data.labels.answers import Answer, Answerer

logger = logging.getLogger(__name__)


class _Kept(NamedTuple):
    """A line of the file."""

    prompt: str  # a digest of its tokens and of the answer's limit
    tokens: list[int]
    finish: Literal["end", "limit", "loop", "overflow", ""]
    is_own: bool


class AnswerJournal:
    """An `Answerer` that writes each answer of another down as it ends, and gives those that are written already.

    States are not written: the rows of such answers are labelled like those of a server's.
    """

    def __init__(self, answerer: Answerer, path: Path) -> None:
        """path: of the file, JSON lines, which nobody else writes now; a last line that a kill cut off is removed"""
        self._answerer, self._path = answerer, path
        whole = _whole_lines(path)
        if path.is_file():
            os.truncate(path, len(whole))
        lines = [_parse(line) for line in whole.splitlines()]
        self._kept = {kept.prompt: kept for kept in lines if kept is not None}
        if damaged := lines.count(None):
            logger.warning("%s: answers that are damaged, and are written again: %d", path, damaged)
            write_text(path, "".join(map(_line, self._kept.values())))

    def __call__(self, prompts: Sequence[list[int]], limits: Sequence[int]) -> Iterator[tuple[int, Answer]]:
        """As `Answerer`, first the answers that are written already."""
        digests = [_digest(prompt, limit) for prompt, limit in zip(prompts, limits)]
        rest = []
        for index, digest in enumerate(digests):
            if (kept := self._kept.get(digest)) is None:
                rest.append(index)
            else:
                yield index, Answer(list(kept.tokens), kept.finish, kept.is_own)
        if not rest:
            return
        ended = self._answerer([prompts[index] for index in rest], [limits[index] for index in rest])
        with names_path(self._path):  # opened now: what a later run puts in its place gets none of these answers
            file = self._path.open("a", encoding="utf-8")
        try:
            for place, answer in ended:
                index = rest[place]
                with names_path(self._path):
                    file.write(_line(_Kept(digests[index], answer.tokens, answer.finish, answer.is_own)))
                    file.flush()
                yield index, answer
        finally:
            with names_path(self._path):
                file.close()


def count_answers(path: Path) -> int:
    """How many answers a file holds, which another process may be writing; 0 where there is none."""
    return _whole_lines(path).count(b"\n")


def _digest(prompt: list[int], limit: int) -> str:
    return hashlib.sha256(json.dumps([limit, prompt]).encode()).hexdigest()[:32]


def _whole_lines(path: Path) -> bytes:
    """The file up to its last line break."""
    content = path.read_bytes() if path.is_file() else b""
    return content[: content.rfind(b"\n") + 1]


def _line(kept: _Kept) -> str:
    return sealed(kept._asdict()) + "\n"


def _parse(line: bytes) -> _Kept | None:
    """None for a line that is damaged: its answer is written again. Those of older versions are lists."""
    with suppress(ValueError, TypeError):
        if not line.startswith(b"["):
            return _Kept(**unsealed(line))
        kept = _Kept(*json.loads(line))
        if isinstance(kept.prompt, str) and all(type(token) is int for token in kept.tokens):
            return kept
    return None
