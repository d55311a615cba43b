"""What ends a run before its last step: SIGTERM on one of several processes, the wall clock, patience."""

import json
import re
from types import SimpleNamespace

import pytest
import torch

from draft_heads.train.checkpoints import newest_complete_checkpoint
from draft_heads.train.run import metrics_line
from draft_heads.train.stopping import Patience, StopOnSigterm, WallClock
from draft_heads.train.trainer import DraftHeadTrainer
from tests.running import run_script
from tests.train.runs import command, without


def test_processes_ask_each_other_after_every_step_that_is_slow_on_one_of_them(monkeypatch):
    now, asked, slow_elsewhere = 0.0, [], False

    def all_reduce(tensor):
        asked.append(state.global_step)
        tensor += torch.tensor([0, slow_elsewhere])

    monkeypatch.setattr("time.monotonic", lambda: now)
    monkeypatch.setattr("torch.distributed.all_reduce", all_reduce)
    sigterm, control = StopOnSigterm(), SimpleNamespace(should_training_stop=False, should_save=False)
    args = SimpleNamespace(world_size=2, device="cpu")
    state = SimpleNamespace(global_step=0)
    sigterm.on_train_begin(args, state, control)
    for step in range(1, 31):
        state.global_step, slow_elsewhere = step, step == 19
        now += 2.0 if step in (9, 10) else 0.1
        sigterm._received = step >= 27
        sigterm.on_step_end(args, state, control)
        if sigterm.stopped:
            break
    assert asked == [1, 9, 10, 11, 19, 20, 28] and control.should_training_stop and control.should_save


@pytest.mark.parametrize("stopped, epoch, cleared", [(True, 1.4, True), (True, 2.0, False), (False, 1.4, False)])
def test_an_epoch_that_sigterm_cut_short_is_not_evaluated_as_a_whole_one(stopped, epoch, cleared):
    sigterm, control = StopOnSigterm(), SimpleNamespace(should_evaluate=True, should_save=True)
    sigterm.stopped = stopped
    sigterm.on_epoch_end(None, SimpleNamespace(epoch=epoch), control)
    assert control.should_evaluate == control.should_save == (not cleared)


@pytest.mark.parametrize("saved, wanted, steps", [(True, True, 4), (False, True, 6), (True, False, 6)])
def test_the_steps_of_a_head_are_those_of_the_checkpoint_that_was_loaded(saved, wanted, steps):
    best = "r/checkpoint-4" if saved else None
    state = SimpleNamespace(best_global_step=4, best_model_checkpoint=best, global_step=6)
    trainer = SimpleNamespace(args=SimpleNamespace(load_best_model_at_end=wanted), state=state)
    trainer._best = DraftHeadTrainer._best.fget(trainer)
    assert DraftHeadTrainer.steps.fget(trainer) == steps
    state.epoch, trainer.steps = 3.0, steps
    assert DraftHeadTrainer.epochs.fget(trainer) == steps / 2  # half an epoch each


def received_after(monkeypatch, step):
    """As if SIGTERM came in this step of a run."""
    own = StopOnSigterm.on_step_end

    def on_step_end(self, args, state, control, **options):
        self._received = state.global_step == step
        own(self, args, state, control, **options)

    monkeypatch.setattr(StopOnSigterm, "on_step_end", on_step_end)


def newest_state(output):
    return json.loads((newest_complete_checkpoint(output) / "trainer_state.json").read_text())


def test_sigterm_within_an_epoch_leaves_evaluations_to_the_ends_of_epochs(dataset, tmp_path, monkeypatch):
    received_after(monkeypatch, 5)  # 40 rows: an epoch has 3 steps
    output, flags = tmp_path / "run", "--max_steps 9 --eval_strategy epoch --patience 1 --learning_rate 1e-9"
    words = command(dataset, output, *flags.split(), batch=16, kind="medusa")
    status, told = run_script(*without(words, "--save_steps"))
    assert status == 0 and f"stopped by SIGTERM after step 5; the newest checkpoint is {output}/checkpoint-5" in told
    state = newest_state(output)
    assert [entry["step"] for entry in state["log_history"] if "eval_loss" in entry] == [3]
    assert state["stateful_callbacks"]["Patience"]["attributes"]["early_stopping_patience_counter"] == 0
    assert state["best_global_step"] == 3 and state["best_model_checkpoint"].endswith("checkpoint-3")


def test_sigterm_saves_where_only_the_best_is_saved_and_this_step_is_not(dataset, tmp_path, monkeypatch):
    received_after(monkeypatch, 4)
    output, flags = tmp_path / "run", "--max_steps 9 --eval_strategy steps --eval_steps 2 --save_strategy best"
    flags += " --load_best_model_at_end true --learning_rate 0.5"  # the best by eval_loss, as nothing else is asked for
    words = command(dataset, output, *flags.split(), kind="medusa")
    status, told = run_script(*without(words, "--save_steps"))
    assert status == 0 and f"stopped by SIGTERM after step 4; the newest checkpoint is {output}/checkpoint-4" in told
    state = newest_state(output)
    assert state["best_global_step"] == 2 and state["best_model_checkpoint"].endswith("checkpoint-2")
    assert [entry["step"] for entry in state["log_history"] if "eval_loss" in entry] == [2, 4]


def test_the_end_of_the_time_is_measured_where_the_best_checkpoint_counts():
    for best in (False, True):
        clock = WallClock(1e-9)
        control = SimpleNamespace(should_training_stop=False, should_save=False, should_evaluate=False)
        args = SimpleNamespace(world_size=1, device="cpu", load_best_model_at_end=best)
        clock.on_train_begin(args, None, control)
        clock.on_step_end(args, SimpleNamespace(global_step=1), control)
        assert control.should_training_stop and control.should_save and control.should_evaluate == best


def test_the_step_at_which_patience_ends_a_run_is_logged(dataset, tmp_path):
    output, flags = (
        tmp_path / "run",
        "--max_steps 20 --eval_strategy steps --eval_steps 3 --patience 1 --logging_steps 4",
    )
    words = command(dataset, output, *flags.split(), "--learning_rate", "0.5", kind="medusa")
    status, told = run_script(*without(words, "--save_steps"))
    assert status == 0, told
    history = newest_state(output)["log_history"]
    ended = max(entry["step"] for entry in history)
    assert ended < 20 and ended % 4
    assert [entry["step"] for entry in history if "loss" in entry][-1] == ended


def test_patience_goes_on_counting_in_a_resumed_run():
    args = SimpleNamespace(load_best_model_at_end=True, metric_for_best_model="eval_loss", eval_strategy="steps")
    args.greater_is_better = False
    control, state = (
        SimpleNamespace(should_training_stop=False),
        SimpleNamespace(best_metric=1.0, stateful_callbacks={}, global_step=4),
    )
    first = Patience(2)
    first.on_train_begin(args, state, control)
    state.global_step = 6
    first.on_evaluate(args, state, control, {"eval_loss": 2.0})
    assert not first.exhausted and not control.should_training_stop
    resumed, state.stateful_callbacks = Patience(2), {"Patience": first.state()}
    resumed.on_train_begin(args, state, control)
    resumed.on_evaluate(args, state, control, {"eval_loss": 2.0})  # --eval_on_start: of step 6, which has counted
    assert not resumed.exhausted and not control.should_training_stop
    state.global_step = 8
    resumed.on_evaluate(args, state, control, {"eval_loss": 2.0})
    assert resumed.exhausted and control.should_training_stop


@pytest.fixture(scope="module")
def short_answers(distil, tmp_path_factory):
    """Answers of one token and their end: two labels, of which a head drafts one."""
    turns = [[("human", f"Say a, number {number}"), ("gpt", "a")] for number in range(24)]
    rows = [{"conversations": [{"from": who, "value": text} for who, text in row]} for row in turns]
    return distil(tmp_path_factory.mktemp("short") / "out", rows=rows)


@pytest.mark.parametrize(
    ("metric", "best", "why"),
    [
        ("accuracy_2", "--patience 1", "no held-out label counts in it: none is at its offset"),
        ("eval_accuracy_2", "--load_best_model_at_end true", "no held-out label counts in it"),
        ("accuracy_2", "--lr_scheduler_type reduce_lr_on_plateau --warmup_steps 0", "no held-out label counts in it"),
        ("simulated_beta", "--patience 1", "no held-out answer is the target's own text"),
    ],
)
def test_a_metric_that_decides_and_cannot_be_measured_ends_the_run(short_answers, tmp_path, metric, best, why):
    flags = f"--eval_strategy steps --eval_steps 2 --metric_for_best_model {metric} {best}"
    words = command(short_answers, tmp_path / "run", *flags.split(), kind="hydra")
    status, told = run_script(*without(words, "--save_steps"))
    name = metric.removeprefix("eval_")
    assert status == 1 and f"--metric_for_best_model {name} could not be measured, as {why}" in told


def test_accuracy_where_no_label_is_is_not_shown(short_answers, tmp_path):
    status, told = run_script(*command(short_answers, tmp_path / "run", kind="hydra"))
    assert status == 0 and re.search(r"held-out rows: loss \S+, simulated β .*, top-1 accuracy by offset \S+\n", told)
    metrics = json.loads((tmp_path / "run/head/provenance.json").read_text())["metrics"]
    assert "eval_accuracy_1" in metrics and "eval_accuracy_2" not in metrics


def test_what_was_not_measured_is_said():
    assert metrics_line({"eval_windows": 0}) == (
        "held-out rows: loss not measured, simulated β not measured, top-1 accuracy by offset not measured"
    )
    metrics = {"eval_loss": 2.0, "eval_accuracy_1": 0.5, "eval_accuracy_3": 0.25}
    assert metrics_line(metrics).endswith(
        "loss 2.000, simulated β not measured, top-1 accuracy by offset 0.500 – 0.250"
    )
