"""The processes that torchrun, accelerate or DeepSpeed's launcher started for one job, or the only one."""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from threading import Timer
from typing import Any
from uuid import uuid4

import torch
import torch.distributed as dist

from draft_heads.data.common.console import brief

logger = logging.getLogger(__name__)

TOKEN = ".shared-"  # prefix of the file that shows whether all processes see the same folder
_TOLD_AFTER = 60.0  # seconds; `WORLD_SIZE` may also be what another program has left in the environment
_LONGEST_WAIT = timedelta(days=7)  # for a process whose share of the work takes longer

_PEER_IS_GONE = re.compile(r"closed by peer|likely closed|Connection (reset|refused)|Broken pipe|remote process exited")


@dataclass(frozen=True)
class Processes:
    """Which process this is, of how many."""

    rank: int = 0
    count: int = 1

    @classmethod
    def from_environment(cls) -> Processes:
        """As the launcher's environment says; opens the process group, through which they wait for each other."""
        count = int(os.environ.get("WORLD_SIZE", "1"))
        if count > 1 and not dist.is_initialized():
            late = Timer(_TOLD_AFTER, logger.warning, ("waiting for all of WORLD_SIZE=%d processes to start", count))
            late.daemon = True
            late.start()
            try:
                dist.init_process_group("gloo", timeout=_LONGEST_WAIT)
            finally:
                late.cancel()
        return cls(int(os.environ.get("RANK", "0")), count) if count > 1 else cls()

    @classmethod
    def current(cls) -> Processes:
        """As the open process group says; `ALONE` without one."""
        return cls(dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else cls()

    def first_of(self, text: str | None) -> str | None:
        """The text of the first process whose text is not None, on every process; all must call it."""
        found = [text] * self.count
        if self.count > 1:
            with _others_may_end():
                dist.all_gather_object(found, text)
        return next((one for one in found if one is not None), None)

    def wait(self) -> None:
        """Return when all processes have called it."""
        if self.count > 1:
            with _others_may_end():
                dist.barrier()

    @contextmanager
    def first_alone(self) -> Iterator[bool]:
        """The first process (True) runs the block before the others; its ValueError is raised on all of them."""
        failure: list[str | None] = [None]
        if self.rank:
            with _others_may_end():
                dist.broadcast_object_list(failure, src=0)
            if failure[0] is not None:
                raise ValueError(failure[0])
            yield False
            return
        try:
            yield True
        except (ValueError, OSError) as error:
            failure = [str(error)]
            raise
        finally:
            if self.count > 1:
                with _others_may_end() if failure[0] is None else suppress(RuntimeError):  # else that is the reason
                    dist.broadcast_object_list(failure, src=0)

    def check_same(self, given: Mapping[str, Any]) -> None:
        """ValueError on every process unless all were given the same values, as JSON, by name.

        The nodes of a launcher have commands, configuration files and disks of their own.
        """
        every = [json.dumps(given, sort_keys=True)] * self.count
        if self.count > 1:
            with _others_may_end():
                dist.all_gather_object(every, every[0])
        first, *others = map(json.loads, every)
        for number, other in enumerate(others, start=1):
            if changed := [name for name in {**first, **other} if first.get(name) != other.get(name)]:
                name = changed[0]
                raise ValueError(
                    f"all processes of a run must be given the same {', '.join(changed)}; of {name} the first has "
                    f"{brief(first.get(name))} and number {number} {brief(other.get(name))}: start them with one "
                    "command, one configuration and one copy of the data"
                )

    def check_shared(self, folder: Path, option: str) -> None:
        """ValueError on every process unless all see a file that the first one has just written to the folder."""
        if self.count == 1:
            return
        name = [uuid4().hex]
        with _others_may_end():
            dist.broadcast_object_list(name, src=0)
        written = folder / f"{TOKEN}{name[0]}"
        if self.rank == 0:
            written.touch()
        try:
            self.wait()
            seen: list[bool | None] = [None] * self.count
            with _others_may_end():
                dist.all_gather_object(seen, written.is_file())
        finally:  # also where another process has died
            if self.rank == 0:
                written.unlink()
        if not all(seen):
            raise ValueError(
                f"{option} must be a folder that all nodes share; what the first process writes to {folder} is not on "
                "the disk of every node; name a shared folder"
            )

    def on_this_node(self) -> Processes:
        """Which of the processes of this node it is, and of how many; alone where the launcher does not say it."""
        count = int(os.environ.get("LOCAL_WORLD_SIZE", os.environ.get("LOCAL_SIZE", "1")))  # DeepSpeed's is the second
        return Processes(int(os.environ.get("LOCAL_RANK", "0")), count) if self.count > 1 and count > 1 else ALONE


@contextmanager
def _others_may_end() -> Iterator[None]:
    """Where processes wait for each other: ValueError for one that has ended, which has said why. Other errors pass."""
    try:
        yield
    except RuntimeError as error:
        told = next((line for line in str(error).splitlines() if _PEER_IS_GONE.search(line)), None)
        if told is None or "NCCL error" in str(error):  # which says several things of its own start, as to an address
            raise
        raise ValueError(
            f"another process of this run has ended ({told[:200]}); its own lines say why, and what to do then"
        ) from None


ALONE = Processes()


def trains_on_gpu() -> bool:
    """Whether torch sees a GPU that heads are trained on: not a Mac's, which has no float64 to add losses up in."""
    found = torch.accelerator.current_accelerator(check_available=True)
    return found is not None and found.type != "mps"


def own_device(device: str | None) -> str | None:
    """The device of this process: where several share a node and none is named, the GPU of its local rank. A GPU that
    is named by its number becomes torch's current one, which kernels, graphs and counters take that name none.

    Where every process sees GPUs of its own, as under Slurm, the local rank may exceed their number. ValueError for
    `auto` in several processes, and for more processes than GPUs on a node.
    """
    count = int(os.environ.get("WORLD_SIZE", "1"))
    if device == "auto" and count > 1:
        raise ValueError(
            f"--device auto spreads the target over the GPUs of one process; this run has {count}; start one, or leave "
            "it out, and each process takes a GPU"
        )
    if (device == "auto" and torch.backends.mps.is_available()) or str(device).startswith("mps"):
        raise ValueError(f"--device {device}: a Mac's GPU has no float64 and is not used; leave it out for the CPU")
    if device not in (None, "auto"):
        try:
            named = torch.device(device)
            unseen = named.type == "cuda" and not (named.index or 0) < torch.cuda.device_count()
            if named.type != "cuda":
                torch.empty(0, device=named)
        except (RuntimeError, AssertionError, NotImplementedError, ImportError):  # this torch was built without it
            unseen = True
        if unseen:
            raise ValueError(f"--device must be one that torch sees; got {device}, which it does not; leave it out")
        if named.type == "cuda" and named.index is not None:
            torch.cuda.set_device(named.index)
    local = os.environ.get("LOCAL_RANK")
    if local is None or device not in (None, "cuda") or not torch.cuda.is_available():
        return device
    gpus, here = torch.cuda.device_count(), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if here > gpus:
        raise ValueError(f"each process of a node needs a GPU; got {here} processes and {gpus}; start {gpus}")
    own = int(local) % gpus
    torch.cuda.set_device(own)
    return f"cuda:{own}"
