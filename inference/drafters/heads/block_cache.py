"""Keys and values that a head's block has read, kept from step to step by its drafter.

Shapes: G key/value heads, C capacity, C' visible slots, D head size, Q new rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from draft_heads.heads.base import DraftHead
from draft_heads.heads.block import Attend, folded_attention


class BlockCache:
    """One buffer `[C, 2·G, D]` of which the first C' slots are visible; slots behind the rows in use are overwritten.

    The number of rows in use stays on the device: slots are tensors, and masks hide what lies behind them.
    """

    def __init__(self, head: DraftHead) -> None:
        config = head.config
        self._heads = config.num_key_value_heads
        self._store = self._rows = next(head.parameters()).new_zeros(0, 2 * self._heads, config.head_dim)
        self._views: dict[int, Tensor] = {}

    def reserve(self, slots: int) -> None:
        """Room for `slots` rows, all visible; allocates only where there is too little."""
        size, *shape = self._store.shape
        if size < slots:
            self._store = self._store.new_zeros(-(-slots // 256) * 256, *shape)
            self._views.clear()
        self.set_visible_length(len(self._store))

    def set_visible_length(self, slots: int) -> None:
        """Only the first `slots` rows are read and written until the next call."""
        slots = min(-(-slots // 16) * 16, len(self._store))  # attention is slower over odd numbers of keys
        if slots not in self._views:
            self._views[slots] = self._store[:slots]
            torch._dynamo.maybe_mark_dynamic(self._views[slots], 0)  # compiled programs serve any length
        self._rows = self._views[slots]

    def memory(self) -> list[Tensor]:
        """The buffer."""
        return [self._store]

    @property
    def keys(self) -> Tensor:
        """[1, G, C', D]"""
        return self._rows[:, : self._heads].transpose(0, 1)[None]

    @property
    def values(self) -> Tensor:
        """[1, G, C', D]"""
        return self._rows[:, self._heads :].transpose(0, 1)[None]

    def write(self, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """Put rows `[1, G, Q, D]` at `slots [Q]`."""
        self._rows.index_copy_(0, slots, torch.cat([keys, values], dim=1)[0].transpose(0, 1))

    def index(self) -> Tensor:
        """[C'], every slot's number."""
        return torch.arange(len(self._rows), device=self._rows.device)

    def entering(self, slots: Tensor, causal: bool) -> Attend:
        """Attention that writes Q rows at ascending `slots [Q]`; each sees all slots up to its own or the last of them.

        Worked example: rows at slots 2, 3 see slots 0 … 2 and 0 … 3 if causal, else both 0 … 3.
        """
        visible = self.index() <= (slots[:, None] if causal else slots[-1])

        def attend(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
            self.write(slots, keys, values)
            return folded_attention(queries, self.keys, self.values, visible.expand(queries.shape[2], -1))

        return attend
