"""The quickstart with every head, in small."""

import io
import json
import os
import re
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest

from draft_heads.data.common.console import plain_console
from draft_heads.heads.checkpoint import HEADS
from draft_heads.scripts import quickstart


@pytest.mark.slow
def test_a_head_that_reads_several_layers_goes_the_whole_way(tmp_path, monkeypatch, capfd):
    """The other heads: test_study.py, the tiny form of studies."""
    small = "--conversations 90 --steps 3 --questions 1 --problems 1"
    words = ["quickstart.py", "--output", str(tmp_path / "out"), "--heads", "eagle3", *small.split()]
    monkeypatch.setattr(sys, "argv", words)
    quickstart.main()
    rows = json.loads((tmp_path / "out/report/report.json").read_text())["results"]
    assert {row["drafter"] for row in rows} == {"eagle3", "vanilla", "transformers", "ngram", "eagle3_ngram"}
    assert all(row["lossless"]["unexplained"] == 0 and row["new_tokens"] > 0 for row in rows)
    out = capfd.readouterr().out
    assert "scripts/chat.py" in out and "--target data/tiny_target" in out
    assert out.rstrip().endswith("out/report/report.html") and (tmp_path / "out/report/report.html").is_file()


def test_the_heads_of_the_quickstart_are_all_there_are():
    assert set(quickstart.HEADS) == set(HEADS)


def test_commands_are_shown_and_run_with_paths_of_the_checkout(monkeypatch):
    ran = []
    done = nullcontext(SimpleNamespace(wait=lambda: 0))
    monkeypatch.setattr(quickstart.subprocess, "Popen", lambda args, **_: ran.append(args) or done)
    console = plain_console()
    console.file, console.width = io.StringIO(), 80
    target, head = str(quickstart.TARGET), f"ctc={quickstart.ROOT}/runs/ctc/head"
    words = ("scripts/evaluate.py", "--target", target, head, "/elsewhere/x")
    shown = ["scripts/evaluate.py", "--target", "data/tiny_target", "ctc=runs/ctc/head", "/elsewhere/x"]
    quickstart.run(console, "a step", ("python", *words))
    quickstart.run(console, "a step", ("torchrun", "--nproc_per_node", "2", *words))
    assert ran == [
        [sys.executable, *shown],
        [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", *shown],
    ]
    printed = console.file.getvalue()
    assert f"$ python {' '.join(shown)}\n" in printed
    assert f"$ torchrun --nproc_per_node 2 {' '.join(shown)}\n" in printed


def test_a_failing_command_ends_the_quickstart_with_its_status():
    console = plain_console()
    console.file = io.StringIO()
    with pytest.raises(SystemExit, match="the step 'one' failed \\(status 3\\)"):
        quickstart.run(console, "one", ("python", "-c", "import sys; sys.exit(3)"))
    with pytest.raises(SystemExit, match=r"failed \(status -9\)"):
        quickstart.run(console, "one", ("python", "-c", "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"))


@pytest.mark.parametrize(
    ("threads", "launcher", "rows"), [(1, "python", "8"), (2, "torchrun", "4"), (16, "torchrun", "4")]
)
def test_a_step_has_eight_rows_on_one_process_and_on_two(tmp_path, monkeypatch, threads, launcher, rows):
    commands = []
    monkeypatch.setattr(quickstart, "run", lambda console, title, command: commands.append(command))
    monkeypatch.setattr(quickstart, "check_report", lambda *_: None)
    monkeypatch.setattr(quickstart.torch, "get_num_threads", lambda: threads)
    monkeypatch.setattr(quickstart.torch.cuda, "is_available", lambda: False)
    small = "--heads ctc medusa --conversations 90 --steps 3 --questions 1 --problems 1"
    monkeypatch.setattr(sys, "argv", ["quickstart.py", "--output", str(tmp_path / "out"), *small.split()])
    quickstart.main()
    assert [command[0] for command in commands] == [launcher] * 4
    for command in commands[1:3]:
        assert command[command.index("--per_device_train_batch_size") + 1] == rows


RUNS = """
import sys
from draft_heads.configs.command_line import exit_status
from draft_heads.data.common.console import plain_console
from draft_heads.scripts import quickstart
script = "import os, sys, time; open(sys.argv[1], 'w').write(str(os.getpid())); time.sleep(60)"
command = ("python", "-c", script, sys.argv[1])
sys.exit(exit_status(lambda: quickstart.run(plain_console(), "a step", command)))
"""


def test_a_signal_to_the_quickstart_alone_ends_what_it_runs(tmp_path):
    """As a container that is stopped sends it; a terminal's Ctrl-C reaches every process itself."""
    file = tmp_path / "pid"
    process = subprocess.Popen([sys.executable, "-c", RUNS, str(file)], stdout=subprocess.DEVNULL)
    limit = time.monotonic() + 120
    while not (file.is_file() and file.read_text()) and time.monotonic() < limit:
        time.sleep(0.05)
    process.terminate()
    assert process.wait(30) == 130
    with pytest.raises(ProcessLookupError):
        os.kill(int(file.read_text()), 0)


def test_only_a_folder_of_a_quickstart_is_replaced(tmp_path):
    quickstart.check_earlier(tmp_path)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "conversations.jsonl").touch()  # stopped while it wrote its questions
    quickstart.check_earlier(tmp_path)
    (tmp_path / "data" / "thesis.txt").touch()
    with pytest.raises(ValueError, match="must be a new folder or one of an earlier quickstart"):
        quickstart.check_earlier(tmp_path)


def test_what_to_type_next_begins_with_the_environment_where_it_is_not_active(monkeypatch):
    here = Path(sys.executable).parent
    monkeypatch.setenv("PATH", str(here))
    assert quickstart.next_commands() == [*quickstart.NEXT]
    monkeypatch.setenv("PATH", "/nothing")
    assert quickstart.next_commands() == [f". {here}/activate", *quickstart.NEXT]


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ("--conversations 60", "--conversations must be at least 80, of which 64 are held out; got 60"),
        *((f"--{name} 0", f"--{name} must be 1 or more; got 0") for name in ("steps", "questions", "problems")),
    ],
)
def test_too_little_to_train_or_measure_is_refused_before_anything_is_done(tmp_path, monkeypatch, capsys, given, told):
    monkeypatch.setattr(sys, "argv", ["quickstart.py", "--output", str(tmp_path / "out"), *given.split()])
    with pytest.raises(SystemExit):
        quickstart.main()
    assert told in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("unexplained", "beta", "heads", "told"),
    [
        (0, 3.8, ["ctc"], None),
        (1, 3.8, ["ctc"], "quickstart: answers of ctc are not the target's own; report says which"),
        (0, 1.9, ["ctc"], "quickstart: β of ctc is below 2.0; see"),
        (0, 1.9, [], None),  # a few steps
    ],
)
def test_other_answers_and_heads_that_learned_nothing_end_it(tmp_path, monkeypatch, unexplained, beta, heads, told):
    monkeypatch.chdir(tmp_path)
    file = Path("report") / "report.json"
    file.parent.mkdir()
    rows = [{"drafter": "ngram", "category": None, "beta": 1.1, "lossless": {"unexplained": 0}}]
    rows.append({"drafter": "ctc", "category": None, "beta": beta, "lossless": {"unexplained": unexplained}})
    rows.append({"drafter": "ctc", "category": "math", "beta": 1.2, "lossless": {"unexplained": 0}})
    file.write_text(json.dumps({"results": rows}))
    if told is None:
        quickstart.check_report(file, heads)
        return
    with pytest.raises(SystemExit, match=re.escape(told)):
        quickstart.check_report(file, heads)
