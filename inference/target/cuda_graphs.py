"""Steps captured once and replayed: on a GPU one launch instead of hundreds.

A replay uses the addresses it was captured with: what it reads is copied into buffers, what it returns lies in others,
and whatever else changes is written in place. Another tree size, visible length or buffer address needs another graph.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeVar

import torch
from torch import Tensor

from draft_heads.inference.step import VerifiedStep
from draft_heads.inference.tree import DraftTree


@dataclass(frozen=True)
class Drafted:
    """The trees after B base tokens `base [B]`: the input of a step's verification."""

    base: Tensor
    tree: DraftTree

    def tensors(self) -> list[Tensor]:
        """All of them."""
        return [self.base, *self.tree.tensors()]

    def map(self, change: Callable[[Tensor], Tensor]) -> Drafted:
        """The same with `change` applied to every tensor."""
        return Drafted(change(self.base), self.tree.map(change))


Given = TypeVar("Given", VerifiedStep, Drafted)


def current(device: torch.device) -> AbstractContextManager[Any]:
    """Inside this context a CUDA device is the current one: streams, events and graphs are its own."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


@cache
def _pool_and_stream(device: int) -> tuple[Any, Any, Any]:
    """The memory of a device's graphs, the stream of its captures, and an empty graph: a pool is lost with its last."""
    pool, stream, kept = torch.cuda.graph_pool_handle(), torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(kept, pool=pool, stream=stream):
        torch.zeros(1, device="cuda")
    return pool, stream, kept


def cuda_graph(work: Callable[[], None]) -> torch.cuda.CUDAGraph:
    """Work captured on the current CUDA device; only one graph runs there at a time, so all share one memory pool."""
    pool, stream, _ = _pool_and_stream(torch.cuda.current_device())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool, stream=stream):
        work()
    return graph


class CapturedSteps:
    """Runs steps: of each `key` the first normally and captures it, later ones by replay."""

    def __init__(self, capture: Callable[[Callable[[], None]], Any] = cuda_graph) -> None:
        """capture: makes an object with `replay()` from work, which it need not run."""
        self._capture = capture
        self._graphs: dict[Hashable, tuple[Any, Any, tuple[VerifiedStep, Tensor]]] = {}
        self._buffers: dict[Hashable, Any] = {}  # by shapes: what graphs read and what they return
        self._graph_key: Hashable = None

    def __len__(self) -> int:
        return len(self._graphs)

    def __iter__(self) -> Iterator[Hashable]:
        return iter(self._graphs)

    def valid_for(self, graph_key: Hashable) -> bool:
        """Whether the graphs were captured for these settings and addresses of memory: the key of `begin_anew`."""
        return graph_key == self._graph_key

    def begin_anew(self, graph_key: Hashable) -> None:
        """Drop all graphs: their buffers moved or the settings changed."""
        self._graph_key = graph_key
        self._graphs.clear()
        self._buffers.clear()

    def __call__(
        self, key: Hashable, given: Given, body: Callable[[Given], tuple[VerifiedStep, Tensor]], chained: bool
    ) -> tuple[VerifiedStep, Tensor]:
        """`body(given)`: what a step committed, and the tokens to copy to the host; by replay where `key` is known.

        chained: the next step is given the result of this one, so that a graph writes what it returns over what it
        reads.
        """
        if key not in self._graphs:
            result, packed = body(given)  # before it is captured: memory that a first run allocates is no graph's
            reads: Any = self._buffer(given)
            returns: Any = reads if chained else self._buffer(result)
            self._graphs[key] = self._capture_copying(reads, returns, packed, body), reads, (returns, packed)
            return result.map(torch.clone), packed.clone()
        graph, reads, returned = self._graphs[key]
        if given is not reads:
            copy(reads, given)
        graph.replay()
        return returned

    def _buffer(self, like: Any) -> Any:
        """Memory for `like`, shared by graphs of different lengths."""
        shapes = tuple((type(like), x.shape, x.dtype) for x in like.tensors())
        return self._buffers.setdefault(shapes, like.map(torch.clone))

    def _capture_copying(self, reads: Any, returns: VerifiedStep, packed: Tensor, body: Callable[[Any], Any]) -> Any:
        def work() -> None:
            result, fresh = body(reads)
            copy(returns, result)
            packed.copy_(fresh)

        return self._capture(work)


def copy(into: Given, given: Given) -> None:
    """Write every tensor of `given` into the memory of `into`."""
    for old, new in zip(into.tensors(), given.tensors()):
        old.copy_(new)
