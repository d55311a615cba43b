"""How the rows of a tree attend to cached text and to each other: three ways to the same numbers.

`masked`  one attention over all of it under a dense mask; the reference
`merged`  the text, which every row sees alike, and the tree, under its mask, apart; joined by their log-sum-exps
`flex`    FlexAttention, which skips blocks of keys that nobody sees

Shapes: B sequences, R rows, G key/value heads, Q = N/G·R queries of a key head (its heads' rows one after another),
D head size, C cache rows that are read.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from draft_heads.heads.block import grouped_attention
from draft_heads.inference.target.masks import behind_text, by_kind

KeysValues = tuple[Tensor, Tensor]


class MaskedAttention:
    """Built once a forward; every layer calls it."""

    def __init__(
        self,
        sees: Tensor,
        positions: Tensor,
        lengths: Tensor,
        end: int,
        window: int | None,
        kinds: Collection[str],
        repeat: int,
        dtype: torch.dtype,
    ) -> None:
        """sees [B, R, R]; positions [B, R]; lengths [B]; C = `end`; repeat = N/G; dtype of the states."""
        self.repeat, self.dtype = repeat, dtype
        self.prepare(sees, positions, lengths, end, window, kinds)

    def prepare(
        self, sees: Tensor, positions: Tensor, lengths: Tensor, end: int, window: int | None, kinds: Collection[str]
    ) -> None:
        """Masks for every kind of layer."""
        visible, key_positions = behind_text(sees, positions, lengths, end)
        masks = by_kind(visible, positions, key_positions, window, kinds)
        self.biases = {kind: self.bias(mask) for kind, mask in masks.items()}

    def bias(self, mask: Tensor) -> Tensor:
        """[B, R, C] bool → [B, 1, Q, C]: 0 where a key is seen, else −inf."""
        bias = torch.zeros(mask.shape, dtype=self.dtype, device=mask.device).masked_fill_(~mask, -torch.inf)
        return bias.repeat(1, self.repeat, 1)[:, None]

    def __call__(self, kind: str, queries: Tensor, own: KeysValues, cached: KeysValues) -> Tensor:
        """[B, G, Q, D] from queries [B, G, Q, D], the rows' own keys and values [B, G, R, D] and all [B, G, C, D]."""
        return grouped_attention(queries, *cached, self.biases[kind])


class MergedAttention(MaskedAttention):
    """softmax over two sets of keys A, B: `out = Σ_s w_s·out_s`, `w_s = exp(lse_s − log(e^lse_A + e^lse_B))`."""

    def prepare(
        self, sees: Tensor, positions: Tensor, lengths: Tensor, end: int, window: int | None, kinds: Collection[str]
    ) -> None:
        """Text and rows apart: what is text is the same for every row, unless a window cuts it."""
        index = torch.arange(end, device=positions.device).expand(len(lengths), -1)
        text = (index < lengths[:, None])[:, None].expand(-1, positions.shape[1], -1)
        self.biases = {k: self.bias(mask) for k, mask in by_kind(text, positions, index, window, kinds).items()}
        self.among = {k: self.bias(mask) for k, mask in by_kind(sees, positions, positions, window, kinds).items()}

    def __call__(self, kind: str, queries: Tensor, own: KeysValues, cached: KeysValues) -> Tensor:
        """As the masked one."""
        (text, text_lse), (tree, tree_lse) = (
            attention_and_lse(queries, *pair, bias)
            for pair, bias in ((cached, self.biases[kind]), (own, self.among[kind]))
        )
        total = torch.logaddexp(text_lse, tree_lse)  # never −inf: a row sees itself
        joined = text * (text_lse - total).exp()[..., None] + tree * (tree_lse - total).exp()[..., None]
        return joined.to(queries.dtype)


class FlexTreeAttention(MaskedAttention):
    """The dense masks as FlexAttention's mask functions; compiled on a GPU, where alone it is fast."""

    _compiled: Callable[..., Any] | None = None

    def prepare(
        self, sees: Tensor, positions: Tensor, lengths: Tensor, end: int, window: int | None, kinds: Collection[str]
    ) -> None:
        """A block mask for every kind of layer."""
        visible, key_positions = behind_text(sees, positions, lengths, end)
        rows = positions.shape[1]
        self.blocks = {}
        for kind, mask in by_kind(visible, positions, key_positions, window, kinds).items():

            def seen(b: Tensor, head: Tensor, query: Tensor, key: Tensor, mask: Tensor = mask) -> Tensor:
                return mask[b, query % rows, key]

            queries = self.repeat * rows
            self.blocks[kind] = create_block_mask(seen, len(lengths), None, queries, end, device=positions.device)

    def __call__(self, kind: str, queries: Tensor, own: KeysValues, cached: KeysValues) -> Tensor:
        """As the masked one."""
        flex: Any = flex_attention
        if queries.is_cuda:
            if FlexTreeAttention._compiled is None:
                FlexTreeAttention._compiled = torch.compile(flex_attention, dynamic=True)
            flex = FlexTreeAttention._compiled
        return flex(queries, *cached, block_mask=self.blocks[kind])


def attention_and_lse(queries: Tensor, keys: Tensor, values: Tensor, bias: Tensor) -> KeysValues:
    """Attention [..., Q, D] and the log-sum-exp [..., Q] of its scores; rows that see nothing give 0 and −inf.

    In float32 at least: two halves joined in half precision would be ten times less exact than one attention.
    """
    wide = torch.promote_types(queries.dtype, torch.float32)
    queries, keys, values = queries.to(wide), keys.to(wide), values.to(wide)
    scores = queries @ keys.transpose(-1, -2) * queries.shape[-1] ** -0.5 + bias
    lse = scores.logsumexp(-1)
    weights = (scores - lse.clamp(min=torch.finfo(lse.dtype).min)[..., None]).exp()
    return weights @ values, lse


TREE_ATTENTION: dict[str, type[MaskedAttention]] = {
    "masked": MaskedAttention,
    "merged": MergedAttention,
    "flex": FlexTreeAttention,
}
