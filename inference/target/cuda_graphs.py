"""A decoding step captured once and replayed: on a GPU one launch instead of hundreds.

Captured work reads and writes the same memory at every replay. So the step's input lies in tensors of its own, into
which the step copies its results at its end, and everything else that changes from step to step (lengths, keys and
values, the drafter's memory) is written in place. A graph serves one size of tree, one reach of the cache and one
place of every buffer; another one is captured when any of these change.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor

from draft_heads.inference.step import VerifiedStep

Body = Callable[[VerifiedStep], tuple[VerifiedStep, Tensor]]
"""What the last step committed → what this one committed, and what the host is told."""


class CudaGraph:
    """Work captured on a CUDA device; all graphs share one pool of memory, as only one runs at a time."""

    _pool: Any = None
    _anchor: Any = None  # a graph that is never dropped: a pool whose last graph has died cannot be used again

    def __init__(self, work: Callable[[], None]) -> None:
        if CudaGraph._pool is None:
            CudaGraph._pool = torch.cuda.graph_pool_handle()
            CudaGraph._anchor = torch.cuda.CUDAGraph()
            with torch.cuda.graph(CudaGraph._anchor, pool=CudaGraph._pool):
                torch.zeros(1, device="cuda")
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, pool=CudaGraph._pool):
            work()

    def replay(self) -> None:
        """Do the work once more."""
        self._graph.replay()


class Rerun:
    """Stands in for a graph where there is no GPU: the captured work is done at every replay, not when captured."""

    def __init__(self, work: Callable[[], None]) -> None:
        self.replay = work


class CapturedSteps:
    """Runs step after step; the second of a kind is captured, the later ones are replayed."""

    def __init__(self, capture: Callable[[Callable[[], None]], Any] = CudaGraph) -> None:
        """`capture` makes an object with `replay()` from work that it need not run."""
        self._capture = capture
        self._graphs: dict[Hashable, tuple[Any, Tensor]] = {}
        self._seen: set[Hashable] = set()
        self._places: Hashable = None
        self._step: VerifiedStep | None = None  # every graph's input, and where it leaves its result

    def __call__(self, places: Hashable, key: Hashable, step: VerifiedStep, body: Body) -> tuple[VerifiedStep, Tensor]:
        """`body(step)`, by a graph where one of this `key` is at hand.

        places  where the memory that outlives steps lies; graphs made for other places are dropped
        key     everything else that a graph depends on
        """
        if places != self._places:
            self._places = places
            self._graphs.clear()
            self._seen.clear()
        if key not in self._seen:  # memory that a first run sets aside must not be part of a graph
            self._seen.add(key)
            return body(step)
        if self._step is None or self._step.tokens.shape != step.tokens.shape:
            self._step = step.map(torch.clone)
            self._graphs.clear()
        elif step is not self._step:
            copy(self._step, step)
        if key not in self._graphs:
            self._graphs[key] = self._captured(self._step, body)
        graph, told = self._graphs[key]
        graph.replay()
        return self._step, told

    def _captured(self, step: VerifiedStep, body: Body) -> tuple[Any, Tensor]:
        told = step.tokens.new_empty(1 + 2 * len(step.tokens))  # a count, tokens, sources

        def work() -> None:
            result, news = body(step)
            copy(step, result)
            told.copy_(news)

        return self._capture(work), told


def copy(into: VerifiedStep, step: VerifiedStep) -> None:
    """Every tensor of a step into another's memory."""
    for old, new in zip(into.tensors(), step.tensors()):
        old.copy_(new)
