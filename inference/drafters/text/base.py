"""Drafters that need nothing but the text: they keep tables of token ids on the host."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from draft_heads.inference.drafters.base import Drafter
from draft_heads.inference.step import VerifiedStep
from draft_heads.inference.tree import DraftTree


class TextTarget(Protocol):
    """The part of a target that text drafters are made from: a tokenizer is enough (`inference.evaluation.replay`)."""

    tokenizer: Any

    @property
    def device(self) -> torch.device: ...

    @property
    def vocab_size(self) -> int: ...


class TextDrafter(Drafter):
    """Reads the committed tokens, the base token included, and proposes trees made of lists.

    A subclass has `start` (a new text), `read` (more of it) and `propose`.
    """

    text_only: ClassVar[bool] = True
    on_device = False  # the tokens of every step are read back

    def __init__(self, device: torch.device | str, max_nodes: int, max_depth: int) -> None:
        self.device = torch.device(device)
        self.max_nodes, self.max_depth = max_nodes, max_depth
        with torch.inference_mode():  # as every other tree: a program would be compiled for each kind of tensor
            whole = DraftTree.build(
                torch.zeros(max_depth, dtype=torch.long), torch.arange(max_depth) - 1, torch.zeros(max_depth)
            )
            self._chains = [whole.map(lambda x, size=size: x[:size]) for size in range(max_depth + 1)]  # type: ignore[misc]

    def start(self) -> None:
        """A new text begins."""

    def read(self, tokens: list[int]) -> None:
        """More of the text."""

    def begin(self, prompt: Tensor, capacity: int) -> None:
        """See `Drafter.begin`."""
        self.start()

    def observe(self, step: VerifiedStep) -> None:
        """Hand the new tokens on: what follows each committed one, and before that the prompt's first."""
        self.read(committed(step))

    def chain(self, tokens: Sequence[int]) -> DraftTree:
        """Tokens one after another, no more than `max_depth`."""
        _, *others = self._chains[len(tokens)].tensors()
        tree = DraftTree(torch.tensor(tokens, dtype=torch.long), *others)
        return tree if self.device.type == "cpu" else tree.map(lambda x: x.to(self.device))

    def tree(self, tokens: Sequence[int], parents: Sequence[int], log_probs: Sequence[float]) -> DraftTree:
        """Nodes from lists, parents before children."""
        return DraftTree.of_lists(tokens, parents, log_probs, [0] * len(tokens), self.device)


def committed(step: VerifiedStep) -> list[int]:
    """The tokens that a step added to the text: its accepted drafts and the new base token; at first the prompt too."""
    new = step.next_tokens.tolist()[: int(step.count)]
    return new if step.tree is not None else [int(step.tokens[0]), *new]


def own_choices(step: VerifiedStep, proposed: DraftTree | None) -> list[int] | None:
    """What the target said at the base token and at every node of `proposed`; None where another tree was verified.

    The verified tree may have more nodes behind those: one padded to a fixed size has.
    """
    if proposed is None or step.choices is None or step.tree is None:
        return None
    size, tree = len(proposed), step.tree
    same = torch.equal(tree.tokens[:size], proposed.tokens) and torch.equal(tree.parents[:size], proposed.parents)
    return step.choices[: 1 + size].tolist() if same else None


def check_positive(**options: int) -> None:
    """ValueError for an option below 1."""
    for name, value in options.items():
        if value < 1:
            raise ValueError(f"drafter option {name} must be at least 1; got {value}; leave it out for the default")


def refuse_path(kind: str, path: str) -> None:
    """ValueError for a path given to a drafter that loads nothing."""
    if path:
        raise ValueError(f"{kind} loads nothing; got the path {path!r}; write {kind} alone, options behind commas")
