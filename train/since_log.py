"""What the training log says beside the loss: its parts, speed, fill and memory since the last line.

Sums stay on the device until a line is due, so that no step waits for the host.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from resource import RUSAGE_SELF, getrusage

import torch
from torch import Tensor

from draft_heads.heads.base import HeadLoss
from draft_heads.train.options import peak_flops


class SinceLog:
    """The batches of this process since the last line.

    batches  the mean loss, tokens and segments of the last ones
    """

    def __init__(self) -> None:
        self.batches: deque[tuple[Tensor, Tensor, Tensor]] = deque(maxlen=1024)
        self.begin()

    def begin(self) -> None:
        """A new line."""
        self.batches.clear()
        self._parts: dict[str, Tensor] = {}
        self._windows, self._tokens, self._slots = torch.zeros(()), torch.zeros((), dtype=torch.long), 0
        self._began = time.monotonic()

    def add(self, loss: HeadLoss, mean: Tensor, input_ids: Tensor, segment_ids: Tensor) -> None:
        """A batch, and its loss as it was trained on."""
        device = segment_ids.device
        for name, value in loss.parts.items():
            self._parts[name] = self._parts.get(name, 0) + value
        self._windows = self._windows.to(device) + loss.windows
        self._tokens = self._tokens.to(device) + (segment_ids > 0).sum()
        self._slots += segment_ids.numel()
        self.batches.append((mean.detach(), input_ids, segment_ids))

    def told(self, processes: int, operations_a_token: float, device: torch.device) -> dict[str, float]:
        """The line, behind which a new one begins.

        Parts of the loss; tokens a second of all processes; `fill`, the share of batches that is no padding; on a GPU
        whose peak is known `mfu`, `operations_a_token` over it; peak memory.
        """
        seconds, tokens = time.monotonic() - self._began, int(self._tokens)
        per_second = tokens / seconds  # of this process
        found = self._parts_of_loss() | {"tokens_per_second": round(per_second * processes)}
        found |= {"fill": round(tokens / max(self._slots, 1), 3)}
        if (peak := peak_flops(device)) is not None:
            found["mfu"] = round(per_second * operations_a_token / peak, 3)
        if device.type == "cuda":
            found["memory_gib"] = round(torch.cuda.max_memory_allocated() / 2**30, 2)
        else:
            kib = getrusage(RUSAGE_SELF).ru_maxrss / (1024 if sys.platform == "darwin" else 1)
            found["memory_mib"] = round(kib / 1024)
        self.begin()
        return found

    def _parts_of_loss(self) -> dict[str, float]:
        """Unweighted means per window, and counts that are not 0."""
        names, windows = list(self._parts), float(self._windows)
        values = torch.stack([self._parts[name].double() for name in names]).tolist() if names else []
        found: dict[str, float] = {}
        for name, value in zip(names, values):
            if not name.endswith("_count"):
                found[f"loss_{name}"] = round(value / max(windows, 1), 5)
            elif value:
                found[name] = int(value)
        return found
