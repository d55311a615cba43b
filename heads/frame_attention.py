"""Attention of CTC frames in training: all anchors of a row at once, one mask function, two ways to run it.

Shapes: B batch, A anchors a row, T frames an anchor, L context length, N / G heads, D head size.

Frame (a, t) is query a·T + t. Keys are the L context states followed by all frames of the row. Worked example with
L = 4, T = 2 and anchors (1, 2): queries 0, 1 belong to anchor 1, queries 2, 3 to anchor 2; query 2 sees contexts
0, 1, 2 and keys 4+2, 4+3 (the frames of its own anchor); it sees neither context 3 nor keys 4, 5.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from heads.block import Attend, grouped_attention

FrameMask = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def frame_mask(anchors: Tensor, segment_ids: Tensor, frames: int) -> FrameMask:
    """The predicate `(b, head, query, key) → visible` for anchors `[B, A]` in rows with `segment_ids [B, L]`.

    Callable with scalar tensors (FlexAttention) and with broadcast index tensors (dense mask) alike.
    """
    length = segment_ids.shape[1]

    def visible(b: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        anchor = anchors[b, query // frames]
        context = key.clamp(max=length - 1)
        in_context = (context <= anchor) & (segment_ids[b, context] == segment_ids[b, anchor])
        return torch.where(key < length, in_context, (key - length) // frames == query // frames)

    return visible


def dense_frame_mask(anchors: Tensor, segment_ids: Tensor, frames: int) -> Tensor:
    """[B, A·T, L + A·T] bool, the mask written out: the oracle of both fast ways."""
    batch, count = anchors.shape
    length = segment_ids.shape[1]
    device = anchors.device
    b = torch.arange(batch, device=device)[:, None, None]
    query = torch.arange(count * frames, device=device)[None, :, None]
    key = torch.arange(length + count * frames, device=device)[None, None, :]
    b, query, key = torch.broadcast_tensors(b, query, key)
    return frame_mask(anchors, segment_ids, frames)(b, torch.zeros_like(b), query, key)


def dense_attention(
    context_keys: Tensor,
    context_values: Tensor,
    anchors: Tensor,
    segment_ids: Tensor,
    frames: int,
    anchors_per_chunk: int = 16,
) -> Attend:
    """SDPA with a dense mask, a few neighbouring anchors at a time.

    Anchors are ascending, so a chunk needs the contexts up to its last anchor only, and only its own frames: the
    same numbers as one call with the whole mask, at a fraction of the work.
    """

    def attend(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        pieces = []
        for start in range(0, anchors.shape[1], anchors_per_chunk):
            some = anchors[:, start : start + anchors_per_chunk]
            upto = int(some.max()) + 1
            rows = slice(start * frames, (start + some.shape[1]) * frames)
            pieces.append(
                grouped_attention(
                    queries[:, :, rows],
                    torch.cat([context_keys[:, :, :upto], keys[:, :, rows]], dim=2),
                    torch.cat([context_values[:, :, :upto], values[:, :, rows]], dim=2),
                    dense_frame_mask(some, segment_ids[:, :upto], frames)[:, None],
                )
            )
        return torch.cat(pieces, dim=2)

    return attend


_compiled_flex: Callable[..., Tensor] | None = None


def _flex(device_type: str) -> Callable[..., Tensor]:
    """FlexAttention, compiled once on GPU (uncompiled it would build the full score matrix), as is on CPU."""
    global _compiled_flex
    if device_type != "cuda":
        return flex_attention
    if _compiled_flex is None:
        _compiled_flex = torch.compile(flex_attention, dynamic=True)
    return _compiled_flex


def flex_frame_attention(
    context_keys: Tensor, context_values: Tensor, anchors: Tensor, segment_ids: Tensor, frames: int
) -> Attend:
    """FlexAttention with a block mask from the same predicate; FlexAttention has no backward on CPU."""
    batch, count = anchors.shape
    block_mask = create_block_mask(
        frame_mask(anchors, segment_ids, frames),
        batch,
        None,
        count * frames,
        segment_ids.shape[1] + count * frames,
        device=anchors.device.type,
    )

    def attend(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        return _flex(queries.device.type)(
            queries,
            torch.cat([context_keys, keys], dim=2),
            torch.cat([context_values, values], dim=2),
            block_mask=block_mask,
            enable_gqa=queries.shape[1] != keys.shape[1],
        )

    return attend


def causal_attention(segment_ids: Tensor) -> Attend:
    """Every state of rows with `segment_ids [B, L]` sees itself and what lies before it in its conversation."""
    index = torch.arange(segment_ids.shape[1], device=segment_ids.device)
    mask = (index <= index[:, None]) & (segment_ids[:, :, None] == segment_ids[:, None, :])

    def attend(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        return grouped_attention(queries, keys, values, mask[:, None])

    return attend


def before_anchor(anchors: Tensor, segment_ids: Tensor) -> Tensor:
    """[B, A, L] bool, the contexts before each anchor `[B, A]`, without its own: that one opens the chain."""
    index = torch.arange(segment_ids.shape[1], device=segment_ids.device)
    same = segment_ids[:, None, :] == segment_ids.gather(1, anchors)[:, :, None]
    return same & (index < anchors[:, :, None])


def chain_attention(context_keys: Tensor, context_values: Tensor, visible: Tensor) -> Attend:
    """For chains drafted one state at a time: each call's states see `visible [B, A, L]` contexts and their own chain.

    Called once per step with the states of all A anchors; remembers the keys and values of the steps before.
    """
    chain_keys, chain_values = [context_keys], [context_values]
    own = torch.eye(visible.shape[1], dtype=torch.bool, device=visible.device).expand(len(visible), -1, -1)

    def attend(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        chain_keys.append(keys)
        chain_values.append(values)
        mask = torch.cat([visible, own.repeat(1, 1, len(chain_keys) - 1)], dim=2)[:, None]
        return grouped_attention(queries, torch.cat(chain_keys, dim=2), torch.cat(chain_values, dim=2), mask)

    return attend
