"""Who sees whom in training: one mask function a method, handed to SDPA as a dense mask or to FlexAttention.

Shapes: B batch, A anchors a row, T frames or K heads an anchor, L row length, N / G heads, D head size.

`frame_mask` (CTC): frame (a, t) is query a·T + t; keys are the L context states followed by all frames of the row.
Worked example with L = 4, T = 2 and anchors (1, 2): queries 0, 1 belong to anchor 1, queries 2, 3 to anchor 2; query 2
sees contexts 0, 1, 2 and keys 4+2, 4+3 (the frames of its own anchor); it sees neither context 3 nor keys 4, 5.

`fusion_mask` (Chimera): head k of anchor a is query a·K + k; keys are h_0 … h_{L−1} followed by g_0 … g_{L−1}. Worked
example with L = 6, K = 2 and anchor 2: query 0 sees h_0 … h_2 and g_0 … g_3, query 1 sees h_0 … h_2 and g_0 … g_4.

FlexAttention has no backward on CPU, so CPU trains with dense masks, a few neighbouring anchors at a time: they need
the keys up to the last of them only, which gives the same numbers at a fraction of the work.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from draft_heads.heads.block import Attend, grouped_attention

Mask = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""(b, head, query, key) → visible; for scalar tensors (FlexAttention) and broadcast index tensors alike."""

KeysValues = tuple[Tensor, Tensor]


def frame_mask(anchors: Tensor, segment_ids: Tensor, frames: int) -> Mask:
    """Mask of CTC frames for anchors `[B, A]` in rows with `segment_ids [B, L]`."""
    length = segment_ids.shape[1]

    def visible(b: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        anchor = anchors[b, query // frames]
        context = key.clamp(max=length - 1)
        in_context = (context <= anchor) & (segment_ids[b, context] == segment_ids[b, anchor])
        return torch.where(key < length, in_context, (key - length) // frames == query // frames)

    return visible


def fusion_mask(anchors: Tensor, segment_ids: Tensor, heads: int) -> Mask:
    """Mask of Chimera's queries for anchors `[B, A]` in rows with `segment_ids [B, L]`."""
    length = segment_ids.shape[1]

    def visible(b: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        anchor = anchors[b, query // heads]
        index = torch.where(key < length, key, key - length)
        last = torch.where(key < length, anchor, anchor + 1 + query % heads)
        return (index <= last) & (segment_ids[b, index] == segment_ids[b, anchor])

    return visible


def dense_mask(visible: Mask, batch: int, queries: Tensor, keys: Tensor) -> Tensor:
    """[B, Q, C] bool, the mask written out for the given query and key indices."""
    b = torch.arange(batch, device=queries.device)[:, None, None]
    b, query, key = torch.broadcast_tensors(b, queries[None, :, None], keys[None, None, :])
    return visible(b, torch.zeros_like(b), query, key)


def anchor_attention(
    visible: Mask, anchors: Tensor, per_anchor: int, left: KeysValues, right: KeysValues | None = None
) -> Attend:
    """Attention of the queries of anchors `[B, A]`, `per_anchor` each, under a mask: flex on GPU, dense on CPU.

    left, right: the two halves of the keys and values, `[B, G, ·, D]`; without a right half, the queries' own.
    """
    return (flex_anchor_attention if anchors.is_cuda else dense_anchor_attention)(
        visible, anchors, per_anchor, left, right
    )


def dense_anchor_attention(
    visible: Mask,
    anchors: Tensor,
    per_anchor: int,
    left: KeysValues,
    right: KeysValues | None = None,
    anchors_per_chunk: int = 16,
) -> Attend:
    """`anchor_attention` by SDPA, neighbouring anchors at a time, each chunk with the keys up to its last anchor.

    Without a right half all queries of an anchor see the same keys, so the mask is made for the first and repeated.
    """
    length, count = left[0].shape[2], anchors.shape[1]
    alike = per_anchor if right is None else 1  # neighbouring queries under one row of the mask

    def attend(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        pieces = []
        for start in range(0, count, anchors_per_chunk):
            own = slice(start * per_anchor, min(start + anchors_per_chunk, count) * per_anchor)
            upto = int(anchors[:, start : start + anchors_per_chunk].max()) + 1
            first = slice(0, upto)
            second = own if right is None else slice(0, min(upto + per_anchor, length))
            halves = zip(left, (keys, values) if right is None else right)
            seen_keys, seen_values = (torch.cat([a[:, :, first], b[:, :, second]], dim=2) for a, b in halves)
            index = torch.cat([torch.arange(upto), torch.arange(length + second.start, length + second.stop)])
            rows = torch.arange(own.start, own.stop, alike, device=anchors.device)
            mask = dense_mask(visible, len(anchors), rows, index.to(anchors.device)).repeat_interleave(alike, dim=1)
            pieces.append(grouped_attention(queries[:, :, own], seen_keys, seen_values, mask[:, None]))
        return torch.cat(pieces, dim=2)

    return attend


@functools.cache
def compiled_flex() -> Callable[..., Any]:
    return torch.compile(flex_attention, dynamic=True)


def flex_anchor_attention(
    visible: Mask, anchors: Tensor, per_anchor: int, left: KeysValues, right: KeysValues | None = None
) -> Attend:
    """`anchor_attention` by FlexAttention: compiled once on GPU (uncompiled it builds every score), as is on CPU."""
    count = anchors.shape[1] * per_anchor
    keys_count = left[0].shape[2] + (count if right is None else right[0].shape[2])
    block_mask = create_block_mask(visible, len(anchors), None, count, keys_count, device=anchors.device)
    flex: Any = compiled_flex() if anchors.is_cuda else flex_attention

    def attend(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        halves = zip(left, (keys, values) if right is None else right)
        all_keys, all_values = (torch.cat(both, dim=2) for both in halves)
        grouped = queries.shape[1] != all_keys.shape[1]
        return flex(queries, all_keys, all_values, block_mask=block_mask, enable_gqa=grouped)

    return attend


def causal_attention(segment_ids: Tensor) -> Attend:
    """Every state of rows with `segment_ids [B, L]` sees itself and the states before it in its conversation."""
    index = torch.arange(segment_ids.shape[1], device=segment_ids.device)
    mask = (index <= index[:, None]) & (segment_ids[:, :, None] == segment_ids[:, None, :])

    def attend(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        return grouped_attention(queries, keys, values, mask[:, None])

    return attend


def before_anchor(anchors: Tensor, segment_ids: Tensor) -> Tensor:
    """[B, A, L] bool, the contexts before each anchor `[B, A]`; the anchor's own is the first state of its chain."""
    index = torch.arange(segment_ids.shape[1], device=segment_ids.device)
    same = segment_ids[:, None, :] == segment_ids.gather(1, anchors)[:, :, None]
    return same & (index < anchors[:, :, None])


def chain_attention(context: KeysValues, visible: Tensor) -> Attend:
    """For chains drafted one state at a time: each call's states see `visible [B, A, L]` contexts and their own chain.

    Called once per step with the states of all A anchors; remembers the keys and values of the steps before.
    """
    chain_keys, chain_values = [context[0]], [context[1]]
    own = torch.eye(visible.shape[1], dtype=torch.bool, device=visible.device).expand(len(visible), -1, -1)

    def attend(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        chain_keys.append(keys)
        chain_values.append(values)
        mask = torch.cat([visible, own.repeat(1, 1, len(chain_keys) - 1)], dim=2)[:, None]
        return grouped_attention(queries, torch.cat(chain_keys, dim=2), torch.cat(chain_values, dim=2), mask)

    return attend
