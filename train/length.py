"""What ends a run: steps, epochs or minutes. Options, plan, schedule and loop read it here."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

ENDLESS_EPOCHS = 1e6  # of a run that ends by time
ENOUGH_STEPS = 300  # fewer leave a head near its start values
INTERVALS = ("logging_steps", "eval_steps", "save_steps", "warmup_steps")
OFTEN = 5  # times that a recipe evaluates, saves and logs in a short run, at least


def settle_end(given: Mapping[str, Any], defaults: dict[str, Any], source: str) -> None:
    """Take out of a recipe's `defaults` what would end the run otherwise than the command line's `given` says.

    Minutes stand alone; of steps and epochs, steps count. source: what names a user's own file in errors, "" for a
    bundled recipe. Raises ValueError for minutes beside steps or epochs, and for values that are no numbers above 0.
    """
    for options, where in ((given, ""), (defaults, source)):
        for name in ("max_steps", "num_train_epochs"):
            value = options.get(name)
            if value is not None and not 0 < value < math.inf and (name, value) != ("max_steps", -1):  # -1: by epochs
                raise ValueError(f"{where}--{name} must be a number above 0; got {value}")
        if where or options is given:
            _check_one_end(options, where)
    asked = given.keys() & {"max_minutes", "max_steps", "num_train_epochs"}
    others: tuple[str, ...] = ()
    if given.get("max_minutes") or (not asked and defaults.get("max_minutes")):
        others = ("max_steps", "num_train_epochs")
    elif "max_steps" in given:
        others = ("max_minutes",)
    elif "num_train_epochs" in given:
        others = ("max_minutes", "max_steps")
    for name in others:
        defaults.pop(name, None)


def _check_one_end(options: Mapping[str, Any], source: str) -> None:
    minutes, steps = options.get("max_minutes") or 0, options.get("max_steps") or 0
    other = f"--max_steps {steps}" if steps > 0 else ""
    if options.get("num_train_epochs"):
        other = other or f"--num_train_epochs {options['num_train_epochs']:g}"
    if minutes > 0 and other:
        raise ValueError(
            f"{source}a run ends by time or by steps, and its schedule with it; got --max_minutes {minutes:g} and "
            f"{other}; drop one of the two"
        )


def saves_what_it_evaluates(options: Any) -> bool:
    """Whether --eval_steps says when to save too: the best checkpoint can be exported only if it was saved."""
    return bool(options.load_best_model_at_end and options.eval_strategy == options.save_strategy == "steps")


@dataclass(frozen=True)
class RunLength:
    """How long a run is: `steps`, or where `minutes` are given those."""

    steps: int
    steps_per_epoch: int
    minutes: float = 0.0

    def __str__(self) -> str:
        if self.minutes:
            return f"{self.minutes:g} minutes (an epoch has {self.steps_per_epoch:,} steps)"
        epochs = self.steps / self.steps_per_epoch
        return f"{self.steps:,} steps ({epochs:.3g} epochs of {self.steps_per_epoch:,})"

    def fit_intervals(self, args: Any) -> dict[str, Any]:
        """Let a recipe's intervals, its warm-up too, be a fifth at most of a run by steps; not `args.own_intervals`.

        Returns those that changed.
        """
        before = {name: getattr(args, name) for name in INTERVALS}
        for name, value in before.items():
            read = name == "warmup_steps" or getattr(args, name.replace("steps", "strategy")) == "steps"
            if read and not self.minutes and name not in args.own_intervals and value > 1:
                setattr(args, name, min(value, max(1, self.steps // OFTEN)))
        if saves_what_it_evaluates(args):
            args.save_steps = args.eval_steps
        return {name: getattr(args, name) for name, value in before.items() if getattr(args, name) != value}

    def warnings(self, args: Any) -> list[str]:
        """Lines about a run that is too short for a head, or for the intervals of its TrainingArguments."""
        if self.minutes:
            return []
        found = []
        if self.steps < ENOUGH_STEPS:
            epochs = math.ceil(ENOUGH_STEPS / self.steps_per_epoch)
            found.append(
                f"a run of {self.steps:,} steps is too short: a head needs a few hundred at least; "
                f"--num_train_epochs {epochs} has {epochs * self.steps_per_epoch:,} steps, --max_steps {ENOUGH_STEPS} "
                f"has {ENOUGH_STEPS}"
                + (
                    ", and a lower --gradient_accumulation_steps has more"
                    if args.gradient_accumulation_steps > 1
                    else ""
                )
            )
        warm = args.get_warmup_steps(self.steps)
        return found + long_warm_up(args, warm, self.steps) + late_intervals(args, self.steps)


def long_warm_up(args: Any, warm: int, steps: int) -> list[str]:
    """A line about a warm-up of `warm` steps that no other step of the run follows."""
    told = (
        f"the warm-up of {warm:,} steps (--warmup_steps {args.warmup_steps:g}) lasts as long as the run of {steps:,} "
        "steps, so the rate never reaches --learning_rate; lower it"
    )
    return [told] * (warm >= steps)


def late_intervals(args: Any, steps: int) -> list[str]:
    """A line about intervals of TrainingArguments that are longer than a run of so many steps."""
    late = [
        f"--{kind}_steps {getattr(args, f'{kind}_steps'):g}"
        for kind in ("logging", "eval", "save")
        if getattr(args, f"{kind}_strategy") == "steps" and getattr(args, f"{kind}_steps") > steps
    ]
    if args.eval_strategy == "steps" and args.eval_delay > steps:
        late.append(f"--eval_delay {args.eval_delay:g}")
    if not late:
        return []
    return [
        f"{', '.join(late)}: later than the last step, {steps:,}, so none is due before the end; pass "
        f"{max(1, steps // OFTEN)}"
    ]


def too_few_in(args: Any, steps: int) -> list[str]:
    """Lines about a run that ended by time, whose number of steps was not known before."""
    few = f"{args.max_minutes:g} minutes had {steps:,} steps: a head needs a few hundred at least; raise --max_minutes"
    warm_up = long_warm_up(args, int(args.warmup_steps), steps)  # below 1 it is a share of the time
    return [few] * (steps < ENOUGH_STEPS) + warm_up + late_intervals(args, steps)
