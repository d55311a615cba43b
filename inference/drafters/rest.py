"""REST: how a corpus goes on where it reads like the newest tokens of the text (https://arxiv.org/abs/2311.08252)."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray

from data.datastore import Datastore
from inference.drafters.text import TextDrafter, TextTarget, check_positive
from inference.tree import DraftTree


class RESTDrafter(TextDrafter):
    """Finds the longest suffix of the text in a datastore; the most frequent continuations there are the tree.

    It reads the datastore only: what the text itself said before is no source.
    """

    sources = ("rest",)
    options: ClassVar[dict[str, Any]] = {"n": 16, "k": 10, "least": 1, "places": 1000}

    def __init__(
        self,
        datastore: Datastore,
        device: torch.device | str = "cpu",
        max_nodes: int = 32,
        n: int = 16,
        k: int = 10,
        least: int = 1,
        places: int = 1000,
    ) -> None:
        """n, least: tokens of the longest and the shortest suffix that is looked up; k: tokens drafted at most;
        places: of so many, sampled evenly, continuations are counted."""
        check_positive(n=n, k=k, least=least, places=places, max_nodes=max_nodes)
        if least > n:
            raise ValueError(f"a rest drafter's shortest suffix is no longer than n; got least={least} and n={n}")
        if n + k > datastore.depth:
            raise ValueError(
                f"a datastore sorted to {datastore.depth} tokens serves n + k up to that; got n={n} and k={k}; "
                "lower one of them"
            )
        super().__init__(device, max_nodes, min(k, max_nodes))
        self.datastore = datastore
        self.n, self.least, self.places = n, least, places
        self._tokens, self._suffixes = datastore.tokens.data, datastore.suffixes.data
        self._newest: list[int] = []

    @classmethod
    def from_options(cls, path: str, target: TextTarget, **options: int) -> RESTDrafter:
        """See `FREE_DRAFTERS`; ValueError for a datastore that cannot be used with the target."""
        if not path:
            raise ValueError("a rest drafter needs a datastore: write rest=FOLDER; got no path")
        datastore = Datastore.open(Path(path))
        datastore.check_tokenizer(target.tokenizer, target.vocab_size, path)
        return cls(datastore, target.device, **options)

    def start(self) -> None:
        """Forget the last text."""
        self._newest = []

    def read(self, tokens: list[int]) -> None:
        """Keep the newest n."""
        self._newest = [*self._newest, *tokens][-self.n :]

    def propose(self) -> DraftTree:
        """See the class."""
        size, first, last = self.longest_match()
        if size < self.least:
            return self.chain([])
        return self.tree(*frequent(self._continuations(size, first, last), self.datastore.separator, self.max_nodes))

    def longest_match(self) -> tuple[int, int, int]:
        """Tokens of the longest suffix that occurs (0: none), and where its places are in the suffix array.

        What holds for a suffix holds for a shorter one, so lengths are searched by halving too.
        """
        size, first, too_long = 0, 0, len(self._newest) + 1
        while size + 1 < too_long:
            middle = (size + too_long) // 2
            found = self._first_place(self._newest[-middle:])
            if found is None:
                too_long = middle
            else:
                size, first = middle, found
        if not size:
            return 0, 0, 0
        phrase, end = self._newest[-size:], self._starts(self._newest[-size])[1]
        return size, first, bisect_right(self._suffixes, phrase, first, end, key=self._reads(size))

    def _first_place(self, phrase: list[int]) -> int | None:
        """Index of the first suffix that begins with `phrase`."""
        begin, end = self._starts(phrase[0])
        reads = self._reads(len(phrase))
        first = bisect_left(self._suffixes, phrase, begin, end, key=reads)
        return first if first < end and reads(self._suffixes[first]) == phrase else None

    def _starts(self, token: int) -> tuple[int, int]:
        """Where the suffixes that begin with a token are; nowhere for tokens beyond the datastore's vocabulary."""
        if token >= self.datastore.separator:
            return 0, 0
        begin, end = self.datastore.starts[token : token + 2].tolist()
        return begin, end

    def _reads(self, size: int) -> Any:
        """From a place to the `size` tokens that stand there."""
        tokens = self._tokens
        return lambda place: tokens[place : place + size].tolist()

    def _continuations(self, size: int, first: int, last: int) -> NDArray[np.int64]:
        """[P, k] the tokens behind P places of the suffix, in order; past the end the last separator repeats."""
        store, count = self.datastore, last - first
        chosen = first + np.arange(min(count, self.places)) * count // min(count, self.places)
        places = store.suffixes[chosen].astype(np.int64)[:, None] + np.arange(size, size + self.max_depth)
        return store.tokens[np.minimum(places, len(store.tokens) - 1)].astype(np.int64)


def frequent(rows: NDArray[np.int64], separator: int, most: int) -> tuple[list[int], list[int], list[float]]:
    """The `most` most frequent beginnings of ordered `rows [P, k]`: tokens, parents, log of the share of rows.

    Nothing counts from a separator on. Equally frequent: shorter ones first, then in order of rows. Example with
    separator 9: the rows 1 2, 1 3, 1 3, 4 9 give the nodes 1 (3 of 4 rows), 3 under it (2), 4 (1), 2 under 1 (1).
    """
    P, k = rows.shape
    inside = np.logical_and.accumulate(rows < separator, axis=1)
    new = np.ones((P, k), dtype=bool)  # whether a beginning differs from that of the row before
    np.logical_or.accumulate(rows[1:] != rows[:-1], axis=1, out=new[1:])
    depth, row = np.nonzero(new.T)  # a beginning is its first row and the column where it ends
    behind = np.append(row[1:], 0)
    count = np.where(behind == 0, P, behind) - row
    counts = inside[row, depth]
    depth, row, count = depth[counts], row[counts], count[counts]
    place = ((P - count) * k + depth) * P + row  # most frequent, shortest, first
    if len(place) > most:
        best = np.argpartition(place, most)[:most]
        depth, row, count, place = depth[best], row[best], count[best], place[best]
    order = np.argsort(place)
    depth, row, count = depth[order], row[order], count[order]
    heads = np.maximum.accumulate(np.where(new, np.arange(P)[:, None], 0), axis=0)  # first row of each beginning
    nodes = {node: index for index, node in enumerate(zip(depth.tolist(), row.tolist()))}
    above = heads[row, depth - 1].tolist()
    parents = [nodes.get((place - 1, head), -1) for place, head in zip(depth.tolist(), above)]
    return rows[row, depth].tolist(), parents, np.log(count / P).tolist()
