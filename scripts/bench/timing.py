"""Interleaved timing: arms take turns, and ratios compare runs that are neighbours in time."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch


def interleaved_seconds(
    arms: dict[str, Callable[[], Any]], repeats: int, device: torch.device
) -> dict[str, list[float]]:
    """Wall seconds of every run of every arm, the device's work included; a first round is a warm-up and discarded."""
    seconds: dict[str, list[float]] = {name: [] for name in arms}
    for repeat in range(repeats + 1):
        for name, run in arms.items():
            synchronize(device)
            start = time.perf_counter()
            run()
            synchronize(device)
            if repeat:
                seconds[name].append(time.perf_counter() - start)
    return seconds


def synchronize(device: torch.device) -> None:
    """Wait for the device's work."""
    if device.type == "cuda":
        torch.cuda.synchronize()


def ratio(numerator: list[float], denominator: list[float]) -> dict[str, float]:
    """Median and quartiles of the ratios of neighbouring runs."""
    ratios = [a / b for a, b in zip(numerator, denominator)]
    low, middle, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
    return {"median": round(middle, 3), "low": round(low, 3), "high": round(high, 3)}
