"""Drafters that read the text only, one text each; their tables of token ids are on the host."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from draft_heads.inference.drafters.base import Drafter
from draft_heads.inference.step import VerifiedStep
from draft_heads.inference.tree import DraftTree


class TextDrafter(Drafter):
    """Reads the committed tokens, the base token included, and builds trees from lists.

    A subclass implements `start` (a new text), `read` (its next tokens) and `propose`.
    """

    text_only: ClassVar[bool] = True
    on_device = False  # every step copies its tokens to the host

    def __init__(self, device: torch.device | str, max_nodes: int, max_depth: int) -> None:
        self.device = torch.device(device)
        self.max_nodes, self.max_depth = max_nodes, max_depth

    def start(self) -> None:
        """Start a new text."""

    def read(self, tokens: list[int]) -> None:
        """Read the next tokens of the text."""

    def begin(self, slot: int, prompt: Tensor, capacity: int) -> None:
        self.start()

    def observe(self, step: VerifiedStep, slot: int | None = None) -> None:
        self.read(committed_tokens(step))

    def chain(self, tokens: Sequence[int]) -> DraftTree:
        """A tree of one path, of at most `max_depth` tokens."""
        return self.tree(tokens, range(-1, len(tokens) - 1), [0.0] * len(tokens))

    def tree(self, tokens: Sequence[int], parents: Sequence[int], log_probs: Sequence[float]) -> DraftTree:
        """A tree from lists, parents before children."""
        return DraftTree.of_lists(tokens, parents, log_probs, [0] * len(tokens), self.device)


def committed_tokens(step: VerifiedStep, text: int = 0) -> list[int]:
    """The tokens that a step added to a text: its accepted drafts and the new base token; first the prompt."""
    if step.new_tokens is not None:
        return step.new_tokens[text]
    new: list[int] = step.next_tokens[text].tolist()[: int(step.count[text])]
    return new if step.tree is not None else [int(step.tokens[text, 0]), *new]


def target_choices(step: VerifiedStep, proposed: DraftTree | None) -> list[int] | None:
    """The target's choices at the base token and at every node of `proposed`; None if another tree was verified.

    The verified tree may have more nodes after those, as one padded to a fixed size has.
    """
    if proposed is None or step.choices is None or step.tree is None:
        return None
    size, tree = len(proposed), step.tree
    if tree is not proposed and not (
        torch.equal(tree.tokens[:, :size], proposed.tokens) and torch.equal(tree.parents[:, :size], proposed.parents)
    ):
        return None
    return (step.choices.tolist() if step.read_choices is None else step.read_choices)[0][: 1 + size]
