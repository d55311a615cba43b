"""Whether code may read a value back to decide what to do next.

On a CPU asking is free, and an answer can save work (a tree level without survivors need not be expanded). On a GPU it
stalls the queue, and inside a compiled or captured program there is nobody to ask: there, sizes must follow from
settings alone. Code that can do both asks `may_ask`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch

_SILENT = ContextVar("silent", default=False)


def may_ask(device: torch.device) -> bool:
    """Whether the host may look at values on this device in the middle of a step."""
    return device.type == "cpu" and not torch.compiler.is_compiling() and not _SILENT.get()


@contextmanager
def asking_nothing() -> Iterator[None]:
    """Within it a CPU is treated as a GPU is: shapes follow from settings alone."""
    token = _SILENT.set(True)
    try:
        yield
    finally:
        _SILENT.reset(token)
