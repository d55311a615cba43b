"""What a node costs to verify on this machine, and what a token costs at all, measured while decoding.

Medians, not means: a step in which a program was compiled or the machine was busy must not count for hundreds.
"""

from __future__ import annotations

from collections import deque
from statistics import median
from typing import NamedTuple

KEPT = 256
"""Steps that are remembered."""
TRIES = (1, 4, 2)
"""By what the budget is divided in trial steps: without different sizes nothing is learned of what size costs."""
EARLY, EVERY = 24, 16
"""So many steps are trial steps at first, and one in so many later."""


class Step(NamedTuple):
    """nodes of the tree, seconds its verification took, seconds of the whole step, new tokens."""

    nodes: int
    verify: float
    seconds: float
    tokens: int


class RunningCosts:
    """The latest steps, and what follows from them."""

    def __init__(self) -> None:
        self.steps = 0
        self.seconds_per_node = 0.0
        self.seconds_per_step = 0.0
        self.seconds_per_token = 0.0
        self._latest: deque[Step] = deque(maxlen=KEPT)

    def add(self, step: Step) -> None:
        """One more step; now and then the figures are computed anew."""
        self._latest.append(step)
        self.steps += 1
        if self.steps % EVERY == 0 and self.steps >= EARLY:
            self.seconds_per_node = self._slope()
            tokens = sum(step.tokens for step in self._latest) / len(self._latest)
            self.seconds_per_step = median(step.seconds for step in self._latest)
            self.seconds_per_token = self.seconds_per_step / tokens

    def _slope(self) -> float:
        """Of a line through the median times of each size; of one row alone, which runs through other kernels, none."""
        sizes: dict[int, list[float]] = {}
        for step in self._latest:
            if step.nodes:
                sizes.setdefault(step.nodes, []).append(step.verify)
        points = [(nodes, median(times), len(times)) for nodes, times in sizes.items()]
        weight = sum(count for _, _, count in points)
        if len(points) < 2:
            return 0.0
        nodes = sum(count * x for x, _, count in points) / weight
        times = sum(count * y for _, y, count in points) / weight
        spread = sum(count * (x - nodes) ** 2 for x, _, count in points)
        return max(sum(count * (x - nodes) * (y - times) for x, y, count in points) / spread, 0.0)

    def plan(self, most: int) -> tuple[int, float]:
        """The nodes to draft next and the acceptance each should have: `most` and `least`, but for trial steps."""
        if self.steps < EARLY:
            return max(1, most // TRIES[self.steps % 3]), 0.0
        if self.steps % EVERY == 0:
            return max(1, most // TRIES[self.steps // EVERY % 3]), 0.0
        return most, self.least

    @property
    def least(self) -> float:
        """The acceptance below which a node costs more time than the tokens it brings would otherwise take."""
        return self.seconds_per_node / self.seconds_per_token if self.seconds_per_token else 0.0
