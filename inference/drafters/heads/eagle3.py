"""Drafting with an EAGLE-3 head: level by level, every node with its own ancestors and its parent's output.

Shapes: n committed tokens, A newly committed ones, W nodes of a level, H hidden, C capacity.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from draft_heads.heads.base import TargetView
from draft_heads.heads.eagle3 import Eagle3Head
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

    def __init__(self, head: Eagle3Head, view: TargetView, max_nodes: int = 32, **options: Any) -> None:
        """options: see `LevelTreeOptions`."""
        chosen = LevelTreeOptions(max_nodes=max_nodes, **options)
        self._cache, levels = BlockCache(head), head.config.passes
        after = (chosen.max_nodes + 1) * levels + 1
        super().__init__(head, view, chosen, levels, [self._cache], after, head.block)
        self.chain = chosen.tree == "chain"
        self._state: Tensor  # g_n, [H]
        self._base: Tensor

    def observe(self, step: VerifiedStep) -> None:
        head = self.head
        states = head.target_states(step.hidden, step.aux_hidden)
        slots = self._new_slots(states)
        tokens = head.tokens(step.next_tokens, self.view)
        keys_values = head.block.context_keys_values(states[None], self._rotation(slots), tokens[None])
        self._cache.write(slots, *keys_values)
        self.length += step.count
        self._state, self._base = states[-1], step.base

    def propose(self) -> DraftTree:
        """The best tree; its first node is the anchor itself, in the row of the last committed token."""
        head, passes = self.head, self.head.config.passes
        attend = LevelAttention(self._cache, self.length - 1, head.block.heads, self.max_nodes * passes)
        states = self._state[None]  # [W, H], what the nodes of a level leave to their children
        cos, sin = self._rotation(self.length + torch.arange(-1, passes - 1, device=self.length.device))  # of levels

        def log_probs(level: int, tokens: Tensor, parents: Tensor) -> Tensor:
            nonlocal states
            attend.enter(parents)
            rotation = cos[:, :, level : level + 1], sin[:, :, level : level + 1]
            states = head.block(states[parents][None], rotation, attend, head.tokens(tokens, self.view)[None])[0]
            return tempered(head.next_log_probs(states), head.config.tree_temperature)

        first = log_probs(0, self._base[None], torch.zeros_like(self._base)[None])[0]
        return grow_tree(first, log_probs, self.max_nodes, passes, head.draft_vocab, self.chain)
