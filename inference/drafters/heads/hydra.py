"""Drafting with Hydra heads: level by level, every node with the tokens of its own path.

Shapes: n committed tokens, A newly committed ones, W nodes of a level, H hidden, C capacity.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from draft_heads.heads.base import TargetView
from draft_heads.heads.hydra import HydraHead
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

    def __init__(self, head: HydraHead, view: TargetView, max_nodes: int = 32, **options: Any) -> None:
        """options: see `LevelTreeOptions`."""
        chosen = LevelTreeOptions(max_nodes=max_nodes, **options)
        caches = [BlockCache(head)] if head.config.prefix_attention else []
        super().__init__(head, view, chosen, head.config.heads, caches, after=head.config.heads + 1)
        self.chain = chosen.tree == "chain"
        self._state: Tensor  # s_n, [H]
        self._base: Tensor

    def observe(self, step: VerifiedStep) -> None:
        head = self.head
        hidden = head.target_states(step.hidden, step.aux_hidden)
        for cache in self._caches:
            slots = self._new_slots(hidden)
            rotation = head.prefix.rotation(slots[None])
            hidden = head.prefix(hidden[None], rotation, cache.entering(slots, causal=True))[0]
        # rows after the last committed one see more than they should: take that one itself
        self._state = hidden.index_select(0, step.count[None] - 1)[0]
        self._base = step.base
        self.length += step.count

    def propose(self) -> DraftTree:
        head, view = self.head, self.view
        paths = head.token_states(self._base, view)[None, None]  # [W, tokens known, H]

        def expand(level: int, tokens: Tensor, parents: Tensor) -> Tensor:
            nonlocal paths
            paths = torch.cat([paths[parents], head.token_states(tokens, view)[:, None]], dim=1)
            return log_probs(level)

        def log_probs(level: int) -> Tensor:
            states = self._state.expand(len(paths), -1)
            return tempered(head.next_log_probs(level, states, paths), head.config.tree_temperature)

        return grow_tree(log_probs(0)[0], expand, self.max_nodes, head.config.heads, head.draft_vocab, self.chain)
