"""No drafts: the engine's step becomes the plain greedy loop, the reference and denominator of every other drafter."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from draft_heads.inference.drafters.base import Builder, Drafter
from draft_heads.inference.step import VerifiedStep
from draft_heads.inference.tree import DraftTree


class VanillaDrafter(Drafter):
    """Proposes the empty tree."""

    kind = "vanilla"
    text_only = True
    max_nodes = 0
    max_depth = 0

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self._tree = DraftTree.empty(device)

    @classmethod
    def from_options(cls, path: str, build: Builder, **options: Any) -> VanillaDrafter:
        """See `Drafter.from_options`."""
        return cls(build.target.device)

    def begin(self, prompt: Tensor, capacity: int) -> None:
        """Nothing to forget."""

    def observe(self, step: VerifiedStep) -> None:
        """Nothing to learn."""

    def propose(self) -> DraftTree:
        """The base token alone is verified."""
        return self._tree
