"""What a part of a hybrid cost and what it brought, and whether that pays."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf, sqrt

MEMORY = 1024
"""Target steps after which the older half of their weight is forgotten."""
LOST, CLEAR = 64, 3.0
"""A part is switched off that has cost so many steps, and loses by so many standard errors: the text of one answer is
no sample of all, and what hardly matters is no reason."""


class Account:
    """The sums of one part's steps.

    Brought are the accepted tokens that the tree would not have had without it; its cost is by how much steps would
    have been shorter without it, as a share of them at that time: machines slow down and recover.

    cost  in steps
    """

    def __init__(self, sums: Sequence[float] = (0.0, 0.0, 0.0, 0.0)) -> None:
        """sums: as `state` said."""
        self.steps, self._brought, self._squares, self.cost = sums

    def state(self) -> list[float]:
        """What it is made from."""
        return [self.steps, self._brought, self._squares, self.cost]

    def add(self, brought: Sequence[int], cost: float) -> None:
        """So many steps more, and the cost of all of them."""
        self.steps += len(brought)
        self._brought += sum(brought)
        self._squares += sum(tokens * tokens for tokens in brought)
        self.cost += cost
        if self.steps > MEMORY:
            self.steps, self._brought, self._squares, self.cost = (one / 2 for one in self.state())

    def begin_again(self) -> None:
        """What was is no guide to what comes: others draft beside it now, or it was switched off for long."""
        self.steps = self._brought = self._squares = self.cost = 0.0

    def balance(self) -> tuple[float, float]:
        """Steps that it saved in each, less what it cost of one; and the standard error.

        A token that it brought is taken to save a step in which it would not draft: where nobody else had it, others
        would have found little more there.
        """
        if not self.steps:
            return 0.0, inf
        cost, brought = self.cost / self.steps, self._brought / self.steps
        spread = sqrt(max(self._squares / self.steps - brought * brought, 0.0) / self.steps)
        return brought * (1 - cost) - cost, spread * (1 - cost)

    def loss(self) -> float:
        """Steps by which it clearly loses; negative: by which it pays, whatever the doubt; 0: nobody knows."""
        balance, error = self.balance()
        if balance > 0:
            return -balance
        return max(0.0, -balance - CLEAR * error) if -balance * self.steps >= LOST else 0.0
