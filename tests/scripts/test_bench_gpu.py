"""What is measured as soon as there is a GPU runs on a CPU too, with a small shape."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from draft_heads.configs.recipes import SHAPES
from draft_heads.inference.target.fused_decoder import FusedDecoder
from draft_heads.scripts.bench import answers_on_gpu, decode, gpu

TINY = {**SHAPES["8b"], "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
SMALL = "--prompt_tokens 32 --new_tokens 24 --repeats 1 --train_rows 1 --train_tokens 48 --layers 2 --threads 1"


def rehearse(tmp_path, monkeypatch, *more):
    """The exit value of a run with a small shape, and what it wrote."""
    monkeypatch.setitem(decode.SHAPES, "1b", {**TINY, "head_dim": 16, "vocab_size": 32000})
    output = tmp_path / "gpu.json"
    arguments = ["--output", str(output), "--shapes", "1b", "--dtype", "float32", *SMALL.split(), *more]
    monkeypatch.setattr(sys, "argv", ["gpu.py", *arguments])
    return gpu.run(), json.loads(output.read_text())


@pytest.mark.slow
def test_every_part_runs(tmp_path, monkeypatch):
    sound, found = rehearse(tmp_path, monkeypatch, "--targets", "llama", "--seconds", "3600")  # also on a busy machine
    assert sound and not found["failed"] and not found["no_time"]
    assert len(found["correctness llama"]) == 2 * (1 + len(answers_on_gpu.CHECKED))
    for name in ("8 nodes", "64 nodes", "chimera", "ctc+ngram", "plain eager", "ctc scripted"):
        assert found[f"1b: {name}"]["over_plain_step"]["median"] > 0
    assert found["1b: hf generate"]["median"] > 0 and found["1b: drafting hydra"]["median"] > 0
    assert 3 < found["1b: ctc scripted"]["beta"] < 4  # measured over the steps that were timed
    assert found["1b: training"]["tokens_per_second"] > 0
    assert found["correctness llama bfloat16"]["eagle3:head"]["unexplained"] == 0
    for words in answers_on_gpu.HEAD_WORDS:  # else worse drafts would take as many steps
        assert found["correctness llama"][words]["steps"] < 0.8 * found["correctness llama"]["vanilla"]["steps"]
    assert all(count > 0 for count, _ in found["1b: kernels of 32 nodes"].values())


def test_of_a_shape_only_the_parts_asked_for_run(tmp_path, monkeypatch):
    sound, found = rehearse(tmp_path, monkeypatch, "--targets", "--parts", "masked over", "drafting ctc")
    parts = {name: value for name, value in found.items() if name.startswith("1b: ") and value}
    assert sound and list(parts) == [
        "1b: drafting ctc",
        "1b: 0 nodes: masked over products",
        "1b: 32 nodes: masked over products",
    ]
    assert all(value["median"] > 0 for value in parts.values())


def test_what_fails_is_named_and_stops_nothing_else(tmp_path, monkeypatch):
    def fails(*_):
        raise RuntimeError("planted")

    parts = [("plain step", lambda: {"plain_step_ms": 1}), ("8 nodes", fails), ("ctc scripted", dict)]
    parts += [("training", fails), ("last", dict)]
    monkeypatch.setattr(gpu.StepTimer, "parts", lambda self: iter(parts))
    sound, found = rehearse(tmp_path, monkeypatch, "--targets")
    assert not sound and found["failed"].keys() == {"1b: 8 nodes", "1b: training"}
    assert "planted" in found["failed"]["1b: 8 nodes"] and found["1b: plain step"] and "1b: last" in found

    sound, found = rehearse(tmp_path, monkeypatch, "--targets", "llama", "--seconds", "0")
    assert not sound and found["no_time"] == ["correctness llama", "correctness llama bfloat16", "1b: target"]


def test_a_target_that_runs_through_its_modules_is_a_failure(tmp_path, monkeypatch):
    """A fused forward that fails on a GPU falls back to the modules, whose answers are right: times would be theirs."""
    monkeypatch.setattr(FusedDecoder, "__call__", lambda *_: 1 / 0)
    sound, found = rehearse(tmp_path, monkeypatch, "--targets", "llama")
    assert not sound and {"correctness llama", "1b: target"} <= found["failed"].keys()
    assert "must run through the fused forward" in found["failed"]["correctness llama"]


def test_worse_drafts_with_graphs_are_found():
    steps = {"vanilla": 48, "vanilla, graphs": 48, "ngram": 12, "ngram, graphs": 16, "ctc:head": 40}
    steps |= {"ctc:head, graphs": 46, "draft, graphs": 9}
    counted = {words: {"steps": taken} for words, taken in steps.items()} | {"draft": {"unexplained": 4}}
    assert answers_on_gpu.draft_worse(counted) == ["ngram, graphs"]


def test_a_tensor_off_the_device_is_found():
    watching = answers_on_gpu.OnDevice(torch.device("meta"))
    with watching:
        torch.ones(2, device="meta") + torch.ones(2, device="meta")
        assert not watching.elsewhere
        torch.ones(2)
    assert watching.elsewhere == {"aten.ones.default"}


def test_it_needs_neither_datasets_nor_deepspeed_nor_an_installed_package(tmp_path):
    """As on a machine that somebody lends: a checkout, torch and transformers."""
    program = (
        "import sys, importlib.machinery as m\n"
        "real = m.PathFinder.find_spec\n"
        "absent = ('datasets', 'xxhash', 'deepspeed', 'peft', 'tensorboard', 'matplotlib', 'fastapi')\n"
        "m.PathFinder.find_spec = staticmethod("
        "lambda name, *rest: None if name.split('.')[0] in absent else real(name, *rest))\n"
        "import draft_heads.scripts.bench.gpu"
    )
    packages = tmp_path / "draft_heads"
    packages.mkdir()
    for room in ("configs", "data", "heads", "inference", "scripts", "train"):
        (packages / room).symlink_to(Path(gpu.__file__).parents[2] / room)
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    subprocess.run([sys.executable, "-c", program], env=environment, check=True, timeout=120)
