"""What a node costs to verify on this machine, measured while decoding."""

from __future__ import annotations

KEPT = 0.995
"""What a step's observation weighs one step later: about the last two hundred count."""
TRIES = (1, 4, 2)
"""By what the budget is divided in trial steps: without different sizes nothing is learned of what size costs."""
EARLY, EVERY = 24, 16
"""So many steps are trial steps at first, and one in so many later."""


class RunningCosts:
    """A line through (nodes, seconds) of the latest steps, and how fast tokens came."""

    def __init__(self) -> None:
        self._sums = [0.0] * 5  # of 1, n, t, n², n·t, the older ones weighing less
        self._steps = 0
        self._tokens = 0.0
        self._seconds = 0.0

    def verified(self, nodes: int, seconds: float) -> None:
        """A tree of `nodes` took so long; a step that was held up counts as one of twice the usual length.

        Steps without drafts are left out: a forward of one row runs through other kernels.
        """
        if not nodes:
            return
        count, _, total, _, _ = self._sums
        if count > 1:
            seconds = min(seconds, 2 * total / count)
        new = (1.0, nodes, seconds, nodes * nodes, nodes * seconds)
        self._sums = [KEPT * old + fresh for old, fresh in zip(self._sums, new)]

    def stepped(self, tokens: int, seconds: float) -> None:
        """A whole step brought so many tokens."""
        self._steps += 1
        self._tokens = KEPT * self._tokens + tokens
        self._seconds = KEPT * self._seconds + seconds

    def plan(self, most: int) -> tuple[int, float]:
        """The nodes to draft next and the acceptance each should have: `most` and `least`, but for trial steps."""
        if self._steps < EARLY:
            return max(1, most // TRIES[self._steps % 3]), 0.0
        if self._steps % EVERY == 0:
            return max(1, most // TRIES[self._steps // EVERY % 3]), 0.0
        return most, self.least

    @property
    def seconds_per_node(self) -> float:
        """The slope; 0 while it is unknown."""
        count, n, t, nn, nt = self._sums
        spread = nn - n * n / count if count else 0.0
        return max((nt - n * t / count) / spread, 0.0) if self._steps >= EARLY and spread > 1e-9 else 0.0

    @property
    def seconds_per_token(self) -> float:
        """Of whole steps; 0 before the first."""
        return self._seconds / self._tokens if self._tokens else 0.0

    @property
    def least(self) -> float:
        """The acceptance below which a node costs more time than the tokens it brings would otherwise take."""
        return self.seconds_per_node / self.seconds_per_token if self._tokens else 0.0
