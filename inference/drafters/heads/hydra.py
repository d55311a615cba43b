"""Drafting with Hydra heads: level by level, every node with the tokens of its own path.

Shapes: n committed tokens, A newly committed ones, W nodes of a level, H hidden, C capacity.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from draft_heads.heads.base import TargetView
from draft_heads.heads.hydra import HydraHead
from draft_heads.inference.drafters.base import check_max_nodes, tempered
from draft_heads.inference.drafters.heads.base import HeadDrafter
from draft_heads.inference.drafters.heads.block_cache import BlockCache
from draft_heads.inference.drafters.heads.level_tree import grow_tree
from draft_heads.inference.int8_weights import DraftingHead
from draft_heads.inference.step import VerifiedStep
from draft_heads.inference.target.target import Target
from draft_heads.inference.tree import DraftTree


def draft_tree(head: HydraHead, view: TargetView, state: Tensor, base: Tensor, max_nodes: int) -> DraftTree:
    """The best tree behind base token `base []`, from s_n [H]."""
    paths = head.token_states(base, view)[None, None]  # [W, tokens known, H]

    def expand(level: int, tokens: Tensor, parents: Tensor) -> Tensor:
        nonlocal paths
        paths = torch.cat([paths[parents], head.token_states(tokens, view)[:, None]], dim=1)
        return log_probs(level)

    def log_probs(level: int) -> Tensor:
        states = state.expand(len(paths), -1)
        return tempered(head.next_log_probs(level, states, paths), head.config.tree_temperature)

    return grow_tree(log_probs(0)[0], expand, max_nodes, head.config.heads, head.draft_vocab)


class HydraDrafter(HeadDrafter):
    """Keeps s_n and the base token; with prefix attention also the keys and values of h_1 … h_n in the head's block."""

    kind = "hydra"
    options: ClassVar[dict[str, Any]] = {"int8": 1}

    def __init__(self, head: HydraHead, target: Target, max_nodes: int = 32, int8: int = 1) -> None:
        """int8: 1 drafts with weights of eight bits where that is faster, in compiled programs on a CPU."""
        self.drafting = DraftingHead(head, int8)
        self.view = target.decoding_view()
        self.max_nodes = check_max_nodes(max_nodes)
        self.max_depth = min(head.config.heads, self.max_nodes)
        self.length = torch.zeros((), dtype=torch.long, device=target.device)
        self._state: Tensor | None = None  # s_n, [H]
        self._base: Tensor | None = None
        self._cache = BlockCache(head) if head.config.prefix_attention else None

    def prepare(self) -> None:
        """See `Drafter.prepare`: the weights in eight bits."""
        self.drafting.prepare()

    def memory(self) -> list[Tensor]:
        """See `Drafter.memory`."""
        return [self.length, *([] if self._cache is None else self._cache.memory())]

    def begin(self, prompt: Tensor, capacity: int) -> None:
        """Room for `capacity` tokens in the prefix block's cache."""
        self.length.zero_()
        self._state = self._base = None
        if self._cache is not None:
            self._cache.reserve(capacity + self.max_depth + 1)

    def set_visible_length(self, tokens: int) -> None:
        """See `Drafter.set_visible_length`."""
        if self._cache is not None:
            self._cache.reach(tokens + self.max_depth + 1)

    def observe(self, step: VerifiedStep) -> None:
        """Take in the committed tokens' hidden states."""
        head = self.drafting.head
        hidden = step.hidden.to(head.dtype)
        if self._cache is not None:
            slots = self.length + torch.arange(len(hidden), device=hidden.device)
            hidden = head.prefix(hidden[None], slots[None], self._cache.entering(slots, causal=True))[0]
        # rows behind the last committed one see more than they should: take that one itself
        self._state = hidden.index_select(0, step.count[None] - 1)[0]
        self._base = step.base
        self.length += step.count

    def propose(self) -> DraftTree:
        """The best tree of at most `max_nodes` drafts."""
        assert self._state is not None and self._base is not None, "observe the prefill before proposing"
        return draft_tree(self.drafting.head, self.view, self._state, self._base, self.max_nodes)
