"""The folder of a training run: whether it may be used, what it was begun with (run.json), where it resumes."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, TextIO

from accelerate.utils import broadcast_object_list

from draft_heads.configs.options import option_names
from draft_heads.data.common.files import LOCK, lock_folder, read_object, write_text
from draft_heads.data.common.processes import TOKEN, Processes
from draft_heads.heads.checkpoint import CONFIG
from draft_heads.train.checkpoints import (
    delete_incomplete,
    is_checkpoint,
    newest_complete_checkpoint,
    set_damaged_aside,
)
from draft_heads.train.inherited import BY_METRIC, EVALUATE, FREE, READ
from draft_heads.train.options import RunOptions, TrainingOptions
from draft_heads.train.training_arguments import HeadTrainingArguments
from draft_heads.train.zero_config import read_zero_config

SETTINGS, RECIPE = "run.json", "recipe.yaml"
_OWN = {"runs", LOCK, f".{SETTINGS}.partial"}  # TensorBoard's folder; a first file that a kill cut short
_WRITTEN = _OWN | {
    SETTINGS,
    RECIPE,
    f".{RECIPE}.partial",
    "head",
    "loss.png",
    ".loss.png.partial",
}  # and folders of checkpoints
_FREE = FREE | {"overwrite", "threads", "dataset"}  # datasets and DeepSpeed's configuration count by their content
_EVALUATE = EVALUATE | {"simulate_rows", "simulate_nodes"}
_TOGETHER = EVALUATE | {"logging_strategy", "logging_steps", "logging_first_step", "save_steps"}


def check_same_steps(run: RunOptions, args: HeadTrainingArguments) -> None:
    """ValueError on every process unless all log, save and evaluate at the same steps: each then waits for the others.
    These flags may change when a run is resumed."""
    flags = {**vars(run), **args.to_sanitized_dict()}
    names = _TOGETHER | _EVALUATE | {"per_device_eval_batch_size"}
    fitted = {
        "intervals that are written": sorted(args.own_intervals)
    }  # those that are not written are fitted to the run
    _processes(args).check_same({name: flags.get(name) for name in sorted(names)} | fitted)


def check_folder(
    args: HeadTrainingArguments, settings: dict[str, Any], defaults: Mapping[str, Any] = MappingProxyType({})
) -> None:
    """ValueError if --output_dir holds a finished run or one of other settings (it names --overwrite), or other files.

    The first process looks, and all raise what it found, or that they were given other settings. defaults: of
    options, for runs begun before these existed.

    A run that ended before its first checkpoint, say for want of memory, may be begun again with other settings.
    Nothing is written or deleted: `begin` does that, when everything else has been checked too.
    """
    processes = _processes(args)
    processes.check_same({name: value for name, value in settings.items() if name != "target"})  # a path on each node
    with processes.first_alone() as first:
        if first:
            folder = Path(args.output_dir or "")
            if (folder / LOCK).is_file():
                lock_folder(folder, "--output_dir").close()  # refused now rather than when the target is loaded
            _check_files(folder, args.overwrite)
            if not args.overwrite:
                _check_unfinished(folder)
                _check_same_settings(folder, settings, defaults)


def _check_files(folder: Path, overwrite: bool) -> None:
    """ValueError if a folder that is no run's holds files of something else."""
    if not folder.exists() or (folder / SETTINGS).is_file() or (folder / "head" / CONFIG).is_file():
        return
    names = sorted(folder.iterdir()) if folder.is_dir() else [folder]
    others = [path.name for path in names if not _is_ours(path)]
    if not others and not overwrite:  # another program may have checkpoints of the same name
        others = [path.name for path in names if path.name not in _OWN and not path.name.startswith(TOKEN)]
    if others:
        raise ValueError(
            f"--output_dir {folder} must be a new folder or one of this program; it holds {', '.join(others[:3])}; "
            "pick another folder"
        )


def _check_unfinished(folder: Path) -> None:
    if (folder / "head" / CONFIG).is_file():
        raise ValueError(
            f"--output_dir {folder} holds a finished run (its head is in {folder / 'head'}); pick another folder or "
            "add --overwrite to delete it"
        )


def _check_same_settings(folder: Path, settings: dict[str, Any], defaults: Mapping[str, Any]) -> None:
    """ValueError if there is a checkpoint to resume that was trained with other settings."""
    if not (folder / SETTINGS).is_file() or not newest_complete_checkpoint(folder):
        return
    usual = {name: value for name, value in defaults.items() if name not in _EVALUATE}  # kept of some runs only
    before = {**usual, **read_object(folder / SETTINGS, "restore it, or add --overwrite to delete the run")}
    keys = settings.keys() & before.keys()  # older runs wrote others too
    changed = sorted(key for key in keys if settings[key] != before[key])
    if "target" in changed and Path(settings["target"]).resolve() == Path(before["target"]).resolve():
        changed.remove("target")
    if changed:
        differences = "; ".join(f"{key} was {before.get(key)!r}, now {settings.get(key)!r}" for key in changed)
        raise ValueError(
            f"--output_dir {folder} was begun with other settings ({differences}); repeat those, pick "
            "another folder or add --overwrite to delete it"
        )


def begin(args: HeadTrainingArguments, settings: dict[str, Any]) -> tuple[Path | None, TextIO | None]:
    """Write the settings of a checked run; returns the checkpoint to resume from, None for a fresh start, and the
    folder's lock, which the first process holds.

    The first process chooses for all. ValueError on every process if they do not share the folder, or if the run to
    resume was begun with other settings, of which those that depend on the run's length are known now.
    """
    folder, resume, lock, processes = Path(args.output_dir or ""), None, None, _processes(args)
    with processes.first_alone() as first:
        if first:
            lock = lock_folder(folder, "--output_dir")
            if args.overwrite:
                _delete_run(folder)
            else:
                _check_same_settings(folder, settings, {})
            delete_incomplete(folder)
            set_damaged_aside(folder)
            write_text(folder / SETTINGS, json.dumps(settings, indent=2, sort_keys=True) + "\n")
            write_text(folder / RECIPE, args.recipe)
            resume = newest_complete_checkpoint(folder)
    processes.check_shared(folder, "--output_dir")
    chosen: Path | None = broadcast_object_list([resume])[0]
    return chosen, lock


def _delete_run(folder: Path) -> None:
    """Delete what a training run writes, except the lock that this run holds."""
    for path in filter(_is_ours, folder.iterdir()):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        elif path.name != LOCK:
            path.unlink()


def _is_ours(path: Path) -> bool:
    """Whether a training run writes a file or folder of this name; of `runs`, TensorBoard's files only."""
    if path.name == "runs":
        return all(x.is_dir() or x.name.startswith("events.out.tfevents") for x in path.rglob("*"))
    own = path.name in _WRITTEN or path.name.startswith(TOKEN)
    return own or is_checkpoint(path.name.removeprefix("damaged-"))


def _processes(args: HeadTrainingArguments) -> Processes:
    return Processes(args.process_index, args.world_size)


def run_settings(run: RunOptions, head: dict[str, Any], args: HeadTrainingArguments) -> dict[str, Any]:
    """The flags that decide what is learned, as JSON values, but for those in whose place others are read; of
    evaluations those of a run that goes by them."""
    plain, flags = (int, float, str, bool, type(None)), {*READ, *option_names(TrainingOptions)}
    training = {k: value for k, value in args.to_sanitized_dict().items() if k in flags and isinstance(value, plain)}
    settings = {**vars(run), **head, **training, "processes": args.world_size}
    settings["deepspeed_config"] = read_zero_config(args.deepspeed) if args.deepspeed else None
    by_evaluations = settings.get("load_best_model_at_end") or settings.get("lr_scheduler_type") in BY_METRIC
    free = _FREE if by_evaluations or settings.get("patience") else _FREE | _EVALUATE
    ends = settings.get("max_minutes") or settings.get("max_steps", -1) > 0
    unread = {"num_train_epochs"} if ends else set[str]()
    unread |= {"per_device_train_batch_size"} if settings.get("tokens_per_batch") else set()
    return {key: value for key, value in settings.items() if key not in free | unread}
