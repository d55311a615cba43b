"""Whether code may copy a value to the host to decide what to do next.

On a CPU that is free, and an answer can save work (a tree level without survivors need not be expanded). On a GPU it
stalls the queue, and a compiled program or a CUDA graph cannot do it at all: there, sizes must follow from settings
alone. Code that can do both asks `host_sync_allowed`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch

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
