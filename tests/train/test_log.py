"""Progress of a training run in a log file, whose last step is logged, and what is noted of the program."""

import json
import shutil
import subprocess
from types import SimpleNamespace

import datasets
import pytest
import torch

from draft_heads.data.common import program
from draft_heads.data.common.progress import ProgressLines
from draft_heads.heads.base import HeadLoss
from draft_heads.train import log
from draft_heads.train import run as train_run
from draft_heads.train.log import (
    LogLastStep,
    LogMetrics,
    MetricLines,
    StepsBar,
    TrainingLines,
    check_losses,
    log_line,
    progress_callback,
)
from draft_heads.train.loss_plot import held_out_losses
from draft_heads.train.stopping import WallClock
from draft_heads.train.trainer import DraftHeadTrainer
from tests.train.runs import run


@pytest.mark.parametrize(
    ("minutes", "first", "count"),
    [
        (0, "steps of training: 2 of 40, 6.0 s each, about 3 min 48 s left", 4),
        (2, "minutes of training: 0.2 of 2, 0.2 steps a second, about 1 min 48 s left", 5),
    ],
)
def test_a_log_file_gets_a_line_every_half_minute(minutes, first, count, monkeypatch):
    written, now = [], 0.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    clock = WallClock(minutes)
    lines = TrainingLines(clock, ProgressLines(written.append, clock=lambda: now))
    state = SimpleNamespace(is_world_process_zero=True, global_step=0, max_steps=40)
    lines.on_train_begin(None, state, None)
    for step in range(1, 21):
        now += 6
        state.global_step, clock.elapsed = step, now / 60
        lines.on_step_end(None, state, None)
    assert (written[0], len(written)) == (first, count)


@pytest.mark.parametrize("strategy", ["steps", "no"])
@pytest.mark.parametrize("stops", [True, False])
def test_the_step_that_ends_training_is_logged_whatever_logging_steps_says(strategy, stops):
    control = SimpleNamespace(should_training_stop=stops, should_log=False)
    LogLastStep().on_step_end(SimpleNamespace(logging_strategy=strategy), None, control)
    assert control.should_log == (stops and strategy == "steps")


def test_the_held_out_curve_is_of_the_labels_in_the_draft_vocabulary_as_the_training_curve_is():
    history = [{"step": 1, "loss": 9.0}, {"step": 2, "eval_loss": 20.0, "eval_outside_vocabulary": 0.25}]
    assert held_out_losses(history) == ([2], [15.0])
    assert held_out_losses([{"step": 4, "eval_loss": 20.0}]) == ([4], [20.0])  # the whole vocabulary


def test_a_line_of_metrics_is_readable_and_short(capsys):
    logs = {"loss": 24.87507, "grad_norm": 17.4, "learning_rate": 0.00588, "tokens_per_second": 4932, "epoch": 0.2}
    line = "step 50: loss 24.88, rate 0.00588, 4,932 tokens/s"
    held_out = {"eval_loss": 3.18536, "eval_accuracy_1": 0.8617, "eval_simulated_beta": 4.4134, "epoch": 4.1}
    assert log_line(50, logs) == line
    assert log_line(1000, held_out) == (
        "step 1,000: held-out loss 3.185, simulated β 4.41, accuracy of the first drafted token 86.2%"
    )
    assert log_line(7, {"mine": 3}) == "step 7: {'mine': 3}"
    state = SimpleNamespace(is_local_process_zero=True, is_world_process_zero=True, global_step=50)
    TrainingLines(WallClock(0), None).on_log(None, state, None, logs)
    without_progress = progress_callback(SimpleNamespace(disable_tqdm=True), WallClock(0))
    assert isinstance(without_progress, MetricLines)
    without_progress.on_log(None, state, None, logs)
    assert capsys.readouterr().out == f"{line}\n" * 2
    written, bar = [], StepsBar()
    bar.training_bar = SimpleNamespace(write=written.append)
    bar.on_log(None, state, None, logs)
    assert written == [line]


def test_the_commit_is_that_of_the_program_and_not_of_a_repository_around_it(tmp_path, monkeypatch):
    def git(*words):
        own = ("git", "-c", "user.name=a", "-c", "user.email=a@b.c", *words)
        return subprocess.run(own, cwd=tmp_path, check=True, capture_output=True, text=True).stdout.strip()

    git("init", "-q")
    (tmp_path / "data").mkdir()
    for name in ("theirs.py", "data/program.py"):
        (tmp_path / name).write_text("")
    git("add", "theirs.py")
    git("commit", "-qm", "a project of the user's, in whose environment this one is installed")
    monkeypatch.setattr(program, "__file__", str(tmp_path / "data" / "program.py"))
    monkeypatch.setattr(program, "_ROOT", tmp_path)
    assert program.git_commit() == "unknown"
    git("add", "data/program.py")
    git("commit", "-qm", "the program")
    (tmp_path / "notes.txt").write_text("of the user's")
    (tmp_path / "data" / "distilled").mkdir()
    (tmp_path / "data" / "distilled" / "shard-00000.arrow").write_text("made by this program")
    assert program.git_commit() == git("rev-parse", "HEAD") != ""
    (tmp_path / "heads").mkdir()
    (tmp_path / "heads" / "linear.py").write_text("")
    assert program.git_commit() == git("rev-parse", "HEAD") + "-dirty"


def test_sources_are_told_apart_where_nothing_else_tells(tmp_path, monkeypatch):
    assert program.this_program()["sources"] == program.source_digest()  # of this program, for the whole process
    monkeypatch.setattr(program, "_ROOT", tmp_path)
    seen = set()
    for package in ("heads", "inference/native"):
        (tmp_path / package).mkdir(parents=True)
        (tmp_path / package / "__init__.py").write_text("")
    for name, text in (("heads/a.py", "1"), ("heads/a.py", "2"), ("heads/b.py", "2"), ("inference/native/c.cpp", "")):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
        seen.add(program.source_digest.__wrapped__())
    (tmp_path / "heads" / "notes.md").write_text("changes no result")
    shutil.copytree("data/tiny_target", tmp_path / "data" / "my_target")
    (tmp_path / "data" / "my_target" / "modeling.py").write_text("of a target")
    seen.add(program.source_digest.__wrapped__())
    assert len(seen) == 4


def test_a_run_names_the_commits_that_trained_it_and_not_the_one_at_its_end(dataset, tmp_path, monkeypatch):
    """The code is committed while the run trains, and the run goes on later under that commit."""
    output = tmp_path / "run"
    monkeypatch.setattr(program, "git_commit", lambda: "b" if list(output.glob("checkpoint-*")) else "a-dirty")
    status, told = run(dataset, output, kind="medusa")
    known = json.loads((output / "head" / "provenance.json").read_text())
    assert status == 0 and known["git_commit"] == "a-dirty" and "programs" not in known, told
    for later in ("head", "checkpoint-6"):
        shutil.rmtree(output / later)
    status, told = run(dataset, output, kind="medusa")
    changed = "any step after 4 is this program's, which provenance.json tells apart: git_commit was a-dirty, now b\n"
    assert status == 0 and changed in told, told
    known = json.loads((output / "head" / "provenance.json").read_text())
    assert known["git_commit"] == "b"
    assert [(one["from_step"], one["git_commit"]) for one in known["programs"]] == [(0, "a-dirty"), (4, "b")]
    assert all(one["packages"] == known["packages"] for one in known["programs"])
    shutil.rmtree(output / "head")  # of the last step, after which another commit trains no more
    monkeypatch.setattr(program, "git_commit", lambda: "c")
    status, told = run(dataset, output, kind="medusa")
    assert status == 0 and "git_commit was b, now c" in told, told
    again = json.loads((output / "head" / "provenance.json").read_text())
    assert (again["git_commit"], again["programs"]) == ("b", known["programs"])


def test_a_program_is_another_by_its_packages_too(tmp_path):
    first = {"git_commit": "a", "python": "3.12", "packages": {"torch": "2.11", "datasets": "5.2"}}
    second = {**first, "packages": {"torch": "2.12", "datasets": "5.2"}}
    checkpoint = tmp_path / "checkpoint-5"
    checkpoint.mkdir()
    (checkpoint / "complete.json").write_text(json.dumps({"minutes": 1.0, "programs": [{"from_step": 2, **first}]}))
    assert train_run.programs_of(first, checkpoint) == [{"from_step": 2, **first}]
    both = [{"from_step": 2, **first}, {"from_step": 5, **second}]
    assert train_run.programs_of(second, checkpoint) == both
    assert train_run.change_of_program(both).endswith("tells apart: torch was 2.11, now 2.12")
    (checkpoint / "complete.json").write_text('{"minutes": 1.0}')  # as older versions wrote it
    (alone,) = train_run.programs_of(first, checkpoint)
    assert alone == {"from_step": 5, **first}
    assert "git_commit was not recorded, now a; python was not recorded" in train_run.change_of_program([alone])


def test_memory_and_work_are_those_of_all_gpus_of_a_process(monkeypatch):
    """As of a target that --target_device auto spreads over two."""
    gpus = [torch.device("cuda", 0), torch.device("cuda", 1)]
    peaks, held = {gpus[0]: 100.0, gpus[1]: 300.0}, {gpus[0]: 2**30, gpus[1]: 3 * 2**30}
    monkeypatch.setattr(log, "peak_flops", peaks.get)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", held.get)
    monkeypatch.setattr(LogMetrics, "_sums", lambda self: {"loss": 2.0, "windows": 1.0, "tokens": 40, "slots": 50})
    for devices, mfu, gib in ((gpus, 0.5, 4.0), (gpus[:1], 2.0, 1.0), ([*gpus, torch.device("cuda", 2)], None, None)):
        held[torch.device("cuda", 2)] = 0
        metrics = LogMetrics()
        metrics.start()
        metrics._began -= 2  # 20 tokens a second
        found = metrics.since_last_log(10.0, devices)
        assert found.get("mfu") == (None if mfu is None else pytest.approx(mfu, rel=0.01))
        assert gib is None or found["memory_gib"] == gib


def test_a_batch_without_a_window_has_no_loss(monkeypatch):
    """Losses 2 and 4 of one window, 9 of three and none: 15 / 5 in a line and in the run's, not (2 + 4 + 3 + 0) / 4."""
    logged = []
    monkeypatch.setattr("transformers.Trainer.log", lambda self, logs, start_time: logged.append(logs))
    trainer, row = object.__new__(DraftHeadTrainer), torch.ones(1, 4, dtype=torch.long)
    trainer._metrics, trainer._loss_before = LogMetrics(), torch.zeros(2, dtype=torch.float64)
    trainer._loss_sum, trainer.flops_per_token = torch.zeros(2, dtype=torch.float64), 1.0
    trainer.args = SimpleNamespace(world_size=1, device=torch.device("cpu"))
    trainer.target, trainer.clock = SimpleNamespace(runs=False), SimpleNamespace(elapsed=1.0)
    trainer.state, trainer.accelerator = SimpleNamespace(global_step=4), SimpleNamespace(reduce=lambda sums: sums)
    for total, windows in ((2.0, 1), (4.0, 1), (9.0, 3), (0.0, 0)):
        loss = HeadLoss(torch.tensor(total), torch.tensor(windows), {"ce": torch.tensor(total / 2)})
        monkeypatch.setattr(DraftHeadTrainer, "head_loss", lambda self, model, batch, seed, loss=loss: loss)
        inputs = {"input_ids": row, "segment_ids": row}
        step = DraftHeadTrainer.compute_loss(trainer, None, inputs, num_items_in_batch=torch.tensor(windows))
        assert step == total / max(windows, 1)
    DraftHeadTrainer.log(trainer, {"loss": 2.25})
    DraftHeadTrainer.log(trainer, {"train_loss": 2.25})
    assert (logged[0]["loss"], logged[0]["loss_ce"], logged[1]["train_loss"]) == (3.0, 1.5, 3.0)


@pytest.mark.parametrize(
    ("other", "told"),
    [
        (0, "rows of the batch: b;"),
        (1, "rows of the batch: b;"),
        (2, "rows of the batch: b;"),
        (3, "those of another process;"),
    ],
)
def test_of_losses_that_are_no_number_the_first_is_told_whichever_process_had_it(tmp_path, other, told):
    """Its gradients reach every process, whose later losses are none either. Own losses: 1 nan nan."""
    batches = [
        (torch.tensor(loss), torch.tensor([[token, 9]]), torch.ones(1, 2, dtype=torch.long))
        for loss, token in ((1.0, 5), (float("nan"), 6), (float("nan"), 7))
    ]
    rows = datasets.Dataset.from_list([{"id": name, "input_ids": [token, 9]} for name, token in zip("abc", (5, 6, 7))])
    trainer = SimpleNamespace(
        args=SimpleNamespace(device="cpu", output_dir=str(tmp_path), fp16=False),
        train_dataset=rows,
        target=SimpleNamespace(dtype=torch.float32),
    )
    trainer.accelerator = SimpleNamespace(gather=lambda own: torch.cat([own, torch.tensor([other])]))
    trainer.state, trainer.longest = SimpleNamespace(global_step=4), 8
    with pytest.raises(ValueError, match=rf"not a number by step 4; .*{told} begin anew \(--overwrite\)"):
        check_losses(trainer, batches)
    if other < 3:
        trainer.accelerator.gather = lambda own: torch.zeros(2)
        check_losses(trainer, batches[:1])


def test_an_evaluation_before_a_resume_counts_if_its_simulation_was_the_same(tmp_path):
    """The rows and nodes of simulated β may change when a run goes on."""
    entry = {"step": 5, "eval_windows": 9, "eval_simulated_beta": 2.0}
    checkpoint = tmp_path / "checkpoint-5"
    checkpoint.mkdir()
    marker = {"minutes": 1.0, "losses": [3.0, 2.0], "simulate_rows": 32.0, "simulate_nodes": 32.0}
    cases = ((32.0, False, 5, True), (64.0, False, 5, False), (64.0, False, 6, True), (64.0, True, 5, True))
    for nodes, old, last, known in cases:
        text = {name: value for name, value in marker.items() if not (old and name.startswith("simulate"))}
        (checkpoint / "complete.json").write_text(json.dumps(text))
        trainer = SimpleNamespace(clock=WallClock(0), _simulation={"simulate_rows": 32.0, "simulate_nodes": nodes})
        trainer._evaluated_until, trainer.steps, trainer.evaluate = -1, last, lambda: {"eval_simulated_beta": 3.0}
        trainer.state = SimpleNamespace(log_history=[entry | {"step": last}])
        DraftHeadTrainer.resume(trainer, checkpoint)
        found = DraftHeadTrainer.final_evaluation(trainer)["eval_simulated_beta"]
        assert found == (2.0 if known else 3.0)
