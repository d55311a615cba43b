"""Compiled programs: a step's many small operations as one, made once and good for every length of text."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

Function = TypeVar("Function", bound=Callable[..., Any])


def program(function: Function, device: torch.device) -> Function:
    """`function` compiled."""
    made: Any = torch.compile(function, options={"cpp_wrapper": device.type == "cpu"})
    return made
