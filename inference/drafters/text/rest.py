"""REST: continuations from a corpus, by the text's longest matching suffix (https://arxiv.org/abs/2311.08252)."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from draft_heads.configs.options import option
from draft_heads.data.datastore import Datastore
from draft_heads.inference.drafters.base import Builder
from draft_heads.inference.drafters.options import TreeOptions
from draft_heads.inference.drafters.text.base import TextDrafter
from draft_heads.inference.tree import DraftTree

ENOUGH_PLACES = 100  # a suffix with so many matches needs no shorter ones

Prefixes = tuple[list[int], list[int], list[float]]
"""Tokens, parents and relative frequencies of nodes, parents first."""


@dataclass(frozen=True)
class RESTOptions(TreeOptions):
    n: int = option(16, "tokens of the longest suffix that is looked up", least=1)
    k: int = option(10, "most tokens of a path", least=1)
    least: int = option(1, "tokens of the shortest suffix", least=1)
    levels: int = option(3, "suffixes combined (1: as published)", least=1)
    places: int = option(300, "matches, sampled evenly, whose continuations are counted", least=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.least > self.n:
            raise ValueError(
                f"a rest drafter's shortest suffix is no longer than its longest; got least={self.least} and "
                f"n={self.n}; lower least"
            )


class RESTDrafter(TextDrafter):
    """Finds the longest suffix of the text in a datastore and drafts its most frequent continuations there.

    With few matches, shorter suffixes contribute too (`levels`, 1 in the paper): continuations of P matches have the
    weight P/(P+1), the rest goes to the next shorter suffix with more matches.
    """

    sources = ("rest",)
    kind = "rest"
    title = "what followed the newest tokens in a datastore"
    loads = "DATASTORE"
    options_type = RESTOptions
    options: RESTOptions

    def __init__(
        self,
        datastore: Datastore,
        device: torch.device | str = "cpu",
        vocabulary: int | None = None,
        **options: Any,
    ) -> None:
        """vocabulary: continuations end before tokens beyond it, None: all of the datastore's; options: see
        `RESTOptions`."""
        self.options = chosen = RESTOptions(**options)
        if chosen.n + chosen.k > datastore.depth:
            raise ValueError(
                f"a datastore sorted to {datastore.depth} tokens serves n + k up to that; got n={chosen.n} and "
                f"k={chosen.k}; lower one of them"
            )
        super().__init__(device, chosen.max_nodes, min(chosen.k, chosen.max_nodes))
        self.datastore = datastore
        self._tokens, self._suffixes = datastore.tokens.data, datastore.suffixes.data
        self._newest: list[int] = []
        self.vocabulary = min(datastore.separator, vocabulary or datastore.separator)

    @classmethod
    def from_options(cls, path: str, build: Builder, **options: Any) -> RESTDrafter:
        """See `Drafter.from_options`; ValueError for a datastore that cannot be used with the target."""
        datastore = Datastore.open(Path(path))
        target = build.target
        datastore.check_tokenizer(target.tokenizer, target.vocab_size, path)
        return cls(datastore, target.device, vocabulary=target.vocab_size, **options)

    def start(self) -> None:
        self._newest = []

    def read(self, tokens: list[int]) -> None:
        self._newest = [*self._newest, *tokens][-self.options.n :]

    def propose(self) -> DraftTree:
        known = [
            (last - first, frequent_prefixes(self._rows(size, first, last), self.vocabulary, self.max_nodes))
            for size, first, last in self._matches()
        ]
        if not known:
            return self.chain([])
        tokens, parents, shares = known[0][1] if len(known) == 1 else blend_prefixes(known, self.max_nodes)
        return self.tree(tokens, parents, [math.log(share) for share in shares])

    # ---- suffix array search ------------------------------------------------------------------------------

    def _matches(self) -> Iterator[tuple[int, int, int]]:
        """(tokens, first, last) of the suffixes to combine, longest first; first and last bound the suffix array."""
        size = self.longest_match()
        places = used = 0
        while size >= self.options.least and used < self.options.levels and places < ENOUGH_PLACES:
            first, last = self.matches(self._newest[-size:])
            if last - first > places:
                yield size, first, last
                places, used = last - first, used + 1
            size -= 1

    def longest_match(self) -> int:
        """Tokens of the longest suffix that occurs, 0 when none does; by binary search: its own suffixes occur too."""
        size, too_long = 0, len(self._newest) + 1
        while size + 1 < too_long:
            middle = (size + too_long) // 2
            first, last = self.matches(self._newest[-middle:])
            size, too_long = (middle, too_long) if first < last else (size, middle)
        return size

    def matches(self, phrase: list[int]) -> tuple[int, int]:
        """[first, last) in the suffix array of the suffixes that begin with `phrase`; none for an unknown token."""
        token, size, tokens = phrase[0], len(phrase), self._tokens
        if token >= self.datastore.separator:
            return 0, 0

        def reads(place: int) -> list[int]:
            words: list[int] = tokens[place : place + size].tolist()
            return words

        begin, end = self.datastore.starts[token : token + 2].tolist()
        first = bisect_left(self._suffixes, phrase, begin, end, key=reads)
        return first, bisect_right(self._suffixes, phrase, first, end, key=reads)

    def _rows(self, size: int, first: int, last: int) -> NDArray[np.int64]:
        """[P, k] the tokens after P sorted matches of a suffix; past the end the last separator repeats."""
        store, count = self.datastore, last - first
        chosen = first + np.arange(min(count, self.options.places)) * count // min(count, self.options.places)
        places = store.suffixes[chosen].astype(np.int64)[:, None] + np.arange(size, size + self.max_depth)
        return store.tokens[np.minimum(places, len(store.tokens) - 1)].astype(np.int64)


def frequent_prefixes(rows: NDArray[np.int64], separator: int, most: int) -> Prefixes:
    """The `most` most frequent prefixes of ordered `rows [P, k]`, most frequent first.

    Rows end at a token from the separator on. Ties: shorter prefixes first, then in order of rows. Example with
    separator 9: the rows 1 2, 1 3, 1 3, 4 9 give the nodes 1 (¾ of the rows), 3 under it (½), 4 (¼), 2 under 1 (¼).
    """
    P, k = rows.shape
    inside = np.logical_and.accumulate(rows < separator, axis=1)
    new = np.ones((P, k), dtype=bool)  # whether a prefix differs from that of the previous row
    np.logical_or.accumulate(rows[1:] != rows[:-1], axis=1, out=new[1:])
    depth, row = np.nonzero(new.T)  # a prefix is its first row and its last column
    following = np.append(row[1:], 0)
    count = np.where(following == 0, P, following) - row
    counts = inside[row, depth]
    depth, row, count = depth[counts], row[counts], count[counts]
    rank = ((P - count) * k + depth) * P + row  # most frequent, then shortest, then first
    best = np.argpartition(rank, most)[:most] if len(rank) > most else np.arange(len(rank))
    best = best[np.argsort(rank[best])]
    depth, row, count = depth[best], row[best], count[best]
    heads = np.maximum.accumulate(np.where(new, np.arange(P)[:, None], 0), axis=0)  # first row of each prefix
    nodes = {node: index for index, node in enumerate(zip(depth.tolist(), row.tolist()))}
    parents = [nodes.get((level - 1, head), -1) for level, head in zip(depth.tolist(), heads[row, depth - 1].tolist())]
    return rows[row, depth].tolist(), parents, (count / P).tolist()


def blend_prefixes(known: Sequence[tuple[int, Prefixes]], most: int) -> Prefixes:
    """The `most` likeliest prefixes of several suffixes combined: (matches, prefixes) of each, longest suffix first.

    Example: 1 match followed by 5, 3 matches followed by 5, 5, 6: 5 gets ½ + ½·¾·⅔ = ¾, 6 gets ½·¾·⅓ = ⅛.
    """
    scores: dict[tuple[int, ...], float] = {}
    remaining = 1.0
    for places, (tokens, parents, shares) in known:
        weight, remaining = remaining * places / (places + 1), remaining / (places + 1)
        paths: list[tuple[int, ...]] = []
        for token, parent, share in zip(tokens, parents, shares):
            path = (*paths[parent], token) if parent >= 0 else (token,)
            paths.append(path)
            scores[path] = scores.get(path, 0.0) + weight * share
    best = sorted(scores, key=lambda path: (-scores[path], len(path)))[:most]  # no path scores more than its prefix
    nodes = {path: index for index, path in enumerate(best)}
    return [path[-1] for path in best], [nodes.get(path[:-1], -1) for path in best], [scores[path] for path in best]
