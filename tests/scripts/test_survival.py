"""Killed training and distillation resume to what they would have been; `make survival` has many more kills."""

import os
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest

from draft_heads.scripts.checks import survival

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_killed_runs_end_as_undisturbed_ones():
    command = [sys.executable, "scripts/checks/survival.py", "--training", "3", "--distillation", "4"]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert '"wrong": 0' in done.stdout


def test_the_guide_has_the_command_that_make_survival_runs():
    guide = (ROOT / "docs" / "scaling.md").read_text()
    (told,) = re.findall(r"make survival +# python (scripts/checks/survival.*)", guide)
    assert f"$(BIN)/python {told}\n" in (ROOT / "Makefile").read_text()


def test_an_attempt_that_starts_anew_is_told(tmp_path, monkeypatch):
    """Its results are those of an undisturbed run, and it loses nothing that it kept."""
    run = tmp_path / "run"
    attempts = iter([(False, 9, 6, 1), (True, 3, 3, 1), (True, 6, 5, 4), (False, 9, 6, 1)])

    def attempt(*_):
        run.mkdir(exist_ok=True)
        found = survival.Attempt(*next(attempts))
        (run / "kept").write_text(str(found.progress))
        return found

    monkeypatch.setattr(survival, "attempt", attempt)
    saved = lambda folder: int((folder / "kept").read_text())  # noqa: E731
    wrong = survival.survive([], run, 2, random.Random(0), saved, 0, lambda folder: [folder / "kept"])
    assert wrong == ["5 were kept, and the next attempt went on with 1"]
