"""The log of a run: the metrics of a line, losses that end it, the last line of a short run, the progress bar or lines.

Sums of metrics stay on the device until a line is due, so no step waits for the host.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from functools import partial
from resource import RUSAGE_SELF, getrusage
from typing import Any

import torch
from accelerate.utils import gather_object
from torch import Tensor
from tqdm.auto import tqdm
from transformers import PrinterCallback, ProgressCallback, TrainerCallback

from draft_heads.data.common.progress import ProgressLines, Update
from draft_heads.heads.base import HeadLoss
from draft_heads.train.options import peak_flops
from draft_heads.train.stopping import WallClock

Trainer = Any  # a `trainer.DraftHeadTrainer`, whose module imports this one

# --- metrics of a log line ------------------------------------------------------------------------------------------


class LogMetrics:
    """Sums over the batches since the last log line: parts of the loss, tokens, padding.

    batches  mean loss, tokens and segments of the last ones
    """

    def __init__(self) -> None:
        self.batches: deque[tuple[Tensor, Tensor, Tensor]] = deque(maxlen=1024)
        self.reset()

    def reset(self) -> None:
        """Set all counters to zero."""
        self.batches.clear()
        self._parts: dict[str, Tensor] = {}
        self._loss = torch.zeros(2, dtype=torch.float64)
        self._tokens, self._slots = torch.zeros((), dtype=torch.long), 0
        self._began = time.monotonic()

    def start(self) -> None:
        """Start the timer, unless batches are counted already."""
        if not self.batches:
            self._began = time.monotonic()

    def exclude(self, seconds: float) -> None:
        """Exclude these seconds (an evaluation) from the measured time."""
        self._began += seconds

    def add(self, loss: HeadLoss, mean: Tensor, input_ids: Tensor, segment_ids: Tensor) -> None:
        """Count a batch of tokens and segments `[B, L]`; mean is its loss as the optimizer sees it."""
        device = segment_ids.device
        for name, value in loss.parts.items():
            self._parts[name] = self._parts.get(name, 0) + value
        self._loss = self._loss.to(device) + loss.sums()
        self._tokens = self._tokens.to(device) + (segment_ids > 0).sum()
        self._slots += segment_ids.numel()
        self.batches.append((mean.detach(), input_ids, segment_ids))

    def since_last_log(self, flops_per_token: float, devices: Sequence[torch.device]) -> dict[str, float]:
        """Return this line's metrics and reset the counters. Call on every process.

        devices: those of this process: the head's and, spread over several, the target's

        The loss and its parts per window; tokens per second; `fill`, the share of batches that is not padding; `mfu` on
        GPUs whose peaks are known; this process's peak memory. Memory and what is divided by this process's seconds are
        its own.
        """
        seconds = time.monotonic() - self._began
        every: list[dict[str, float]] = gather_object([self._sums()])
        sums = {name: sum(process[name] for process in every) for name in every[0]}
        loss, windows, tokens, slots = (sums.pop(name) for name in ("loss", "windows", "tokens", "slots"))
        metrics = {"loss": round(loss / max(windows, 1), 5)} | loss_parts(sums, windows)
        metrics |= {"tokens_per_second": round(tokens / seconds)}
        metrics |= {"fill": round(tokens / max(slots, 1), 3)}
        peaks = [peak for device in devices if (peak := peak_flops(device)) is not None]
        if len(peaks) == len(devices):
            metrics["mfu"] = round(tokens / seconds / len(every) * flops_per_token / sum(peaks), 3)
        self.reset()
        return metrics | peak_memory(devices)

    def _sums(self) -> dict[str, float]:
        """This process's sums, on the host."""
        names = list(self._parts)
        values = torch.stack([self._parts[name].double() for name in names]).tolist() if names else []
        loss, windows = self._loss.tolist()
        counts = {"loss": loss, "windows": windows, "tokens": int(self._tokens), "slots": self._slots}
        return dict(zip(names, values)) | counts


def loss_parts(sums: dict[str, float], windows: float) -> dict[str, float]:
    """Unweighted means per window, and counts that are not 0."""
    parts: dict[str, float] = {}
    for name, value in sums.items():
        if not name.endswith("_count"):
            parts[f"loss_{name}"] = round(value / max(windows, 1), 5)
        elif value:
            parts[name] = int(value)
    return parts


def peak_memory(devices: Sequence[torch.device]) -> dict[str, float]:
    """This process's peak: of its GPUs together where it has some, else of the process."""
    if gpus := [device for device in devices if device.type == "cuda"]:
        return {"memory_gib": round(sum(map(torch.cuda.max_memory_allocated, gpus)) / 2**30, 2)}
    kib = getrusage(RUSAGE_SELF).ru_maxrss / (1024 if sys.platform == "darwin" else 1)
    return {"memory_mib": round(kib / 1024)}


# --- losses that are no finite number -------------------------------------------------------------------------------


def check_losses(trainer: Trainer, batches: list[tuple[Tensor, Tensor, Tensor]]) -> None:
    """ValueError on every process if a loss of `batches`, (loss, tokens, segments), is no finite number on one.

    It ends training before the head is saved, and names the rows of the first such batch: after its step the weights
    of every process, and so all its losses, are no numbers either.
    """
    finite = torch.stack([loss for loss, _, _ in batches] or [torch.zeros(())]).isfinite().tolist()
    ago = len(finite) - finite.index(False) if False in finite else 0  # batches
    longest_ago = int(trainer.accelerator.gather(torch.tensor([ago], device=trainer.args.device)).max())
    if not longest_ago:
        return
    rows = "those of another process"
    if ago == longest_ago:
        _, input_ids, segment_ids = batches[finite.index(False)]
        rows = ", ".join(row_names(trainer.train_dataset, input_ids, segment_ids, trainer.longest))
    half = ""
    if trainer.args.fp16 or trainer.target.dtype == torch.float16:
        half = "without --fp16 or --target_dtype float16, in which numbers above 65,504 are infinite, "
    raise ValueError(
        f"the loss became infinite or not a number by step {trainer.state.global_step}; rows of the batch: {rows}; "
        f"begin anew (--overwrite) {half}with a lower --learning_rate, or with labels of other rows"
    )


def row_names(dataset: Any, input_ids: Tensor, segment_ids: Tensor, longest: int) -> list[str]:
    """The `id` of every row of the dataset, cut to `longest` tokens, that a batch `[B, L]` was made of."""
    batch = {
        tuple(tokens[segments == number].tolist())
        for tokens, segments in zip(input_ids, segment_ids)
        for number in range(1, int(segments.max()) + 1)
    }
    rows = dataset.select_columns(["id", "input_ids"])
    return [row["id"] for row in rows if tuple(row["input_ids"][:longest]) in batch]


# --- when to log, and progress --------------------------------------------------------------------------------------


class LogLastStep(TrainerCallback):
    """Logs the step that ends training; of a run shorter than --logging_steps nothing else would be known.

    Comes after the callbacks that end training; `DraftHeadTrainer` sees to those that patience ends.
    """

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if control.should_training_stop and args.logging_strategy != "no":
            control.should_log = True


def progress_callback(args: Any, clock: WallClock) -> TrainerCallback:
    """What shows progress and metrics in place of transformers' callbacks."""
    if args.disable_tqdm:
        return MetricLines()
    if not sys.stderr.isatty():
        return TrainingLines(clock, ProgressLines(partial(print, file=sys.stderr, flush=True)))
    return MinutesBar(clock) if args.max_minutes else StepsBar()


SHOWN = {
    "loss": "loss {:.4g}",
    "eval_loss": "held-out loss {:.4g}",
    "eval_simulated_beta": "simulated β {:.2f}",
    "eval_accuracy_1": "accuracy of the first drafted token {:.1%}",
    "train_loss": "mean loss {:.4g}",
    "learning_rate": "rate {:.3g}",
    "tokens_per_second": "{:,.0f} tokens/s",
    "train_runtime": "{:,.0f} s of training",
}
"""The metrics of a line that is printed; TensorBoard and `trainer_state.json` have all."""


def log_line(step: int, logs: Mapping[str, Any]) -> str:
    """`step 50: loss 24.88, rate 0.00588, 4,932 tokens/s`; metrics of other callers as they are."""
    known = [form.format(logs[name]) for name, form in SHOWN.items() if isinstance(logs.get(name), (int, float))]
    return f"step {step:,}: {', '.join(known) or dict(logs)}"


class StepsBar(ProgressCallback):
    """transformers' progress bar, with readable lines of metrics."""

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if state.is_world_process_zero and self.training_bar is not None and logs is not None:
            self.training_bar.write(log_line(state.global_step, logs))


class MinutesBar(StepsBar):
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


class MetricLines(PrinterCallback):
    """Lines of metrics, for a log file."""

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if state.is_local_process_zero and logs is not None:
            print(log_line(state.global_step, logs))


class TrainingLines(MetricLines):
    """Progress in a log file: lines with steps or minutes, and lines of metrics."""

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
