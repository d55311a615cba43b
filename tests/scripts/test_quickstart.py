"""The quickstart with every head, in small."""

import io
import json
import sys
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
    done = SimpleNamespace(returncode=0)
    monkeypatch.setattr(quickstart.subprocess, "run", lambda words, **_: ran.append(words) or done)
    console = plain_console()
    console.file, console.width = io.StringIO(), 80
    target, head = str(quickstart.TARGET), f"ctc={quickstart.ROOT}/runs/ctc/head"
    quickstart.run(console, "a step", "scripts/evaluate.py", "--target", target, head, "/elsewhere/x")
    assert ran[0][1:] == ["scripts/evaluate.py", "--target", "data/tiny_target", "ctc=runs/ctc/head", "/elsewhere/x"]
    printed = console.file.getvalue()
    assert "$ python scripts/evaluate.py --target data/tiny_target ctc=runs/ctc/head /elsewhere/x" in printed


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
