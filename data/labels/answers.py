"""The interface of what writes a target's greedy answers: `inference.answers`, or a server (`answer_server`)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from torch import Tensor


@dataclass
class Answer:
    """A target's answer to a prompt.

    tokens      as generated
    finish      "end" (an end-of-turn token, the last of them), "limit" or "loop"; "overflow" where it is no answer, as
                the target's states are no numbers
    is_own      the target itself wrote them here, so that they are their own labels
    hidden      [n, H] on the CPU, its states at every token of prompt and answer; None where not kept
    aux_hidden  [n, k·H], the outputs of `target_layers` side by side
    """

    tokens: list[int] = field(default_factory=list)
    finish: Literal["end", "limit", "loop", "overflow", ""] = ""
    is_own: bool = False
    hidden: Tensor | None = None
    aux_hidden: Tensor | None = None


class Answerer(Protocol):
    """Writes answers."""

    def __call__(self, prompts: Sequence[list[int]], limits: Sequence[int]) -> Iterator[tuple[int, Answer]]:
        """(index of the prompt, its greedy answer of at most `limits[index] >= 1` tokens), as the answers end."""


def in_order(answerer: Answerer, prompts: Sequence[list[int]], limits: Sequence[int]) -> list[Answer]:
    """One answer per prompt, in the prompts' order."""
    found = dict(answerer(prompts, limits))
    return [found[index] for index in range(len(prompts))]
