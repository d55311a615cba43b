"""What ends a run before its last step: the wall clock, SIGTERM, patience."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from transformers import EarlyStoppingCallback, TrainerCallback

ASK_EVERY = 8  # steps after which several processes agree on whether one of them received SIGTERM
_SLOW_STEP = 1.0  # seconds; after a step that took longer they ask again: launchers kill 30 s after SIGTERM


class WallClock(TrainerCallback):
    """Counts minutes of training, also across a resume, and ends the run after `max_minutes` (0: never).

    All processes use the first one's clock: with clocks of their own they would use different learning rates.
    """

    def __init__(self, max_minutes: float) -> None:
        self.max_minutes = max_minutes
        self.elapsed = 0.0  # minutes at the end of the last step, equal on all processes
        self.warm_until = 0.0  # progress when a warm-up of a number of steps ended
        self._before = 0.0  # minutes of the runs that this one resumes
        self._start = time.monotonic()

    @property
    def progress(self) -> float:
        """0…1, the share of the minutes that is over; 0 where the run has no limit."""
        return min(1.0, self.elapsed / self.max_minutes) if self.max_minutes else 0.0

    def now(self) -> float:
        """Minutes of training up to this moment, by this process's clock."""
        return self._before + (time.monotonic() - self._start) / 60

    def resume(self, marker: Mapping[str, Any]) -> None:
        """Go on from the minutes in a checkpoint's marker."""
        self._before = self.elapsed = float(marker["minutes"])
        self.warm_until = float(marker.get("warm_until", 0.0))

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._start = time.monotonic()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.elapsed = self.now()
        if not self.max_minutes:
            return
        first = torch.tensor(self.elapsed, device=args.device)
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            torch.distributed.broadcast(first, src=0)
        self.elapsed = float(first)
        if self.elapsed >= self.max_minutes:
            control.should_training_stop = True
            control.should_save = True  # a kill between here and the export costs nothing
            control.should_evaluate = args.load_best_model_at_end  # the last step may be the best


class StopOnSigterm(TrainerCallback):
    """SIGTERM ends training with a checkpoint after the step, on several processes a few steps later."""

    def __init__(self) -> None:
        self.stopped = False  # all processes have agreed on it
        self._received = False
        self._ask_at = 0  # step
        self._step_start = time.monotonic()

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Inside, this is the process's handler of SIGTERM."""
        before = signal.signal(signal.SIGTERM, lambda *_: setattr(self, "_received", True))
        try:
            yield
        finally:
            signal.signal(signal.SIGTERM, before)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._step_start = time.monotonic()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        slow, self._step_start = time.monotonic() - self._step_start > _SLOW_STEP, time.monotonic()
        if args.world_size == 1:
            self.stopped = self._received
        elif state.global_step >= self._ask_at:  # not after every short step, as the host waits for the answer
            asked = torch.tensor([self._received, slow], dtype=torch.int32, device=args.device)
            torch.distributed.all_reduce(asked)
            self.stopped, slow_somewhere = asked.bool().tolist()
            self._ask_at = state.global_step + (1 if slow_somewhere else ASK_EVERY)
        if self.stopped:
            control.should_training_stop = control.should_save = True

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Called where an epoch is left too: it is no end of one, which strategies by epoch would evaluate."""
        if self.stopped and state.epoch % 1:
            control.should_evaluate = control.should_save = False


class Patience(EarlyStoppingCallback):
    """Ends training after evaluations without a better metric; a resumed run goes on counting."""

    _began = 0  # step, whose evaluation (--eval_on_start) says nothing of what was trained since

    @property
    def exhausted(self) -> bool:
        """Whether it has ended training."""
        return bool(self.early_stopping_patience_counter >= self.early_stopping_patience)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        super().on_train_begin(args, state, control, **kwargs)
        saved = state.stateful_callbacks.get(type(self).__name__, {}).get("attributes", {})
        self.early_stopping_patience_counter = saved.get("early_stopping_patience_counter", 0)
        self._began = state.global_step

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any = None, **kwargs: Any) -> None:
        if state.global_step != self._began:
            super().on_evaluate(args, state, control, metrics, **kwargs)
