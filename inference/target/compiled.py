"""Compiled methods of a decoding step, one program for every length of text, and who may copy values to the host.

On a CPU a copy to the host is free and can save work. On a GPU it stalls the queue, and a compiled program or a CUDA
graph cannot make it: there, sizes follow from settings alone. Code that can do both calls `host_sync_allowed`.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

import torch

Method = TypeVar("Method", bound=Callable[..., Any])


def program(method: Method, device: torch.device) -> Method:
    """A bound method compiled without graph breaks."""
    function: Any = method.__func__  # type: ignore[attr-defined]
    # dynamo keeps a limited number of programs per code object, and each engine needs its own
    code, defaults, closure = function.__code__.replace(), function.__defaults__, function.__closure__
    copied = types.FunctionType(code, function.__globals__, function.__name__, defaults, closure)
    bound = types.MethodType(copied, method.__self__)  # type: ignore[attr-defined]
    on_cpu = device.type == "cpu"
    options: dict[str, Any] = {"cpp_wrapper": on_cpu, "guard_filter_fn": argument_guards}
    if on_cpu:
        options["max_fusion_size"] = 8  # a search level by level is one long chain: the default 64 takes minutes
    compiled: Any = torch.compile(bound, fullgraph=True, options=options)
    return compiled


def argument_guards(guards: Sequence[Any]) -> list[bool]:
    """Which of dynamo's guards are checked at every call: those on arguments. Weights and settings never change."""
    return [not guard.is_global and "self" not in guard.name for guard in guards]


_FORBIDDEN = ContextVar("host_sync_forbidden", default=False)


def host_sync_allowed(device: torch.device) -> bool:
    """Whether a step may read values on this device from the host."""
    return device.type == "cpu" and not torch.compiler.is_compiling() and not _FORBIDDEN.get()


@contextmanager
def no_host_sync() -> Iterator[None]:
    """Inside this context a CPU is treated like a GPU: shapes follow from settings alone."""
    token = _FORBIDDEN.set(True)
    try:
        yield
    finally:
        _FORBIDDEN.reset(token)
