"""A small form of `make lossless`: every row of the matrix once, spread over targets and precisions.

All heads and drafters on the target `llama`: `tests/test_every_head.py` and `tests/test_every_drafter.py`.
"""

import pytest

from draft_heads.heads.chimera import ChimeraHead
from draft_heads.inference.drafters.registry import DRAFTERS, HEAD_DRAFTERS
from draft_heads.scripts.checks.lossless_matrix import BUDGETS, FREE, KINDS, NEW_TOKENS, USUAL, _Cell, check

QUICK = ("ctc", "free")
CELLS = [
    ("mistral", "float64", QUICK),  # sliding windows
    *(
        pytest.param(*cell, marks=pytest.mark.slow)
        for cell in [
            ("mistral", "float64", [kind for kind in USUAL if kind not in QUICK]),
            ("qwen2", "float64", [kind for kind in KINDS if kind not in USUAL]),
            ("qwen3", "float32", USUAL),
            ("tests/tiny_target", "float32", USUAL),
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


def test_a_head_that_copies_the_first_layer_is_left_out_only_where_that_layer_is_not_a_llamas(monkeypatch):
    random_llama, other = (_Cell(name, "float64", 1, 0) for name in ("llama", "qwen3"))
    assert not random_llama.refuses("chimera_layer") and other.refuses("chimera_layer")
    monkeypatch.setattr(ChimeraHead, "start_from", lambda *_: (_ for _ in ()).throw(ValueError("broken")))
    with pytest.raises(ValueError, match="broken"):
        random_llama.refuses("chimera_layer")
