"""What ends a run, and what its plan says of one that is too short."""

import json
import math
import re
import shutil
from types import SimpleNamespace

import pytest
from transformers import TrainingArguments

from draft_heads.train.length import INTERVALS, RunLength, settle_end, too_few_in
from tests.running import run_script
from tests.train.runs import command, losses, run, without


def test_the_command_lines_end_replaces_the_recipes():
    steps, epochs, minutes = {"max_steps": 5}, {"num_train_epochs": 2.0}, {"max_minutes": 15.0}
    for given, recipe, left in (
        (steps, minutes, {}),
        (epochs, steps | epochs, epochs),
        (minutes, steps | epochs, {}),
        ({}, minutes, minutes),
        ({}, steps | epochs, steps | epochs),
        ({"max_minutes": 0.0}, minutes, minutes),  # set on the command line, over the default that stays here
    ):
        defaults = dict(recipe)
        settle_end(given, defaults, "")
        assert defaults == left
    with pytest.raises(ValueError, match="got --max_minutes 15 and --num_train_epochs 2; drop one"):
        settle_end(epochs | minutes, {}, "")
    for name, value in (
        ("max_steps", 0),
        ("max_steps", -2),
        ("num_train_epochs", -1.0),
        ("num_train_epochs", math.inf),
    ):
        with pytest.raises(ValueError, match=f"^--{name} must be a number above 0; got {value}"):
            settle_end({name: value}, {}, "")
        with pytest.raises(ValueError, match=f"^--config r.yaml: --{name} must be a number above 0; got {value}"):
            settle_end({}, {name: value}, "--config r.yaml: ")  # an untrained head would be exported


def arguments(**options):
    usual = {"logging_steps": 1, "save_strategy": "no", "eval_strategy": "no"}
    return TrainingArguments(output_dir="unused", use_cpu=True, **{**usual, **options})


def test_a_plan_says_steps_and_epochs():
    assert str(RunLength(8, 4)) == "8 steps (2 epochs of 4)"
    assert str(RunLength(500, 375)) == "500 steps (1.33 epochs of 375)"
    assert str(RunLength(4_000_000, 4, 15)) == "15 minutes (an epoch has 4 steps)"


def test_a_short_run_is_warned_of_with_what_would_be_enough():
    assert RunLength(300, 4).warnings(arguments()) == []
    (told,) = RunLength(8, 7).warnings(arguments())
    assert "a run of 8 steps is too short" in told
    assert told.endswith("--num_train_epochs 43 has 301 steps, --max_steps 300 has 300")  # 43 · 7


def test_intervals_after_the_end_are_warned_of():
    late = arguments(logging_steps=500, eval_strategy="steps", eval_steps=400, save_strategy="steps", save_steps=401)
    (told,) = RunLength(400, 4).warnings(late)
    assert told.startswith("--logging_steps 500, --save_steps 401: later than the last step, 400, so")
    (told,) = RunLength(400, 4).warnings(arguments(eval_strategy="steps", eval_steps=4, eval_delay=401))
    assert told.startswith("--eval_delay 401: later than the last step, 400, so")
    assert RunLength(400, 4).warnings(arguments(logging_steps=0.5)) == []
    assert RunLength(400, 4).warnings(arguments(logging_strategy="epoch", logging_steps=500)) == []
    (told,) = RunLength(400, 4).warnings(arguments(warmup_steps=400))
    assert "the warm-up of 400 steps (--warmup_steps 400) lasts as long as the run of 400 steps" in told


def test_a_recipes_intervals_come_five_times_in_a_short_run_and_ones_own_as_asked_for():
    def fitted(length, own=(), **options):
        every = {"eval_strategy": "steps", "save_strategy": "steps", "logging_steps": 20, "eval_steps": 500}
        args = arguments(**{**every, "save_steps": 500, "warmup_steps": 100, **options})
        args.own_intervals = set(own)
        before = {name: getattr(args, name) for name in INTERVALS}
        changed = length.fit_intervals(args)
        assert before | changed == {name: getattr(args, name) for name in INTERVALS}
        return args.logging_steps, args.eval_steps, args.save_steps, args.warmup_steps

    assert fitted(RunLength(92, 46)) == (18, 18, 18, 18)
    assert fitted(RunLength(3, 46)) == (1, 1, 1, 1)
    assert fitted(RunLength(5000, 46)) == (20, 500, 500, 100)
    assert fitted(RunLength(92, 46), own={"eval_steps"}) == (18, 500, 18, 18)
    assert fitted(RunLength(92, 46), eval_steps=0.5, warmup_steps=0.03) == (18, 0.5, 18, 0.03)  # shares of the run
    assert fitted(RunLength(92, 46, minutes=5)) == (20, 500, 500, 100)
    assert fitted(RunLength(92, 46), eval_strategy="epoch", save_strategy="no") == (18, 500, 500, 18)  # not read


@pytest.mark.parametrize("own, both", [((), 18), (("eval_steps",), 250), (("save_steps",), 18)])
def test_the_best_checkpoint_is_saved_when_it_is_evaluated_however_short_the_run(own, both):
    steps = {"eval_strategy": "steps", "eval_steps": 250, "save_strategy": "steps", "save_steps": 500}
    args = arguments(**steps, load_best_model_at_end=True)
    args.own_intervals = set(own)
    assert RunLength(92, 46).fit_intervals(args)["save_steps"] == both
    assert args.eval_steps == args.save_steps == both


def test_the_plan_has_the_steps_that_are_trained_and_the_last_is_logged(dataset, tmp_path):
    late = ("--num_train_epochs", "2", "--max_steps", "-1", "--logging_steps", "500", "--save_strategy", "no")
    for batches, steps in (({"batch": 16}, 6), ({"batch": None}, None)):  # 40 rows: 3 batches an epoch
        given = late if steps else (*late, "--tokens_per_batch", "1500")
        words = command(dataset, tmp_path / str(steps), *given, kind="medusa", **batches)
        status, told = run_script(*without(words, "--save_steps"))
        assert status == 0, told
        planned = int(re.search(r"parameters for (\d+) steps \(2 epochs of \d+\) on", told)[1])
        assert steps in (planned, None) and f"warning: a run of {planned} steps is too short" in told
        assert "--logging_steps 500: later than the last step" in told
        provenance = json.loads((tmp_path / str(steps) / "head" / "provenance.json").read_text())
        assert provenance["steps"] == planned and re.findall(r"step (\d+): loss", told) == [str(planned)]


def test_the_training_loss_is_that_of_all_steps_after_a_resume_too(dataset, tmp_path):
    output = tmp_path / "run"
    status, told = run(dataset, output, "--disable_tqdm", "true", kind="medusa")
    assert status == 0, told
    assert "'loss':" not in told and "step 6: held-out loss" in told  # our lines in place of transformers'
    every = losses(output)
    mean = sum(every) / 6
    assert float(re.search(r"mean loss ([^,]*)", told)[1]) == pytest.approx(mean, rel=1e-3)
    for later in ("head", "checkpoint-6"):
        shutil.rmtree(output / later)
    status, told = run(dataset, output, kind="medusa")
    assert status == 0 and "resuming" in told, told
    assert losses(output) == pytest.approx(every, abs=1e-6)
    assert float(re.search(r"mean loss ([^,]*)", told)[1]) == pytest.approx(mean, rel=1e-3)


@pytest.mark.parametrize(
    "saves",
    ["--save_steps 3", "--save_strategy best --eval_strategy steps --eval_steps 3 --metric_for_best_model loss"],
)
def test_a_line_after_a_resume_is_that_of_an_uninterrupted_run(dataset, uninterrupted, tmp_path, saves):
    """Saved within the steps of a line: each line has the mean of the steps since the one before."""
    one, two, three, four, five, six = losses(uninterrupted)
    output = tmp_path / "run"
    words = without(command(dataset, output, "--logging_steps", "4"), "--save_steps", "--eval_strategy")
    status, told = run_script(*words, *saves.split())
    assert status == 0, told
    every = [(one + two + three) / 3, four, (five + six) / 2]
    assert losses(output) == pytest.approx(every, abs=1e-5)
    for later in ("head", "checkpoint-6"):
        shutil.rmtree(output / later)
    status, told = run_script(*words, *saves.split())
    assert status == 0 and f"resuming {output / 'checkpoint-3'}" in told, told
    assert losses(output) == pytest.approx(every, abs=1e-5)


def test_a_run_by_time_has_no_step_limit():
    assert RunLength(13_000_000, 13, 15).warnings(SimpleNamespace()) == []
    args = SimpleNamespace(**vars(arguments(eval_strategy="steps", eval_steps=44)), max_minutes=15)
    assert too_few_in(args, 300) == []
    told, late = too_few_in(args, 43)
    assert late == "--eval_steps 44: later than the last step, 43, so none is due before the end; pass 8"
    assert told == "15 minutes had 43 steps: a head needs a few hundred at least; raise --max_minutes"
    for warmup_steps, steps, warned in ((0.9, 300, False), (300, 301, False), (300, 300, True), (5000, 300, True)):
        args = SimpleNamespace(**vars(arguments(warmup_steps=warmup_steps)), max_minutes=15)
        told = too_few_in(args, steps)
        assert len(told) == warned and all("so the rate never reaches --learning_rate" in line for line in told)
