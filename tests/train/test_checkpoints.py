"""Which checkpoints are kept, and which are damaged."""

import os
import shutil
from types import SimpleNamespace

import pytest

from draft_heads.train.checkpoints import (
    MarkComplete,
    SoundBest,
    complete_checkpoints,
    damage,
    delete_incomplete,
    mark_complete,
    newest_complete_checkpoint,
    read_marker,
    set_damaged_aside,
)


def saved(run, step, limit=2, best=None):
    """A checkpoint of a step, saved as the trainer does."""
    (run / f"checkpoint-{step}").mkdir()
    (run / f"checkpoint-{step}" / "model.safetensors").touch(0o600)  # as safetensors writes it
    args = SimpleNamespace(output_dir=str(run), world_size=1)
    best = best and str(run / f"checkpoint-{best}")
    state = SimpleNamespace(global_step=step, is_world_process_zero=True, best_model_checkpoint=best)
    MarkComplete(lambda: {"minutes": 1.0}, limit).on_save(args, state, None)
    return [int(path.name.split("-")[1]) for path in complete_checkpoints(run)]


def test_the_last_checkpoints_by_step_are_kept_wherever_the_clock_stood(tmp_path):
    (tmp_path / "checkpoint-1").mkdir()  # never finished: neither counted nor deleted
    assert saved(tmp_path, 9) == [9]
    weights, marker = (tmp_path / "checkpoint-9" / name for name in ("model.safetensors", "complete.json"))
    assert weights.stat().st_mode == marker.stat().st_mode
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


@pytest.mark.parametrize(
    ("saved_at", "evaluated_at", "again"),
    [(3, 3, (False, False)), (3, None, (True, True)), (None, 3, (False, True)), (2, 2, (True, True))],
)
def test_at_an_epochs_end_a_step_is_evaluated_once_and_saved_again_only_with_that(
    tmp_path, saved_at, evaluated_at, again
):
    """As where the time is up, or SIGTERM comes, in the epoch's last step, the third."""
    marks, args = MarkComplete(lambda: {"minutes": 1.0}), SimpleNamespace(output_dir=str(tmp_path), world_size=1)
    state = SimpleNamespace(is_world_process_zero=False, best_model_checkpoint=None)
    for step, told in ((evaluated_at, marks.on_evaluate), (saved_at, marks.on_save)):
        state.global_step = step
        if step is not None:
            told(args, state, None)
    state.global_step, control = 3, SimpleNamespace(should_evaluate=True, should_save=True)
    marks.on_epoch_end(args, state, control)
    assert (control.should_evaluate, control.should_save) == again


def test_damage_is_found_by_size_or_checksum(tmp_path):
    saved(tmp_path, 1)
    checkpoint = tmp_path / "checkpoint-2"
    (checkpoint / "global_step2").mkdir(parents=True)
    file = checkpoint / "global_step2" / "rank_0.pt"
    file.write_bytes(b"weights")
    args = SimpleNamespace(output_dir=str(tmp_path), world_size=1)
    state = SimpleNamespace(global_step=2, is_world_process_zero=True, best_model_checkpoint=None)
    MarkComplete(lambda: {"minutes": 1.0}).on_save(args, state, None)
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


def test_the_marker_of_a_checkpoint_is_what_was_written(tmp_path):
    checkpoint, other = tmp_path / "checkpoint-2", tmp_path / "checkpoint-9"
    checkpoint.mkdir()
    mark_complete(checkpoint, step=2, minutes=0.5, losses=[3.25, 2])
    written = (checkpoint / "complete.json").read_text()
    assert read_marker(checkpoint) == {"step": 2, "minutes": 0.5, "losses": [3.25, 2], "files": {}}
    for before, after in (("0.5", "90.5"), ("3.25", "3.75"), ('"files"', '"filez"'), ("2]", '"2"]')):
        assert before in written
        (checkpoint / "complete.json").write_text(written.replace(before, after))
        assert damage(checkpoint) == "complete.json: it has other content than was written"
    for text, what in (("[]", "it holds a list, not an object"), ("{}", "it has no minutes")):
        (checkpoint / "complete.json").write_text(text)
        assert damage(checkpoint) == f"complete.json: {what}"
    (checkpoint / "complete.json").write_text(written)
    shutil.copytree(checkpoint, other)
    assert damage(other) == "it is that of step 2" and newest_complete_checkpoint(tmp_path) == checkpoint
    set_damaged_aside(tmp_path)
    assert (tmp_path / "damaged-checkpoint-9").is_dir() and not other.exists()
    other.write_text("mine")
    with pytest.raises(ValueError, match=r"checkpoints are folders; .*checkpoint-9 is a file of that name"):
        delete_incomplete(tmp_path)
    assert other.read_text() == "mine"


@pytest.mark.parametrize("lost", ["sound", "damaged", "deleted", "all"])
@pytest.mark.parametrize("more", [False, True])
@pytest.mark.parametrize("recorded", ["elsewhere/checkpoint-4", None])
def test_a_resumed_run_exports_the_best_checkpoint_that_is_sound(tmp_path, capsys, lost, more, recorded):
    """recorded: None is what transformers makes of a path that is no folder, as in a run that was moved."""
    measured = {2: 0.3, 4: 0.1, 6: 0.2, 8: float("nan")}
    for step in measured:
        folder = tmp_path / f"checkpoint-{step}"
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(b"weights")
        mark_complete(folder, minutes=1.0)
    best = max(2, 4, 6, key=measured.get) if more else 4
    if lost == "deleted":
        shutil.rmtree(tmp_path / f"checkpoint-{best}")
    for step in {"damaged": [best], "all": measured}.get(lost, []):
        (tmp_path / f"checkpoint-{step}" / "model.safetensors").write_bytes(b"weightz")
    history = [{"step": 0, "eval_x": 9.0 if more else 0.0}]  # --eval_on_start
    history += [{"step": step, "loss": 1.0} for step in measured] + [
        {"step": s, "eval_x": x} for s, x in measured.items()
    ]
    state = SimpleNamespace(log_history=history, best_model_checkpoint=recorded, is_world_process_zero=True)
    args = SimpleNamespace(output_dir=str(tmp_path), metric_for_best_model="x", greater_is_better=more)
    args.load_best_model_at_end = True
    SoundBest().on_train_begin(args, state, None)
    step = {"sound": best, "all": None}.get(lost, 6)
    expected = (measured[step], step, f"{tmp_path}/checkpoint-{step}") if step else (None, None, None)
    assert (state.best_metric, state.best_global_step, state.best_model_checkpoint) == expected
    told = capsys.readouterr().out
    assert (told == "") == (lost == "sound")
    if lost in ("damaged", "deleted"):
        assert f"cannot be exported: checkpoint-{best} (" in told and told.endswith(f"is now {tmp_path}/checkpoint-6\n")
