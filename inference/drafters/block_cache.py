"""Keys and values that a head's block has read, kept from step to step by its drafter.

Shapes: G key/value heads, C capacity, D head size, Q new rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from heads.base import DraftHead
from heads.block import Attend, grouped_attention


class BlockCache:
    """Buffers `keys`, `values [1, G, C, D]`; what lies behind the rows in use is overwritten."""

    def __init__(self, head: DraftHead) -> None:
        config = head.config
        self._shape = (1, config.num_key_value_heads, 0, config.head_dim)
        self.keys = self.values = next(head.parameters()).new_zeros(self._shape)

    def reserve(self, slots: int) -> None:
        """Room for `slots` rows, rounded up; nothing is allocated where there is room already."""
        if self.keys.shape[2] < slots:
            batch, heads, _, size = self._shape
            shape = (batch, heads, -(-slots // 256) * 256, size)
            self.keys, self.values = self.keys.new_zeros(shape), self.values.new_zeros(shape)

    def write(self, start: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Put rows `[1, G, Q, D]` at `start`; lends everything up to the last of them."""
        end = start + keys.shape[2]
        self.keys[:, :, start:end], self.values[:, :, start:end] = keys, values
        return self.keys[:, :, :end], self.values[:, :, :end]

    def entering(self, start: int, causal: bool) -> Attend:
        """Attention of rows that enter at `start` and see all before them; each other, or only backwards (`causal`)."""

        def attend(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
            all_keys, all_values = self.write(start, keys, values)
            rows = torch.arange(start, all_keys.shape[2], device=keys.device)
            visible = torch.arange(all_keys.shape[2], device=keys.device) <= rows[:, None] if causal else None
            return grouped_attention(queries, all_keys, all_values, visible)

        return attend
