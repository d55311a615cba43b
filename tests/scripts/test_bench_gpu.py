"""What is measured as soon as there is a GPU runs on a CPU too, with a small shape."""

import json
import sys

import pytest

from draft_heads.scripts.bench import decode, gpu
from draft_heads.train.options import SHAPES

TINY = {**SHAPES["8b"], "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
SMALL = "--prompt_tokens 32 --new_tokens 6 --repeats 1 --train_rows 1 --train_tokens 48 --layers 2 --threads 1"


@pytest.mark.slow
def test_every_part_runs_and_what_fails_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(decode.SHAPES, "1b", {**TINY, "head_dim": 16, "vocab_size": 32000})
    output = tmp_path / "gpu.json"
    arguments = ["--output", str(output), "--shapes", "1b", "--targets", "llama", "--dtype", "float32"]
    monkeypatch.setattr(sys, "argv", ["gpu.py", *arguments, *SMALL.split()])
    assert gpu.run()
    found = json.loads(output.read_text())
    assert not found["failed"] and len(found["correctness"]) == 20
    steps = found["decoding 1b"]["over_plain_step"]
    assert {"8 nodes", "64 nodes", "chimera", "ctc+ngram", "hf generate", "vanilla eager"} <= steps.keys()
    assert found["training 1b"]["tokens_per_second"] > 0

    monkeypatch.setattr(gpu, "training", lambda *arguments: 1 / 0)
    monkeypatch.setattr(gpu, "decoding", lambda *arguments: None)
    assert not gpu.run()
    assert "ZeroDivisionError" in json.loads(output.read_text())["failed"]["training 1b"]
