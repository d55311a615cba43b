"""Which keys the rows of a forward behind cached text see, sliding windows included: our masks replace a decoder's own.

Shapes: B sequences, R rows of a forward, C cache rows that are read (committed text, the forward's rows, garbage).
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor


def behind_text(sees: Tensor, positions: Tensor, lengths: Tensor, end: int) -> tuple[Tensor, Tensor]:
    """For rows behind `lengths [B]` committed ones: which keys they see `[B, R, C]`, and key positions `[B, C]`.

    sees [B, R, R] among the rows; positions [B, R]; C = `end`. Reads nothing back to the host. Worked example: 2
    committed rows, R = 2, C = 5, causal: row 0 sees slots 0, 1, 2 and row 1 sees 0, 1, 2, 3; slot 4 is garbage.
    """
    rows = positions.shape[1]
    start = lengths[:, None]
    index = torch.arange(end, device=positions.device)[None]  # against start: [B, C]
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
