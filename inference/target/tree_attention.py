"""How the rows of a tree attend to cached text and to each other: which keys they see, sliding windows included (our
masks replace a decoder's own), and two ways to the same numbers.

`masked`    torch's attention under a dense mask; the reference
`products`  plain products, faster on a GPU that has few rows to attend
`auto`      the faster of the two by device and shape

Shapes: B sequences, R rows, G key/value heads, Q = N/G·R queries of a key head (its heads' rows one after another),
D head size, C cache rows that are read (committed text, the forward's rows, garbage).
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor

from draft_heads.heads.block import grouped_attention


def visible_keys(sees: Tensor, positions: Tensor, lengths: Tensor, end: int) -> tuple[Tensor, Tensor]:
    """For rows after `lengths [B]` committed ones: which keys they see `[B, R, C]`, and key positions `[B, C]`.

    sees [B, R, R] among the rows; positions [B, R]; C = `end`. Reads nothing back to the host. Worked example: 2
    committed rows, R = 2, C = 5, causal: row 0 sees slots 0, 1, 2 and row 1 sees 0, 1, 2, 3; slot 4 is garbage.
    """
    rows = positions.shape[1]
    start = lengths[:, None]
    index = torch.arange(end, device=positions.device)[None]  # against start: [B, C]
    if rows == 1:  # it sees itself, at the position that its slot has
        return (index <= start)[:, None], index.expand(len(start), -1)
    row = (index - start).clamp(0, rows - 1)
    among_rows = (index >= start) & (index < start + rows)
    seen = sees.gather(2, row[:, None].expand(-1, rows, -1))
    visible = (index < start)[:, None] | (among_rows[:, None] & seen)
    return visible, torch.where(among_rows, positions.gather(1, row), index)


def masks_by_layer_type(
    visible: Tensor, query_positions: Tensor, key_positions: Tensor, window: int | None, layer_types: Collection[str]
) -> dict[str, Tensor]:
    """`visible [B, R, C]` for each layer type. Window w, row at position 9: sees positions 10 − w … 9."""
    masks = {"full_attention": visible}
    if window is not None and "sliding_attention" in layer_types:
        masks["sliding_attention"] = visible & (key_positions[:, None] > query_positions[:, :, None] - window)
    return {layer_type: mask for layer_type, mask in masks.items() if layer_type in layer_types}


class MaskedAttention:
    """Built once per forward; every layer calls it."""

    def __init__(self, masks: dict[str, Tensor], repeat: int, dtype: torch.dtype) -> None:
        """masks: layer type → [B, R, C] bool, which keys each row sees; repeat = N/G; dtype of the states."""
        self.biases = {}  # [B, 1, Q, C] of each layer type: 0 where a key is seen, else −inf
        for layer_type, mask in masks.items():
            bias = torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, -torch.inf)
            self.biases[layer_type] = bias.repeat(1, repeat, 1)[:, None]

    def __call__(self, layer_type: str, queries: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
        """[B, G, Q, D] from queries [B, G, Q, D] and all keys and values [B, G, C, D]; scale: of the scores."""
        return grouped_attention(queries, keys, values, self.biases[layer_type], scale)


class ProductAttention(MaskedAttention):
    """The same as two batched products around a softmax in float32.

    For a GPU and one text: its products share the keys of a head among the blocks of the GPU, where the kernel of
    `masked` has one block for 64 rows of a head, which reads all keys one after another.
    """

    def __call__(self, layer_type: str, queries: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
        """See `MaskedAttention`."""
        shape = queries.shape
        queries, keys, values = (states.flatten(0, 1) for states in (queries, keys, values))  # [B·G, …]
        half = queries.dtype in (torch.bfloat16, torch.float16)
        if half and queries.is_cuda:
            scores = torch.bmm(queries, keys.transpose(1, 2), out_dtype=torch.float32)
        else:
            queries, keys = (x.float() if half else x for x in (queries, keys))
            scores = queries @ keys.transpose(1, 2)
        scores = torch.add(self.biases[layer_type], scores.unflatten(0, shape[:2]), alpha=scale)  # [B, G, Q, C]
        attended = scores.softmax(-1).to(values.dtype).flatten(0, 1) @ values
        return attended.unflatten(0, shape[:2])


FEW_QUERIES = 2048
"""Rows of all heads, N·R, up to which `products` is faster on an H200: beyond, its scores, written and read, cost more
than the idle blocks of `masked`. With several texts it is slower, because it copies the keys of all."""


def faster_way(texts: int, queries: int, on_gpu: bool) -> str:
    """`products` or `masked`, for B texts with N·R queries each."""
    return "products" if on_gpu and texts == 1 and queries <= FEW_QUERIES else "masked"


def tree_attention(
    way: str, masks: dict[str, Tensor], heads: int, kv_heads: int, dtype: torch.dtype
) -> MaskedAttention:
    """What every layer of a forward calls, by a name of `TREE_ATTENTION`; masks: layer type → [B, R, C] bool."""
    if way == "auto":
        mask = next(iter(masks.values()))
        texts, rows, _ = mask.shape
        way = faster_way(texts, heads * rows, mask.is_cuda and torch.version.hip is None)  # not tried on AMD's
    return (ProductAttention if way == "products" else MaskedAttention)(masks, heads // kv_heads, dtype)


TREE_ATTENTION = ("auto", "masked", "products")
