"""GPU memory and energy of each drafter's answers, where the device tells them. Drafters take turns in one process."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
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


def devices_of(target: Any) -> list[torch.device]:
    """The devices of a target: its own, or all over which `--device auto` has spread its layers."""
    return sorted({target.device, *target.layer_devices}, key=str)


class Meter:
    """Reads the counters of CUDA devices before and after the answers of each drafter; of other devices, nothing.

    All drafters' weights and caches are allocated at the same time. A drafter's peak is what its answers allocate, and
    what it keeps from its earlier answers (its caches): not its weights, nothing of the others, and not what the CUDA
    graphs of its steps reserve for their own tensors, which a line tells when they are captured.
    Energy is the whole GPU's while the drafter answers. Of several GPUs both are sums.
    """

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self._devices = [device for device in devices if device.type == "cuda"]
        counters = [energy_counter(device) for device in self._devices]
        self._counters = [counter for counter in counters if counter is not None]
        self._counted = bool(counters) and None not in counters
        self._kept: dict[str, int] = {}  # bytes that each drafter keeps

    def measure(self, name: str, answer: Callable[[], Found]) -> tuple[Found, Usage]:
        """What `answer()` gives, and what it took; `name` is the drafter's.

        Worked example: a first answer allocates 5 bytes and keeps 3 of them, the next one allocates 2: their peaks are
        5 and 5, as the 3 are there while the 2 are.
        """
        if not self._devices:
            return answer(), Usage()
        for device in self._devices:
            torch.cuda.synchronize(device)
            torch.cuda.reset_peak_memory_stats(device)
        before, energy = self._allocated(), self._joules()
        found = answer()
        for device in self._devices:
            torch.cuda.synchronize(device)
        joules, kept = self._joules() - energy, self._kept.get(name, 0)
        self._kept[name] = kept + self._allocated() - before
        peak = sum(map(torch.cuda.max_memory_allocated, self._devices))
        return found, Usage(kept + peak - before, joules if self._counted else None)

    def _allocated(self) -> int:
        return sum(map(torch.cuda.memory_allocated, self._devices))

    def _joules(self) -> float:
        return sum(counter() for counter in self._counters)


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
