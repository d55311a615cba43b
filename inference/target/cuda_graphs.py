"""A decoding step captured once and replayed: on a GPU one launch instead of hundreds.

A replay uses the addresses it was captured with: the step copies its result into its input's tensors, and whatever else
changes is written in place. Another tree size, visible length or buffer address needs another graph.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor

from draft_heads.inference.step import VerifiedStep

Body = Callable[[VerifiedStep], tuple[VerifiedStep, Tensor]]
"""What the last step committed → what this one committed, and the tokens to copy to the host."""


class CudaGraph:
    """Work captured on a CUDA device; only one graph runs at a time, so all share one memory pool."""

    _pool: Any = None
    _anchor: Any = None  # an empty graph that is kept: a pool is lost with its last graph

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
        """Run the work once more."""
        self._graph.replay()


class Rerun:
    """Stands in for a graph where there is no GPU: runs the work at every replay, and not when capturing."""

    def __init__(self, work: Callable[[], None]) -> None:
        self.replay = work


class CapturedSteps:
    """Runs steps: of each `key` the first normally, the second while capturing it, later ones by replay."""

    def __init__(self, capture: Callable[[Callable[[], None]], Any] = CudaGraph) -> None:
        """capture: makes an object with `replay()` from work, which it need not run."""
        self._capture = capture
        self._graphs: dict[Hashable, tuple[Any, Tensor]] = {}
        self._seen: set[Hashable] = set()
        self._addresses: Hashable = None
        self._step: VerifiedStep | None = None  # every graph's input and output

    def __call__(
        self, addresses: Hashable, key: Hashable, step: VerifiedStep, body: Body
    ) -> tuple[VerifiedStep, Tensor]:
        """`body(step)`, by replay where a graph with this `key` and these buffer `addresses` exists."""
        if addresses != self._addresses:
            self._addresses = addresses
            self._graphs.clear()
            self._seen.clear()
        if key not in self._seen:  # a first run allocates memory, which must not be part of a graph
            self._seen.add(key)
            return body(step)
        if self._step is None or self._step.tokens.shape != step.tokens.shape:
            self._step = step.map(torch.clone)
            self._graphs.clear()
        elif step is not self._step:
            copy(self._step, step)
        if key not in self._graphs:
            self._graphs[key] = self._captured(self._step, body)
        graph, packed = self._graphs[key]
        graph.replay()
        return self._step, packed

    def _captured(self, step: VerifiedStep, body: Body) -> tuple[Any, Tensor]:
        packed = step.tokens.new_empty(1 + 2 * len(step.tokens))  # a count, tokens, sources

        def work() -> None:
            result, fresh = body(step)
            copy(step, result)
            packed.copy_(fresh)

        return self._capture(work), packed


def copy(into: VerifiedStep, step: VerifiedStep) -> None:
    """Write every tensor of `step` into the memory of `into`."""
    for old, new in zip(into.tensors(), step.tensors()):
        old.copy_(new)
