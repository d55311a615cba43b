"""A small form of `make lossless`: every head, training-free drafter and hybrid on every target."""

import pytest

from draft_heads.scripts.checks.lossless_matrix import BUDGETS, NEW_TOKENS, check

TINY = "tests/tiny_target"
CELLS = [
    ("mistral", "float64"),  # sliding windows: the cell of the quick run
    *(
        pytest.param(*cell, marks=pytest.mark.slow)
        for cell in [
            ("llama", "float64"),
            ("qwen2", "float64"),
            ("qwen3", "float32"),
            (TINY, "float64"),
            (TINY, "float32"),
        ]
    ),
]


@pytest.mark.parametrize("name,dtype", CELLS)
def test_decoding_is_lossless(name, dtype):
    count = len(BUDGETS)  # each prompt has a budget of its own
    rows = check((name, dtype, count), steps=60)
    assert all(row["turns"] == count and row["tokens"] == count * NEW_TOKENS for row in rows)
    if dtype == "float64":
        assert all(row["identical_turns"] == count for row in rows), rows
    assert all(row["unexplained"] == 0 for row in rows), rows
    trained = {row["drafter"]: row["beta"] for row in rows if row["trained"] == "yes"}
    for drafter in ("ctc prefix", "chimera", "medusa", "hydra", "ctc + ngram"):
        assert trained[drafter] > 1.1, trained  # acceptances happened, so the trees were really walked
    free = {row["drafter"]: row["beta"] for row in rows if row["trained"] == "free"}
    assert min(free[name] for name in ("draft_model", "cascade", "ouroboros", "self_speculative")) > 1.1, free
