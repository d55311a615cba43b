"""Drafting with Hydra heads: level by level, every node with the tokens of its own path.

Shapes: n committed tokens, A newly committed ones, W nodes of a level, H hidden, C capacity.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from heads.base import TargetView
from heads.block import grouped_attention
from heads.hydra import HydraHead
from inference.drafters.base import VerifiedStep, check_max_nodes, tempered
from inference.level_tree import grow_tree
from inference.target import Target
from inference.tree import DraftTree


def draft_tree(head: HydraHead, view: TargetView, state: Tensor, base: Tensor, max_nodes: int) -> DraftTree:
    """The best tree behind base token `base []`, from s_n [H]."""
    paths = view.embed(base)[None, None].to(state.dtype)  # [W, tokens known, H]

    def expand(level: int, tokens: Tensor, parents: Tensor) -> Tensor:
        nonlocal paths
        paths = torch.cat([paths[parents], view.embed(tokens)[:, None].to(state.dtype)], dim=1)
        return log_probs(level)

    def log_probs(level: int) -> Tensor:
        states = state.expand(len(paths), -1)
        return tempered(head.next_log_probs(level, states, paths), head.config.tree_temperature)

    return grow_tree(log_probs(0)[0], expand, max_nodes, head.config.heads)


class HydraDrafter:
    """Keeps s_n and the base token; with prefix attention also the keys and values of h_1 … h_n in the head's block."""

    options: ClassVar[dict[str, Any]] = {}

    def __init__(self, head: HydraHead, target: Target, max_nodes: int = 32) -> None:
        self.head = head.eval()
        self.view = target.view()
        self.max_nodes = check_max_nodes(max_nodes)
        self.max_depth = head.config.heads
        self.length = 0
        self._state: Tensor | None = None  # s_n, [H]
        self._base: Tensor | None = None
        self._cache: tuple[Tensor, Tensor] | None = None  # keys, values [1, G, C, D]

    def begin(self, prompt: Tensor, capacity: int) -> None:
        """Room for `capacity` tokens in the prefix block's cache; reused when large enough."""
        self.length, self._state, self._base = 0, None, None
        config = self.head.config
        if not config.prefix_attention or (self._cache and self._cache[0].shape[2] >= capacity):
            return
        shape = (1, config.num_key_value_heads, -(-capacity // 256) * 256, config.head_dim)
        like = self.head.each[0].vocabulary.weight
        self._cache = (like.new_zeros(shape), like.new_zeros(shape))

    def observe(self, step: VerifiedStep) -> None:
        """Take in the committed tokens' hidden states."""
        hidden = step.hidden.to(self.head.dtype)
        self._base = step.base
        if self._cache is not None:
            hidden = self._through_prefix(hidden)
        self.length += len(hidden)
        self._state = hidden[-1]

    def _through_prefix(self, hidden: Tensor) -> Tensor:
        assert self._cache is not None
        keys_so_far, values_so_far = self._cache
        start, end = self.length, self.length + len(hidden)
        positions = torch.arange(start, end, device=hidden.device)
        visible = torch.arange(end, device=hidden.device) <= positions[:, None]

        def attend(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
            keys_so_far[:, :, start:end], values_so_far[:, :, start:end] = keys, values
            return grouped_attention(queries, keys_so_far[:, :, :end], values_so_far[:, :, :end], visible)

        return self.head.prefix(hidden[None], positions[None], attend)[0]

    @torch.inference_mode()
    def propose(self) -> DraftTree:
        """The best tree of at most `max_nodes` drafts."""
        assert self._state is not None and self._base is not None, "observe the prefill before proposing"
        return draft_tree(self.head, self.view, self._state, self._base, self.max_nodes)
