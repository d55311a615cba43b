"""N-grams, calibration and the merging of drafts in C++ (`merging.cpp`): what the classes they stand in for do.

    NgramTable    Calibration
    draft_heads.inference.drafters.hybrid.merged_tree.MergedTree

In Python a tree of seven nodes takes longer than a tenth of a small target's step: the target's weights have gone
through the processor's caches, and every dictionary has to come back from memory.
"""

from __future__ import annotations

import ctypes
import weakref
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from ctypes import POINTER, c_bool, c_double, c_int32, c_int64, c_void_p
from functools import cache
from math import inf
from typing import Any

import torch
from torch import Tensor

from draft_heads.inference.drafters.hybrid import calibration
from draft_heads.inference.drafters.hybrid.merged_tree import LevelSource, PhraseSource, Source, TreeSource
from draft_heads.inference.drafters.text import ngram_table
from draft_heads.inference.drafters.text.ngram_table import Context, Followers
from draft_heads.inference.native import library
from draft_heads.inference.tree import DraftTree, all_candidates

SILENT = -(1 << 31)  # the entry of a source that says nothing


class _Source(ctypes.Structure):
    _fields_ = (
        ("size", c_int64),
        ("ranks", c_int64),
        ("tokens", c_void_p),
        ("parents", c_void_p),
        ("log_probs", c_void_p),
        ("candidate", c_void_p),
        ("levels", c_void_p),
        ("least", c_double),
        ("table", c_void_p),
    )


_FUNCTIONS: dict[str, tuple[Any, ...]] = {
    "ngram_table": (c_void_p, c_int64),
    "ngram_table_free": (None, c_void_p),
    "ngram_table_start": (None, c_void_p, c_bool),
    "ngram_table_extend": (None, c_void_p, c_void_p, c_int64),
    "ngram_table_end": (None, c_void_p, c_void_p),
    "ngram_table_after": (None, c_void_p, c_void_p, c_int64, c_void_p),
    "ngram_table_followers": (c_bool, c_void_p, c_void_p, c_int64, c_void_p),
    "ngram_table_shares": (c_int64, c_void_p, c_void_p, c_void_p, c_void_p),
    "ngram_table_chain": (c_int64, c_void_p, c_int64, c_void_p),
    "calibration": (c_void_p, c_int64),
    "calibration_free": (None, c_void_p),
    "calibration_cells": (c_int64, c_void_p),
    "calibration_cells_alone": (c_int64, c_void_p),
    "calibration_cell": (None, c_void_p, c_int64, c_void_p, c_void_p),
    "calibration_cell_alone": (None, c_void_p, c_int64, c_void_p, c_void_p),
    "calibration_put": (None, c_void_p, c_void_p, c_double, c_double),
    "calibration_put_alone": (None, c_void_p, c_int64, c_int64, c_double, c_double),
    "merged_tree": (
        c_void_p,
        POINTER(_Source),
        c_void_p,
        c_int64,
        c_int64,
        c_void_p,
        c_void_p,
        c_void_p,
        c_void_p,
        c_void_p,
        c_void_p,
    ),
    "merged_tree_free": (None, c_void_p),
    "merged_tree_learn": (c_int64, c_void_p, c_void_p, c_int64, c_int64, c_void_p, c_void_p),
    "merged_tree_needing": (c_int64, c_void_p, c_int64, c_int64),
    "merged_tree_rows": (None, c_void_p, c_int64, c_int64, c_int64, c_void_p),
}
"""What each returns and takes."""


@cache
def _functions() -> Any:
    functions = library.functions()
    for name, (result, *arguments) in _FUNCTIONS.items():
        function = getattr(functions, name)
        function.restype, function.argtypes = result, arguments
    return functions


def _integers(values: Sequence[int]) -> Any:
    return (c_int64 * len(values))(*values)


class NgramTable(ngram_table.NgramTable):
    """See `ngram_table.NgramTable`; a context is an array here."""

    def __init__(self, n: int) -> None:
        super().__init__(n)
        self._lib = _functions()
        self.native = self._lib.ngram_table(n)
        weakref.finalize(self, self._lib.ngram_table_free, self.native)
        self._tokens = (c_int64 * 0)()  # of the longest chain so far
        self._shared = (c_int64 * (2 * n - 2))(), (c_double * (2 * n - 2))()  # tokens, shares

    @property
    def code(self) -> Context:
        """The text's last n − 1 tokens."""
        end = (c_int32 * self.n)()
        self._lib.ngram_table_end(self.native, end)
        return end

    def start(self, keep: bool = False) -> None:
        """A new text; no n-gram spans two of them."""
        self._lib.ngram_table_start(self.native, keep)

    def extend(self, tokens: Sequence[int]) -> None:
        """Count more of the text."""
        self._lib.ngram_table_extend(self.native, _integers(tokens), len(tokens))

    def after(self, code: Context, token: int) -> Context:
        """The context `code` with one more token behind it."""
        longer = (c_int32 * self.n)()
        self._lib.ngram_table_after(self.native, code, token, longer)
        return longer

    def followers(self, code: Context) -> tuple[int, Followers] | None:
        """The level of the longest context at the end of `code` that was seen before, and what followed it."""
        return next(self.levels(code), None)

    def levels(self, code: Context) -> Iterator[tuple[int, Followers]]:
        """The same for every context at the end of `code` that was seen before, longest first."""
        found = (c_int64 * 6)()
        for tokens in range(self.n - 1, 0, -1):
            if self._lib.ngram_table_followers(self.native, code, tokens, found):
                level, first, count, second, second_count, total = found
                yield level, (first, count, second, second_count, total)

    def shares(self, code: Context) -> dict[int, float]:
        """Token → the share of what followed, all levels together; of each its two most frequent followers."""
        tokens, shares = self._shared
        count = self._lib.ngram_table_shares(self.native, code, tokens, shares)
        return dict(zip(tokens[:count], shares[:count]))

    def chain(self, most: int) -> list[int]:
        """What follows the text, each time the most frequent by the longest context; no more than `most` tokens."""
        if len(self._tokens) < most:
            self._tokens = (c_int64 * most)()
        return self._tokens[: self._lib.ngram_table_chain(self.native, most, self._tokens)]


class Calibration(calibration.Calibration):
    """See `calibration.Calibration`; of a number of sources that is known."""

    def __init__(self, sources: int) -> None:
        self._lib = _functions()
        self.native = self._lib.calibration(sources)
        weakref.finalize(self, self._lib.calibration_free, self.native)
        self.sources = sources

    def state_dict(self) -> dict[str, Any]:
        """As `calibration.Calibration.state_dict`."""
        lib, native = self._lib, self.native
        cells = self._said(lib.calibration_cells(native), self.sources, lib.calibration_cell)
        return {"cells": cells, "alone": self._said(lib.calibration_cells_alone(native), 2, lib.calibration_cell_alone)}

    def _said(self, count: int, width: int, read: Callable[..., None]) -> list[list[Any]]:
        key, cell = (c_int32 * width)(), (c_double * 2)()
        said: list[list[Any]] = []
        for number in range(count):
            read(self.native, number, key, cell)
            if cell[1] > calibration.PRIOR:
                said.append([*(None if entry == SILENT else entry for entry in key), *cell])
        return said

    def put(self, state: Mapping[str, Any]) -> None:
        """What `state_dict` said, here or in Python."""
        for *evidence, accepted, tried in state["cells"]:
            key = (c_int32 * self.sources)(*(SILENT if entry is None else entry for entry in evidence))
            self._lib.calibration_put(self.native, key, accepted, tried)
        for source, entry, accepted, tried in state["alone"]:
            self._lib.calibration_put_alone(self.native, source, entry, accepted, tried)


class MergedTree:
    """See `merged_tree.MergedTree`."""

    def __init__(
        self,
        sources: Sequence[Source],
        known: Calibration,
        max_nodes: int,
        max_depth: int,
        bounds: Sequence[float] | None = None,
    ) -> None:
        self._lib, self._calibration = known._lib, known
        self._tokens = torch.empty(max_nodes, dtype=torch.long)
        self._parents = torch.empty(max_nodes, dtype=torch.long)
        self._source = torch.empty(max_nodes, dtype=torch.long)
        self._scores = torch.empty(max_nodes, dtype=torch.float32)
        said, size = (_Source * len(sources))(), c_int64()
        lent = [_tell(one, source) for one, source in zip(said, sources)]
        least = array("d", bounds or [-inf] * max_nodes)
        self.native = self._lib.merged_tree(
            said,
            known.native,
            max_nodes,
            max_depth,
            least.buffer_info()[0],
            self._tokens.data_ptr(),
            self._parents.data_ptr(),
            self._source.data_ptr(),
            self._scores.data_ptr(),
            ctypes.byref(size),
        )
        del lent, least
        self._size = size.value
        if self._size < max_nodes:
            self._narrow()

    def __del__(self) -> None:
        if hasattr(self, "native"):
            self._lib.merged_tree_free(self.native)

    def _narrow(self) -> None:
        kept = (x[: self._size] for x in (self._tokens, self._parents, self._source, self._scores))
        self._tokens, self._parents, self._source, self._scores = kept

    def __len__(self) -> int:
        return self._size

    @property
    def scores(self) -> list[float]:
        """Log-probabilities that nodes are accepted."""
        return self._scores.tolist()

    def as_tree(self, device: torch.device) -> DraftTree:
        """The nodes as tensors."""
        if not self._size:
            return DraftTree.empty(device)
        tree = DraftTree(self._tokens, self._parents, self._scores, self._source, all_candidates(self._size))
        return tree if device.type == "cpu" else tree.map(lambda x: x.to(device))

    def cut(self, nodes: int) -> None:
        """Keep the first nodes only, which are the best; those after them are still learned from."""
        if nodes < self._size:
            self._size = nodes
            self._narrow()

    def learn(self, followed: Sequence[int]) -> list[tuple[int, int]]:
        """See `merged_tree.Merged`."""
        sources, needs = (c_int64 * len(followed))(), (c_int64 * len(followed))()
        followed = _integers(followed)
        count = self._lib.merged_tree_learn(self.native, followed, len(followed), self._size, sources, needs)
        return list(zip(sources[:count], needs[:count]))

    def needing(self, source: int) -> int:
        """See `merged_tree.Merged`."""
        nodes: int = self._lib.merged_tree_needing(self.native, source, self._size)
        return nodes

    def rows(self, source: int, nodes: int) -> list[int]:
        """[1 + nodes]: in which row of the target's forward each node of a source's own tree is, −1 where in none."""
        rows = (c_int64 * (1 + nodes))()
        self._lib.merged_tree_rows(self.native, source, nodes, self._size, rows)
        return rows[:]


def _tell(said: _Source, source: Source) -> list[Tensor]:
    """What a source has to say in this step. Returns whose memory that is."""
    if isinstance(source, PhraseSource):
        assert isinstance(source.table, NgramTable)
        said.table = source.table.native
    elif isinstance(source, TreeSource) and source.tree is not None:
        tree = source.tree
        tokens, parents = _lent(tree.tokens, torch.long), _lent(tree.parents, torch.long)
        log_probs, candidate = _lent(tree.log_probs, torch.float32), _lent(tree.candidate, torch.bool)
        said.size, said.tokens, said.parents = tokens.numel(), tokens.data_ptr(), parents.data_ptr()
        said.log_probs, said.candidate = log_probs.data_ptr(), candidate.data_ptr()
        return [tokens, parents, log_probs, candidate]
    elif isinstance(source, LevelSource) and source.levels is not None:
        levels = _lent(source.levels, torch.float64)
        _, said.size, said.ranks = levels.shape
        said.levels, said.least = levels.data_ptr(), source.least
        return [levels]
    return []


def _lent(x: Tensor, dtype: torch.dtype) -> Tensor:
    """On the host, one value behind another."""
    if x.dtype is not dtype or not x.is_cpu:
        x = x.to("cpu", dtype)
    return x if x.is_contiguous() else x.contiguous()
