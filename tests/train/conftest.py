"""A distilled dataset and a run of six steps that nothing interrupts; tests only read them."""

import json
import re

import pytest

from draft_heads.data.synthetic.corpus import conversations
from tests.running import run_script
from tests.train.runs import TARGET, run


@pytest.fixture(scope="session")
def distil(tmp_path_factory):
    written = conversations(48, 5, "heldout")
    command = ["scripts/distill.py", "--target", TARGET, "--labels", "argmax"]

    def into(folder, *flags, rows=written):
        source = tmp_path_factory.mktemp("source") / "conversations.jsonl"
        source.write_text("".join(json.dumps(row) + "\n" for row in rows))
        status, told = run_script(*command, "--dataset", str(source), "--output", str(folder), *flags)
        assert status == 0, told
        return str(folder)

    return into


@pytest.fixture(scope="session")
def dataset(distil, tmp_path_factory):
    return distil(tmp_path_factory.mktemp("distilled") / "out")


@pytest.fixture(scope="session")
def cached(distil, tmp_path_factory):
    """The dataset with its hidden states."""
    return distil(tmp_path_factory.mktemp("cached") / "out", "--hidden_states", "float32")


@pytest.fixture(scope="session")
def uninterrupted(dataset, tmp_path_factory):
    output = tmp_path_factory.mktemp("run") / "a whole run"
    status, told = run(dataset, output)
    assert status == 0, told
    assert re.search(
        rf"held-out rows: loss \S+, simulated β .*, top-1 accuracy by offset .*\nhead: {output}/head\n", told
    )
    return output
