"""A trained head on disk, with where it comes from: command, versions, options, data and metrics."""

from __future__ import annotations

import math
import platform
import shlex
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

from draft_heads.data.labels.shards import DistilledDataset
from draft_heads.heads.card import target_licence
from draft_heads.train.options import RunOptions
from draft_heads.train.run_folder import run_settings
from draft_heads.train.trainer import DraftHeadTrainer


def export_head(
    trainer: DraftHeadTrainer, run: RunOptions, settings: dict[str, Any], data: list[DistilledDataset]
) -> Path:
    """Write RUN/head: weights, configuration, provenance and model card. Called on every process."""
    folder = Path(trainer.args.output_dir or "") / "head"
    head = trainer.whole_head()
    if trainer.args.process_index != 0:
        return folder
    head.save_pretrained(folder, provenance(trainer, run, settings, data))
    return folder


def provenance(
    trainer: DraftHeadTrainer, run: RunOptions, settings: dict[str, Any], data: list[DistilledDataset]
) -> dict[str, Any]:
    """What `provenance.json` holds: command, versions, options, data, steps, minutes and metrics."""
    known = {key: float(value) for key, value in trainer.final_metrics.items()}
    metrics = {key: round(value, 5) for key, value in known.items() if math.isfinite(value)}
    return {
        "command": shlex.join(_command()),
        "git_commit": _git_commit(),
        "python": platform.python_version(),
        "packages": {name: version(name) for name in ("torch", "transformers", "deepspeed", "datasets")},
        "options": run_settings(run, settings, trainer.args),
        "data": [
            {
                "name": _data_name(part.manifest["data"]["source"]),
                "fingerprint": part.manifest["data"]["fingerprint"],
                "counts": part.manifest["counts"],
            }
            for part in data
        ],
        "steps": trainer.steps,
        "minutes": round(trainer.clock.elapsed, 2),
        "metrics": metrics,
        "target_licence": target_licence(run.target),
    }


def _command() -> list[str]:
    """The command as it was typed, without what DeepSpeed's launcher adds to it and where this project's folder is."""
    arguments = [text for text in sys.argv[1:] if not text.startswith("--local_rank")]
    script = "/".join(Path(sys.argv[0]).parts[-2:])  # train/ctc.py
    return [Path(sys.executable).name if arguments == sys.argv[1:] else "deepspeed", script, *arguments]


def _data_name(source: str) -> str:
    """A hub id, or the last part of a path: what a file is called, not where this machine has it."""
    on_hub = source.count("/") == 1 and source[0] not in "./~" and not Path(source).exists()
    return source if on_hub else Path(source).name


def _git_commit() -> str:
    here = Path(__file__).resolve().parent
    try:
        done = subprocess.run(
            ["git", "rev-parse", "HEAD"], cwd=here, capture_output=True, text=True, check=True, timeout=10
        )
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return done.stdout.strip()
