"""Trees from CTC frames: against enumeration of Ψ, against each other, and the published code's traps."""

import itertools

import pytest
import torch

from draft_heads.inference.drafters.heads.ctc_search import (
    alignment_tree,
    build_tree,
    collapsed,
    prefix_tree,
    until_blank,
)
from tests.inference.trees import check_tree, only


def every_prefix(log_probs, bias=None):
    """{prefix: Ψ(prefix)} by enumerating every alignment; bias [V+1, V+1]: of each label before, the base's last."""
    frames, classes = log_probs.shape
    scores = {}
    for alignment in itertools.product(range(classes), repeat=frames):
        probability = 1.0
        for t, emitted in enumerate(alignment):
            before = collapsed(list(alignment[:t]), classes - 1)
            own = log_probs[t] if bias is None else (log_probs[t] + bias[before[-1] if before else -1]).log_softmax(-1)
            probability *= float(own[emitted].exp())
        text = tuple(collapsed(list(alignment), classes - 1))
        for length in range(1, len(text) + 1):
            scores[text[:length]] = scores.get(text[:length], 0.0) + probability
    return scores


def paths(tree):
    found = []
    for token, parent in zip(tree.tokens.tolist(), tree.parents.tolist()):
        found.append((found[parent] if parent >= 0 else ()) + (token,))
    return found


def random_frames(frames, vocabulary, seed):
    torch.manual_seed(seed)
    return torch.randn(frames, vocabulary + 1, dtype=torch.float64).mul(2).log_softmax(-1)


def test_the_worked_example_of_the_prefix_scores():
    log_probs = torch.tensor([[0.6, 1e-30, 0.4], [0.5, 0.5, 1e-30]]).log()
    tree = only(prefix_tree(log_probs[None], 3))
    scores = dict(zip(paths(tree), tree.log_probs.exp().tolist()))
    assert scores == pytest.approx({(0,): 0.8, (1,): 0.2, (0, 1): 0.3})


def test_a_chain_is_the_best_child_of_the_best_child():
    for seed in range(5):
        log_probs = random_frames(4, 4, seed)
        scores, path = every_prefix(log_probs), ()
        tree = only(build_tree(log_probs[None].float(), 3, "chain"))
        assert tree.parents.tolist() == [-1, 0, 1]
        for token, score in zip(tree.tokens.tolist(), tree.log_probs.exp().tolist()):
            best = max((child for child in scores if child[:-1] == path), key=scores.get)
            path = (*path, token)
            assert path == best and score == pytest.approx(scores[path], rel=1e-4)


def test_a_bias_of_zero_changes_no_tree():
    for seed in range(5):
        log_probs = random_frames(6, 30, seed)
        plain = prefix_tree(log_probs[None], 16)
        none = torch.zeros(31, 31, dtype=torch.float64)
        same = prefix_tree(
            log_probs[None], 16, bias_of=lambda classes, none=none: none[None, :1] if classes is None else none[classes]
        )
        assert torch.equal(plain.tokens, same.tokens) and torch.equal(plain.parents, same.parents)
        assert torch.allclose(plain.log_probs, same.log_probs, rtol=1e-12)


@pytest.mark.parametrize("context", [False, True])
@pytest.mark.parametrize("max_nodes", [1, 3, 8, 20])
@pytest.mark.parametrize("frames,vocabulary", itertools.product([1, 2, 3, 4], [1, 2, 4]))
def test_prefix_nodes_are_the_best_of_all_prefixes(frames, vocabulary, max_nodes, context):
    for seed in range(2 if context else 5):
        log_probs, bias, bias_of = random_frames(frames, vocabulary, seed), None, None
        if context:
            bias = torch.randn(vocabulary + 1, vocabulary + 1, dtype=torch.float64)

            def bias_of(classes, bias=bias):
                return bias[None, -1:] if classes is None else bias[classes]

        scores = every_prefix(log_probs, bias)
        tree = only(prefix_tree(log_probs[None], max_nodes, bias_of=bias_of))
        check_tree(tree)
        got = dict(zip(paths(tree), tree.log_probs.exp().tolist()))
        got = {path: score for path, score in got.items() if score > 1e-30}  # the rest is impossible text
        assert got == pytest.approx({path: scores[path] for path in got})
        best = sorted(scores.values(), reverse=True)[:max_nodes]
        assert sorted(got.values(), reverse=True) == pytest.approx(best)


@pytest.mark.parametrize("seed", range(20))
def test_no_raw_tree_has_a_higher_expected_accepted_length(seed):
    log_probs = random_frames(4, 4, seed)
    scores = every_prefix(log_probs)
    for max_nodes in (1, 2, 5, 12, 30):
        raw = only(alignment_tree(log_probs, max_nodes, collapse=True))
        check_tree(raw)
        prefix = only(prefix_tree(log_probs[None], len(raw)))
        total = sum(scores.get(path, 0.0) for path in paths(prefix))
        assert total >= sum(scores[path] for path in paths(raw)) - 1e-12


def test_considering_only_the_likeliest_labels_changes_nothing_when_the_rest_is_unlikely():
    torch.manual_seed(0)
    log_probs = (torch.randn(8, 3001, dtype=torch.float64) * 4).log_softmax(-1)
    exact = only(prefix_tree(log_probs[None], 16, labels_considered=3000))
    default = only(prefix_tree(log_probs[None], 16))
    assert paths(exact) == paths(default)
    assert torch.allclose(exact.log_probs, default.log_probs)


def test_collapse_merges_repeats_before_it_drops_blanks():
    assert collapsed([1, 1, 9, 1, 2, 2], blank=9) == [1, 1, 2]
    assert collapsed([9, 9], blank=9) == []
    assert until_blank([1, 1, 9, 2], blank=9) == [1, 1]


def one_hot_frames(alignment, classes):
    log_probs = torch.full((len(alignment), classes), 1e-9)
    log_probs[range(len(alignment)), alignment] = 1.0
    return log_probs.log_softmax(-1).mul(50).log_softmax(-1)


def test_a_doubled_word_needs_a_blank_between_and_stands_at_depth_two():
    tree = only(build_tree(one_hot_frames([0, 3, 0, 1], 4)[None], 3, "raw"))
    assert paths(tree)[:3] == [(0,), (0, 0), (0, 0, 1)]
    tree = only(build_tree(one_hot_frames([0, 0, 3, 1], 4)[None], 2, "raw"))
    assert paths(tree) == [(0,), (0, 1)]


def test_plain_trees_keep_repeats_and_stop_at_the_first_blank():
    tree = only(build_tree(one_hot_frames([0, 0, 3, 1], 4)[None], 2, "plain"))
    assert paths(tree) == [(0,), (0, 0)]


@pytest.mark.parametrize("mode", ["prefix", "raw", "plain"])
def test_the_node_budget_is_kept(mode):
    log_probs = random_frames(8, 50, 0)
    for max_nodes in (1, 2, 4, 16, 64):
        tree = build_tree(log_probs[None], max_nodes, mode)
        check_tree(only(tree))
        assert len(tree) <= max_nodes
        assert mode == "plain" or len(tree) == max_nodes


def test_unknown_modes_are_refused():
    log_probs = random_frames(2, 2, 0)
    with pytest.raises(ValueError, match="prefix, chain, raw, plain"):
        build_tree(log_probs, 4, "beam")
