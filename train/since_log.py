"""What the training log says beside the loss: its parts, speed, fill and memory since the last line.

Sums stay on the device until a line is due, so that no step waits for the host.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from resource import RUSAGE_SELF, getrusage

import torch
from accelerate.utils import gather_object
from torch import Tensor

from draft_heads.heads.base import HeadLoss
from draft_heads.train.options import peak_flops


class SinceLog:
    """The batches since the last line.

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

    def start(self) -> None:
        """Training starts now, unless it has."""
        if not self.batches:
            self._began = time.monotonic()

    def leave_out(self, seconds: float) -> None:
        """These seconds went into something else."""
        self._began += seconds

    def add(self, loss: HeadLoss, mean: Tensor, input_ids: Tensor, segment_ids: Tensor) -> None:
        """A batch, and its loss as it was trained on."""
        device = segment_ids.device
        for name, value in loss.parts.items():
            self._parts[name] = self._parts.get(name, 0) + value
        self._windows = self._windows.to(device) + loss.windows
        self._tokens = self._tokens.to(device) + (segment_ids > 0).sum()
        self._slots += segment_ids.numel()
        self.batches.append((mean.detach(), input_ids, segment_ids))

    def told(self, operations_a_token: float, device: torch.device) -> dict[str, float]:
        """The line, behind which a new one begins; called on every process, and the same on all but for memory.

        Parts of the loss; tokens a second; `fill`, the share of batches that is not padding; on a GPU whose peak is
        known `mfu`, `operations_a_token` over it; this process's peak memory.
        """
        seconds = time.monotonic() - self._began
        every: list[dict[str, float]] = gather_object([self._sums()])
        sums = {name: sum(process[name] for process in every) for name in every[0]}
        windows, tokens, slots = (sums.pop(name) for name in ("windows", "tokens", "slots"))
        found = parts_of_loss(sums, windows) | {"tokens_per_second": round(tokens / seconds)}
        found |= {"fill": round(tokens / max(slots, 1), 3)}
        if (peak := peak_flops(device)) is not None:
            found["mfu"] = round(tokens / seconds / len(every) * operations_a_token / peak, 3)
        if device.type == "cuda":
            found["memory_gib"] = round(torch.cuda.max_memory_allocated() / 2**30, 2)
        else:
            kib = getrusage(RUSAGE_SELF).ru_maxrss / (1024 if sys.platform == "darwin" else 1)
            found["memory_mib"] = round(kib / 1024)
        self.begin()
        return found

    def _sums(self) -> dict[str, float]:
        """What this process has added up."""
        names = list(self._parts)
        values = torch.stack([self._parts[name].double() for name in names]).tolist() if names else []
        own = {"windows": float(self._windows), "tokens": int(self._tokens), "slots": self._slots}
        return dict(zip(names, values)) | own


def parts_of_loss(sums: dict[str, float], windows: float) -> dict[str, float]:
    """Unweighted means per window, and counts that are not 0."""
    found: dict[str, float] = {}
    for name, value in sums.items():
        if not name.endswith("_count"):
            found[f"loss_{name}"] = round(value / max(windows, 1), 5)
        elif value:
            found[name] = int(value)
    return found
