"""Keys and values that a head's block has read, kept from step to step by its drafter.

Shapes: G key/value heads, C capacity, C' slots within reach, D head size, Q new rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from heads.base import DraftHead
from heads.block import Attend, grouped_attention


class BlockCache:
    """Two buffers `[C, G, D]` of which the first C' slots are read; what lies behind the rows in use is overwritten.

    How many rows are in use is a tensor on the device: positions come in as tensors, and masks say who is seen.
    """

    def __init__(self, head: DraftHead) -> None:
        config = head.config
        self._buffers = [next(head.parameters()).new_zeros(0, config.num_key_value_heads, config.head_dim)] * 2
        self._views: dict[int, list[Tensor]] = {}
        self._keys, self._values = self._buffers

    def reserve(self, slots: int) -> None:
        """Room for `slots` rows, rounded up, all within reach; nothing is allocated where there is room already."""
        size, *shape = self._buffers[0].shape
        if size < slots:
            self._buffers = [self._keys.new_zeros(-(-slots // 256) * 256, *shape) for _ in range(2)]
            self._views.clear()
        self.reach(len(self._buffers[0]))

    def reach(self, slots: int) -> None:
        """Nothing is read or written beyond the first `slots` rows until more are reached, or a new text begins."""
        slots = min(slots, len(self._buffers[0]))
        if slots not in self._views:
            self._views[slots] = [buffer[:slots] for buffer in self._buffers]
            for view in self._views[slots]:  # compiled programs serve any length
                torch._dynamo.maybe_mark_dynamic(view, 0)
        self._keys, self._values = self._views[slots]

    def memory(self) -> list[Tensor]:
        """The buffers."""
        return self._buffers

    @property
    def keys(self) -> Tensor:
        """[1, G, C', D]"""
        return self._keys.transpose(0, 1)[None]

    @property
    def values(self) -> Tensor:
        """[1, G, C', D]"""
        return self._values.transpose(0, 1)[None]

    def write(self, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """Put rows `[1, G, Q, D]` at `slots [Q]`."""
        self._keys.index_copy_(0, slots, keys[0].transpose(0, 1))
        self._values.index_copy_(0, slots, values[0].transpose(0, 1))

    def index(self) -> Tensor:
        """[C'], every slot's number."""
        return torch.arange(len(self._keys), device=self._keys.device)

    def entering(self, slots: Tensor, causal: bool) -> Attend:
        """Attention of rows that enter at ascending `slots [Q]` and see all before them; each other, or backwards only.

        `causal` [Q, C'] is slot ≤ the row's own; otherwise slot ≤ the last row's.
        """
        visible = self.index() <= (slots[:, None] if causal else slots[-1])

        def attend(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
            self.write(slots, keys, values)
            return grouped_attention(queries, self.keys, self.values, visible.expand(queries.shape[2], -1))

        return attend
