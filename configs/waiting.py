"""How OpenMP's threads wait for each other: spinning where cores are free, asleep where other programs use them.

OpenMP reads the choice once, when torch loads it. Sleeping threads wake slowly on the idle cores of a virtual machine,
where a model of 135M parameters then decodes at two thirds of its speed; spinning ones beside a busy program halve it.
"""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

POLICY = "OMP_WAIT_POLICY"
FREE = 0.8
"""The share of the cores' time that must be idle: nobody computes on them, but a system is never quite still."""


def choose_wait_policy(arguments: Sequence[str]) -> None:
    """Let threads sleep while they wait, unless the user has chosen, there is an idle core for each of them, or torch
    is loaded already, which has read the choice.

    arguments: the command line, of which `--threads` counts, or that of its `--config` file
    """
    threads = _threads(arguments)
    if (
        "torch" not in sys.modules
        and threads > 1
        and POLICY not in os.environ
        and (_several_processes() or free_cores() < FREE * threads)
    ):
        os.environ[POLICY] = "PASSIVE"


def waiting_threads() -> str:
    """What threads do while they wait, for a report: `sleep` or `spin`."""
    return "sleep" if os.environ.get(POLICY, "").upper() == "PASSIVE" else "spin"


def threads_text(threads: int, waiting: str) -> str:
    """`1 thread`, or `2 threads that spin while they wait`."""
    return "1 thread" if threads == 1 else f"{threads} threads that {waiting} while they wait"


def threads_in_use() -> str:
    """Those of torch in this process, as `threads_text` says them."""
    import torch  # whose import must follow `choose_wait_policy`

    return threads_text(torch.get_num_threads(), waiting_threads())


def free_cores(seconds: float = 0.1) -> float:
    """Cores that this process may use and nobody used for so many seconds; without Linux' counters, all of them."""
    if not hasattr(os, "sched_getaffinity") or not Path("/proc/stat").exists():
        return os.cpu_count() or 1
    ours = {f"cpu{core}" for core in os.sched_getaffinity(0)}
    before = _idle_time(ours)
    time.sleep(seconds)
    return min((_idle_time(ours) - before) / (seconds * os.sysconf("SC_CLK_TCK")), _allowed_cores())


def _idle_time(cores: set[str]) -> int:
    """The time in which these cores have had nothing to do since the machine started, in clock ticks."""
    counts = (line.split() for line in Path("/proc/stat").read_text().splitlines())
    return sum(int(fields[4]) + int(fields[5]) for fields in counts if fields[0] in cores)


def _allowed_cores(limit: Path = Path("/sys/fs/cgroup/cpu.max")) -> float:
    """The processor time that a container may use, in cores; infinite without a limit."""
    quota, _, period = (limit.read_text() if limit.exists() else "max").strip().partition(" ")
    return float("inf") if quota == "max" else int(quota) / int(period)


def _several_processes() -> bool:
    """Whether a launcher started several processes, which share the cores."""
    return int(os.environ.get("WORLD_SIZE") or 1) > 1


def _threads(arguments: Sequence[str]) -> int:
    """The threads that this process will compute with: `--threads`, also of a `--config` file, or OpenMP's choice."""
    words = [part for word in arguments for part in word.split("=", 1)]
    after = dict(pairwise(words))
    asked = after.get("--threads") or _threads_in(Path(after.get("--config", "")))
    given = int(asked) if asked.isdecimal() else 0
    cores = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0]
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return given or (int(cores) if cores.isdecimal() else 0) or allowed


def _threads_in(file: Path) -> str:
    """`threads` of a YAML file, read without a parser; "" where there is none."""
    found = re.search(r"^threads:\s*(\d+)", file.read_text(errors="replace"), re.MULTILINE) if file.is_file() else None
    return found[1] if found else ""
