"""Drafting with a CTC head: T frames in one pass over the cached context, then a trie of collapsed candidates.

Shapes: n committed tokens, A newly committed ones, T frames, H hidden, C capacity.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from draft_heads.heads.attention import chain_attention
from draft_heads.heads.base import TargetView
from draft_heads.heads.block import DecoderBlock
from draft_heads.heads.ctc import CTCHead
from draft_heads.inference.drafters.base import check_max_nodes, tempered
from draft_heads.inference.drafters.heads.base import HeadDrafter
from draft_heads.inference.drafters.heads.block_cache import BlockCache
from draft_heads.inference.drafters.heads.ctc_search import TREE_MODES, build_tree
from draft_heads.inference.int8_weights import DraftingHead
from draft_heads.inference.native import library
from draft_heads.inference.step import VerifiedStep
from draft_heads.inference.target.target import Target
from draft_heads.inference.tree import DraftTree


def draft_tree(head: CTCHead, view: TargetView, frames: Tensor, max_nodes: int, tree: str = "prefix") -> DraftTree:
    """The tree of collapsed candidates of one anchor's frames [T, H]."""
    log_probs = tempered(head.frame_log_probs(frames, view), head.config.tree_temperature)
    return build_tree(log_probs, max_nodes, tree, vocabulary=head.draft_vocab)


class CTCDrafter(HeadDrafter):
    """Keeps the keys and values of the context states `c_i`, rolled forward with the *verified* hidden states.

    `c_i` needs the token after i, which is known for every committed i: the next committed token, or the base token.
    """

    kind = "ctc"
    options: ClassVar[dict[str, Any]] = {"tree": "prefix", "int8": 1}

    def __init__(self, head: CTCHead, target: Target, max_nodes: int = 32, tree: str = "prefix", int8: int = 1) -> None:
        """tree: one of `TREE_MODES`; int8: 1 drafts with weights of eight bits where that is faster, in compiled
        programs on a CPU."""
        if tree not in TREE_MODES:
            raise ValueError(f"tree must be one of {', '.join(TREE_MODES)}; got {tree!r}")
        self.drafting = DraftingHead(head, int8, head.draft_view(target.decoding_view()))
        if tree == "prefix" and target.device.type == "cpu":
            library.load()  # no answer shall wait for its compiler
        self.tree = tree
        self.on_device = tree == "prefix"  # the trees of the published code are built on the host
        self.max_nodes = check_max_nodes(max_nodes)
        self.max_depth = min(head.config.frames, self.max_nodes)
        self.length = torch.zeros((), dtype=torch.long, device=target.device)
        self._state: Tensor | None = None  # c_n, [H]
        self._cache = [BlockCache(head) for _ in head.blocks]
        self._behind = 2 * head.config.frames + 1  # rows that are written behind the text

    def prepare(self) -> None:
        """See `Drafter.prepare`: the weights in eight bits."""
        self.drafting.prepare()

    def memory(self) -> list[Tensor]:
        """See `Drafter.memory`."""
        return [self.length, *(buffer for cache in self._cache for buffer in cache.memory())]

    def begin(self, prompt: Tensor, capacity: int) -> None:
        """Room for the context states of `capacity` tokens and one draft's frames."""
        self.length.zero_()
        self._state = None
        for cache in self._cache:
            cache.reserve(capacity + self._behind)

    def set_visible_length(self, tokens: int) -> None:
        """See `Drafter.set_visible_length`."""
        for cache in self._cache:
            cache.reach(tokens + self._behind)

    def observe(self, step: VerifiedStep) -> None:
        """Append the context states of the newly committed tokens."""
        head = self.drafting.head
        hidden = step.hidden.to(head.dtype)
        states = head.context_states(hidden, step.next_tokens, self.drafting.view)[None]  # [1, A, H]
        slots = self.length + torch.arange(len(hidden), device=states.device)
        for block, cache in zip(head.blocks, self._cache):
            assert isinstance(block, DecoderBlock)
            cache.write(slots, *block.context_keys_values(states, slots[None] + 1))
        self.length += step.count
        self._state = states[0, -1]

    def frames(self) -> Tensor:
        """[T, H], what the LM head reads for each frame at the present anchor."""
        assert self._state is not None, "observe the prefill before proposing"
        head = self.drafting.head
        base_position = self.length.expand(1, 1)
        if head.config.chained:
            # c_n itself opens the chain, so the context ends before it
            sees = (self._cache[0].index() < self.length - 1)[None, None]
            attend_chain = chain_attention((self._cache[0].keys, self._cache[0].values), sees)
            state = self._state[None, None]
            return head.chain_frames(state, base_position, attend_chain, self.drafting.view)[0, 0]
        # frames see the whole context and each other; they lie behind the context, overwritten each step
        slots = self.length + torch.arange(head.config.frames, device=self.length.device)
        attend = [cache.entering(slots, causal=False) for cache in self._cache]
        return head.draft_frames(self._state[None, None], base_position, attend)[0, 0]

    def propose(self) -> DraftTree:
        """The best tree of at most `max_nodes` collapsed candidates."""
        return draft_tree(self.drafting.head, self.drafting.view, self.frames(), self.max_nodes, self.tree)
