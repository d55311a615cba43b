"""A small form of `make lossless`: usual heads, training-free drafters and hybrids on every target, options on two."""

import pytest

from draft_heads.inference.drafters.registry import DRAFTERS, HEAD_DRAFTERS
from draft_heads.scripts.checks.lossless_matrix import BUDGETS, FREE, KINDS, NEW_TOKENS, USUAL, check

TINY = "tests/tiny_target"
CELLS = [
    ("mistral", "float64", USUAL),  # sliding windows: the cell of the quick run
    *(
        pytest.param(*cell, marks=pytest.mark.slow)
        for cell in [
            ("llama", "float64", USUAL),
            ("qwen2", "float64", KINDS),
            ("qwen3", "float32", USUAL),
            (TINY, "float64", USUAL),
            (TINY, "float32", KINDS),
        ]
    ),
]


@pytest.mark.parametrize("name,dtype,kinds", CELLS)
def test_decoding_is_lossless(name, dtype, kinds):
    count = len(BUDGETS)  # each prompt has a budget of its own
    rows = check((name, dtype, count), tuple(kinds), steps=60)
    assert all(row["turns"] == count and row["tokens"] == count * NEW_TOKENS for row in rows)
    if dtype == "float64":
        assert all(row["identical_turns"] == count for row in rows), rows
    assert all(row["unexplained"] == 0 for row in rows), rows
    other_trees = (" chain", " raw", " plain")
    trained = [row for row in rows if row["trained"] == "yes" and not row["drafter"].endswith(other_trees)]
    free = [row for row in rows if row["drafter"] in ("draft_model", "cascade", "ouroboros", "self_speculative")]
    assert all(row["beta"] > 1.1 for row in trained + free), rows  # acceptances: the trees were really walked


def test_every_training_free_drafter_is_in_the_matrix_but_the_one_that_needs_a_datastore():
    assert DRAFTERS.keys() - HEAD_DRAFTERS.keys() - FREE.keys() == {"vanilla", "rest"}
