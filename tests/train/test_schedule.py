"""Learning rates of a run that ends at a wall time."""

import json
import re
from contextlib import nullcontext

import pytest
import torch
from transformers import SchedulerType, TrainingArguments, get_scheduler

from draft_heads.heads.ctc import CTCConfig
from draft_heads.train.schedule import check_schedule, wall_time_scheduler
from draft_heads.train.stopping import WallClock
from draft_heads.train.training_arguments import parse_options


def rates(warmup, name="cosine", **options):
    """Learning rates at 0, 1 … 10 steps of a schedule of ten minutes, a minute each."""
    optimizer, clock = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0), WallClock(10)
    schedule, found = wall_time_scheduler(name, optimizer, warmup, clock, options or None), []
    for _ in range(11):
        found.append(optimizer.param_groups[0]["lr"])
        clock.elapsed += 1
        optimizer.step()
        schedule.step()
    return found


def test_a_warm_up_is_a_share_of_the_time_or_a_number_of_steps():
    by_steps, by_share, none = rates(4, "linear"), rates(0.4, "linear"), rates(0, "linear")
    assert none == pytest.approx([1 - i / 10 for i in range(11)], abs=2e-4)
    assert by_share == pytest.approx([0.00025, 0.25, 0.5, 0.75, *(1 - i / 6 for i in range(7))], abs=2e-4)
    # the fourth step is the last of the warm-up, after three minutes; the line falls from there to the end
    assert by_steps == pytest.approx([0.25, 0.5, 0.75, 1, *(1 - i / 7 for i in range(1, 8))], abs=2e-4)


@pytest.mark.parametrize("name", ["linear", "cosine", "polynomial", "cosine_with_restarts", "constant"])
@pytest.mark.parametrize("warmup", [0.1, 0.9, 1, 7])
def test_the_rate_reaches_its_peak_at_the_end_of_the_warm_up(name, warmup):
    assert max(rates(warmup, name)) == pytest.approx(1, abs=2e-3)


def test_a_resumed_schedule_by_time_goes_on_where_its_warm_up_ended():
    whole = rates(4, "linear")
    clock, optimizer = WallClock(10), torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    clock.resume({"minutes": 6, "warm_until": 0.3})
    schedule = wall_time_scheduler("linear", optimizer, 4, clock)
    schedule.last_epoch = 5
    optimizer.step()
    schedule.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(whole[6], abs=2e-4)


def test_a_schedule_by_time_takes_its_options():
    assert rates(0, "cosine_with_min_lr", min_lr_rate=0.1)[-1] == pytest.approx(0.1)


@pytest.mark.parametrize("option", ["num_decay_steps", "num_stable_steps", "timescale"])
def test_a_schedule_by_time_refuses_options_that_count_steps(option):
    with pytest.raises(ValueError, match=f"^{option} must be a number of steps, which a run of --max_minutes does not"):
        rates(0, "warmup_stable_decay", **{option: 300})


@pytest.mark.parametrize(
    ("kind", "own", "told"),
    [
        ("inverse_sqrt", {}, "by which inverse_sqrt would not go"),
        ("cosine_warmup_with_min_lr", {"min_lr_rate": 0.1, "warmup_lr_rate": 0.2}, "by which warmup_lr_rate would not"),
    ],
)
def test_a_schedule_by_time_refuses_what_its_own_warm_up_would_replace(kind, own, told):
    with pytest.raises(ValueError, match=f"^--max_minutes has a warm-up of its own, .*{told}"):
        rates(0.1, kind, **own)


@pytest.mark.parametrize("kind", ["reduce_lr_on_plateau", "greedy"])
@pytest.mark.parametrize(
    "metric, own, values, factor",
    [
        ("accuracy_1", {}, (0.1, 0.2, 0.3), 1),  # it grows, which is better
        ("accuracy_1", {}, (0.3, 0.2, 0.1), 0.25),
        ("accuracy_1", {"mode": "max"}, (0.3, 0.2, 0.1), 0.25),
        ("loss", {}, (0.1, 0.2, 0.3), 0.25),
    ],
)
def test_a_schedule_that_follows_a_metric_knows_which_way_is_better(kind, metric, own, values, factor):
    flags = ["--target", "tests/tiny_target", "--dataset", "d", "--output_dir", "r", "--use_cpu", "--max_steps", "9"]
    bounds = {"min_lr": 1e-9, "max_lr": 1.0} if kind == "greedy" else {}
    options = json.dumps({"patience": 0, "factor": 0.5} | bounds | own)
    flags += ["--lr_scheduler_type", kind, "--lr_scheduler_kwargs", options, "--metric_for_best_model", metric]
    training = parse_options(CTCConfig, flags)[2]
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    schedule = get_scheduler(kind, optimizer, scheduler_specific_kwargs=training.lr_scheduler_kwargs)
    for value in values:
        schedule.step(value)
    # greedy raises a rate that may be raised; its most is 1
    assert optimizer.param_groups[0]["lr"] == pytest.approx(factor)


@pytest.mark.parametrize(("metric", "mode"), [("accuracy_1", "min"), ("loss", "max")])
def test_a_schedule_that_follows_a_metric_has_no_mode_of_its_own(metric, mode, capsys):
    """By which better evaluations would lower the rate."""
    own = json.dumps({"mode": mode})
    flags = ["--target", "tests/tiny_target", "--dataset", "d", "--output_dir", "r", "--use_cpu", "--max_steps", "9"]
    flags += ["--lr_scheduler_type", "reduce_lr_on_plateau", "--lr_scheduler_kwargs", own]
    with pytest.raises(SystemExit):
        parse_options(CTCConfig, [*flags, "--metric_for_best_model", metric])
    assert (
        "the mode of --lr_scheduler_kwargs follows from --metric_for_best_model, for which" in capsys.readouterr().err
    )


def check(steps, minutes=0, own=None, **options):
    """`check_schedule` of a run of so many steps, or minutes."""
    args = TrainingArguments(output_dir="unused", use_cpu=True, lr_scheduler_kwargs=own, **options)
    args.max_minutes = minutes
    check_schedule(args, steps)


@pytest.mark.parametrize("steps, minutes", [(3, 0), (5000, 0), (200_000, 0), (9, 5)])
@pytest.mark.parametrize("warmup", [0, 2, 0.03])
@pytest.mark.parametrize("kind", [x.value for x in SchedulerType if x.value not in ("greedy", "reduce_lr_on_plateau")])
def test_every_schedule_reaches_the_learning_rate(kind, warmup, steps, minutes):
    if kind in ("warmup_stable_decay", "inverse_sqrt") and minutes:
        pytest.skip("it counts steps")
    own = {"min_lr_rate": 0.1} if "min_lr" in kind else {"num_decay_steps": 1} if "stable" in kind else None
    check(steps, minutes, own, learning_rate=0.01, warmup_steps=warmup, lr_scheduler_type=kind)


@pytest.mark.parametrize(
    "kind, rate, own, steps, minutes, peak",
    [
        # the last 3 of 1000 steps of decay: the first has (1 + cos(0.997 pi)) / 2 = 2.22e-5 of the rate
        ("warmup_stable_decay", 0.01, {"num_decay_steps": 1000}, 3, 0, "2.22e-07"),
        ("cosine_with_min_lr", 0.001, {"min_lr": 0.01}, 10_000, 0, "0.01"),
        ("cosine_with_min_lr", 0.001, {"min_lr": 0.01}, 9, 5, "0.01"),
    ],
)
def test_a_schedule_whose_peak_is_not_the_learning_rate_is_refused(kind, rate, own, steps, minutes, peak):
    told = rf"got {rate:g}, and --lr_scheduler_type {kind} and --lr_scheduler_kwargs .* that reach {peak} in "
    with pytest.raises(ValueError, match=told):
        check(steps, minutes, own, learning_rate=rate, lr_scheduler_type=kind)


def test_a_schedule_that_ends_above_the_learning_rate_is_refused_before_anything_is_loaded():
    with pytest.raises(ValueError, match=r"polynomial and .* make no schedule: lr_end.*; --learning_rate is 0.001$"):
        check(0, 0, {"lr_end": 0.01}, learning_rate=0.001, lr_scheduler_type="polynomial")


@pytest.mark.parametrize(
    "kind, rate, own, told",
    [
        ("greedy", 5e-4, {}, "keep it between 0.001 and 1; give min_lr below it, and max_lr, as"),
        ("greedy", 5e-4, {"min_lr": 1e-6}, "keep it between 1e-06 and 1; give"),
        ("greedy", 5e-4, {"min_lr": 1e-6, "max_lr": 1e-4}, "keep it between 1e-06 and 0.0001; give"),
        ("greedy", 5e-4, {"min_lr": 1e-6, "max_lr": 5e-4}, None),
        ("greedy", 5e-4, {"min_lr": 1e-6, "max_lr": 1.0}, None),
        ("reduce_lr_on_plateau", 5e-4, {"min_lr": 0.01}, "keep it between 0.01 and 0.0005; give min_lr below it as"),
        ("reduce_lr_on_plateau", 5e-4, {}, None),
        (
            "reduce_lr_on_plateau",
            5e-4,
            {"min_lr": "1e-6"},
            "min_lr of --lr_scheduler_kwargs must be a number; got '1e-6'",
        ),
        ("greedy", 5e-4, {"min_lr": 0, "max_lr": None}, "max_lr of --lr_scheduler_kwargs must be a number; got None"),
        ("cosine", 0.0, {}, None),
    ],
)
def test_a_rate_that_follows_a_metric_has_room_below_it_and_above_it_what_was_given(kind, rate, own, told):
    """Whose bounds are rates, not shares: greedy's own would raise most recipes' at once, and never lower them."""
    with nullcontext() if told is None else pytest.raises(ValueError, match=re.escape(told)):
        check(0, 0, own, learning_rate=rate, lr_scheduler_type=kind, eval_strategy="steps")


@pytest.mark.parametrize("kind", ["reduce_lr_on_plateau", "greedy"])
def test_a_schedule_that_follows_a_metric_needs_evaluations(capsys, kind):
    given = "--target tests/tiny_target --dataset d --output_dir r --use_cpu --max_steps 9 --eval_strategy no"
    with pytest.raises(SystemExit):
        parse_options(CTCConfig, [*given.split(), "--lr_scheduler_type", kind])
    told = capsys.readouterr().err
    assert f"--lr_scheduler_type {kind} follows evaluations, got --eval_strategy no; pass --eval_strategy steps" in told
