"""What a source's word is worth: how often tokens that it proposed so were accepted, counted while decoding.

Evidence for one token behind one node is a tuple with an entry per source: what that source says of the token. A table
keeps, for each evidence, how many such tokens were tried (the node was accepted) and how many the target then said.
Evidence seen seldom is judged by its parts: each source's entry has a table of its own, and the chance that all of them
are wrong is the product of the chances that each is.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence

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

    def estimate(self, evidence: tuple[Hashable, ...], guesses: Sequence[float]) -> float:
        """The share of tokens of this evidence that are accepted where the node before them is.

        evidence  one entry a source
        guesses   what each entry is worth before anything was observed; 0 for one that does not speak for the token
        """
        cell = self._cells.get(evidence)
        if cell is None:
            wrong = 1.0
            for source, (entry, guess) in enumerate(zip(evidence, guesses)):
                if guess > 0:
                    accepted, tried = self._alone.setdefault((source, entry), [PRIOR * guess, PRIOR])
                    wrong *= 1 - accepted / tried
            cell = self._cells[evidence] = [PRIOR * (1 - wrong), PRIOR]
        return cell[0] / cell[1]

    def count(self, evidence: tuple[Hashable, ...], accepted: bool) -> None:
        """A token of an evidence that was estimated has been tried."""
        _count(self._cells[evidence], accepted)
        for place in enumerate(evidence):
            alone = self._alone.get(place)
            if alone is not None:
                _count(alone, accepted)


def _count(cell: Cell, accepted: bool) -> None:
    cell[0] += accepted
    cell[1] += 1
    if cell[1] > MEMORY:
        cell[0] /= 2
        cell[1] /= 2
