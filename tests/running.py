"""A script of the project, run inside the test process."""

import contextlib
import io
import runpy
import sys
from pathlib import Path

import pytest
from accelerate.state import AcceleratorState, GradientState

ROOT = Path(__file__).resolve().parents[1]


def run_script(script, *flags):
    """A script of the project in this process: its exit status and all that it printed."""
    told = io.StringIO()
    AcceleratorState._reset_state(reset_partial_state=True)  # what an earlier training left in this process
    GradientState._reset_state()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(told), contextlib.redirect_stderr(told):
        patch.setattr(sys, "argv", [script, *flags])
        try:
            runpy.run_path(str(ROOT / script), run_name="__main__")
        except SystemExit as stopped:
            if isinstance(stopped.code, str):
                print(stopped.code)
            return int(bool(stopped.code)), told.getvalue()
    return 0, told.getvalue()
