"""The tree that a part of a hybrid drafts by itself, less the nodes that do not pay on this machine."""

from __future__ import annotations

from collections.abc import Sequence
from math import exp, log

import torch

from inference.drafters.running_costs import Prices
from inference.tree import DraftTree

FADE, DOUBT = 0.995, 8.0
"""Of what was promised and what came of it: what a further step leaves of a step, and accepted nodes that speak for
the part's own word."""


class OwnTree:
    """Chooses nodes by the part's own probabilities, corrected by how much came of late of what they promised."""

    def __init__(self, state: Sequence[float] = (0.0, 0.0)) -> None:
        self._came, self._promised = state
        self._promise: float | None = None  # of the present tree, uncorrected

    def state(self) -> list[float]:
        """What it is made from."""
        return [self._came, self._promised]

    def cut(self, tree: DraftTree, prices: Prices) -> DraftTree:
        """Of the tree's nodes, of which there are as many as `prices` is for, those that bring most above their price.

        A node is never likelier than its parent, so the likeliest ones are a tree.
        """
        scores = tree.log_probs.tolist()
        order = sorted(range(len(scores)), key=scores.__getitem__, reverse=True)  # of equals the first one stays first
        trust = log((self._came + DOUBT) / (self._promised + DOUBT))
        size, _ = prices.best([min(scores[node] + trust, 0.0) for node in order])
        kept = sorted(order[:size])
        self._promise = sum(exp(scores[node]) for node in kept)
        if size == len(scores):
            return tree
        if kept == order[:size] == list(range(size)):
            return tree.map(lambda values: values[:size])
        return tree.take(torch.tensor(kept, device=tree.tokens.device))

    def learn(self, accepted: int) -> None:
        """So many nodes of the tree that was cut last were accepted; nothing where none was cut since."""
        if self._promise is not None:
            self._came = FADE * self._came + accepted
            self._promised = FADE * self._promised + self._promise
        self._promise = None
