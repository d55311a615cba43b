"""Compiled programs: a step's many small operations as one, made once and good for every length of text."""

from __future__ import annotations

import types
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

Method = TypeVar("Method", bound=Callable[..., Any])


def program(method: Method, device: torch.device) -> Method:
    """A bound method compiled as a whole, in one piece.

    It gets code of its own: programs of one function share a limited store, in which they would crowd each other out.
    """
    function: Any = method.__func__  # type: ignore[attr-defined]
    own = types.FunctionType(
        function.__code__.replace(),
        function.__globals__,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    bound = types.MethodType(own, method.__self__)  # type: ignore[attr-defined]
    on_cpu = device.type == "cpu"
    options: dict[str, Any] = {"cpp_wrapper": on_cpu, "guard_filter_fn": kept_guards}
    if on_cpu:
        options["max_fusion_size"] = 8  # a search level by level is one long chain: with 64, minutes go into fusing it
    made: Any = torch.compile(bound, fullgraph=True, options=options)
    return made


def kept_guards(guards: Sequence[Any]) -> list[bool]:
    """Which conditions are checked at every call: those on arguments. The weights behind `self` do not change."""
    return [not guard.is_global and "self" not in guard.name for guard in guards]
