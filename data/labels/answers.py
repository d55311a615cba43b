"""The interface of what writes a target's greedy answers: `inference.answers`, or a server (`answer_server`)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from draft_heads.data.labels.labeller import Labelled


@dataclass
class Answer:
    """A target's answer to a prompt.

    tokens    as generated
    finish    "end" (an end-of-turn token, the last of them), "limit" or "loop"
    labelled  labels and states of the prompt and the answer, where what wrote the answer has them
    """

    tokens: list[int] = field(default_factory=list)
    finish: Literal["end", "limit", "loop", ""] = ""
    labelled: Labelled | None = None


class Answerer(Protocol):
    """Writes answers."""

    def __call__(self, prompts: Sequence[list[int]], limits: Sequence[int]) -> Iterator[tuple[int, Answer]]:
        """(index of the prompt, its greedy answer of at most `limits[index] >= 1` tokens), as the answers end."""


def in_order(answerer: Answerer, prompts: Sequence[list[int]], limits: Sequence[int]) -> list[Answer]:
    """One answer per prompt, in the prompts' order."""
    found = dict(answerer(prompts, limits))
    return [found[index] for index in range(len(prompts))]
