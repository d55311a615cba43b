"""Drafting with an EAGLE-3 head: level by level, every node with its own ancestors and its parent's output.

Shapes: n committed tokens, A newly committed ones, W nodes of a level, H hidden, C capacity.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from draft_heads.heads.attention import Memory, TreeAttention
from draft_heads.heads.base import Rows, TargetView
from draft_heads.heads.eagle3 import Eagle3Head
from draft_heads.inference.drafters.base import tempered
from draft_heads.inference.drafters.heads.base import BlockCache, GivenMemory, HeadDrafter, RotationTable
from draft_heads.inference.drafters.heads.level_tree import LevelTreeOptions, grow_tree
from draft_heads.inference.step import VerifiedStep
from draft_heads.inference.target.target import Target
from draft_heads.inference.tree import DraftTree


def draft_tree(
    head: Eagle3Head,
    view: TargetView,
    memory: Memory,
    rotation: RotationTable,
    length: Tensor,
    state: Tensor,
    base: Tensor,
    max_nodes: int,
    chain: bool = False,
) -> DraftTree:
    """The best tree behind base token `base []`.

    memory: keys and values of pass 0 at n = `length []` committed tokens; state [H]: g of the last of them.
    """
    # the first node is the anchor itself
    attend = TreeAttention(memory, length - 1, head.block.heads, max_nodes * head.config.passes)
    states = state[None]  # [W, H], what the nodes of a level leave to their children
    levels = torch.arange(-1, head.config.passes - 1, device=length.device)
    cos, sin = rotation(length + levels)  # of every level

    def log_probs(level: int, tokens: Tensor, parents: Tensor) -> Tensor:
        nonlocal states
        attend.enter(parents)
        own = cos[:, :, level : level + 1], sin[:, :, level : level + 1]
        states = head.block(states[parents][None], own, attend, head.tokens(tokens, view)[None])[0]
        return tempered(head.next_log_probs(states), head.config.tree_temperature)

    first = log_probs(0, base[None], torch.zeros_like(base)[None])[0]
    return grow_tree(first, log_probs, max_nodes, head.config.passes, head.draft_vocab, chain)


class Eagle3Drafter(HeadDrafter):
    """Keeps the block's keys and values of pass 0; those of drafted tokens lie behind and are overwritten."""

    kind = "eagle3"
    title = "level by level, each node with its parent's output in the block"
    options_type = LevelTreeOptions

    def __init__(self, head: Eagle3Head, target: Target, max_nodes: int = 32, **options: Any) -> None:
        """options: see `LevelTreeOptions`."""
        chosen = LevelTreeOptions(max_nodes=max_nodes, **options)
        self._cache, levels = BlockCache(head), head.config.passes
        behind = (chosen.max_nodes + 1) * levels + 1
        super().__init__(head, target, chosen, levels, [self._cache], behind, head.block)
        self.chain = chosen.tree == "chain"
        self.lend()
        self._state: Tensor  # g_n, [H]
        self._base: Tensor

    def lend(self) -> None:
        self.view = self._target.view()

    @staticmethod
    def propose_from(head: Eagle3Head, rows: Rows, view: TargetView, max_nodes: int) -> Callable[[int], DraftTree]:
        """Level by level, over the keys and values up to the anchor."""
        text, states, context = rows.input_ids[0], head.row_states(rows)[0], head.context(rows, view)
        room = (max_nodes + 1) * head.config.passes + 1
        rotation = RotationTable(head.block)
        rotation.reserve(len(text) + head.config.passes)

        def at_anchor(anchor: int) -> DraftTree:
            length = torch.tensor(anchor + 1, device=text.device)
            memory = GivenMemory.first(context, anchor + 1, room)
            return draft_tree(head, view, memory, rotation, length, states[anchor], text[anchor + 1], max_nodes)

        return at_anchor

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
        given = self._cache, self._rotation, self.length, self._state, self._base
        return draft_tree(self.head, self.view, *given, self.max_nodes, chain=self.chain)
