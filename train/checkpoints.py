"""The checkpoints of a run: when one is complete, what damages it, which are deleted, where a run resumes.

A checkpoint is complete once `complete.json` is in it. That marker also holds what transformers does not save: the
minutes used, the sum of all losses, where the warm-up ended and which programs trained.
"""

from __future__ import annotations

import math
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback

from draft_heads.data.common.files import checksum, let_others_read, sealed, unsealed, write_text

MARKER = "complete.json"


class MarkComplete(TrainerCallback):
    """Marks a checkpoint once all processes have written their files, then deletes old ones.

    progress: what the marker shall hold beside the step; called on every process
    limit: as --save_total_limit has it
    """

    def __init__(self, progress: Callable[[], dict[str, Any]], limit: int | None = None) -> None:
        self.progress, self.limit = progress, limit
        self.step: int | None = None  # of the newest checkpoint that this run saved
        self._evaluated: int | None = None  # the last step that it evaluated

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._evaluated = state.global_step

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """A step is evaluated once, and a checkpoint that has all of it is not written over."""
        if self._evaluated == state.global_step:
            control.should_evaluate = False
        if self.step == state.global_step and not control.should_evaluate:
            control.should_save = False

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Called when this process has written its files of the checkpoint."""
        progress = self.progress()
        folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        if args.world_size > 1:
            torch.distributed.barrier()
        if state.is_world_process_zero and folder.is_dir():
            let_others_read(folder)
            mark_complete(folder, step=state.global_step, **progress)
            best = state.best_model_checkpoint
            delete_old_checkpoints(folder, self.limit, Path(best).name if best else None)
        self.step = state.global_step


def is_checkpoint(name: str) -> bool:
    """Whether a folder of this name is a checkpoint; copies with names of their own are the user's."""
    return re.fullmatch(r"checkpoint-\d+", name) is not None


def step_of(checkpoint: Path) -> int:
    """The step in a checkpoint's name."""
    return int(checkpoint.name.rsplit("-", 1)[1])


def incomplete_checkpoints(run: Path) -> list[Path]:
    """Checkpoints whose writing never finished."""
    return sorted(path for path in run.iterdir() if is_checkpoint(path.name) and not (path / MARKER).is_file())


def complete_checkpoints(run: Path) -> list[Path]:
    """Checkpoints whose writing finished, in the order of their steps (time stamps may be wrong)."""
    found = [path for path in run.glob("checkpoint-*") if is_checkpoint(path.name) and (path / MARKER).is_file()]
    return sorted(found, key=step_of)


def newest_complete_checkpoint(run: Path) -> Path | None:
    """The last complete checkpoint whose files have the sizes that they were written with."""
    return next((path for path in reversed(complete_checkpoints(run)) if not damage(path, contents=False)), None)


def read_marker(checkpoint: Path) -> dict[str, Any]:
    """What `mark_complete` wrote, older versions `minutes` only; ValueError for anything else."""
    try:
        return unsealed((checkpoint / MARKER).read_bytes(), ("minutes",))
    except ValueError as error:
        raise ValueError(f"{MARKER}: {error}") from None


def mark_complete(checkpoint: Path, **facts: Any) -> None:
    """Write the marker of a checkpoint whose files are all there: `facts`, and size and checksum of every file."""
    files = sorted(path for path in checkpoint.rglob("*") if path.is_file() and path.name != MARKER)
    found = {str(path.relative_to(checkpoint)): [path.stat().st_size, checksum(path)] for path in files}
    write_text(checkpoint / MARKER, sealed({**facts, "files": found}))


def damage(checkpoint: Path, contents: bool = True) -> str | None:
    """What is wrong with a complete checkpoint, None for nothing; older markers list no files.

    contents: compare checksums too, not sizes only
    """
    try:
        marker = read_marker(checkpoint)
        if (step := marker.get("step", step_of(checkpoint))) != step_of(checkpoint):
            return f"it is that of step {step}"
        for name, (size, xxh3) in marker.get("files", {}).items():
            path = checkpoint / name
            if path.stat().st_size != size:
                return f"{name} has {path.stat().st_size} bytes instead of {size}"
            if contents and checksum(path) != xxh3:
                return f"{name} has other content than was written (its checksum differs)"
    except (OSError, ValueError, TypeError, AttributeError) as error:
        return " ".join(str(error).split())
    return None


def delete_old_checkpoints(newest: Path, limit: int | None, best: str | None) -> None:
    """Keep `limit` complete checkpoints (None or 0: all): the newest and the best, then those of the last steps."""
    complete = complete_checkpoints(newest.parent)
    others = [path for path in complete if path.name not in (newest.name, best)]
    surplus = len(complete) - limit if limit else 0
    for path in others[: max(surplus, 0)]:
        (path / MARKER).unlink()  # first: if the deletion is cut short, an incomplete checkpoint is left
        shutil.rmtree(path, ignore_errors=True)


def delete_incomplete(run: Path) -> None:
    """Delete checkpoints whose writing a kill cut short; a line names each. ValueError for a file of such a name."""
    for path in incomplete_checkpoints(run):
        if path.is_file():
            raise ValueError(f"checkpoints are folders; {path} is a file of that name; move it away")
        print(f"{path} was not written to its end; deleting it", flush=True)
        shutil.rmtree(path)


def set_damaged_aside(run: Path) -> None:
    """Rename the newest checkpoints, up to the first whose files are as they were written."""
    for checkpoint in reversed(complete_checkpoints(run)):
        if (wrong := damage(checkpoint)) is None:
            return
        aside = checkpoint.with_name(f"damaged-{checkpoint.name}")
        shutil.rmtree(aside, ignore_errors=True)
        checkpoint.rename(aside)
        print(f"{checkpoint} is damaged: {wrong}; not resumed there, kept as {aside.name}", flush=True)


class SoundBest(TrainerCallback):
    """When a run resumes, its best checkpoint is the best that is still there as it was written."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if not args.load_best_model_at_end:  # transformers has forgotten a best checkpoint that is not where it was
            return
        metric = f"eval_{args.metric_for_best_model.removeprefix('eval_')}"
        entries = [entry for entry in state.log_history if math.isfinite(entry.get(metric, math.nan))]
        measured = {entry["step"]: entry[metric] for entry in entries if entry["step"]}  # 0: --eval_on_start saves none
        told, lost, sign = state.is_world_process_zero, list[str](), -1 if args.greater_is_better else 1
        state.best_metric = state.best_global_step = state.best_model_checkpoint = None
        for step in sorted(measured, key=lambda step: sign * measured[step]):  # of equal ones the first
            checkpoint = Path(args.output_dir, f"checkpoint-{step}")
            wrong = damage(checkpoint) if checkpoint.is_dir() else "is not there"
            if wrong is None:
                state.best_metric, state.best_global_step = measured[step], step
                state.best_model_checkpoint = str(checkpoint)
                break
            lost.append(f"{checkpoint.name} ({wrong})")
        if lost and told:
            left = state.best_model_checkpoint or "that of a later evaluation"
            print(f"the best checkpoint cannot be exported: {', '.join(lost)}; the best is now {left}", flush=True)


def how_to_resume(run: Path) -> str:
    """A sentence: the newest checkpoint of an interrupted run, and how to go on from it."""
    newest = newest_complete_checkpoint(run)
    if newest is None:
        return "no checkpoint was written yet: the same command starts again"
    return f"the newest checkpoint is {newest}: the same command, without --overwrite, resumes there"
