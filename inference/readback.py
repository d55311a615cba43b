"""Copies the tokens of a step to the host while the device works on the next step."""

from __future__ import annotations

import torch
from torch import Tensor

from draft_heads.inference.target.cuda_graphs import current


class PendingReadback:
    """An asynchronous copy of a step's tokens and their sources to the host, through pinned memory on a GPU.

    packed: `[count, token, …, source, …, choice, …]`, of whose `rows` tokens and sources the first `count` are read
    """

    def __init__(self, packed: Tensor, rows: int) -> None:
        self._rows = rows
        self._copied: torch.cuda.Event | None = None
        self._host = torch.empty(packed.shape, dtype=packed.dtype, pin_memory=packed.is_cuda)
        self._host.copy_(packed, non_blocking=True)
        if packed.is_cuda:
            with current(packed.device):
                self._copied = torch.cuda.Event()
                self._copied.record()

    def read(self) -> tuple[list[int], list[int], list[int]]:
        """Wait for the copy; returns the tokens, their sources, and the target's choices where they were packed."""
        if self._copied is not None:
            self._copied.synchronize()
        count, *values = self._host.tolist()
        return values[:count], values[self._rows : self._rows + count], values[2 * self._rows :]
