"""Killed training and distillation resume to what they would have been; `make survival` has many more kills."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

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
