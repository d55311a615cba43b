"""Threads spin while they wait where cores are free, and sleep where they are shared."""

import os
import runpy
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

from draft_heads.configs import command_line, waiting
from draft_heads.configs.waiting import choose_wait_policy, free_cores, waiting_threads


@pytest.mark.parametrize(
    ("given", "free", "command", "launched", "does"),
    [
        (None, 2.0, ["--threads", "2"], None, "spin"),
        (None, 1.7, ["--threads=2"], None, "spin"),
        (None, 1.2, ["--threads", "2"], None, "sleep"),
        (None, 2.0, ["--threads", "4"], None, "sleep"),
        (None, 0.0, ["--threads", "1"], None, "spin"),  # there is nobody to wait for
        (None, 2.0, [], None, "spin"),
        (None, 1.0, [], None, "sleep"),
        (None, 2.0, ["--threads", "two"], None, "spin"),  # argparse refuses it later
        (None, 2.0, ["--threads"], None, "spin"),
        (None, 2.0, ["--threads", "2"], "2", "sleep"),
        (None, 2.0, ["--threads", "2"], "1", "spin"),
        ("ACTIVE", 0.0, ["--threads", "2"], None, "spin"),
        ("passive", 2.0, ["--threads", "2"], None, "sleep"),
    ],
)
def test_threads_sleep_where_cores_are_not_free_unless_the_user_says_otherwise(
    monkeypatch, given, free, command, launched, does
):
    for name, value in ((waiting.POLICY, given), ("WORLD_SIZE", launched), ("OMP_NUM_THREADS", "2")):
        monkeypatch.setenv(name, value or "")
        if value is None:
            monkeypatch.delenv(name)
    monkeypatch.setattr(waiting, "free_cores", lambda: free)
    choose_wait_policy(command)
    assert waiting.POLICY not in os.environ or os.environ[waiting.POLICY] == given  # torch is loaded and has read it
    monkeypatch.setattr(waiting, "sys", SimpleNamespace(modules={}))
    choose_wait_policy(command)
    assert waiting_threads() == does
    assert given is None or os.environ[waiting.POLICY] == given


@pytest.mark.parametrize(
    ("written", "command", "threads"),
    [
        ("seed: 3\nthreads: 2  # of 16\n", [], 2),
        ("seed: 3\nthreads: 2\n", ["--threads", "4"], 4),
        ("data:\n  threads: 2\n", [], 16),
        ("threads: many\n", [], 16),
    ],
)
def test_threads_of_a_file_count_as_those_of_the_command_line(monkeypatch, tmp_path, written, command, threads):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)), raising=False)  # OpenMP's choice
    (tmp_path / "own.yaml").write_text(written)
    for words in (["--config", f"{tmp_path}/own.yaml"], [f"--config={tmp_path}/own.yaml"]):
        assert waiting._threads([*words, *command]) == threads


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="only Linux counts a core's idle time")
def test_a_busy_core_is_not_free(monkeypatch):
    core = min(os.sched_getaffinity(0))
    code = f"import os\nos.sched_setaffinity(0, [{core}])\nprint(flush=True)\nwhile True: pass"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as busy:
        try:
            busy.stdout.readline()
            monkeypatch.setattr(os, "sched_getaffinity", lambda process: {core})
            time.sleep(0.05)
            assert free_cores(0.3) < 0.2
        finally:
            busy.kill()


@pytest.mark.parametrize(
    ("text", "cores"), [("max 100000\n", float("inf")), ("150000 100000\n", 1.5), (None, float("inf"))]
)
def test_a_container_may_use_less_than_the_machine_has(tmp_path, text, cores):
    if text:
        (tmp_path / "cpu.max").write_text(text)
    assert waiting._allowed_cores(tmp_path / "cpu.max") == cores


def test_the_time_of_cores_is_read_from_their_own_lines(monkeypatch):
    lines = "cpu  9 9 9 900 90 9\ncpu0 1 1 1 40 2 1\ncpu1 1 1 1 50 3 1\ncpu11 1 1 1 700 0 1\nintr 5 4 3 2 1 0\n"
    monkeypatch.setattr(waiting.Path, "read_text", lambda path: lines)
    assert waiting._idle_time({"cpu1"}) == 53
    assert waiting._idle_time({"cpu0", "cpu1"}) == 95


def test_every_command_line_chooses_before_torch_is_loaded(monkeypatch):
    monkeypatch.delenv(waiting.POLICY, raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    monkeypatch.setattr(waiting, "free_cores", lambda: 0.0)
    monkeypatch.setattr(waiting, "sys", SimpleNamespace(modules={}))
    runpy.run_path(command_line.__file__)
    assert os.environ.pop(waiting.POLICY) == "PASSIVE"
