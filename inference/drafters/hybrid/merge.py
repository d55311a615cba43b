"""One tree of several sources' drafts: equal prefixes merged, grown best first by calibrated acceptance.

Sources propose what may follow a node: a drafter's tree (`TreeSource`), a distribution by depth (`LevelSource`),
n-grams of the text up to the node (`PhraseSource`), which lengthen a tree anywhere. Runs on the host, in lists.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from heapq import heappop, heappush, heapreplace
from math import exp, inf, log
from typing import Protocol

import torch
from torch import Tensor

from draft_heads.inference.drafters.hybrid.calibration import Calibration, confidence
from draft_heads.inference.drafters.text.ngram import Context, NgramTable
from draft_heads.inference.tree import DraftTree

Proposal = tuple[Hashable, float | None, int | None]
"""Of one token: the source's entry in its evidence, the source's own probability, the node in the source's own tree."""

Proposals = dict[int, Proposal]
"""The tokens that a source proposes after a node."""

Candidate = tuple[int, tuple[Hashable, ...], tuple[float | None, ...], tuple[int | None, ...]]
"""A token after a node: its evidence, and for each source its probability and its node (`Proposal`)."""

LEAST = -30.0  # log-probabilities below are all the same
UNLIKELY = log(0.01)  # a level's tokens of a lower log-probability are not proposed, but for its first
OTHER = 99  # entry of a token that a source does not propose where it proposes others


def _probability(log_prob: float) -> float:
    """At most 1; NaN, as of states that overflowed, is the least."""
    return exp(min(log_prob, 0.0)) if log_prob > LEAST else exp(LEAST)


class Source(Protocol):
    """Proposes what may follow a node."""

    def proposals(self, place: int | None, depth: int, context: Context) -> tuple[Proposals, Hashable]:
        """The tokens proposed after a node, and the entry of all other tokens (None where nothing is proposed).

        place    the node in the source's own tree, −1 for the base token, None for a node that is not in it
        depth    of the node, 0 for the base token
        context  the end of the text up to the node, as `NgramTable` codes it
        """


class TreeSource:
    """A tree that a drafter proposed; before `set` it proposes nothing.

    tokens, parents, log_probs  of its nodes; window_rows: those that are no candidates
    """

    def __init__(self) -> None:
        self._children: list[Proposals] = [{}]
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self.log_probs: list[float] = []
        self.window_rows: list[int] = []

    def set(self, columns: list[list[float]]) -> None:
        """This step's tree, as `columns_of` has it; rows that are no candidates are left out."""
        tokens, parents, log_probs, candidate = columns
        self.tokens, self.parents, self.log_probs = list(map(int, tokens)), list(map(int, parents)), log_probs
        # padding, which has no probability, belongs to no window
        self.window_rows = [node for node, may in enumerate(candidate) if not may and log_probs[node] > -inf]
        self._children = [{} for _ in range(len(tokens) + 1)]  # by parent, the base token first
        for node, (token, parent, log_prob, may) in enumerate(zip(self.tokens, self.parents, log_probs, candidate)):
            if may:
                gap = log_prob - (log_probs[parent] if parent >= 0 else 0.0)
                prior = _probability(gap)  # −inf − −inf is NaN
                self._children[parent + 1][token] = confidence(prior), prior, node

    def proposals(self, place: int | None, depth: int, context: Context) -> tuple[Proposals, Hashable]:
        found = {} if place is None else self._children[place + 1]
        return found, OTHER if found else None


def columns_of(tree: DraftTree) -> Tensor:
    """[B, 4, M] float64, what a merge reads of trees: tokens, parents, log-probabilities, candidates."""
    return torch.stack([x.double() for x in (tree.tokens, tree.parents, tree.log_probs, tree.candidate)], dim=1)


class LevelSource:
    """Distributions that do not depend on what was drafted, one for each depth (Medusa)."""

    def __init__(self) -> None:
        self._levels: list[Proposals] = []

    def set(self, columns: list[list[list[float]]]) -> None:
        """[2, K, R]: for K depths R tokens, best first, and their log-probabilities."""
        self._levels = []
        for tokens, log_probs in zip(*columns):
            proposed: Proposals = {}
            for token, log_prob in zip(tokens, log_probs):
                if proposed and log_prob < UNLIKELY:
                    break
                prior = _probability(log_prob)
                proposed[int(token)] = confidence(prior), prior, None
            self._levels.append(proposed)

    def proposals(self, place: int | None, depth: int, context: Context) -> tuple[Proposals, Hashable]:
        return (self._levels[depth], OTHER) if depth < len(self._levels) else ({}, None)


class PhraseSource:
    """N-grams of the text: after every node the most frequent followers of its contexts, the longest context first."""

    WIDTH = 4  # no further context is looked up once so many followers are found

    def __init__(self, table: NgramTable) -> None:
        self.table = table

    def proposals(self, place: int | None, depth: int, context: Context) -> tuple[Proposals, Hashable]:
        """See `Source`; an entry says the context's level, its count up to 3, whether nothing else followed it,
        whether a longer context proposes others, and which of its followers the token is."""
        found: Proposals = {}
        other: Hashable = None
        for level, (first, count, second, second_count, total) in self.table.levels(context):
            fallback = other is not None  # a longer context proposes something else
            entry, share = (level, min(count, 3), count == total, fallback), (level - 1) / level / (total + 1)
            if fallback:
                share /= 2
            else:
                other = *entry, OTHER
            if first not in found:
                found[first] = (*entry, 1), count * share, None
            if second >= 0 and second not in found:
                found[second] = (*entry, 2), second_count * share, None
            if len(found) >= self.WIDTH:
                break
        return found, other


class MergedTree:
    """The `max_nodes` nodes that are most probably accepted; `learn` corrects the calibration by what was.

    tokens, parents, log_probs, source  [M] lists, as in `DraftTree`; source is the first of those that propose a node
    proposers  [M] bit s: source s proposes the node
    needs  [M] bit s: source s alone proposes the node or one above it, so the tree has the node thanks to that source

    Example: of the trees (5 → 6) and (5 → 7, 9) all four nodes differ but for 5, which both propose: the merged tree is
    (5 → 6, 5 → 7, 9), and the first source is needed for 6 alone, the second for 7 and 9.
    """

    def __init__(
        self,
        sources: Sequence[Source],
        calibration: Calibration,
        max_nodes: int,
        max_depth: int,
        table: NgramTable | None = None,
    ) -> None:
        """table: of the longest n-grams among the sources; its contexts contain those of the shorter ones."""
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self.log_probs: list[float] = []
        self.source: list[int] = []
        self.proposers: list[int] = []
        self.needs: list[int] = []
        self._sources, self._calibration = sources, calibration
        # of every row of the target's forward, the base token first:
        self._places: list[Sequence[int | None]] = [(-1,) * len(sources)]  # its node in each source's own tree
        self._depths = [0]
        self._contexts = [table.code if table else None]
        self._candidates: dict[int, list[Candidate]] = {}  # after a row, once they were collected
        self._rows: dict[tuple[int, int], int] = {}  # row and token after it → the row of that token

        best: list[float] = []  # heap of the highest log-probabilities of any candidate: those of the finished tree
        waiting: list[tuple[float, int, int, Candidate]] = []  # heap: −log-probability, order, row of the parent
        order, row, reached = 0, 0, 0.0
        while True:
            if self._depths[row] < max_depth and (len(best) < max_nodes or reached > best[0]):
                for candidate in self._candidates_after(row):
                    _, evidence, priors, _ = candidate
                    log_prob = reached + log(max(calibration.estimate(evidence, priors), 1e-6))
                    if len(best) < max_nodes:
                        heappush(best, log_prob)
                    elif log_prob > best[0]:
                        heapreplace(best, log_prob)
                    else:
                        continue
                    order += 1  # of equals the first goes first
                    heappush(waiting, (-log_prob, order, row, candidate))
            if not waiting or len(self.tokens) == max_nodes:
                break
            negative, _, parent, (token, _, priors, places) = heappop(waiting)
            reached = -negative
            proposers = [number for number, prior in enumerate(priors) if prior is not None]
            self.tokens.append(token)
            self.parents.append(parent - 1)
            self.log_probs.append(reached)
            self.source.append(proposers[0])
            self.proposers.append(sum(1 << number for number in proposers))
            above = self.needs[parent - 1] if parent else 0
            self.needs.append(above | 1 << proposers[0] if len(proposers) == 1 else above)
            row = self._rows[parent, token] = len(self.tokens)
            self._places.append(places)
            self._depths.append(self._depths[parent] + 1)
            self._contexts.append(table.after(self._contexts[parent], token) if table else None)
        self._candidate_nodes = len(self.tokens)

    def _candidates_after(self, row: int) -> list[Candidate]:
        """All tokens that sources propose after a row."""
        if row in self._candidates:
            return self._candidates[row]
        depth, context = self._depths[row], self._contexts[row]
        proposed = [source.proposals(place, depth, context) for source, place in zip(self._sources, self._places[row])]
        tokens: dict[int, None] = {}
        for found, _ in proposed:
            tokens.update(dict.fromkeys(found))
        by_source = [(found, (other, None, None)) for found, other in proposed]
        candidates = self._candidates[row] = []
        for token in tokens:
            evidence, priors, places = zip(*[found.get(token, absent) for found, absent in by_source])
            candidates.append((token, evidence, priors, places))
        return candidates

    def append_window_rows(self, place: int, source: TreeSource) -> list[int]:
        """Append a source's rows that are no candidates to the tree, below the base token or each other.

        Returns [1 + nodes]: in which row of the target's forward each row of the source's own tree is, −1: in none.
        """
        rows = [-1] * (1 + len(source.tokens))
        for row, places in enumerate(self._places):
            if (node := places[place]) is not None:
                rows[node + 1] = row
        for node in source.window_rows:
            self.tokens.append(source.tokens[node])
            self.parents.append(rows[source.parents[node] + 1] - 1)
            self.log_probs.append(source.log_probs[node])
            self.source.append(place)
            rows[node + 1] = len(self.tokens)
        return rows

    def as_tree(self, device: torch.device) -> DraftTree:
        """The nodes as tensors; window rows are no candidates."""
        tree = DraftTree.of_lists(self.tokens, self.parents, self.log_probs, self.source, device)
        tree.candidate[:, self._candidate_nodes :] = False
        return tree

    def learn(self, followed: Sequence[int]) -> list[tuple[int, int]]:
        """Count which proposals the `followed` tokens show right, before sources read them; each accepted node's
        `proposers` and `needs`."""
        accepted = []
        row = 0
        for token in followed:
            for proposed, evidence, priors, _ in self._candidates_after(row):
                self._calibration.count(evidence, priors, proposed == token)
            if (row, token) not in self._rows:
                break
            row = self._rows[row, token]
            accepted.append((self.proposers[row - 1], self.needs[row - 1]))
        return accepted
