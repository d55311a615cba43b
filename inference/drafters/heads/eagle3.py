"""Drafting with an EAGLE-3 head: level by level, every node with its own ancestors and its parent's output.

Shapes: B texts, n committed tokens, A newly committed ones, W nodes of a level, H hidden.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from draft_heads.heads.base import TargetView
from draft_heads.heads.eagle3 import Eagle3Head
from draft_heads.heads.windows import rows_at
from draft_heads.inference.drafters.base import tempered
from draft_heads.inference.drafters.heads.base import BlockCache, HeadDrafter
from draft_heads.inference.drafters.heads.level_tree import LevelAttention, LevelTreeOptions, grow_tree
from draft_heads.inference.step import VerifiedStep
from draft_heads.inference.tree import DraftTree


class Eagle3Drafter(HeadDrafter):
    """Keeps the block's keys and values of pass 0; those of drafted tokens lie after them and are overwritten."""

    kind = "eagle3"
    title = "level by level, each node with its parent's output in the block"
    options_type = LevelTreeOptions

    def __init__(self, head: Eagle3Head, view: TargetView, max_nodes: int = 32, slots: int = 1, **options: Any) -> None:
        """options: see `LevelTreeOptions`."""
        chosen = LevelTreeOptions(max_nodes=max_nodes, **options)
        self._cache, levels = BlockCache(head, slots), head.config.passes
        after = (chosen.max_nodes + 1) * levels + 1
        super().__init__(head, view, chosen, slots, levels, [self._cache], after, head.block)
        self.chain = chosen.tree == "chain"

    def read(self, step: VerifiedStep, texts: slice) -> tuple[Tensor, ...]:
        """g_n [B, H] and the base token [B]."""
        head, places = self.head, self._places(step.tokens, texts)
        states = head.target_states(step.hidden, step.aux_hidden)
        tokens = head.tokens(step.next_tokens, self.view)
        keys_values = head.block.context_keys_values(states, self._rotation(places), tokens)
        self._cache.of(texts).write(places, *keys_values)
        return states[:, -1], step.base

    def propose(self) -> DraftTree:
        """The best trees; the first node is the anchor itself, in the row of the last committed token."""
        head, passes, (state, base) = self.head, self.head.config.passes, self.state
        attend = LevelAttention(self._cache, self.length - 1, head.block.heads, self.max_nodes * passes)
        states = state[:, None]  # [B, W, H], what the nodes of a level leave to their children
        positions = self.length[:, None] + torch.arange(-1, passes - 1, device=self.length.device)
        cos, sin = self._rotation(positions)  # of every level

        def log_probs(level: int, tokens: Tensor, parents: Tensor) -> Tensor:
            nonlocal states
            attend.enter(parents)
            rotation = cos[:, :, level : level + 1], sin[:, :, level : level + 1]
            states = head.block(rows_at(states, parents), rotation, attend, head.tokens(tokens, self.view))
            return tempered(head.next_log_probs(states), head.config.tree_temperature)

        first = log_probs(0, base[:, None], torch.zeros_like(base)[:, None])[:, 0]
        return grow_tree(first, log_probs, self.max_nodes, passes, head.draft_vocab, self.chain)
