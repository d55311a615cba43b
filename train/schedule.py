"""Learning rates of a run that ends at a wall time, and a check of the schedule's options before data loads."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch.optim.lr_scheduler import LambdaLR
from transformers import get_scheduler

from draft_heads.train.stopping import WallClock

_RESOLUTION = 10_000  # pseudo-steps of a schedule that runs by wall time


def wall_time_scheduler(name: Any, optimizer: Any, warmup: float, clock: WallClock, options: Any = None) -> LambdaLR:
    """transformers' schedule `name` with its own `options`, driven by the clock's progress.

    warmup: below 1 a share of the time, else a number of steps. The schedule's shape begins when the warm-up ends, so
    the rate reaches its peak. Example: 10 minutes, warmup 0.2, linear: at 1, 2, 6 and 10 minutes 0.5, 1, 0.5 and 0.
    ValueError for a schedule, or an option of one, that counts steps.
    """
    if counted := [name for name in options or () if name == "timescale" or re.fullmatch(r"num_\w+_steps", name)]:
        raise ValueError(
            f"{', '.join(counted)} must be a number of steps, which a run of --max_minutes does not know; leave it "
            "out, or give --max_steps"
        )
    kind = getattr(name, "value", name)
    if kind == "inverse_sqrt" or "warmup_lr_rate" in (options or ()):
        what = kind if kind == "inverse_sqrt" else "warmup_lr_rate"
        raise ValueError(
            f"--max_minutes has a warm-up of its own, from 0 to the rate, by which {what} would not go; take another "
            "--lr_scheduler_type or leave it out, or give --max_steps"
        )
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


def check_schedule(args: Any, steps: int = 0) -> None:
    """ValueError if --lr_scheduler_type, with its --lr_scheduler_kwargs, makes no schedule.

    steps: of the run, once they are known; then also if the schedule's highest rate is not --learning_rate. A warm-up
    as long as the run is left to `RunLength.warnings`.
    """
    kind, options = getattr(args.lr_scheduler_type, "value", args.lr_scheduler_type), args.lr_scheduler_kwargs
    if options is not None and not isinstance(options, dict):
        raise ValueError(f"--lr_scheduler_kwargs must be a JSON object; got {options}")
    rate = args.learning_rate
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=rate)
    warm, total = args.get_warmup_steps(steps), steps or _RESOLUTION
    given = f"--lr_scheduler_type {kind}{f' and --lr_scheduler_kwargs {options}' if options else ''}"
    try:
        if args.max_minutes:
            wall_time_scheduler(kind, optimizer, args.warmup_steps, WallClock(args.max_minutes), options)
            warm, total = 0, _RESOLUTION  # the shape that begins when the warm-up ends
        schedule = get_scheduler(
            kind, optimizer, num_warmup_steps=warm, num_training_steps=total, scheduler_specific_kwargs=options
        )
    except (TypeError, ValueError, ArithmeticError) as error:
        raise ValueError(f"{given} make no schedule: {error}; --learning_rate is {rate:g}") from error
    _check_bounds(schedule, options or {}, rate, given)
    if not steps or warm >= total or not isinstance(schedule, LambdaLR):
        return
    factor = schedule.lr_lambdas[0]
    peak = max(factor(step) for step in {warm, *range(0, total, max(1, total // _RESOLUTION))})
    if not 0.5 < peak < 1.01:  # some begin to fall at the first step
        raise ValueError(
            f"--learning_rate must be the highest rate of a schedule; got {rate:g}, and {given} that reach "
            f"{peak * rate:.3g} in {f'{steps:,} steps' if not args.max_minutes else 'its minutes'}; fit "
            "--lr_scheduler_kwargs to the rate and to the length of the run"
        )


def _check_bounds(schedule: Any, options: dict[str, Any], rate: float, given: str) -> None:
    """ValueError where a schedule that follows a metric cannot lower the rate, or raises it to a limit of its own."""
    if not hasattr(schedule, "min_lrs"):
        return
    if wrong := [name for name in ("min_lr", "max_lr") if type(options.get(name, 0.0)) not in (int, float)]:
        raise ValueError(
            f"{wrong[0]} of --lr_scheduler_kwargs must be a number; got {options[wrong[0]]!r}; write one, as 1e-6"
        )
    least = schedule.min_lrs[0]
    most = getattr(schedule, "max_lrs", [rate])[0]  # greedy's, which raises the rate too
    if not least < rate <= most or (most != rate and "max_lr" not in options):
        raise ValueError(
            f"a rate that follows a metric moves from --learning_rate, {rate:g}, between bounds; {given} keep it "
            f"between {least:g} and {most:g}; give min_lr below it{'' if most == rate else ', and max_lr,'} as "
            "--lr_scheduler_kwargs"
        )
