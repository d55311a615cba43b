"""Random trees through every way to attend and to run a step: the answers are transformers' own."""

import pytest

from draft_heads.inference.target.tree_attention import TREE_ATTENTION
from draft_heads.scripts.checks.lossless_trees import RUNS, SAMPLINGS, check


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("path", TREE_ATTENTION)
@pytest.mark.parametrize("name", ["mistral", "qwen3"])
def test_no_tree_changes_an_answer(name, path, run):
    for sampling in SAMPLINGS:
        counts = check(name, "float64", path, run, sampling, turns=2)
        assert counts.identical_turns == counts.turns == 2
