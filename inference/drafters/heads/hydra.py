"""Drafting with Hydra heads: level by level, every node with the tokens of its own path.

Shapes: B texts, n committed tokens, A newly committed ones, W nodes of a level, H hidden.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from draft_heads.heads.base import TargetView
from draft_heads.heads.hydra import HydraHead
from draft_heads.heads.windows import rows_at
from draft_heads.inference.drafters.base import tempered
from draft_heads.inference.drafters.heads.base import BlockCache, HeadDrafter
from draft_heads.inference.drafters.heads.level_tree import LevelTreeOptions, grow_tree
from draft_heads.inference.step import VerifiedStep
from draft_heads.inference.tree import DraftTree


class HydraDrafter(HeadDrafter):
    """Keeps s_n and the base token; with prefix attention also the keys and values of h_1 … h_n in the head's block."""

    kind = "hydra"
    title = "level by level, each node with its own path"
    options_type = LevelTreeOptions

    def __init__(self, head: HydraHead, view: TargetView, max_nodes: int = 32, slots: int = 1, **options: Any) -> None:
        """options: see `LevelTreeOptions`."""
        chosen = LevelTreeOptions(max_nodes=max_nodes, **options)
        caches = [BlockCache(head, slots)] if head.config.prefix_attention else []
        super().__init__(head, view, chosen, slots, head.config.heads, caches, after=head.config.heads + 1)
        self.chain = chosen.tree == "chain"

    def read(self, step: VerifiedStep, texts: slice) -> tuple[Tensor, ...]:
        """s_n [B, H] and the base token [B]."""
        head = self.head
        hidden = head.target_states(step.hidden, step.aux_hidden)
        for cache in self._caches:
            places = self._places(step.tokens, texts)
            hidden = head.prefix(hidden, head.prefix.rotation(places), cache.of(texts).entering(places, causal=True))
        # rows after the last committed one see more than they should: take that one itself
        last = step.count[:, None] - 1
        if self.slots > 1:
            last = last.clamp(min=0)  # a slot without a text
        return rows_at(hidden, last)[:, 0], step.base

    def propose(self) -> DraftTree:
        head, view, (state, base) = self.head, self.view, self.state
        paths = head.token_states(base, view)[:, None, None]  # [B, W, tokens known, H]

        def expand(level: int, tokens: Tensor, parents: Tensor) -> Tensor:
            nonlocal paths
            paths = torch.cat([rows_at(paths, parents), head.token_states(tokens, view)[:, :, None]], dim=2)
            return log_probs(level)

        def log_probs(level: int) -> Tensor:
            states = state[:, None].expand(-1, paths.shape[1], -1)
            return tempered(head.next_log_probs(level, states, paths), head.config.tree_temperature)

        return grow_tree(log_probs(0)[:, 0], expand, self.max_nodes, head.config.heads, head.draft_vocab, self.chain)
