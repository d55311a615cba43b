"""Every command of README and guides runs as it is written, on a tiny target, shortened by documented options."""

import io
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path

import pytest

from draft_heads.configs.options import option_names
from draft_heads.data.synthetic.corpus import conversations
from draft_heads.heads import base
from draft_heads.heads.checkpoint import HEADS, head_classes
from draft_heads.inference.target.target import Target
from tests.inference.models import make_head
from tests.running import ROOT, run_script

GUIDES = ("README.md", "CONTRIBUTING.md") + tuple(
    f"docs/{name}.md" for name in ("training", "choosing", "many_gpus", "serving", "replay")
)
TARGET, TARGETS = "tests/tiny_target", ("Qwen/Qwen3-8B", "data/tiny_target")
LAUNCHERS = re.compile(r"^(deepspeed|torchrun)( --(num_gpus|nproc_per_node|hostfile) \S+)? ")

SHORT = {
    "scripts/distill.py": "--limit 6 --max_new_tokens 8 --max_length 96",
    "train": "--max_steps 2 --held_out 4 --simulate_rows 2 --anchors 4 --eval_strategy no --use_cpu",
    "scripts/evaluate.py": "--limit 1 --max_new_tokens 8",
    "scripts/tune_tree.py": "--rows 4 --prompts 2 --new_tokens 8 --nodes 4 8 --temperatures 1",
    "scripts/chat.py": "--max_new_tokens 8",
}
"""What is added to a command."""

ELSEWHERE = {
    "make": "make's targets are what CI runs, or take hours",
    ". .venv/bin/activate": "the tests run in an environment",
    "pip": "the tests' environment has it",
    "vllm": "make check-engines runs it",
    "--engine openai": "tests/data/labels/test_answer_server.py has servers",
    "scripts/serve.py": "below, with its client",
    "scripts/checks/seeded_defects.py": "an hour; tests/scripts/test_seeded_defects.py",
    "scripts/checks/lossless_matrix.py": "tests/inference/test_lossless_matrix.py",
    "python -m pytest": "the tests are running",
    "python train/head.py --head linear ": "the reader of CONTRIBUTING writes it",
    "python scripts/evaluate.py --target data/tiny_target --drafters linear=": "the reader of CONTRIBUTING writes it",
    "python scripts/evaluate.py --target data/tiny_target --drafters repeat ": "the reader of CONTRIBUTING writes it",
}
"""Commands that are not run here, with the reason or the test that runs them."""


def written_commands():
    """(guide, command) of all, each in one line and without its comment."""
    for guide in GUIDES:
        text = (ROOT / guide).read_text(encoding="utf-8").replace("\\\n", " ")
        text = re.sub(r"```.*?```", "", text, flags=re.DOTALL).partition("## Every file")[0]
        for line in re.findall(r"^    (\S.*)", text, re.MULTILINE):
            yield guide, re.sub(r"\s+", " ", line.split("    #")[0]).strip()


COMMANDS = [
    pytest.param(command, id=f"{Path(guide).stem}: {command[:60]}")
    for guide, command in written_commands()
    if not any(command.startswith(word) or (word[0] == "-" and word in command) or word in command.split()[:2]
               for word in ELSEWHERE)
]  # fmt: skip


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """A folder with the files that the guides name."""
    folder = tmp_path_factory.mktemp("guides")
    rows = "".join(json.dumps(row) + "\n" for row in conversations(40, 5, "heldout"))
    (folder / "sharegpt.json").write_text(rows)
    for name in ("mt_bench", "my_questions"):
        (folder / f"{name}.jsonl").write_text('{"question_id": 1, "category": "a", "turns": ["Name a fruit."]}\n')
    (folder / "gsm8k.jsonl").write_text('{"question": "What is 3 plus 4?", "answer": "7 #### 7"}\n')
    shutil.copy(folder / "sharegpt.json", folder / "sharegpt_small.json")
    turn = {"turns": ["An apple."], "idxs": [3], "new_tokens": [4], "wall_time": [1.0]}
    (folder / "mt_bench_vc_7b_baseline.jsonl").write_text(json.dumps({"question_id": 1, "choices": [turn]}) + "\n")
    (folder / "llama2-tokenizer").symlink_to(ROOT / TARGET)
    (folder / "tests").symlink_to(ROOT / "tests")
    (folder / "configs").symlink_to(ROOT / "configs")
    target = Target.from_pretrained(str(ROOT / TARGET), device="cpu")
    for kind in ("ctc", "eagle3", "medusa"):
        layers = {"target_layers": [1, 2, 3]} if kind == "eagle3" else {}
        head = make_head(target, kind, target_fingerprint=target.fingerprint(), **layers)
        head.config.target = str(ROOT / TARGET)
        head.save_pretrained(folder / "runs" / kind / "head")
        head.save_pretrained(folder / "runs" / "quickstart" / kind / "head")
    status, told = run_script(
        *("scripts/distill.py", "--target", str(ROOT / TARGET), "--dataset", str(folder / "sharegpt.json")),
        *("--labels", "generate", "--max_new_tokens", "24", "--output", str(folder / "runs/distilled")),
    )
    assert status == 0, told
    store = "--tokenizer", str(ROOT / TARGET), "--output", str(folder / "runs/datastore")
    status, told = run_script("scripts/build_datastore.py", "--dataset", str(folder / "sharegpt.json"), *store)
    assert status == 0, told
    return folder


def words_of(command):
    """The words to run, for the tiny target and shortened."""
    words = shlex.split(LAUNCHERS.sub("python ", command))
    assert words[0] == "python", f"neither run nor excepted: {command}"
    words = [TARGET if word in TARGETS else word.replace("/shared/runs", "runs") for word in words[1:]]
    if "--deepspeed" in words:  # tests/train/test_many_processes.py launches it
        place = words.index("--deepspeed")
        assert (ROOT / words[place + 1]).is_file()
        del words[place : place + 2]
    return [word for word in words if word != "--bf16"] + SHORT.get(
        "train" if words[0].startswith("train/") else words[0], ""
    ).split()


def test_the_table_of_options_names_every_option_of_every_head():
    table = re.findall(r"^\| (`--.*?) \|", (ROOT / "docs/training.md").read_text(encoding="utf-8"), re.MULTILINE)
    named = set(re.findall(r"--(\w+)", " ".join(table)))
    assert {name for kind in HEADS for name in option_names(head_classes(kind)[1])} <= named


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_of_the_guides_runs(prepared, tmp_path, monkeypatch, command):
    script, *flags = words_of(command)
    shutil.copytree(prepared, tmp_path / "here", symlinks=True)
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setattr(sys, "stdin", io.StringIO("Name a fruit.\n/drafter\n/quit\n"))
    for option, value in pairwise(flags):
        if option in ("--output", "--output_dir"):
            if script.startswith("train/") or value in ("runs/distilled", "runs/datastore"):
                shutil.rmtree(value, ignore_errors=True)
            written = Path(value)
    status, told = run_script(script, *flags)
    assert status == 0, told
    if any(option in ("--output", "--output_dir") for option in flags):
        assert written.exists()


def blocks_of(guide):
    """The Python blocks of a guide."""
    return re.findall(r"```python\n(.*?)```", (ROOT / guide).read_text(encoding="utf-8"), re.DOTALL)


@pytest.mark.parametrize("command", sorted({line for _, line in written_commands() if "scripts/serve.py" in line}))
def test_the_server_and_the_client_of_the_guide(prepared, tmp_path, command):
    words = words_of(command)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    with (tmp_path / "log").open("w") as log:
        name = ["--served_model_name", "Qwen/Qwen3-8B", "--port", port]
        words = [sys.executable, str(ROOT / words[0]), *words[1:], *name]
        server = subprocess.Popen(
            words, cwd=prepared, stdout=log, stderr=log, env={**os.environ, "OMP_NUM_THREADS": "1"}
        )
        try:
            wait_for(port, server, tmp_path / "log")
            client = blocks_of("docs/serving.md")[0].replace(":8000", f":{port}")
            done = subprocess.run([sys.executable, "-c", client], capture_output=True, text=True, check=True)
            assert done.stdout.strip()
        finally:
            server.send_signal(signal.SIGTERM)
            assert server.wait(30) in (0, -signal.SIGTERM)


def wait_for(port, server, log):
    """Until the port answers."""
    for _ in range(600):
        assert server.poll() is None, log.read_text()
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", int(port))) == 0:
                return
        time.sleep(0.1)
    raise AssertionError(log.read_text())


def test_the_lines_that_pass_a_head_on(prepared, tmp_path, monkeypatch):
    sent = []

    class Hub:
        def create_repo(self, repo_id, private, exist_ok):
            assert private and exist_ok

        def upload_folder(self, repo_id, folder_path):
            sent.append((repo_id, sorted(path.name for path in Path(folder_path).iterdir())))

    monkeypatch.setattr(base, "HfApi", Hub)
    shutil.copytree(prepared / "runs", tmp_path / "runs")
    monkeypatch.chdir(tmp_path)
    exec(blocks_of("docs/serving.md")[1], {})
    files = ["README.md", "config.json", "model.safetensors", "provenance.json"]
    assert sent == [("me/my-head", files)] and sorted(path.name for path in Path("copy").iterdir()) == files


def test_the_table_of_drafters_is_the_one_that_evaluate_prints():
    status, printed = run_script("scripts/evaluate.py", "--list_drafters")
    assert status == 0 and printed.startswith("| drafter | drafts |")
    assert printed in (ROOT / "docs/decoding.md").read_text(encoding="utf-8"), (
        "put what `python scripts/evaluate.py --list_drafters` prints into docs/decoding.md"
    )
