"""How often tokens that sources proposed with some evidence were accepted, counted while decoding.

The evidence for a token after a node is a tuple of what each source says of the token. For each evidence, a table
counts how many such tokens were tried (their parent was accepted) and accepted. New evidence is guessed from counts of
its entries: the chance that all sources are wrong is the product of the chances that each is.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence

PRIOR = 4.0  # observations that the first guess of an evidence counts for
MEMORY = 4000.0  # observations of one evidence after which the weight of the older ones is halved

Counts = list[float]  # [accepted, tried], the prior included


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
        self._joint: dict[tuple[Hashable, ...], Counts] = {}
        self._alone: dict[tuple[int, Hashable], Counts] = {}

    def estimate(self, evidence: tuple[Hashable, ...], priors: Sequence[float | None]) -> float:
        """The share of tokens with this evidence that are accepted where their parent is.

        evidence  one entry per source
        priors    for each source its probability of the token before anything was observed; None: it proposes others
        """
        counts = self._joint.get(evidence) or self._first_counts(evidence, priors)
        return counts[0] / counts[1]

    def count(self, evidence: tuple[Hashable, ...], priors: Sequence[float | None], accepted: bool) -> None:
        """A token of this evidence has been tried; priors as in `estimate`."""
        _count(self._joint.get(evidence) or self._first_counts(evidence, priors), accepted)
        for key in enumerate(evidence):
            if key in self._alone:
                _count(self._alone[key], accepted)

    def _first_counts(self, evidence: tuple[Hashable, ...], priors: Sequence[float | None]) -> Counts:
        """New counts for an evidence: what its entries have shown by themselves."""
        wrong = 1.0
        for source, prior in enumerate(priors):
            if prior is not None:
                accepted, tried = self._alone.setdefault((source, evidence[source]), [PRIOR * prior, PRIOR])
                wrong *= 1 - accepted / tried
        counts = self._joint[evidence] = [PRIOR * (1 - wrong), PRIOR]
        return counts


def _count(counts: Counts, accepted: bool) -> None:
    counts[0] += accepted
    counts[1] += 1
    if counts[1] > MEMORY:
        counts[0] /= 2
        counts[1] /= 2
