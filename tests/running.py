"""A script of the project, run inside the test process, or by two processes that pose as two nodes."""

import contextlib
import io
import os
import runpy
import socket
import subprocess
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


def free_port():
    """A port nobody listens on: two tests may launch at the same moment."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return str(listener.getsockname()[1])


def on_two_nodes(command, *folders):
    """A Python command as processes 0 and 1 of one job, each in its own working folder: (status, output) of each."""
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    shared = {"WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    started = [
        subprocess.Popen(
            [sys.executable, *command],
            cwd=folder, env={**os.environ, **shared, "RANK": str(rank), "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for rank, folder in enumerate(folders)
    ]  # fmt: skip
    told = [process.communicate()[0] for process in started]
    return [(process.returncode, text) for process, text in zip(started, told)]
