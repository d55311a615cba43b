"""Which script trains a kind of head."""

from __future__ import annotations

from pathlib import Path


def trainer_script(kind: str) -> list[str]:
    """What to run, seen from the project's folder, to train a head of this kind: its own entry point if it has one."""
    own = Path(__file__).with_name(f"{kind}.py").is_file()
    return [f"train/{kind}.py"] if own else ["train/head.py", "--head", kind]
