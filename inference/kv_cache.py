"""A preallocated key/value cache: a step writes its rows behind the committed text, then keeps the accepted path.

Shapes: B batch, G key/value heads, C capacity, D head size, R rows of one forward.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin


class PreallocatedLayer(CacheLayerMixin):
    """One layer's keys and values `[B, G, C, D]`; `length` rows are committed, a forward's rows come behind them."""

    is_sliding = False

    def __init__(self, capacity: int) -> None:
        super().__init__()
        self.capacity = capacity
        self.length = 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocate `[B, G, C, D]` like the first states seen."""

        def room(states: Tensor) -> Tensor:
            batch, heads, _, size = states.shape
            return states.new_zeros(batch, heads, self.capacity, size)

        self.keys, self.values = room(key_states), room(value_states)
        self.dtype, self.device = key_states.dtype, key_states.device
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write R rows behind the committed ones (without committing them) and lend all of them."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        assert self.keys is not None and self.values is not None
        end = self.length + key_states.shape[2]
        assert end <= self.capacity, f"cache of {self.capacity} rows asked to hold {end}"
        self.keys[:, :, self.length : end] = key_states
        self.values[:, :, self.length : end] = value_states
        return self.keys[:, :, :end], self.values[:, :, :end]

    def keep(self, rows: Tensor) -> None:
        """Commit the last forward's `rows [A]` (ascending): move them, in place, right behind the committed ones."""
        assert self.keys is not None and self.values is not None
        source = rows.to(self.keys.device) + self.length
        end = self.length + rows.numel()
        self.keys[:, :, self.length : end] = self.keys[:, :, source]
        self.values[:, :, self.length : end] = self.values[:, :, source]
        self.length = end

    def get_seq_length(self) -> int:
        return self.length

    def get_max_length(self) -> int:
        return self.capacity

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.length + query_length, 0


class KVCache(Cache):
    """The cache of every layer of a target, with room for `capacity` rows (committed text plus one forward)."""

    def __init__(self, layers: int, capacity: int) -> None:
        self.own = [PreallocatedLayer(capacity) for _ in range(layers)]
        super().__init__(layers=list(self.own))
        self.capacity = capacity
        self.length = 0

    def buffers(self, like: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """Keys and values [B, G, C, D] of every layer, for a forward that writes its rows itself; allocated `like` one
        layer's states the first time."""
        for layer in self.own:
            if not layer.is_initialized:
                layer.lazy_initialization(like, like)
        pairs = [(layer.keys, layer.values) for layer in self.own]
        return [keys for keys, _ in pairs if keys is not None], [values for _, values in pairs if values is not None]

    def keep(self, rows: Tensor) -> None:
        """Commit `rows [A]` of the last forward in every layer; the other rows of that forward are forgotten."""
        for layer in self.own:
            layer.keep(rows)
        self.length += rows.numel()

    def keep_first(self, count: int) -> None:
        """Commit the first `count` rows of the last forward: nothing has to move (prefill, plain steps)."""
        for layer in self.own:
            layer.length += count
        self.length += count

    def clear(self) -> None:
        """Forget the text, keep the memory."""
        for layer in self.own:
            layer.length = 0
        self.length = 0
