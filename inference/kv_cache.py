"""A preallocated key/value cache: a step writes its rows behind the committed text, then keeps the accepted path.

Shapes: N layers, B sequences, G key/value heads, C capacity, D head size, R rows of one forward, A accepted rows.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin


class PreallocatedLayer(CacheLayerMixin):
    """One layer's keys and values `[B, G, C, D]`, views of its cache's memory, as transformers' modules use them."""

    is_sliding = False

    def __init__(self, cache: KVCache, index: int) -> None:
        super().__init__()
        self.cache, self.index = cache, index

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Take a share of the cache's memory, which the first layer makes it allocate."""
        self.cache.allocate(key_states)
        assert self.cache.store is not None
        self.keys, self.values = self.cache.store[self.index]
        self.dtype, self.device = key_states.dtype, key_states.device
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write R rows behind the committed ones (without committing them) and lend all of them."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        assert self.keys is not None and self.values is not None
        rows = key_states.shape[2]
        slots, end = self.cache.slots(rows)[0], self.cache.end(rows)
        self.keys.index_copy_(2, slots, key_states)
        self.values.index_copy_(2, slots, value_states)
        return self.keys[:, :, :end], self.values[:, :, :end]

    def get_seq_length(self) -> int:
        return self.cache.bound

    def get_max_length(self) -> int:
        return self.cache.capacity

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.cache.bound + query_length, 0


class KVCache(Cache):
    """The cache of every layer of a target, with room for `capacity` rows (committed text plus one forward) a sequence.

    How much is committed is known on the device; the host keeps a bound, which is exact once it has read every step.

    store    [N, 2, B, G, C, D] keys and values, allocated when the first states are seen
    lengths  [B] int64 on the device, committed rows of each sequence
    bound    no sequence has more committed rows
    """

    def __init__(self, layers: int, capacity: int, batch: int = 1, device: torch.device | str = "cpu") -> None:
        super().__init__(layers=[PreallocatedLayer(self, index) for index in range(layers)])
        self.capacity = capacity
        self.lengths = torch.zeros(batch, dtype=torch.long, device=device)
        self.bound = 0
        self.store: Tensor | None = None

    def allocate(self, like: Tensor) -> Tensor:
        """The memory, made the first time for states `[B, G, R, D]` like these."""
        if self.store is None:
            _, heads, _, size = like.shape
            self.store = like.new_zeros(len(self.layers), 2, len(self.lengths), heads, self.capacity, size)
        return self.store

    def end(self, rows: int) -> int:
        """Up to where a forward over `rows` more rows writes and reads, at most."""
        end = self.bound + rows
        assert end <= self.capacity, f"cache of {self.capacity} rows asked to hold {end}"
        return end

    def slots(self, rows: int) -> Tensor:
        """[B, rows] int64, where the next forward's rows go."""
        return self.lengths[:, None] + torch.arange(rows, device=self.lengths.device)

    def only(self, sequence: int, like: Tensor) -> KVCache:
        """A cache of one sequence of this one, in the same memory, empty: to prefill it."""
        one = KVCache(len(self.layers), self.capacity, device=self.lengths.device)
        one.store = self.allocate(like)[:, :, sequence : sequence + 1]
        return one

    def commit(self, rows: Tensor, counts: Tensor) -> None:
        """Commit the first `counts [B]` of `rows [B, A]` (ascending, of the last forward) in place, all layers at once.

        What lies behind a sequence's count is written but not committed. The host's `bound` is left alone: `settle`.
        """
        assert self.store is not None
        into = self.slots(rows.shape[1])
        source = self.lengths[:, None] + rows
        if len(rows) == 1:
            self.store.index_copy_(4, into[0], self.store.index_select(4, source[0]))
        else:
            layers, two, _, heads, _, size = self.store.shape

            def index(slots: Tensor) -> Tensor:
                return slots[None, None, :, None, :, None].expand(layers, two, -1, heads, -1, size)

            self.store.scatter_(4, index(into), self.store.gather(4, index(source)))
        self.lengths += counts

    def keep_first(self, count: int) -> None:
        """Commit the first `count` rows of the last forward of the only sequence: nothing has to move (prefill)."""
        self.lengths += count
        self.bound += count

    def settle(self, bound: int) -> None:
        """The host has learned that no sequence holds more than `bound` rows."""
        self.bound = bound

    def clear(self) -> None:
        """Forget the text, keep the memory."""
        self.lengths.zero_()
        self.bound = 0
