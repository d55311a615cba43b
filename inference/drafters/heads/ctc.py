"""Drafting with a CTC head: T frames in one pass over the cached context, then a trie of collapsed candidates.

Shapes: n committed tokens, A newly committed ones, T frames, H hidden, C capacity.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from draft_heads.configs.options import option
from draft_heads.heads.attention import chain_attention
from draft_heads.heads.base import Rows, TargetView
from draft_heads.heads.ctc import CTCHead
from draft_heads.inference.drafters.base import tempered
from draft_heads.inference.drafters.heads.base import BlockCache, HeadDrafter, HeadOptions
from draft_heads.inference.drafters.heads.ctc_search import TREE_MODES, build_tree
from draft_heads.inference.native import library
from draft_heads.inference.step import VerifiedStep
from draft_heads.inference.target.target import Target
from draft_heads.inference.tree import DraftTree


def draft_tree(
    head: CTCHead, view: TargetView, frames: Tensor, base: Tensor, max_nodes: int, tree: str = "prefix"
) -> DraftTree:
    """The tree of collapsed candidates of one anchor's frames [T, H] behind base token `base []`."""
    temperature, bias_of = head.config.tree_temperature, None
    if head.config.label_context:
        log_probs = head.frame_logits(frames, view) / temperature

        def bias_of(classes: Tensor | None) -> Tensor:
            tokens = base[None] if classes is None else head.draft_tokens(classes)
            return head.label_bias(tokens, view) / temperature

    else:
        log_probs = tempered(head.frame_log_probs(frames, view), temperature)
    return build_tree(log_probs, max_nodes, tree, vocabulary=head.draft_vocab, bias_of=bias_of)


@dataclass(frozen=True)
class CTCOptions(HeadOptions):
    tree: str = option("prefix", "how candidates become a tree", choices=TREE_MODES)


class CTCDrafter(HeadDrafter):
    """Keeps the keys and values of the context states `c_i`, rolled forward with the *verified* hidden states.

    `c_i` needs the token after i, which is known for every committed i: the next committed token, or the base token.
    """

    kind = "ctc"
    title = "a tree of collapsed CTC candidates"
    options_type = CTCOptions

    def __init__(self, head: CTCHead, target: Target, max_nodes: int = 32, **options: Any) -> None:
        """options: see `CTCOptions`."""
        chosen = CTCOptions(max_nodes=max_nodes, **options)
        tree = chosen.tree
        if tree in ("raw", "plain") and head.config.label_context:
            raise ValueError(
                f"tree={tree} takes frames for independent, which those of a head with label_context are not; drop it"
            )
        caches = [BlockCache(head) for _ in head.blocks]
        super().__init__(head, target, chosen, head.config.frames, caches, behind=2 * head.config.frames + 1)
        self.lend()
        if tree == "prefix" and target.device.type == "cpu":
            library.load_library()  # compile now, not during the first answer
        self.tree = tree
        self.on_device = tree in ("prefix", "chain")  # the trees of the published code are built on the host
        self._state: Tensor  # c_n, [H]
        self._base: Tensor

    def lend(self) -> None:
        self.view = self._target.drafting_view(self.head)

    @staticmethod
    def propose_from(head: CTCHead, rows: Rows, view: TargetView, max_nodes: int) -> Callable[[int], DraftTree]:
        """The head's frames at every anchor at once, then a tree for each."""
        anchors = torch.arange(rows.input_ids.shape[1], device=rows.hidden.device)[None]
        view = head.draft_view(view)
        frames, text = head.drafted_frames(rows, anchors, view)[0], rows.input_ids[0]
        return lambda anchor: draft_tree(head, view, frames[anchor], text[anchor + 1], max_nodes)

    def observe(self, step: VerifiedStep) -> None:
        head = self.head
        hidden = head.target_states(step.hidden, step.aux_hidden)
        states = head.context_states(hidden, step.next_tokens, self.view)[None]  # [1, A, H]
        slots = self._new_slots(hidden)
        rotation = head.block.rotation(slots[None] + 1)
        self._caches[0].write(slots, *head.block.context_keys_values(states, rotation))
        self.length += step.count
        self._state, self._base = states[0, -1], step.base

    def frames(self) -> Tensor:
        """[T, H], what the LM head reads for each frame at the present anchor."""
        head = self.head
        base_position = self.length.expand(1, 1)
        if head.config.chained:
            # c_n itself opens the chain, so the context ends before it
            cache = self._caches[0]
            sees = (cache.index() < self.length - 1)[None, None]
            attend_chain = chain_attention((cache.keys, cache.values), sees)
            return head.chain_frames(self._state[None, None], base_position, attend_chain, self.view)[0, 0]
        # frames see the whole context and each other; they lie behind the context, overwritten each step
        slots = self.length + torch.arange(head.config.frames, device=self.length.device)
        attend = self._caches[0].entering(slots, causal=False)
        return head.draft_frames(self._state[None, None], base_position, attend)[0, 0]

    def propose(self) -> DraftTree:
        return draft_tree(self.head, self.view, self.frames(), self._base, self.max_nodes, self.tree)
