"""Which rows form a batch, and which batches the processes of a step get: every epoch has every row once.

Batches come in steps of one for each process, as accelerate hands them out. Where too few rows are left for a step,
some of its batches are empty (`DraftCollator` makes padding of them); accelerate would fill them with rows that the
epoch has had already. Workers that load batches leave signals to the trainer.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from types import TracebackType

import torch
from torch.utils.data import BatchSampler, Sampler

_MULTIPLE = 8  # `DraftCollator` rounds lengths up to it
_JITTER = 20  # lengths are disturbed by up to a twentieth before sorting, so that batches differ from epoch to epoch


class EpochSampler(Sampler[int]):
    """Row numbers in an order that depends on seed and epoch only: the same on one process and on many."""

    def __init__(self, rows: int, seed: int) -> None:
        self.rows, self.seed, self.epoch = rows, seed, 0

    def __len__(self) -> int:
        return self.rows

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def generator(self) -> torch.Generator:
        """A random generator of its own for this epoch."""
        return torch.Generator().manual_seed(self.seed * 1_000_003 + self.epoch)

    def __iter__(self) -> Iterator[int]:
        yield from torch.randperm(self.rows, generator=self.generator()).tolist()


class RowBatches(BatchSampler):
    """Batches of `size` rows in the epoch's order; the rows of its last step are shared out evenly.

    The rows of a step are those that one process would have in a batch of `size * processes`. Worked example: 7 rows in
    the order a … g, size 2 and two processes give [a b] [c d], then [e] [f g]; of 5 rows the last step is [] [e].
    """

    sampler: EpochSampler  # accelerate calls its set_epoch

    def __init__(self, rows: int, size: int, seed: int, processes: int = 1, drop_last: bool = False) -> None:
        """drop_last: leave out a last step that is not full; ValueError if then no step is left."""
        self.sampler = EpochSampler(rows, seed)
        self.processes, self.drop_last = processes, False  # accelerate would drop more than that step
        self.rows_per_step = size * processes
        self.steps = rows // self.rows_per_step if drop_last else -(-rows // self.rows_per_step)
        if not self.steps:
            raise ValueError(
                f"--dataloader_drop_last leaves no step: one takes {self.rows_per_step:,} rows, and there are {rows:,} "
                "to train on; lower --per_device_train_batch_size, or leave --dataloader_drop_last out"
            )

    def __len__(self) -> int:
        return self.steps * self.processes

    def __iter__(self) -> Iterator[list[int]]:
        order = list(self.sampler)
        for step in range(self.steps):
            rows = order[step * self.rows_per_step : (step + 1) * self.rows_per_step]
            for rank in range(self.processes):
                yield rows[len(rows) * rank // self.processes : len(rows) * (rank + 1) // self.processes]


class TokenBatches(BatchSampler):
    """Batches of at most `tokens` tokens, padding included (one that is a single row may be padded beyond).

    Rows are sorted by a slightly disturbed length and cut into batches whose sizes are fixed once, so that every epoch
    has the same number of batches; their order is random. Example: lengths 8, 8, 16, 16, 16 with 36 tokens give the
    batches [16, 16], [16, 8], [8]. The number of batches is a multiple of `processes`; the ranks of a step get batches
    of about as many tokens, so that none waits for another. Where batches of one row each do not come out even, some
    are empty.
    """

    sampler: EpochSampler  # accelerate calls its set_epoch

    def __init__(self, lengths: Sequence[int], tokens: int, seed: int, processes: int = 1) -> None:
        """Raises ValueError if the longest row alone has more than `tokens` tokens."""
        self.lengths = torch.as_tensor(lengths)
        self.sampler = EpochSampler(len(self.lengths), seed)
        self.processes, self.drop_last = processes, False
        longest = int(self.lengths.max())
        at_most = (self.lengths + self.lengths // _JITTER).clamp(max=longest)  # of the row that a disturbance puts here
        padded = (-(-at_most // _MULTIPLE) * _MULTIPLE).sort(descending=True).values.tolist()
        if tokens < longest:
            raise ValueError(
                f"--tokens_per_batch must hold the longest row, {longest} tokens; got {tokens}; raise it or lower "
                "--max_length"
            )
        self.sizes: list[int] = []
        start = 0
        while start < len(padded):
            self.sizes.append(max(1, tokens // padded[start]))
            start += self.sizes[-1]
        self.sizes[-1] -= start - len(padded)
        while len(self.sizes) % processes and max(self.sizes) > 1:  # each rank of a step needs one: halve the largest
            largest = self.sizes.index(max(self.sizes))
            whole = self.sizes.pop(largest)
            self.sizes[largest:largest] = [whole - whole // 2, whole // 2]
        self.sizes += [0] * (-len(self.sizes) % processes)

    def __len__(self) -> int:
        return len(self.sizes)

    def __iter__(self) -> Iterator[list[int]]:
        generator = self.sampler.generator()
        disturbed = self.lengths * (1 + torch.rand(len(self.lengths), generator=generator).double() / _JITTER)
        ranked = disturbed.argsort(descending=True)
        batches = list(ranked.split(self.sizes))
        batches.sort(key=lambda rows: int(self.lengths[rows].sum()))
        for step in torch.randperm(len(batches) // self.processes, generator=generator).tolist():
            for rows in batches[step * self.processes : (step + 1) * self.processes]:
                yield rows.tolist()


def leave_signals_to_trainer(worker: int) -> None:
    """For `worker_init_fn`: a SIGTERM or SIGINT that a scheduler or a terminal sends to every process of a run ends no
    worker of its data loader; the trainer needs them until it has saved, and ends them itself.

    A trainer that stops while it fetches a batch hangs up on the thread of `multiprocessing` that hands it out, which
    would print a traceback: that is no error. Where the system tells no sender (macOS), workers end as torch lets them.
    """
    before = sys.excepthook  # the worker's own errors reach the trainer another way

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if not issubclass(kind, (ConnectionError, EOFError)):
            before(kind, error, trace)

    sys.excepthook = hook
    if not hasattr(signal, "sigwaitinfo"):
        return
    numbers, trainer = (signal.SIGTERM, signal.SIGINT), multiprocessing.parent_process()
    assert trainer is not None
    signal.pthread_sigmask(signal.SIG_BLOCK, numbers)

    def wait() -> None:
        while signal.sigwaitinfo(numbers).si_pid != trainer.pid:  # no getppid: under forkserver that is the server's
            pass
        os._exit(0)

    threading.Thread(target=wait, daemon=True).start()
