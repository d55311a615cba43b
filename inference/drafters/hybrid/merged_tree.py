"""Trees of several sources as one, grown best first by calibrated acceptance; on the host, in lists.

A node's children are what the sources' own trees have behind it (`TreeSource`), what heads say of its depth whatever
was drafted before (`LevelSource`), and what n-grams say of the text up to it (`PhraseSource`), so that the leaves of a
learned tree are lengthened by phrases, at any depth.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from heapq import heappop, heappush
from math import exp, inf, log
from typing import Protocol

import torch
from torch import Tensor

from draft_heads.inference.drafters.hybrid.calibration import Calibration, confidence
from draft_heads.inference.drafters.text.ngram_table import Context, NgramTable
from draft_heads.inference.tree import DraftTree

Opinion = dict[int, tuple[Hashable, float, int | None]]
"""Token → what the source says of it, what that is worth at first sight, the node of the source's own tree."""

LEAST = -30.0  # a log-probability below which nothing is told apart
UNLIKELY = 0.02  # a probability of which hardly any node will pay
OTHER = 99  # a source that proposes something, but not this token


class Source(Protocol):
    """Says what may follow a node.

    by_level  whether it says the same behind every node of a depth; a node's place is its depth then, from 0
    """

    by_level: bool

    def opinion(self, place: int | None, context: Context) -> tuple[Opinion, Hashable]:
        """What follows a node, and what the source says of all other tokens (None: nothing).

        place    the node in the source's own tree, −1 the base token, None where it is not in it
        context  the text up to the node, as the largest table codes it
        """


class TreeSource:
    """A tree that was proposed as a whole."""

    by_level = False

    def __init__(self) -> None:
        self.tree: DraftTree | None = None
        self._kids: list[Opinion] | None = None

    def take(self, tree: DraftTree) -> None:
        """This step's tree."""
        self.tree, self._kids = tree, None

    def _read(self, tree: DraftTree) -> list[Opinion]:
        """Its candidates by the node they are behind, the base token first."""
        kids: list[Opinion] = [{} for _ in range(len(tree) + 1)]
        scores = tree.log_probs.tolist()
        rows = zip(tree.tokens.tolist(), tree.parents.tolist(), scores, tree.candidate.tolist())
        for node, (token, parent, score, candidate) in enumerate(rows):
            if candidate:
                gap = score - (scores[parent] if parent >= 0 else 0.0)
                share = exp(min(gap, 0.0)) if gap > LEAST else exp(LEAST)  # of two nodes that are impossible: no number
                kids[parent + 1][token] = confidence(share), share, node
        return kids

    def opinion(self, place: int | None, context: Context) -> tuple[Opinion, Hashable]:
        """See `Source`."""
        if place is None or self.tree is None:
            return {}, None
        if self._kids is None:
            self._kids = self._read(self.tree)
        found = self._kids[place + 1]
        return (found, OTHER) if found else ({}, None)


class LevelSource:
    """Distributions that do not depend on what was drafted, one for each depth (Medusa): they speak for every node."""

    by_level = True

    def __init__(self, least: float = UNLIKELY) -> None:
        """least: probability of a token that is told of, but for each depth's first."""
        self.least = least
        self.levels: Tensor | None = None
        self._said: list[Opinion] | None = None

    def take(self, levels: Tensor) -> None:
        """[2, K, R] float64: tokens and their log-probabilities, best first, of K depths."""
        self.levels, self._said = levels, None

    def _read(self, levels: Tensor) -> list[Opinion]:
        """By depth, what is told of."""
        tokens, log_probs = levels.tolist()
        by_level: list[Opinion] = []
        for row, scores in zip(tokens, log_probs):
            said: Opinion = {}
            for token, score in zip(row, scores):
                share = exp(max(score, LEAST))
                if said and share < self.least:
                    break
                said[int(token)] = confidence(share), share, None
            by_level.append(said)
        return by_level

    def opinion(self, place: int | None, context: Context) -> tuple[Opinion, Hashable]:
        """See `Source`."""
        if self.levels is None:
            return {}, None
        if self._said is None:
            self._said = self._read(self.levels)
        level = 0 if place is None else place + 1
        return (self._said[level], OTHER) if level < len(self._said) else ({}, None)


class PhraseSource:
    """N-grams of the text: at every node the most frequent followers of the contexts that were seen, longest first."""

    by_level = False
    WIDTH = 4  # followers of a node

    def __init__(self, table: NgramTable) -> None:
        self.table = table

    def opinion(self, place: int | None, context: Context) -> tuple[Opinion, Hashable]:
        """See `Source`."""
        said: Opinion = {}
        otherwise: Hashable = None
        for level, (first, count, second, second_count, total) in self.table.levels(context):
            sure, worth = level * 8 + min(count, 3) * 2 + (count == total), (level - 1) / level / (total + 1)
            if otherwise is None:
                otherwise = 1000 + sure
            else:
                sure, worth = sure + 100, worth / 2  # a longer context says something else
            if first not in said:
                said[first] = sure, count * worth, None
            if second >= 0 and second not in said:
                said[second] = -sure, second_count * worth, None
            if len(said) >= self.WIDTH:
                break
        return said, otherwise


class SilentSource:
    """A source that has been switched off."""

    by_level = False

    def opinion(self, place: int | None, context: Context) -> tuple[Opinion, Hashable]:
        """Nothing."""
        return {}, None


class _Node:
    """A node of the merged tree: where each source has it, the text up to it, what was considered behind it."""

    __slots__ = ("considered", "context", "inside", "places")

    def __init__(self, places: Sequence[int | None], context: Context) -> None:
        self.places, self.context = places, context
        self.considered: list[tuple[int, tuple[Hashable, ...]]] = []
        self.inside: dict[int, int] = {}  # token → index, of the children that got a node


class Merged(Protocol):
    """A tree of several sources, and why its nodes are in it."""

    @property
    def scores(self) -> Sequence[float]:
        """Log-probabilities that nodes are accepted."""

    def as_tree(self, device: torch.device) -> DraftTree:
        """The nodes as tensors."""

    def cut(self, nodes: int) -> None:
        """Keep the first nodes only, which are the best; those after them are still learned from."""

    def learn(self, followed: Sequence[int]) -> Sequence[tuple[int, int]]:
        """The tokens that really followed, as far as they are known: counts what was right and wrong of it.

        Returns of each accepted node its source, and who is needed for it: bit s says that source s alone proposed it
        or a node above it, so that the tree would not have it without that source.
        """

    def needing(self, source: int) -> int:
        """How many nodes would not be there without a source."""

    def rows(self, source: int, nodes: int) -> list[int]:
        """[1 + nodes]: in which row of the target's forward each node of a source's own tree is, −1 where in none."""


class MergedTree:
    """The `max_nodes` nodes that are most probably accepted; remembers why, to learn from what is. See `Merged`.

    tokens, parents, scores, source  as in `DraftTree`, lists; source is the first of those that propose a node
    """

    def __init__(
        self,
        sources: Sequence[Source],
        calibration: Calibration,
        max_nodes: int,
        max_depth: int,
        bounds: Sequence[float] | None = None,
    ) -> None:
        """bounds: log-probabilities, the tree of n nodes is not given another that is accepted less often than
        bounds[n] says (`running_costs.Prices`)."""
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self.scores: list[float] = []
        self.source: list[int] = []
        self.needs: list[int] = []  # as `learn` returns them
        self._sources, self._calibration = sources, calibration
        self._levels = [number for number, source in enumerate(sources) if source.by_level]
        self._waiting: list[tuple[float, int, int, int, int, list[int | None], int, int]] = []
        self._serial = 0
        tables = [source.table for source in sources if isinstance(source, PhraseSource)]
        after = max(tables, key=lambda table: table.n, default=None)  # its contexts are good for shorter ones too
        self._nodes = [_Node((-1,) * len(sources), after and after.code)]
        bounds = bounds or [-inf] * max_nodes
        bound = min(bounds, default=-inf)
        self._expand(0, 0.0, 0, bound)
        while self._waiting and len(self.tokens) < max_nodes:
            score, _, parent, token, depth, places, source, needs = heappop(self._waiting)
            if -score < bounds[len(self.tokens)]:
                break
            self._nodes[parent].inside[token] = len(self._nodes)
            self.tokens.append(token)
            self.parents.append(parent - 1)
            self.scores.append(-score)
            self.source.append(source)
            self.needs.append(needs)
            for level in self._levels:
                places[level] = depth - 1
            self._nodes.append(_Node(places, after and after.after(self._nodes[parent].context, token)))
            if depth < max_depth and len(self.tokens) < max_nodes:
                self._expand(len(self.tokens), -score, depth, bound)

    def _expand(self, index: int, score: float, depth: int, bound: float) -> None:
        """Let the children of a node wait for their turn."""
        node, above = self._nodes[index], self.needs[index - 1] if index else 0
        children: dict[int, tuple[list[Hashable], list[tuple[int, float]], list[int | None]]] = {}
        otherwise: list[Hashable] = []
        nowhere: list[int | None] = [None] * len(self._sources)
        for number, (source, place) in enumerate(zip(self._sources, node.places)):
            said, other = source.opinion(place, node.context)
            for token, (entry, guess, inside) in said.items():
                child = children.get(token)
                if child is None:
                    child = children[token] = otherwise.copy(), [], nowhere.copy()
                child[0].append(entry)
                child[1].append((number, guess))
                child[2][number] = inside
            otherwise.append(other)
            for evidence, _, _ in children.values():
                if len(evidence) == number:
                    evidence.append(other)
        for token, (evidence, guesses, places) in children.items():
            key = tuple(evidence)
            node.considered.append((token, key))
            reached = score + log(max(self._calibration.estimate(key, guesses), 1e-6))
            if reached >= bound:
                self._serial += 1
                first = guesses[0][0]
                needs = above | 1 << first if len(guesses) == 1 else above
                waiting = -reached, self._serial, index, token, depth + 1, places, first, needs
                heappush(self._waiting, waiting)

    def as_tree(self, device: torch.device) -> DraftTree:
        """See `Merged`."""
        return DraftTree.of_lists(self.tokens, self.parents, self.scores, self.source, device)

    def cut(self, nodes: int) -> None:
        """See `Merged`."""
        for values in (self.tokens, self.parents, self.scores, self.source, self.needs):
            del values[nodes:]

    def learn(self, followed: Sequence[int]) -> list[tuple[int, int]]:
        """See `Merged`."""
        accepted = []
        index = 0
        for token in followed:
            node = self._nodes[index]
            for considered, evidence in node.considered:
                self._calibration.count(evidence, considered == token)
            index = node.inside.get(token, -1)
            if not 0 < index <= len(self.tokens):
                break
            accepted.append((self.source[index - 1], self.needs[index - 1]))
        return accepted

    def needing(self, source: int) -> int:
        """See `Merged`."""
        return sum(needs >> source & 1 for needs in self.needs)

    def rows(self, source: int, nodes: int) -> list[int]:
        """See `Merged`."""
        rows = [0] + [-1] * nodes
        for index, node in enumerate(self._nodes[1 : len(self.tokens) + 1], start=1):
            place = node.places[source]
            if place is not None:
                rows[place + 1] = index
        return rows
