"""What a source's word is worth: how often tokens that it proposed so were accepted, counted while decoding.

Evidence for one token behind one node is a tuple with an entry per source: what that source says of the token. A table
keeps, for each evidence, how many such tokens were tried (the node was accepted) and how many the target then said.
Evidence seen seldom is judged by its parts: each source's entry has a table of its own, and the chance that all of them
are wrong is the product of the chances that each is.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Mapping
from typing import Any

PRIOR = 4.0
"""Observations that the first guess of an evidence counts for."""
MEMORY = 4000.0
"""Observations of one evidence after which the older half of their weight is forgotten."""

Cell = list[float]
"""[accepted, tried], prior included."""


def confidence(probability: float) -> int:
    """A probability as one of 17 classes, half a nat of odds each: .5 → 0, .73 → 2, .27 → −2, .98 and more → 8."""
    if probability >= 0.982:
        return 8
    if probability <= 0.018:
        return -8
    return round(2 * math.log(probability / (1 - probability)))


class Calibration:
    """Counts of accepted and tried tokens by evidence."""

    def __init__(self) -> None:
        self._cells: dict[tuple[Hashable, ...], Cell] = {}
        self._alone: dict[tuple[int, Hashable], Cell] = {}

    def state_dict(self) -> dict[str, Any]:
        """What was counted, as JSON can say it; a first guess that nothing was seen of is guessed again."""
        cells = [[*key, *cell] for key, cell in self._cells.items() if cell[1] > PRIOR]
        alone = [[*key, *cell] for key, cell in self._alone.items() if cell[1] > PRIOR]
        return {"cells": cells, "alone": alone}

    @classmethod
    def from_state(cls, state: Mapping[str, Any], sources: int) -> Calibration:
        """What `state_dict` said; ValueError where that is not evidence of so many sources."""
        made = cls()
        for *evidence, _, _ in state["cells"]:
            if len(evidence) != sources or not all(entry is None or isinstance(entry, int) for entry in evidence):
                raise ValueError(f"evidence has an entry for each of {sources} sources; got {evidence}")
        for source, entry, _, _ in state["alone"]:
            if source not in range(sources) or not isinstance(entry, int):
                raise ValueError(f"an entry is that of one of {sources} sources; got {entry!r} of {source!r}")
        made._cells = {tuple(key): [float(accepted), float(tried)] for *key, accepted, tried in state["cells"]}
        for source, entry, accepted, tried in state["alone"]:
            made._alone[source, entry] = [float(accepted), float(tried)]
        return made

    def estimate(self, evidence: tuple[Hashable, ...], guesses: Iterable[tuple[int, float]]) -> float:
        """The share of tokens of this evidence that are accepted where the node before them is.

        evidence  one entry a source
        guesses   (source, what its entry is worth before anything was observed), of those that speak for the token
        """
        cell = self._cells.get(evidence)
        if cell is None:
            wrong = 1.0
            for source, guess in guesses:
                accepted, tried = self._alone.setdefault((source, evidence[source]), [PRIOR * guess, PRIOR])
                wrong *= 1 - accepted / tried
            cell = self._cells[evidence] = [PRIOR * (1 - wrong), PRIOR]
        return cell[0] / cell[1]

    def count(self, evidence: tuple[Hashable, ...], accepted: bool) -> None:
        """A token of an evidence that was estimated has been tried."""
        _count(self._cells[evidence], accepted)
        for known in map(self._alone.get, enumerate(evidence)):
            if known is not None:
                _count(known, accepted)


def _count(cell: Cell, accepted: bool) -> None:
    cell[0] += accepted
    cell[1] += 1
    if cell[1] > MEMORY:
        cell[0] /= 2
        cell[1] /= 2
