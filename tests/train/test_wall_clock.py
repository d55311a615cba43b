"""Progress of a training run in a log file."""

from types import SimpleNamespace

import pytest

from draft_heads.data.progress import ProgressLines
from draft_heads.train.wall_clock import TrainingLines, WallClock


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


def test_the_last_evaluation_is_printed_once_though_it_is_made_twice(capsys):
    lines = TrainingLines(WallClock(0), ProgressLines(print))
    state = SimpleNamespace(is_local_process_zero=True, global_step=4)
    for loss, seconds in ((2.0, 1.0), (2.0, 1.5), (1.5, 1.0)):  # the last is of the best checkpoint
        lines.on_log(None, state, None, {"eval_loss": loss, "eval_seconds": seconds})
    state.global_step = 5
    lines.on_log(None, state, None, {"eval_loss": 1.5, "eval_seconds": 1.0})
    assert capsys.readouterr().out.count("eval_loss") == 3
