"""A preallocated key/value cache: a step writes its rows after the committed text, then keeps the accepted path.

Shapes: N layers, B sequences, G key/value heads, C capacity, D head size, R rows of one forward, A accepted rows.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

# the visible part of a cache grows by so many rows: a GPU captures a graph per length, a CPU pays per row
STEPS = {"cpu": 64, "cuda": 256}


class PreallocatedLayer(CacheLayerMixin):
    """What transformers' modules see of one layer: keys and values `[B, G, C, D]`, views of the cache's memory."""

    is_sliding = False

    def __init__(self, cache: KVCache, index: int) -> None:
        super().__init__()
        self.cache, self.index = weakref.proxy(cache), index  # a cache is freed as soon as nobody holds it

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.cache.allocate(key_states)
        self.keys, self.values = key_states[:, :, :0], value_states[:, :, :0]
        self.dtype, self.device = key_states.dtype, key_states.device
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        cache: KVCache = self.cache
        return cache.write(self.index, cache.slots(key_states.shape[2]), key_states, value_states)

    def get_seq_length(self) -> int:
        return int(self.cache.bound)

    def get_max_length(self) -> int:
        return int(self.cache.capacity)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.cache.bound + query_length, 0


class KVCache(Cache):
    """The cache of every layer of a target, with room for `capacity` rows (committed text plus one forward) a sequence.

    The device knows how many rows are committed; the host keeps an upper bound, exact once it has read every step.
    Masks hide the rows after a text by adding −inf to their scores, which hides no NaN: of a text that overflowed in
    half precision nothing is left for the next one to read.

    store    [N, B, 2, G, C, D] keys and values, allocated when the first states are seen
    rows     [N, B·2·G, C', D] the visible part of it, set by `set_visible_length`: what a forward reads and writes
    lengths  [B] int64 on the device, committed rows of each sequence
    bound    no sequence has more committed rows
    """

    def __init__(self, layers: int, capacity: int, batch: int = 1, device: torch.device | str = "cpu") -> None:
        super().__init__(layers=[PreallocatedLayer(self, index) for index in range(layers)])
        self.step = STEPS.get(torch.device(device).type, 256)
        self.capacity = -(-capacity // self.step) * self.step
        self.lengths = torch.zeros(batch, dtype=torch.long, device=device)
        self.bound = 0
        self.store: Tensor | None = None
        self.rows: Tensor | None = None
        self._end = self._written = 0  # what is visible, and the most of it since all was zeros
        self._views: dict[int, Tensor] = {}

    def allocate(self, like: Tensor) -> None:
        """Allocate the memory, once, for states `[B, G, R, D]` like these."""
        if self.store is None:
            _, heads, _, size = like.shape
            self.store = like.new_zeros(len(self.layers), len(self.lengths), 2, heads, self.capacity, size)
            self._update_view()

    def memory(self) -> list[Tensor]:
        """The tensors that outlive a step; CUDA graphs hold their addresses."""
        return [self.lengths] if self.store is None else [self.lengths, self.store]

    def set_visible_length(self, rows: int) -> int:
        """Make visible what a forward over `rows` rows reads and writes, rounded up to `step`; the visible length."""
        end = self.bound + rows
        assert end <= self.capacity, f"cache of {self.capacity} rows asked to hold {end}"
        self._end = max(self._end, -(-end // self.step) * self.step)  # back to nothing when cleared
        self._written = max(self._written, self._end)
        self._update_view()
        return self._end

    def set_bound(self, rows: int) -> None:
        """No sequence has more than `rows` committed rows any more; what lies after them is not read."""
        self.bound, self._end = rows, 0

    def _update_view(self) -> None:
        if self.store is None or not self._end:
            return
        if self._end not in self._views:
            self._views[self._end] = self.store.flatten(1, 3)[:, :, : self._end]
        self.rows = self._views[self._end]

    def slots(self, rows: int) -> Tensor:
        """[B, rows] int64, the slots of the next forward's rows."""
        return self.lengths[:, None] + torch.arange(rows, device=self.lengths.device)

    def write(self, layer: int, slots: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Put states `[B, G, R, D]` into `slots [B, R]` of a layer; its keys and values `[B, G, C', D]` after that."""
        assert self.rows is not None
        batch, heads, _, size = keys.shape
        states = torch.cat([keys, values], dim=1).flatten(0, 1)  # [B·2·G, R, D]
        if batch == 1:
            self.rows[layer].index_copy_(1, slots[0], states)
        else:
            lanes = torch.arange(len(states), device=slots.device)[:, None]
            self.rows[layer].index_put_((lanes, slots.repeat_interleave(2 * heads, 0)), states)
        both = self.rows[layer].view(batch, 2, heads, -1, size)
        return both[:, 0], both[:, 1]

    def copy_sequence(self, index: int, single: KVCache) -> None:
        """Sequence `index` becomes the text of another cache, which holds one sequence."""
        assert single.store is not None
        self.allocate(single.store[0, :, 0, :, :0])
        assert self.store is not None
        self.store[:, index, :, :, : single.bound] = single.store[:, 0, :, :, : single.bound]
        self.store[:, index, :, :, single.bound : self._written] = 0
        self.lengths[index] = single.bound

    def select_sequences(self, index: Tensor) -> None:
        """Keep only the sequences `index [B']` int64, in that order."""
        assert self.store is not None
        self.store, self.lengths = self.store[:, index], self.lengths[index]
        self._views = {}
        self._update_view()

    def commit(self, rows: Tensor, counts: Tensor) -> None:
        """Move the ascending `rows [B, A]` of the last forward next to the text, commit the first `counts [B]`."""
        assert self.rows is not None
        into = self.slots(rows.shape[1])
        source = self.lengths[:, None] + rows
        if len(rows) == 1:
            self.rows.index_copy_(2, into[0], self.rows.index_select(2, source[0]))
        else:
            layers, lanes, _, size = self.rows.shape

            def index(slots: Tensor) -> Tensor:
                return slots.repeat_interleave(lanes // len(rows), 0)[None, :, :, None].expand(layers, -1, -1, size)

            self.rows.scatter_(2, index(into), self.rows.gather(2, index(source)))
        self.lengths += counts

    def keep_first(self, count: int) -> None:
        """Commit the first `count` rows of the only sequence's last forward (prefill)."""
        self.lengths += count
        self.bound += count

    def clear(self) -> None:
        """Forget the text, keep the memory."""
        self.lengths.zero_()
        self._zero_written()
        self.bound = self._end = self._written = 0

    @torch.inference_mode()  # in which the memory may have been made
    def _zero_written(self) -> None:
        if self.store is not None:
            self.store[:, :, :, :, : self._written] = 0


class PerLayerKVCache(KVCache):
    """The cache of a target whose layers lie on several devices or differ in sizes: memory per layer.

    Keys and values of a layer may have different head sizes, as in multi-head latent attention.
    """

    def __init__(self, devices: Sequence[torch.device], capacity: int, batch: int, device: torch.device) -> None:
        """devices: of every layer; device: of token ids, lengths and choices."""
        super().__init__(len(devices), capacity, batch, device)
        self.devices = devices
        self.stores: dict[int, tuple[Tensor, Tensor]] = {}  # keys and values [B, C, G, D] of a layer

    def allocate(self, like: Tensor) -> None:
        """Nothing: a layer's memory is allocated when its states are first written."""

    def _make_room(self, layer: int, *like: Tensor) -> None:
        """Allocate the memory of a layer, once, for keys and values `[B', R, G, D]` like these."""
        if layer not in self.stores:
            shapes = [(len(self.lengths), self.capacity, *states.shape[2:]) for states in like]
            keys, values = (x.new_zeros(shape, device=self.devices[layer]) for x, shape in zip(like, shapes))
            self.stores[layer] = keys, values

    def write(self, layer: int, slots: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        new = keys.transpose(1, 2), values.transpose(1, 2)  # [B, R, G, D]
        self._make_room(layer, *new)
        into = self._index(slots, self.devices[layer])
        for store, states in zip(self.stores[layer], new):
            store[into] = states
        stored_keys, stored_values = (store[:, : self._end].transpose(1, 2) for store in self.stores[layer])
        return stored_keys, stored_values

    @staticmethod
    def _index(slots: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
        """What selects `slots [B, R]` of a store: the sequence and the slot of each row."""
        slots = slots.to(device)
        return torch.arange(len(slots), device=device)[:, None], slots

    def copy_sequence(self, index: int, single: KVCache) -> None:
        assert isinstance(single, PerLayerKVCache)
        for layer, stores in single.stores.items():
            self._make_room(layer, *stores)
            for store, other in zip(self.stores[layer], stores):
                store[index, : single.bound] = other[0, : single.bound]
                store[index, single.bound : self._written] = 0
        self.lengths[index] = single.bound

    def select_sequences(self, index: Tensor) -> None:
        self.lengths = self.lengths[index]
        for layer, (keys, values) in self.stores.items():
            at = index.to(keys.device)
            self.stores[layer] = keys[at], values[at]

    def commit(self, rows: Tensor, counts: Tensor) -> None:
        into, source = self.slots(rows.shape[1]), self.lengths[:, None] + rows
        for store in self._tensors:
            store[self._index(into, store.device)] = store[self._index(source, store.device)]
        self.lengths += counts

    @torch.inference_mode()  # in which the memory may have been made
    def _zero_written(self) -> None:
        for store in self._tensors:
            store[:, : self._written] = 0

    def memory(self) -> list[Tensor]:
        return [self.lengths, *self._tensors]

    @property
    def _tensors(self) -> list[Tensor]:
        return [store for both in self.stores.values() for store in both]

    @property
    def uniform(self) -> bool:
        """Whether every layer has written keys and values of one shape: `KVCache` can then hold them."""
        return len(self.stores) == len(self.layers) and len({store.shape for store in self._tensors}) == 1
