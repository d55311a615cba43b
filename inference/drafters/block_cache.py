"""Keys and values that a head's block has read, kept from step to step by its drafter.

Shapes: G key/value heads, C capacity, D head size, Q new rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from heads.base import DraftHead
from heads.block import Attend, grouped_attention


class BlockCache:
    """Buffers `keys`, `values [1, G, C, D]`; what lies behind the rows in use is overwritten.

    How many rows are in use is a tensor on the device: positions come in as tensors, and masks say who is seen.
    """

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
            for buffer in (self.keys, self.values):  # compiled programs serve any capacity
                torch._dynamo.maybe_mark_dynamic(buffer, 2)

    def write(self, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """Put rows `[1, G, Q, D]` at `slots [Q]`."""
        self.keys.index_copy_(2, slots, keys)
        self.values.index_copy_(2, slots, values)

    def index(self) -> Tensor:
        """[C], every slot's number."""
        return torch.arange(self.keys.shape[2], device=self.keys.device)

    def entering(self, slots: Tensor, causal: bool) -> Attend:
        """Attention of rows that enter at ascending `slots [Q]` and see all before them; each other, or backwards only.

        `causal` [Q, C] is slot ≤ the row's own; otherwise slot ≤ the last row's.
        """
        visible = self.index() <= (slots[:, None] if causal else slots[-1])

        def attend(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
            self.write(slots, keys, values)
            return grouped_attention(queries, self.keys, self.values, visible.expand(queries.shape[2], -1))

        return attend
