"""What trees of each size cost to verify on this machine, and what a token costs at all, measured while decoding.

Means without outliers: a step in which a program was compiled must not count for hundreds. The price of a tree is what
it costs more than none, in tokens: those that would come in that time anyway.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from math import exp, inf, log
from statistics import fmean, median
from typing import Any, NamedTuple

KEPT = 256
"""Steps that are remembered."""
OUTLIER = 3.0
"""A time of more than so many medians does not count."""
TRIES = (1.0, 0.25, 0.5, 0.0)
"""Parts of the budget that trial steps use: without different sizes nothing is learned of what size costs."""
EARLY, EVERY = 24, 64
"""So many steps are trial steps at first, and one in so many later, of sizes that are seldom seen otherwise."""
ENOUGH = 6
"""Steps of which a size is known by itself; rarer ones are taken together with their neighbours."""
STRETCH = 8
"""Steps in a row during which the machine is taken to be as fast."""
RENEW = 16
"""Steps after which the figures are computed anew; half of those that are remembered, once that is more."""


def typical(seconds: Sequence[float]) -> float:
    """The mean of those that are no more than `OUTLIER` medians."""
    most = OUTLIER * median(seconds)
    kept = [one for one in seconds if one <= most]
    return sum(kept) / len(kept)


class Step(NamedTuple):
    """rows behind the base token, seconds that depend on them, seconds of the whole step, new tokens."""

    rows: int
    verify: float
    seconds: float
    tokens: int


Time = tuple[int, float]
"""Rows behind the base token, seconds."""


def _slope(times: Sequence[Time]) -> float:
    """Seconds that a row more takes, not negative: by how much steps differ from those before them, for the machine
    slows down and recovers over many. Least squares, without the outliers of a first round: between those it did."""
    changes = [(rows - before, seconds - earlier) for (before, earlier), (rows, seconds) in pairwise(times)]
    slope = _fitted(changes)
    misses = [abs(seconds - slope * rows) for rows, seconds in changes]
    most = OUTLIER * median(misses) if misses else 0.0
    return max(0.0, _fitted([change for change, miss in zip(changes, misses) if miss <= most]))


def _fitted(changes: Sequence[Time]) -> float:
    """The slope of the line through 0 that fits best."""
    spread = sum(rows * rows for rows, _ in changes)
    return sum(rows * seconds for rows, seconds in changes) / spread if spread else 0.0


def _levelled(times: Sequence[Time], slope: float) -> list[Time]:
    """The times as if the machine had been as fast in every stretch of them."""
    stretches = [times[start : start + STRETCH] for start in range(0, len(times), STRETCH)]
    levels = [median(seconds - slope * rows for rows, seconds in stretch) for stretch in stretches]
    usual = median(levels)
    return [(rows, seconds - level + usual) for stretch, level in zip(stretches, levels) for rows, seconds in stretch]


def _sizes(times: Sequence[Time]) -> list[tuple[float, float, int]]:
    """Mean rows, mean seconds and number of the steps of each size, fewest rows first; of rare sizes, of several."""
    together: list[list[Time]] = [[]]
    for time in sorted(times):
        if len(together[-1]) >= ENOUGH and time[0] > together[-1][-1][0]:
            together.append([])
        together[-1].append(time)
    if len(together) > 1 and len(together[-1]) < ENOUGH:
        rare = together.pop()
        together[-1] += rare
    return [(fmean(rows for rows, _ in same), fmean(sec for _, sec in same), len(same)) for same in together]


def _rising(sizes: Sequence[tuple[float, float, int]]) -> list[tuple[float, float]]:
    """Rows and seconds; neighbours that fall instead of rising are taken together."""
    groups: list[tuple[float, float, float, int]] = []  # fewest and most rows, mean seconds, steps
    for rows, seconds, count in sizes:
        first = rows
        while groups and groups[-1][2] > seconds:
            first, _, before, steps = groups.pop()
            seconds, count = (before * steps + seconds * count) / (steps + count), steps + count
        groups.append((first, rows, seconds, count))
    return [(end, seconds) for first, last, seconds, _ in groups for end in dict.fromkeys((first, last))]


class Prices(NamedTuple):
    """What trees of 0 … n nodes cost.

    tokens  [n + 1], tokens that would come in the time that a tree takes more than none
    bounds  [n], log of what a node costs on average if to 0 … n − 1 nodes as many more are added as make that least:
            one that is accepted less often does not pay, nor do those after it, which are still worse
    """

    tokens: list[float]
    bounds: list[float]

    @classmethod
    def of(cls, tokens: list[float]) -> Prices:
        """With the bounds that follow."""
        each = (
            min((price - tokens[nodes]) / more for more, price in enumerate(tokens[nodes + 1 :], start=1))
            for nodes in range(len(tokens) - 1)
        )
        return cls(tokens, [log(price) if price > 0 else -inf for price in each])

    def best(self, scores: Sequence[float]) -> int:
        """How many nodes to verify: as many as bring most above their price.

        scores: log-probabilities that nodes are accepted, best first, no more than n.
        """
        brings = accumulate(map(exp, scores), initial=0.0)
        gains = [gain - price for gain, price in zip(brings, self.tokens)]
        return gains.index(max(gains))


class RunningCosts:
    """The latest steps, and what follows from them."""

    def __init__(self) -> None:
        self.steps = 0
        self._next_trial, self._next_renewal = EVERY, EARLY
        self.seconds_per_node = self.seconds_per_token = 0.0
        self._latest: deque[Step] = deque(maxlen=KEPT)
        self._curve: list[tuple[float, float]] = []  # rows, seconds; neither falling
        self._prices: dict[tuple[int, int], Prices] = {}

    def add(self, step: Step) -> bool:
        """One more step; now and then the figures are computed anew. Returns whether they were."""
        self._latest.append(step)
        self.steps += 1
        if self.steps < self._next_renewal:
            return False
        self._compute()
        return True

    def state_dict(self) -> dict[str, Any]:
        """The latest steps, as JSON can say them."""
        return {"steps": self.steps, "latest": [list(step) for step in self._latest]}

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> RunningCosts:
        """What `state_dict` said, and what follows from it."""
        made = cls()
        made.steps = int(state["steps"])
        made._next_trial = made.steps - made.steps % EVERY + EVERY
        for rows, verify, seconds, tokens in state["latest"]:
            made._latest.append(Step(int(rows), float(verify), float(seconds), int(tokens)))
        if made.steps >= EARLY:
            made._compute()
        return made

    def _compute(self) -> None:
        self._next_renewal = self.steps + max(RENEW, len(self._latest) // 2)
        tokens = sum(step.tokens for step in self._latest) / len(self._latest)
        self.seconds_per_token = typical([step.seconds for step in self._latest]) / tokens
        most = OUTLIER * median(step.verify for step in self._latest)
        times = [(step.rows, step.verify) for step in self._latest if step.verify <= most]
        self.seconds_per_node = _slope(times)
        self._curve = _rising(_sizes(_levelled(times, self.seconds_per_node)))
        self._prices.clear()

    def seconds(self, rows: int) -> float:
        """On the lines between the measured sizes, and beyond them as steep as on the whole."""
        left, right = self._curve[0], self._curve[-1]
        if rows <= left[0]:
            return left[1] - (left[0] - rows) * self.seconds_per_node
        if rows >= right[0]:
            return right[1] + (rows - right[0]) * self.seconds_per_node
        for right in self._curve:
            if right[0] >= rows:
                break
            left = right
        return left[1] + (right[1] - left[1]) * (rows - left[0]) / (right[0] - left[0])

    def prices(self, most: int, riders: int = 0) -> Prices | None:
        """Of 0 … `most` nodes, where `riders` more rows are verified anyway; None before they are known."""
        if not self.seconds_per_token:
            return None
        found = self._prices.get((most, riders))
        if found is None:
            seconds = [self.seconds(riders + nodes) for nodes in range(most + 1)]
            found = Prices.of([(x - seconds[0]) / self.seconds_per_token for x in seconds])
            self._prices[most, riders] = found
        return found

    @property
    def node_price(self) -> float:
        """Tokens that would come in the time that one more node takes, on average."""
        return self.seconds_per_node / self.seconds_per_token if self.seconds_per_token else 0.0

    def trial(self, most: int) -> int | None:
        """The nodes to draft in this step whatever they cost, to learn that; None where it is not a trial."""
        if self.steps < EARLY:
            return int(most * TRIES[self.steps % len(TRIES)])
        if self.steps < self._next_trial:
            return None
        self._next_trial = self.steps - self.steps % EVERY + EVERY
        size = int(most * TRIES[self.steps // EVERY % len(TRIES)])
        return None if sum(step.rows == size for step in self._latest) >= ENOUGH else size
