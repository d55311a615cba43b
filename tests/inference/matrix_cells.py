"""One cell of `make lossless`, small: seven prompts, one of every node budget."""

from draft_heads.scripts.checks.lossless_matrix import RANDOM_TARGETS, check

TARGETS = [*RANDOM_TARGETS, "data/tiny_target"]


def check_cell(name, dtype):
    """Every head, training-free drafter and hybrid on one target in one precision."""
    rows = check(name, dtype, 7, steps=60)
    assert all(row["turns"] == 7 and row["tokens"] == 448 for row in rows)
    if dtype == "float64":
        assert all(row["identical_turns"] == 7 for row in rows), rows
    assert all(row["unexplained"] == 0 for row in rows), rows
    trained = {row["drafter"]: row["beta"] for row in rows if row["trained"] == "yes"}
    for drafter in ("ctc prefix", "chimera", "medusa", "hydra", "ctc + ngram"):
        assert trained[drafter] > 1.1, trained  # acceptances happened, so the trees were really walked
    free = {row["drafter"]: row["beta"] for row in rows if row["trained"] == "free"}
    assert min(free[name] for name in ("draft_model", "cascade", "ouroboros", "self_speculative")) > 1.1, free
