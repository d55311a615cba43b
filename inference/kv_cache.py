"""A preallocated key/value cache: a step writes its rows behind the committed text, then keeps the accepted path.

Shapes: N layers, B sequences, G key/value heads, C capacity, D head size, R rows of one forward, A accepted rows.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

STEP = 64
"""Rows by which what a forward reads of a cache grows."""


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
        keys, values = self.cache.buffers[self.index]
        slots = self.cache.slots(rows)[0]
        keys.index_copy_(2, slots, key_states)
        values.index_copy_(2, slots, value_states)
        return keys, values

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
    buffers  keys and values [B, G, C', D] of every layer, views of the store as far as `reach` said
    """

    def __init__(self, layers: int, capacity: int, batch: int = 1, device: torch.device | str = "cpu") -> None:
        super().__init__(layers=[PreallocatedLayer(self, index) for index in range(layers)])
        self.capacity = capacity
        self.lengths = torch.zeros(batch, dtype=torch.long, device=device)
        self.bound = 0
        self.store: Tensor | None = None
        self.buffers: list[tuple[Tensor, Tensor]] = []
        self._end = 0
        self._views: dict[int, list[tuple[Tensor, Tensor]]] = {}

    def allocate(self, like: Tensor) -> Tensor:
        """The memory, made the first time for states `[B, G, R, D]` like these."""
        if self.store is None:
            _, heads, _, size = like.shape
            self.lend(like.new_zeros(len(self.layers), 2, len(self.lengths), heads, self.capacity, size))
        assert self.store is not None
        return self.store

    def lend(self, store: Tensor) -> None:
        """Work in this memory."""
        self.store = store
        self._views.clear()
        self._show()

    def reach(self, rows: int) -> int:
        """Make `buffers` reach as far as a forward over `rows` more rows may write, in steps of 64 rows; how far.

        The host does this before a step, from its bound: a program or a captured graph sees few different lengths.
        """
        end = self.bound + rows
        assert end <= self.capacity, f"cache of {self.capacity} rows asked to hold {end}"
        self._end = min(-(-end // STEP) * STEP, self.capacity)
        self._show()
        return self._end

    def _show(self) -> None:
        if self.store is None or not self._end:
            return
        if self._end not in self._views:
            self._views[self._end] = [(keys, values) for keys, values in self.store[..., : self._end, :]]
            for pair in self._views[self._end]:
                for buffer in pair:
                    torch._dynamo.maybe_mark_dynamic(buffer, 2)  # one compiled program serves them all
        self.buffers = self._views[self._end]

    def slots(self, rows: int) -> Tensor:
        """[B, rows] int64, where the next forward's rows go."""
        return self.lengths[:, None] + torch.arange(rows, device=self.lengths.device)

    def only(self, sequence: int, like: Tensor) -> KVCache:
        """A cache of one sequence of this one, in the same memory, empty: to prefill it."""
        one = KVCache(len(self.layers), self.capacity, device=self.lengths.device)
        one.lend(self.allocate(like)[:, :, sequence : sequence + 1])
        return one

    def commit(self, rows: Tensor, counts: Tensor) -> None:
        """Commit the first `counts [B]` of `rows [B, A]` (ascending, of the last forward) in place, all layers at once.

        What lies behind a sequence's count is written but not committed. The host's `bound` is left alone: `settle`.
        """
        into = self.slots(rows.shape[1])
        source = self.lengths[:, None] + rows
        if len(rows) == 1 and not torch.compiler.is_compiling():  # a program takes the layers' buffers one by one
            assert self.store is not None
            _move(self.store.view(1, -1, *self.store.shape[-2:]), source, into)
        else:
            for pair in self.buffers:
                for buffer in pair:
                    _move(buffer, source, into)
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
        self.bound = self._end = 0


def _move(buffer: Tensor, source: Tensor, into: Tensor) -> None:
    """Copy slots `source [B, A]` of a buffer [B, G, C, D] to slots `into [B, A]`."""
    if len(buffer) == 1:
        buffer.index_copy_(2, into[0], buffer.index_select(2, source[0]))
    else:
        wide = [-1, buffer.shape[1], -1, buffer.shape[3]]
        kept = buffer.gather(2, source[:, None, :, None].expand(wide))
        buffer.scatter_(2, into[:, None, :, None].expand(wide), kept)
