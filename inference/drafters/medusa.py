"""Drafting with Medusa heads: K distributions from one hidden state, combined into the best tree."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from heads.medusa import MedusaHead
from inference.drafters.base import VerifiedStep
from inference.level_tree import grow_tree
from inference.target import Target
from inference.tree import DraftTree


def draft_tree(log_probs: Tensor, max_nodes: int) -> DraftTree:
    """The best tree of distributions [K, V] that do not depend on what is drafted."""

    def expand(level: int, tokens: Tensor, parents: Tensor) -> Tensor:
        return log_probs[level].expand(len(tokens), -1)

    return grow_tree(log_probs[0], expand, max_nodes, len(log_probs))


class MedusaDrafter:
    """Keeps the target's hidden state of the last committed token."""

    options: ClassVar[dict[str, Any]] = {}

    def __init__(self, head: MedusaHead, target: Target, max_nodes: int = 32) -> None:
        self.head = head.eval()
        self.max_nodes = max_nodes
        self.max_depth = head.config.heads
        self._last: Tensor | None = None  # h_n, [H]

    def begin(self, prompt: Tensor, capacity: int) -> None:
        """Nothing is kept from prompt to prompt."""
        self._last = None

    def observe(self, step: VerifiedStep) -> None:
        """Take the last committed token's hidden state."""
        self._last = step.hidden[-1].to(self.head.dtype)

    def log_probs(self) -> Tensor:
        """[K, V] at the present anchor."""
        assert self._last is not None, "observe the prefill before proposing"
        return self.head.draft_log_probs(self._last)

    @torch.inference_mode()
    def propose(self) -> DraftTree:
        """The best tree of at most `max_nodes` drafts."""
        return draft_tree(self.log_probs(), self.max_nodes)
