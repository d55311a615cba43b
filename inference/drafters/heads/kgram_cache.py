"""The Chimera paper's cache of encoded k-grams: least recently used entries move from the device to host memory.

Shapes: W k-grams looked up, k tokens of a k-gram, H hidden.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

import torch
from torch import Tensor

KGram = tuple[int, ...]


class KGramCache:
    """Encodes every k-gram once; `hits`, `reloads` (from host memory) and `misses` count distinct k-grams looked up."""

    def __init__(self, size: int) -> None:
        """size: entries that stay on the device."""
        if size < 1:
            raise ValueError(f"kgram_cache must be 0 (off) or the number of entries, at least 1; got {size}")
        self.size = size
        self.table: OrderedDict[KGram, Tensor] = OrderedDict()  # [H] each, the least recently used first
        self.evicted: dict[KGram, Tensor] = {}  # in host memory
        self.hits = self.reloads = self.misses = 0

    def lookup(self, grams: Tensor, encode: Callable[[Tensor], Tensor]) -> Tensor:
        """g [W, H] of k-grams `grams [W, k]`; `encode` maps [w, k] to [w, H]."""
        keys = [tuple(gram) for gram in grams.tolist()]
        distinct = dict.fromkeys(keys)
        unseen = [key for key in distinct if key not in self.table and key not in self.evicted]
        found = dict(zip(unseen, encode(grams.new_tensor(unseen)).unbind())) if unseen else {}
        self.misses += len(unseen)
        for key in distinct:
            if key in self.table:
                found[key] = self.table.pop(key)
                self.hits += 1
            elif key in self.evicted:
                found[key] = self.evicted.pop(key).to(grams.device)
                self.reloads += 1
        for key in distinct:
            self.table[key] = found[key].clone() if key in unseen else found[key]  # a row would keep all of `encode`'s
        while len(self.table) > self.size:
            oldest, encoding = self.table.popitem(last=False)
            self.evicted[oldest] = encoding.cpu()
        return torch.stack([found[key] for key in keys])
