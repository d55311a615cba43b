"""No drafts: the engine's step becomes the plain greedy loop, the reference and denominator of every other drafter."""

from __future__ import annotations

import torch
from torch import Tensor

from draft_heads.inference.drafters.base import Drafter
from draft_heads.inference.step import VerifiedStep
from draft_heads.inference.tree import DraftTree


class VanillaDrafter(Drafter):
    """Proposes the empty tree."""

    max_nodes = 0
    max_depth = 0

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self._tree = DraftTree.empty(device)

    def begin(self, prompt: Tensor, capacity: int) -> None:
        """Nothing to forget."""

    def observe(self, step: VerifiedStep) -> None:
        """Nothing to learn."""

    def propose(self) -> DraftTree:
        """The base token alone is verified."""
        return self._tree
