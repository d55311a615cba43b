"""Progress of a training run in a log file; which checkpoints are kept."""

import os
from types import SimpleNamespace

import pytest
import torch

from draft_heads.data.common.progress import ProgressLines
from draft_heads.train.wall_clock import (
    Patience,
    TrainingLines,
    WallClock,
    complete_checkpoints,
    damage,
    newest_complete_checkpoint,
    wall_time_scheduler,
)


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


def saved(run, step, limit=2, best=None):
    """A checkpoint of a step, saved as the trainer does."""
    (run / f"checkpoint-{step}").mkdir()
    args = SimpleNamespace(output_dir=str(run), world_size=1, save_total_limit=limit)
    best = best and str(run / f"checkpoint-{best}")
    state = SimpleNamespace(global_step=step, is_world_process_zero=True, best_model_checkpoint=best)
    WallClock(0).on_save(args, state, None)
    return [int(path.name.split("-")[1]) for path in complete_checkpoints(run)]


def test_the_last_checkpoints_by_step_are_kept_wherever_the_clock_stood(tmp_path):
    (tmp_path / "checkpoint-1").mkdir()  # never finished: neither counted nor deleted
    assert saved(tmp_path, 9) == [9]
    assert saved(tmp_path, 10) == [9, 10]
    for step in (9, 10):
        os.utime(tmp_path / f"checkpoint-{step}", (2**32, 2**32))
    assert saved(tmp_path, 11) == [10, 11]
    assert saved(tmp_path, 12, limit=None) == [10, 11, 12]
    assert (tmp_path / "checkpoint-1").is_dir()


def test_the_best_checkpoint_is_kept(tmp_path):
    assert [saved(tmp_path, step, best=best) for step, best in ((2, 2), (4, 2), (6, 2), (8, 2), (10, 10))] == [
        [2],
        [2, 4],
        [2, 6],
        [2, 8],
        [8, 10],
    ]


def test_damage_is_found_by_size_or_checksum(tmp_path):
    saved(tmp_path, 1)
    checkpoint = tmp_path / "checkpoint-2"
    (checkpoint / "global_step2").mkdir(parents=True)
    file = checkpoint / "global_step2" / "rank_0.pt"
    file.write_bytes(b"weights")
    args = SimpleNamespace(output_dir=str(tmp_path), world_size=1, save_total_limit=None)
    state = SimpleNamespace(global_step=2, is_world_process_zero=True, best_model_checkpoint=None)
    WallClock(0).on_save(args, state, None)
    assert damage(checkpoint) is None and newest_complete_checkpoint(tmp_path) == checkpoint
    file.write_bytes(b"WEIGHTS")
    assert "rank_0.pt has other content than was written" in damage(checkpoint)
    file.write_bytes(b"w")
    assert "global_step2/rank_0.pt has 1 bytes instead of 7" in damage(checkpoint)
    file.unlink()
    assert "rank_0.pt" in damage(checkpoint)
    assert newest_complete_checkpoint(tmp_path) == tmp_path / "checkpoint-1"
    (checkpoint / "complete.json").write_text("{")
    assert damage(checkpoint) and newest_complete_checkpoint(tmp_path) == tmp_path / "checkpoint-1"
    (checkpoint / "complete.json").write_text('{"minutes": 1.0}')  # as older versions wrote it
    assert damage(checkpoint) is None


def test_processes_ask_each_other_after_every_step_that_is_slow_on_one_of_them(monkeypatch):
    now, asked, slow_elsewhere = 0.0, [], False

    def all_reduce(tensor):
        asked.append(state.global_step)
        tensor += torch.tensor([0, slow_elsewhere])

    monkeypatch.setattr("time.monotonic", lambda: now)
    monkeypatch.setattr("torch.distributed.all_reduce", all_reduce)
    clock, control = WallClock(0), SimpleNamespace(should_training_stop=False, should_save=False)
    args = SimpleNamespace(world_size=2, device="cpu", logging_strategy="no")
    state = SimpleNamespace(global_step=0)
    clock.on_train_begin(args, state, control)
    for step in range(1, 31):
        state.global_step, slow_elsewhere = step, step == 19
        now += 2.0 if step in (9, 10) else 0.1
        clock._signalled = step >= 27
        clock.on_step_end(args, state, control)
        if clock.terminated:
            break
    assert asked == [1, 9, 10, 11, 19, 20, 28] and control.should_training_stop and control.should_save


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


def test_a_resumed_schedule_by_time_goes_on_where_its_warm_up_ended(tmp_path):
    whole = rates(4, "linear")
    clock, optimizer = WallClock(10), torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    (tmp_path / "complete.json").write_text('{"minutes": 6, "warm_until": 0.3}')
    clock.resume(tmp_path)
    schedule = wall_time_scheduler("linear", optimizer, 4, clock)
    schedule.last_epoch = 5
    optimizer.step()
    schedule.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(whole[6], abs=2e-4)


def test_a_schedule_by_time_takes_its_options():
    assert rates(0, "cosine_with_min_lr", min_lr_rate=0.1)[-1] == pytest.approx(0.1)


def test_the_end_of_the_time_is_measured_where_the_best_checkpoint_counts():
    for best in (False, True):
        clock = WallClock(1e-9)
        control = SimpleNamespace(should_training_stop=False, should_save=False, should_evaluate=False)
        args = SimpleNamespace(world_size=1, device="cpu", load_best_model_at_end=best, logging_strategy="steps")
        clock.on_train_begin(args, None, control)
        clock.on_step_end(args, SimpleNamespace(global_step=1), control)
        assert control.should_training_stop and control.should_save and control.should_evaluate == best
        assert control.should_log  # whatever --logging_steps says


def test_patience_goes_on_counting_in_a_resumed_run():
    args = SimpleNamespace(load_best_model_at_end=True, metric_for_best_model="eval_loss", eval_strategy="steps")
    args.greater_is_better = False
    control, state = (
        SimpleNamespace(should_training_stop=False),
        SimpleNamespace(best_metric=1.0, stateful_callbacks={}),
    )
    first = Patience(2)
    first.on_train_begin(args, state, control)
    first.on_evaluate(args, state, control, {"eval_loss": 2.0})
    assert not first.exhausted and not control.should_training_stop
    resumed, state.stateful_callbacks = Patience(2), {"Patience": first.state()}
    resumed.on_train_begin(args, state, control)
    resumed.on_evaluate(args, state, control, {"eval_loss": 2.0})
    assert resumed.exhausted and control.should_training_stop
