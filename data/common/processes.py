"""The processes that torchrun, accelerate or DeepSpeed's launcher started for one job, or the only one."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from uuid import uuid4

import torch
import torch.distributed as dist

TOKEN = ".shared-"  # how a file's name begins that tells whether processes see the same folder
_LONGEST_WAIT = timedelta(days=7)  # for a process whose share of the work takes longer


@dataclass(frozen=True)
class Processes:
    """Which process this is, of how many."""

    rank: int = 0
    count: int = 1

    @classmethod
    def started(cls) -> Processes:
        """As the launcher's environment says; processes can then wait for each other."""
        count = int(os.environ.get("WORLD_SIZE", "1"))
        if count > 1 and not dist.is_initialized():
            dist.init_process_group("gloo", timeout=_LONGEST_WAIT)
        return cls(int(os.environ.get("RANK", "0")), count) if count > 1 else cls()

    @classmethod
    def running(cls) -> Processes:
        """Those that can wait for each other already; alone where there are none."""
        return cls(dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else cls()

    def first_of(self, told: str | None) -> str | None:
        """The first process's text that is not None, for all; every process must ask."""
        found = [told] * self.count
        if self.count > 1:
            dist.all_gather_object(found, told)
        return next((one for one in found if one is not None), None)

    def wait(self) -> None:
        """Until all processes are here."""
        if self.count > 1:
            dist.barrier()

    @contextmanager
    def first_alone(self) -> Iterator[bool]:
        """The first process (True) goes before the others; its ValueError is everyone's."""
        if self.rank == 0:
            told: list[str | None] = [None]
            try:
                yield True
            except (ValueError, OSError) as error:
                told = [str(error)]
                raise
            finally:
                if self.count > 1:
                    dist.broadcast_object_list(told, src=0)
            return
        told = [None]
        dist.broadcast_object_list(told, src=0)
        if told[0] is not None:
            raise ValueError(told[0])
        yield False

    def check_shared(self, folder: Path, flag: str) -> None:
        """ValueError on every process unless all see a file that the first one has just written to the folder."""
        if self.count == 1:
            return
        name = [uuid4().hex]
        dist.broadcast_object_list(name, src=0)
        written = folder / f"{TOKEN}{name[0]}"
        if self.rank == 0:
            written.touch()
        self.wait()
        seen: list[bool | None] = [None] * self.count
        dist.all_gather_object(seen, written.is_file())
        if self.rank == 0:
            written.unlink()
        if not all(seen):
            raise ValueError(
                f"{flag} must be a folder that all nodes share; what the first process writes to {folder} is not on "
                "the disk of every node; name a shared folder"
            )


ALONE = Processes()


def own_device(device: str | None) -> str | None:
    """The device of this process: where several share a node and none is named, the GPU of its local rank.

    Where every process sees GPUs of its own, as under Slurm, the local rank may exceed their number. ValueError for
    `auto` in several processes, and for more processes than GPUs on a node.
    """
    count = int(os.environ.get("WORLD_SIZE", "1"))
    if device == "auto" and count > 1:
        raise ValueError(
            f"--device auto spreads the target over the GPUs of one process; this run has {count}; start one, or leave "
            "it out, and each process takes a GPU"
        )
    if device not in (None, "auto"):
        try:
            unseen = torch.device(device).type == "cuda" and not torch.cuda.is_available()
        except RuntimeError:
            unseen = True
        if unseen:
            raise ValueError(f"--device must be one that torch sees; got {device}, which it does not; leave it out")
    local = os.environ.get("LOCAL_RANK")
    if local is None or device not in (None, "cuda") or not torch.cuda.is_available():
        return device
    gpus, here = torch.cuda.device_count(), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if here > gpus:
        raise ValueError(f"each process of a node needs a GPU; got {here} processes and {gpus}; start {gpus}")
    own = int(local) % gpus
    torch.cuda.set_device(own)
    return f"cuda:{own}"
