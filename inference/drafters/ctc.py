"""Drafting with a CTC head: T frames in one pass over the cached context, then a trie of collapsed candidates.

Shapes: n committed tokens, A newly committed ones, T frames, H hidden, C capacity.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from heads.attention import chain_attention
from heads.base import TargetView
from heads.block import Attend, DecoderBlock, grouped_attention
from heads.ctc import CTCHead
from inference.ctc_search import TREE_MODES, build_tree
from inference.drafters.base import VerifiedStep, check_max_nodes, tempered
from inference.target import Target
from inference.tree import DraftTree


def draft_tree(head: CTCHead, view: TargetView, frames: Tensor, max_nodes: int, tree: str = "prefix") -> DraftTree:
    """The tree of collapsed candidates of one anchor's frames [T, H]."""
    log_probs = tempered(head.frame_log_probs(frames, view), head.config.tree_temperature)
    return build_tree(log_probs, max_nodes, tree)


class CTCDrafter:
    """Keeps the keys and values of the context states `c_i`, rolled forward with the *verified* hidden states.

    `c_i` needs the token after i, which is known for every committed i: the next committed token, or the base token.
    """

    options: ClassVar[dict[str, Any]] = {"tree": "prefix"}

    def __init__(self, head: CTCHead, target: Target, max_nodes: int = 32, tree: str = "prefix") -> None:
        if tree not in TREE_MODES:
            raise ValueError(f"tree must be one of {', '.join(TREE_MODES)}; got {tree!r}")
        self.head = head.eval()
        self.view = target.view()
        self.tree = tree
        self.max_nodes = check_max_nodes(max_nodes)
        self.max_depth = head.config.frames
        self.length = 0
        self._state: Tensor | None = None  # c_n, [H]
        self._cache: list[tuple[Tensor, Tensor]] = []  # per block: keys, values [1, G, C, D]

    def begin(self, prompt: Tensor, capacity: int) -> None:
        """Room for the context states of `capacity` tokens and one draft's frames; reused when large enough."""
        self.length = 0
        self._state = None
        needed = capacity + self.head.config.frames
        if self._cache and self._cache[0][0].shape[2] >= needed:
            return
        config, like = self.head.config, self.head.norm.weight
        shape = (1, config.num_key_value_heads, -(-needed // 256) * 256, config.head_dim)
        self._cache = [(like.new_zeros(shape), like.new_zeros(shape)) for _ in self.head.blocks]

    def observe(self, step: VerifiedStep) -> None:
        """Append the context states of the newly committed tokens."""
        hidden = step.hidden.to(self.head.dtype)
        next_ids = torch.cat([step.tokens[1:], step.base[None]])
        states = self.head.context_states(hidden, next_ids, self.view)[None]  # [1, A, H]
        end = self.length + step.tokens.numel()
        positions = torch.arange(self.length + 1, end + 1, device=states.device)[None]
        for block, (keys, values) in zip(self.head.blocks, self._cache):
            assert isinstance(block, DecoderBlock)
            keys[:, :, self.length : end], values[:, :, self.length : end] = block.context_keys_values(
                states, positions
            )
        self.length = end
        self._state = states[0, -1]

    def frames(self) -> Tensor:
        """[T, H], what the LM head reads for each frame at the present anchor."""
        assert self._state is not None, "observe the prefill before proposing"
        base_position = torch.full((1, 1), self.length, device=self._state.device)
        if self.head.config.chained:
            earlier = self.length - 1  # c_n itself opens the chain
            keys, values = (cache[:, :, :earlier] for cache in self._cache[0])
            sees = torch.ones(1, 1, earlier, dtype=torch.bool, device=keys.device)
            attend_chain = chain_attention((keys, values), sees)
            return self.head.chain_frames(self._state[None, None], base_position, attend_chain, self.view)[0, 0]
        attend = [self._attend(keys, values) for keys, values in self._cache]
        return self.head.draft_frames(self._state[None, None], base_position, attend)[0, 0]

    def _attend(self, context_keys: Tensor, context_values: Tensor) -> Attend:
        """Frames see the whole context and each other: no mask. They lie behind the context, overwritten each step."""
        length = self.length

        def attend(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
            end = length + keys.shape[2]
            context_keys[:, :, length:end] = keys
            context_values[:, :, length:end] = values
            return grouped_attention(queries, context_keys[:, :, :end], context_values[:, :, :end])

        return attend

    def propose(self) -> DraftTree:
        """The best tree of at most `max_nodes` collapsed candidates."""
        return draft_tree(self.head, self.view, self.frames(), self.max_nodes, self.tree)
