"""A schedule that ends at a wall time: elapsed minutes agreed on by all processes, kept across a resume."""

from __future__ import annotations

import json
import math
import re
import shutil
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.optim.lr_scheduler import LambdaLR
from tqdm.auto import tqdm
from transformers import EarlyStoppingCallback, PrinterCallback, ProgressCallback, TrainerCallback, get_scheduler

from draft_heads.data.common.files import checksum, write_text
from draft_heads.data.common.progress import Update

MARKER = "complete.json"
ASK_EVERY = 8  # steps after which several processes agree on whether one of them was told to end
_SLOW_STEP = 1.0  # seconds; after a step that took longer they ask again: launchers kill 30 s after SIGTERM
_RESOLUTION = 10_000  # pseudo-steps of a schedule that runs by wall time


class WallClock(TrainerCallback):
    """Counts training minutes, stops at `max_minutes` (0: never), marks checkpoints that are whole, deletes old ones.

    The first process's clock is everyone's: ranks with clocks of their own would use different learning rates.
    """

    def __init__(self, max_minutes: float) -> None:
        self.max_minutes = max_minutes
        self.elapsed = 0.0  # minutes, agreed on at the end of each step
        self._before = 0.0  # minutes of the runs this one resumes
        self.loss_sum = self.loss_before = 0.0  # of all steps at the last save; of the steps before the resume
        self.warm_until = 0.0  # progress when a warm-up of a number of steps ended
        self._start = self._step_start = time.monotonic()
        self.terminated = False  # by SIGTERM, which all processes have agreed on
        self._signalled = False
        self._ask_at = 0  # step

    @contextmanager
    def stopped_by_sigterm(self) -> Iterator[None]:
        """Inside, SIGTERM ends training with a checkpoint after the step, on several processes a few steps later."""
        before = signal.signal(signal.SIGTERM, lambda *_: setattr(self, "_signalled", True))
        try:
            yield
        finally:
            signal.signal(signal.SIGTERM, before)

    @property
    def progress(self) -> float:
        """0…1, the share of the schedule that is over."""
        return min(1.0, self.elapsed / self.max_minutes) if self.max_minutes else 0.0

    def resume(self, checkpoint: Path) -> None:
        """Go on from what a checkpoint has used and added up; older ones say the minutes only."""
        marker = json.loads((checkpoint / MARKER).read_text())
        self._before = self.elapsed = float(marker["minutes"])
        self.loss_before = float(marker.get("loss_sum", math.nan))
        self.warm_until = float(marker.get("warm_until", 0.0))

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._start = self._step_start = time.monotonic()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.terminated = self._signalled
        slow, self._step_start = time.monotonic() - self._step_start > _SLOW_STEP, time.monotonic()
        if args.world_size > 1:  # asked for every few short steps: the answer is waited for
            self.terminated = False
            if state.global_step >= self._ask_at:
                asked = torch.tensor([self._signalled, slow], dtype=torch.int32, device=args.device)
                torch.distributed.all_reduce(asked)
                self.terminated, slow_somewhere = asked.bool().tolist()
                self._ask_at = state.global_step + (1 if slow_somewhere else ASK_EVERY)
        if self.terminated:
            control.should_training_stop = control.should_save = True
        self.elapsed = self._before + (time.monotonic() - self._start) / 60
        if self.max_minutes:
            self._end_by_time(args, control)
        if control.should_training_stop and args.logging_strategy != "no":
            control.should_log = True  # of a run shorter than --logging_steps nothing else would be known

    def _end_by_time(self, args: Any, control: Any) -> None:
        """Stop where the first process's minutes are over."""
        now = torch.tensor(self.elapsed, device=args.device)
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            torch.distributed.broadcast(now, src=0)
        self.elapsed = float(now)
        if self.elapsed >= self.max_minutes:
            control.should_training_stop = True
            control.should_save = True  # a kill between here and the export costs nothing
            control.should_evaluate = args.load_best_model_at_end  # the last step may be the best

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Called when this process has written its files of the checkpoint; older ones go when all have."""
        minutes = self._before + (time.monotonic() - self._start) / 60
        folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        if args.world_size > 1:
            torch.distributed.barrier()
        if state.is_world_process_zero and folder.is_dir():
            facts = {"loss_sum": self.loss_sum, "warm_until": self.warm_until}
            mark_complete(folder, minutes=minutes, step=state.global_step, **facts)
            best = state.best_model_checkpoint
            delete_old_checkpoints(folder, args.save_total_limit, Path(best).name if best else None)


class Patience(EarlyStoppingCallback):
    """Ends training after evaluations without a better metric; a resumed run goes on counting where it was."""

    @property
    def exhausted(self) -> bool:
        """Whether training has ended by it."""
        return bool(self.early_stopping_patience_counter >= self.early_stopping_patience)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        super().on_train_begin(args, state, control, **kwargs)
        kept = state.stateful_callbacks.get(type(self).__name__, {}).get("attributes", {})
        self.early_stopping_patience_counter = kept.get("early_stopping_patience_counter", 0)


class MinutesBar(ProgressCallback):
    """The progress bar of a run that ends at a wall time: minutes, since the number of steps is not known."""

    def __init__(self, clock: WallClock) -> None:
        super().__init__()
        self.clock = clock

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.is_world_process_zero:
            shape = "training {percentage:3.0f}% |{bar}| {n:.1f} of {total:g} minutes{postfix}"
            self.training_bar = tqdm(total=self.clock.max_minutes, bar_format=shape, dynamic_ncols=True)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.training_bar is not None:
            self.training_bar.set_postfix(steps=state.global_step, refresh=False)
            self.training_bar.update(min(self.clock.elapsed, self.clock.max_minutes) - self.training_bar.n)


class TrainingLines(PrinterCallback):
    """Progress in a log file: lines with steps or minutes, and the metrics as transformers prints them."""

    def __init__(self, clock: WallClock, show: Update) -> None:
        super().__init__()
        self.clock, self.show = clock, show

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._began = time.monotonic(), state.global_step
        self.on_step_end(args, state, control)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if not state.is_world_process_zero:
            return
        if not self.clock.max_minutes:
            self.show("steps of training", state.global_step, state.max_steps)
            return
        seconds, steps = time.monotonic() - self._began[0], state.global_step - self._began[1]
        minutes = min(self.clock.elapsed, self.clock.max_minutes)
        rate = f"{steps / max(seconds, 1e-9):,.1f} steps a second"
        self.show("minutes of training", minutes, self.clock.max_minutes, rate)


def is_checkpoint(name: str) -> bool:
    """Whether a checkpoint's folder is called so; copies with names of their own are the user's."""
    return re.fullmatch(r"checkpoint-\d+", name) is not None


def incomplete_checkpoints(run: Path) -> list[Path]:
    """Checkpoints whose writing never finished."""
    return sorted(path for path in run.iterdir() if is_checkpoint(path.name) and not (path / MARKER).is_file())


def complete_checkpoints(run: Path) -> list[Path]:
    """Checkpoints whose writing was finished, in the order of their steps; clocks may have been moved."""
    whole = [path for path in run.glob("checkpoint-*") if is_checkpoint(path.name) and (path / MARKER).is_file()]
    return sorted(whole, key=lambda path: int(path.name.rsplit("-", 1)[1]))


def newest_complete_checkpoint(run: Path) -> Path | None:
    """The last checkpoint whose writing was finished and whose files have the sizes that they had then."""
    return next((path for path in reversed(complete_checkpoints(run)) if not damage(path, contents=False)), None)


def mark_complete(checkpoint: Path, **facts: Any) -> None:
    """Write the marker of a checkpoint whose files are all there: `facts`, and size and checksum of every file."""
    files = sorted(path for path in checkpoint.rglob("*") if path.is_file() and path.name != MARKER)
    found = {str(path.relative_to(checkpoint)): [path.stat().st_size, checksum(path)] for path in files}
    write_text(checkpoint / MARKER, json.dumps({**facts, "files": found}))


def damage(checkpoint: Path, contents: bool = True) -> str | None:
    """What is wrong with the files of a complete checkpoint, None for nothing; older markers list no files.

    contents: their checksums are compared too
    """
    try:
        files = json.loads((checkpoint / MARKER).read_text(encoding="utf-8")).get("files", {})
        for name, (size, xxh3) in files.items():
            path = checkpoint / name
            if path.stat().st_size != size:
                return f"{name} has {path.stat().st_size} bytes instead of {size}"
            if contents and checksum(path) != xxh3:
                return f"{name} has other content than was written (its checksum differs)"
    except (OSError, ValueError, TypeError, AttributeError) as error:
        return " ".join(str(error).split())
    return None


def delete_old_checkpoints(newest: Path, limit: int | None, best: str | None) -> None:
    """Keep `limit` complete checkpoints (None or 0: all): the newest and the best, then those of the last steps."""
    complete = complete_checkpoints(newest.parent)
    spare = [path for path in complete if path.name not in (newest.name, best)]
    surplus = len(complete) - limit if limit else 0
    for path in spare[: max(surplus, 0)]:
        (path / MARKER).unlink()  # first: what stays after a kill, or in use, is an incomplete checkpoint
        shutil.rmtree(path, ignore_errors=True)


def wall_time_scheduler(name: Any, optimizer: Any, warmup: float, clock: WallClock, options: Any = None) -> LambdaLR:
    """transformers' schedule `name` with its own `options`, driven by the clock's progress.

    warmup: below 1 a share of the time, else a number of steps. The schedule's shape begins when the warm-up ends, so
    the rate reaches its peak. Example: 10 minutes, warmup 0.2, linear: at 1, 2, 6 and 10 minutes 0.5, 1, 0.5 and 0.
    """
    shape = get_scheduler(
        name, optimizer, num_warmup_steps=0, num_training_steps=_RESOLUTION, scheduler_specific_kwargs=options
    )
    if not isinstance(shape, LambdaLR):
        raise ValueError(
            f"--max_minutes needs a schedule given by a factor of time, such as cosine or linear; got {name}; drop "
            "--max_minutes or pick another --lr_scheduler_type"
        )
    factor = shape.lr_lambdas[0]

    def at(step: int) -> float:
        if warmup >= 1 and step < warmup:
            if step:  # at 0 a resumed run makes the schedule, whose warm-up may be over
                clock.warm_until = clock.progress
            return (step + 1) / warmup
        warm_until = clock.warm_until if warmup >= 1 else warmup
        if clock.progress < warm_until:
            return max(clock.progress, 1 / _RESOLUTION) / warm_until
        share = (clock.progress - warm_until) / max(1 - warm_until, 1 / _RESOLUTION)
        return float(factor(int(share * _RESOLUTION)))

    for group in optimizer.param_groups:
        group["lr"] = group["initial_lr"]
    return LambdaLR(optimizer, at)


def check_schedule(args: Any) -> None:
    """ValueError if --lr_scheduler_type, with its --lr_scheduler_kwargs, makes no schedule: asked before data loads."""
    kind, options = getattr(args.lr_scheduler_type, "value", args.lr_scheduler_type), args.lr_scheduler_kwargs
    if options is not None and not isinstance(options, dict):
        raise ValueError(f"--lr_scheduler_kwargs must be a JSON object; got {options}")
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    try:
        if args.max_minutes:
            wall_time_scheduler(kind, optimizer, args.warmup_steps, WallClock(args.max_minutes), options)
        else:
            get_scheduler(
                kind, optimizer, num_warmup_steps=0, num_training_steps=_RESOLUTION, scheduler_specific_kwargs=options
            )
    except (TypeError, ValueError) as error:
        given = f" and --lr_scheduler_kwargs {options}" if options else ""
        raise ValueError(f"--lr_scheduler_type {kind}{given} make no schedule: {error}") from error
