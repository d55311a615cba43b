"""GPU memory and energy of each drafter's answers, where the device tells them. Drafters take turns in one process."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

logger = logging.getLogger(__name__)
Found = TypeVar("Found")


@dataclass(frozen=True)
class Usage:
    """What answers took: the peak of allocated GPU memory in bytes, and energy in joules; None where nothing tells."""

    peak_memory: int | None = None
    joules: float | None = None


class Meter:
    """Reads the counters of a CUDA device before and after the answers of each drafter; of other devices, nothing.

    All drafters' weights and caches are allocated at the same time. A drafter's peak is what its answers allocate, and
    what it keeps from its earlier answers (its caches, CUDA graphs): not its weights, and nothing of the others.
    Energy is the whole GPU's while the drafter answers.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device if device.type == "cuda" else None
        self._joules = energy_counter(device) if device.type == "cuda" else None
        self._kept: dict[str, int] = {}  # bytes that each drafter keeps

    def measure(self, name: str, answer: Callable[[], Found]) -> tuple[Found, Usage]:
        """What `answer()` gives, and what it took; `name` is the drafter's.

        Worked example: a first answer allocates 5 bytes and keeps 3 of them, the next one allocates 2: their peaks are
        5 and 5, as the 3 are there while the 2 are.
        """
        if self._device is None:
            return answer(), Usage()
        cuda, device = torch.cuda, self._device
        cuda.synchronize(device)
        cuda.reset_peak_memory_stats(device)
        before, energy = cuda.memory_allocated(device), self._joules and self._joules()
        found = answer()
        cuda.synchronize(device)
        joules = None if self._joules is None or energy is None else self._joules() - energy
        kept = self._kept.get(name, 0)
        self._kept[name] = kept + cuda.memory_allocated(device) - before
        return found, Usage(kept + cuda.max_memory_allocated(device) - before, joules)


def energy_counter(device: torch.device) -> Callable[[], float] | None:
    """A function that gives the joules that a GPU has taken since its driver was loaded; None, and a line in the log,
    where pynvml is not installed or the GPU does not count them."""
    try:
        import pynvml
    except ImportError:
        logger.info("energy is not measured: it needs the package nvidia-ml-py")
        return None
    nvml: Any = pynvml
    try:
        nvml.nvmlInit()
        gpu = nvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(device).uuid}")
        nvml.nvmlDeviceGetTotalEnergyConsumption(gpu)
    except nvml.NVMLError as error:
        logger.info(f"energy is not measured: the GPU does not tell it ({error})")
        return None
    return lambda: float(nvml.nvmlDeviceGetTotalEnergyConsumption(gpu)) / 1000  # millijoules
