"""REST: how a corpus goes on where it reads like the newest tokens of the text (https://arxiv.org/abs/2311.08252)."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray

from draft_heads.data.datastore import Datastore
from draft_heads.inference.drafters.base import Builder
from draft_heads.inference.drafters.text.base import TextDrafter, check_positive
from draft_heads.inference.tree import DraftTree

ENOUGH_PLACES = 100  # what follows a suffix found so often is known well enough without shorter suffixes

Beginnings = tuple[list[int], list[int], list[float]]
"""Tokens, parents and shares of rows: the nodes of a tree, parents first."""


class RESTDrafter(TextDrafter):
    """Finds the longest suffix of the text in a datastore; the most frequent continuations there are the tree.

    Where they are few, shorter suffixes add what is known of them (`levels`): continuations seen behind P places have
    P/(P+1) of the say, what is left goes to the next shorter suffix found in more places. The paper's is `levels=1`.
    It reads the datastore only: what the text itself said before is no source.
    """

    sources = ("rest",)
    kind = "rest"
    options: ClassVar[dict[str, Any]] = {"n": 16, "k": 10, "least": 1, "levels": 3, "places": 300}

    def __init__(
        self,
        datastore: Datastore,
        device: torch.device | str = "cpu",
        max_nodes: int = 32,
        n: int = 16,
        k: int = 10,
        least: int = 1,
        levels: int = 3,
        places: int = 300,
    ) -> None:
        """n, least: tokens of the longest and the shortest suffix that is looked up; k: tokens drafted at most;
        levels: suffixes that are asked; places: of so many, sampled evenly, continuations are counted."""
        check_positive(n=n, k=k, least=least, levels=levels, places=places, max_nodes=max_nodes)
        if least > n:
            raise ValueError(
                f"a rest drafter's shortest suffix is no longer than its longest; got least={least} and n={n}; "
                "lower least"
            )
        if n + k > datastore.depth:
            raise ValueError(
                f"a datastore sorted to {datastore.depth} tokens serves n + k up to that; got n={n} and k={k}; "
                "lower one of them"
            )
        super().__init__(device, max_nodes, min(k, max_nodes))
        self.datastore = datastore
        self.n, self.least, self.levels, self.places = n, least, levels, places
        self._tokens, self._suffixes = datastore.tokens.data, datastore.suffixes.data
        self._newest: list[int] = []

    @classmethod
    def from_options(cls, path: str, build: Builder, **options: int) -> RESTDrafter:
        """See `Drafter.from_options`; ValueError for a datastore that cannot be used with the target."""
        if not path:
            raise ValueError("a rest drafter needs a datastore: write rest=FOLDER; got no path")
        datastore = Datastore.open(Path(path))
        target = build.target
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
        known = [
            (last - first, frequent(self._rows(size, first, last), self.datastore.separator, self.max_nodes))
            for size, first, last in self._matches()
        ]
        if not known:
            return self.chain([])
        tokens, parents, shares = known[0][1] if len(known) == 1 else blended(known, self.max_nodes)
        return self.tree(tokens, parents, [math.log(share) for share in shares])

    # ---- where suffixes stand ------------------------------------------------------------------------------

    def _matches(self) -> Iterator[tuple[int, int, int]]:
        """The suffixes to ask, longest first: tokens, and where their places are in the suffix array."""
        size = self.longest_match()
        places = asked = 0
        while size >= self.least and asked < self.levels and places < ENOUGH_PLACES:
            first, last = self.where(self._newest[-size:])
            if last - first > places:
                yield size, first, last
                places, asked = last - first, asked + 1
            size -= 1

    def longest_match(self) -> int:
        """Tokens of the longest suffix that occurs, 0 when none does.

        A suffix of a suffix that occurs does too, so lengths are searched by halving.
        """
        size, too_long = 0, len(self._newest) + 1
        while size + 1 < too_long:
            middle = (size + too_long) // 2
            phrase = self._newest[-middle:]
            first, end, reads = self._first_place(phrase)
            if first < end and reads(self._suffixes[first]) == phrase:
                size = middle
            else:
                too_long = middle
        return size

    def where(self, phrase: list[int]) -> tuple[int, int]:
        """[first, last) of the suffixes that begin with `phrase`."""
        first, end, reads = self._first_place(phrase)
        return first, bisect_right(self._suffixes, phrase, first, end, key=reads)

    def _first_place(self, phrase: list[int]) -> tuple[int, int, Callable[[int], list[int]]]:
        """Index of the first suffix that is not before `phrase`, where those of its first token end, and how a
        suffix is read. Tokens beyond the datastore's vocabulary are nowhere."""
        token, size, tokens = phrase[0], len(phrase), self._tokens
        if token >= self.datastore.separator:
            return 0, 0, lambda place: []

        def reads(place: int) -> list[int]:
            words: list[int] = tokens[place : place + size].tolist()
            return words

        begin, end = self.datastore.starts[token : token + 2].tolist()
        return bisect_left(self._suffixes, phrase, begin, end, key=reads), end, reads

    def _rows(self, size: int, first: int, last: int) -> NDArray[np.int64]:
        """[P, k] the tokens behind P places of a suffix, in order; past the end the last separator repeats."""
        store, count = self.datastore, last - first
        chosen = first + np.arange(min(count, self.places)) * count // min(count, self.places)
        places = store.suffixes[chosen].astype(np.int64)[:, None] + np.arange(size, size + self.max_depth)
        return store.tokens[np.minimum(places, len(store.tokens) - 1)].astype(np.int64)


def frequent(rows: NDArray[np.int64], separator: int, most: int) -> Beginnings:
    """The `most` most frequent beginnings of ordered `rows [P, k]`, most frequent first.

    Nothing counts from a separator on. Equally frequent: shorter ones first, then in order of rows. Example with
    separator 9: the rows 1 2, 1 3, 1 3, 4 9 give the nodes 1 (¾ of the rows), 3 under it (½), 4 (¼), 2 under 1 (¼).
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
    best = np.argpartition(place, most)[:most] if len(place) > most else np.arange(len(place))
    best = best[np.argsort(place[best])]
    depth, row, count = depth[best], row[best], count[best]
    heads = np.maximum.accumulate(np.where(new, np.arange(P)[:, None], 0), axis=0)  # first row of each beginning
    nodes = {node: index for index, node in enumerate(zip(depth.tolist(), row.tolist()))}
    parents = [nodes.get((level - 1, head), -1) for level, head in zip(depth.tolist(), heads[row, depth - 1].tolist())]
    return rows[row, depth].tolist(), parents, (count / P).tolist()


def blended(known: Sequence[tuple[int, Beginnings]], most: int) -> Beginnings:
    """The `most` likeliest beginnings of several suffixes' together: (places, beginnings) of each, longest first.

    Example: 1 place followed by 5, 3 places followed by 5, 5, 6: 5 gets ½ + ½·¾·⅔ = ¾, 6 gets ½·¾·⅓ = ⅛.
    """
    scores: dict[tuple[int, ...], float] = {}
    left = 1.0
    for places, (tokens, parents, shares) in known:
        say, left = left * places / (places + 1), left / (places + 1)
        paths: list[tuple[int, ...]] = []
        for token, parent, share in zip(tokens, parents, shares):
            path = (*paths[parent], token) if parent >= 0 else (token,)
            paths.append(path)
            scores[path] = scores.get(path, 0.0) + say * share
    best = sorted(scores, key=lambda path: (-scores[path], len(path)))[:most]  # no path scores more than its beginning
    nodes = {path: index for index, path in enumerate(best)}
    return [path[-1] for path in best], [nodes.get(path[:-1], -1) for path in best], [scores[path] for path in best]
