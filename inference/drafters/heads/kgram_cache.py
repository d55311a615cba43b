"""The Chimera paper's table of encoded k-grams: fixed size on the device, least recently used entries move to the host.

Shapes: W k-grams looked up, k tokens of a k-gram, H hidden.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

import torch
from torch import Tensor


class KGramCache:
    """`lookup` returns encodings and encodes what it has never seen; `hits`, `reloads` and `misses` count k-grams.

    An entry pushed out of the table is kept in host memory and reloaded, not encoded again, when it comes back.
    """

    def __init__(self, size: int, hidden_size: int, device: torch.device | str = "cpu") -> None:
        if size < 1:
            raise ValueError(f"kgram_cache must be 0 (off) or the number of entries, at least 1; got {size}")
        self.size = size
        self.table = torch.zeros(size, hidden_size, device=device)
        self.slots: OrderedDict[tuple[int, ...], int] = OrderedDict()  # least recently used first
        self.secondary: dict[tuple[int, ...], Tensor] = {}
        self.hits = self.reloads = self.misses = 0

    def lookup(self, grams: Tensor, encode: Callable[[Tensor], Tensor]) -> Tensor:
        """g [W, H] of k-grams `grams [W, k]`; `encode` maps [w, k] to [w, H]. A repeated k-gram is one lookup."""
        keys = [tuple(gram) for gram in grams.tolist()]
        distinct = dict.fromkeys(keys)
        hit = [key for key in distinct if key in self.slots]
        stored = [key for key in distinct if key in self.secondary]
        unseen = [key for key in distinct if key not in self.slots and key not in self.secondary]
        pieces = []
        if hit:
            pieces.append(self.table[[self.slots[key] for key in hit]])
        if stored:
            pieces.append(torch.stack([self.secondary.pop(key) for key in stored]).to(self.table.device))
        if unseen:
            fresh = encode(grams.new_tensor(unseen))
            self.table = self.table.to(fresh.dtype)
            pieces.append(fresh)
        self.hits, self.reloads, self.misses = (
            self.hits + len(hit),
            self.reloads + len(stored),
            self.misses + len(unseen),
        )
        found = torch.cat([piece.to(self.table.dtype) for piece in pieces])
        row = {key: index for index, key in enumerate([*hit, *stored, *unseen])}
        for key in hit:
            self.slots.move_to_end(key)
        for key in [*stored, *unseen]:
            self._enter(key, found[row[key]])
        return found[[row[key] for key in keys]]

    def _enter(self, key: tuple[int, ...], value: Tensor) -> None:
        if len(self.slots) == self.size:
            oldest, slot = self.slots.popitem(last=False)
            self.secondary[oldest] = self.table[slot].to("cpu", copy=True)
        else:
            slot = len(self.slots)
        self.table[slot] = value
        self.slots[key] = slot

    @property
    def hit_rate(self) -> float:
        """Share of lookups that the table answered; 0.0 before the first."""
        total = self.hits + self.reloads + self.misses
        return self.hits / total if total else 0.0
