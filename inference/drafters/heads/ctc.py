"""Drafting with a CTC head: T frames in one pass over the cached context, then a trie of collapsed candidates.

Shapes: B texts, n committed tokens, A newly committed ones, T frames, H hidden.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from draft_heads.configs.options import option
from draft_heads.heads.attention import chain_attention
from draft_heads.heads.base import TargetView
from draft_heads.heads.ctc import CTCHead
from draft_heads.inference.drafters.base import tempered
from draft_heads.inference.drafters.heads.base import BlockCache, HeadDrafter, HeadOptions
from draft_heads.inference.drafters.heads.ctc_search import TREE_MODES, build_tree
from draft_heads.inference.step import VerifiedStep
from draft_heads.inference.tree import DraftTree


@dataclass(frozen=True)
class CTCOptions(HeadOptions):
    tree: str = option("prefix", "how candidates become a tree", choices=TREE_MODES)


class CTCDrafter(HeadDrafter):
    """Keeps the keys and values of the context states `c_i`, rolled forward with the *verified* hidden states.

    `c_i` needs the token after i, which is known for every committed i: the next committed token, or the base token.
    """

    kind = "ctc"
    reads_lm_head = True
    title = "a tree of collapsed CTC candidates"
    options_type = CTCOptions

    def __init__(self, head: CTCHead, view: TargetView, max_nodes: int = 32, slots: int = 1, **options: Any) -> None:
        """options: see `CTCOptions`."""
        chosen = CTCOptions(max_nodes=max_nodes, **options)
        tree = chosen.tree
        if tree in ("raw", "plain") and head.config.label_context:
            raise ValueError(
                f"tree={tree} takes frames for independent; got a head with label_context {head.config.label_context}, "
                "whose frames depend on the label before; leave it out"
            )
        caches, frames = [BlockCache(head, slots)], head.config.frames
        super().__init__(head, view, chosen, slots, frames, caches, after=2 * frames + 1)
        self.tree = tree
        self.on_device = tree in ("prefix", "chain")  # the trees of the published code are built on the host

    def read(self, step: VerifiedStep, texts: slice) -> tuple[Tensor, ...]:
        """c_n [B, H] and the base token [B]."""
        head, places = self.head, self._places(step.tokens, texts)
        hidden = head.target_states(step.hidden, step.aux_hidden)
        states = head.context_states(hidden, step.next_tokens, self.view)  # [B, A, H]
        keys_values = head.block.context_keys_values(states, head.block.rotation(places + 1))
        self._caches[0].of(texts).write(places, *keys_values)
        return states[:, -1], step.base

    def frames(self) -> Tensor:
        """[B, T, H], what the LM head reads for each frame at the present anchor of each text."""
        head, cache, base_position = self.head, self._caches[0], self.length[:, None]
        states = self.state[0][:, None]
        if head.config.chained:
            # c_n itself opens the chain, so the context ends before it
            sees = (cache.index() < base_position - 1)[:, None]
            attend_chain = chain_attention((cache.keys, cache.values), sees)
            return head.chain_frames(states, base_position, attend_chain, self.view)[:, 0]
        # frames see the whole context and each other; they lie after the context, overwritten each step
        places = base_position + torch.arange(head.config.frames, device=base_position.device)
        return head.draft_frames(states, base_position, cache.entering(places, causal=False))[:, 0]

    def propose(self) -> DraftTree:
        """The trees of collapsed candidates of the frames."""
        head, view, frames, temperature = self.head, self.view, self.frames(), self.head.config.tree_temperature
        bias_of = None
        if head.config.label_context:
            log_probs = head.frame_logits(frames, view) / temperature

            def bias_of(classes: Tensor | None) -> Tensor:
                tokens = self.state[1][:, None] if classes is None else head.draft_tokens(classes)
                bias: Tensor = head.label_bias(tokens, view) / temperature
                return bias

        else:
            log_probs = tempered(head.frame_logits(frames, view).log_softmax(-1), temperature)
        return build_tree(log_probs, self.max_nodes, self.tree, vocabulary=head.draft_vocab, bias_of=bias_of)
