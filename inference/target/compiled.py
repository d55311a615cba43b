"""torch.compile for the methods of a decoding step; one compiled program serves every length of text."""

from __future__ import annotations

import types
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

Method = TypeVar("Method", bound=Callable[..., Any])


def program(method: Method, device: torch.device) -> Method:
    """A bound method compiled without graph breaks.

    The method's code object is copied: dynamo keeps a limited number of programs per code object, and each engine needs
    its own.
    """
    function: Any = method.__func__  # type: ignore[attr-defined]
    copied = types.FunctionType(
        function.__code__.replace(),
        function.__globals__,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
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
