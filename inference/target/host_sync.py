"""Who may copy values to the host within a step.

On a CPU a copy to the host is free and can save work. On a GPU it stalls the queue, and a CUDA graph cannot make it:
there, sizes follow from settings alone. Code that can do both calls `host_sync_allowed`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch

_FORBIDDEN = ContextVar("host_sync_forbidden", default=False)


def host_sync_allowed(device: torch.device) -> bool:
    """Whether a step may read values on this device from the host."""
    return device.type == "cpu" and not _FORBIDDEN.get()


@contextmanager
def no_host_sync() -> Iterator[None]:
    """Inside this context a CPU is treated like a GPU: shapes follow from settings alone."""
    token = _FORBIDDEN.set(True)
    try:
        yield
    finally:
        _FORBIDDEN.reset(token)
