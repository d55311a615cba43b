"""No drafts: the engine runs the plain decoding loop, the baseline of all other drafters."""

from __future__ import annotations

import torch
from torch import Tensor

from draft_heads.inference.drafters.base import Drafter
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

    def begin(self, prompt: Tensor, capacity: int) -> None:
        """Nothing to forget."""

    def observe(self, step: VerifiedStep) -> None:
        """Nothing to observe."""

    def propose(self) -> DraftTree:
        """The empty tree."""
        return self._tree
