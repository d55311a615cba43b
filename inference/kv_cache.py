"""A preallocated key/value cache: a step writes its rows behind the committed text, then keeps the accepted path.

Shapes: N layers, B sequences, G key/value heads, C capacity, D head size, R rows of one forward, A accepted rows.
"""

from __future__ import annotations

from collections.abc import Sequence
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
        start = self.cache.length
        end = start + key_states.shape[2]
        assert end <= self.cache.capacity, f"cache of {self.cache.capacity} rows asked to hold {end}"
        self.keys[:, :, start:end] = key_states
        self.values[:, :, start:end] = value_states
        return self.keys[:, :, :end], self.values[:, :, :end]

    def get_seq_length(self) -> int:
        return self.cache.length

    def get_max_length(self) -> int:
        return self.cache.capacity

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.cache.length + query_length, 0


class KVCache(Cache):
    """The cache of every layer of a target, with room for `capacity` rows (committed text plus one forward) a sequence.

    store    [N, 2, B, G, C, D] keys and values, allocated when the first states are seen
    lengths  committed rows of each sequence; `length` is that of the only one
    """

    def __init__(self, layers: int, capacity: int, batch: int = 1) -> None:
        super().__init__(layers=[PreallocatedLayer(self, index) for index in range(layers)])
        self.capacity = capacity
        self.lengths = [0] * batch
        self.store: Tensor | None = None

    @property
    def length(self) -> int:
        """Committed rows of a cache of one sequence."""
        (length,) = self.lengths
        return length

    def allocate(self, like: Tensor) -> Tensor:
        """The memory, made the first time for states `[B, G, R, D]` like these."""
        if self.store is None:
            _, heads, _, size = like.shape
            self.store = like.new_zeros(len(self.layers), 2, len(self.lengths), heads, self.capacity, size)
        return self.store

    def buffers(self, like: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """Keys and values [B, G, C, D] of every layer, for a forward that writes its rows itself."""
        store = self.allocate(like)
        return list(store[:, 0].unbind()), list(store[:, 1].unbind())

    def only(self, sequence: int, like: Tensor) -> KVCache:
        """A cache of one sequence of this one, in the same memory, empty: to prefill it."""
        one = KVCache(len(self.layers), self.capacity)
        one.store = self.allocate(like)[:, :, sequence : sequence + 1]
        return one

    def keep(self, rows: Tensor) -> None:
        """Commit `rows [A]` (ascending) of the last forward in every layer, in place; its other rows are forgotten."""
        assert self.store is not None
        end = self.length + rows.numel()
        self.store[..., self.length : end, :] = self.store[..., rows + self.length, :]
        self.lengths = [end]

    def keep_first(self, count: int) -> None:
        """Commit the first `count` rows of the last forward: nothing has to move (prefill, plain steps)."""
        self.lengths = [self.length + count]

    def keep_each(self, paths: Sequence[Sequence[int]]) -> None:
        """`keep` for every sequence its own rows, which may differ in number; none: nothing is committed there."""
        assert self.store is not None
        longest = max(map(len, paths))
        rows = torch.tensor([[*path, *[0] * (longest - len(path))] for path in paths], device=self.store.device)
        starts = torch.tensor(self.lengths, device=rows.device)[:, None]
        into = (starts + torch.arange(longest, device=rows.device)).clamp(max=self.capacity - 1)

        def index(slots: Tensor) -> Tensor:
            layers, two, _, heads, _, size = self.allocate(rows).shape
            return slots[None, None, :, None, :, None].expand(layers, two, -1, heads, -1, size)

        kept = self.store.gather(4, index(starts + rows))
        self.store.scatter_(4, index(into), kept)  # what lies behind a shorter path is not committed
        self.lengths = [length + len(path) for length, path in zip(self.lengths, paths)]

    def clear(self) -> None:
        """Forget the text, keep the memory."""
        self.lengths = [0] * len(self.lengths)
