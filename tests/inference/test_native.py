"""The loops in C++ against the same in torch, with every set of instructions this processor has."""

import itertools
import os

import pytest
import torch

from draft_heads.inference.drafters.heads.ctc_search import build_tree, prefix_tree
from draft_heads.inference.native import library
from draft_heads.inference.target.compiled import program
from draft_heads.inference.tree import check_tree
from tests.inference.test_ctc_search import every_prefix, paths


@pytest.fixture(scope="module", autouse=True)
def loaded():
    assert library.load(), "the tests need a C++ compiler"


def random_frames(frames, vocabulary, seed, spread=3.0):
    noise = torch.randn(frames, vocabulary + 1, generator=torch.Generator().manual_seed(seed))
    return (noise * spread).log_softmax(-1)


def native_tree(log_probs, max_nodes, max_depth=None):
    assert log_probs.dtype == torch.float32
    return build_tree(log_probs, max_nodes, max_depth=max_depth)


@pytest.mark.parametrize("max_nodes", [1, 3, 8, 20])
@pytest.mark.parametrize("frames,vocabulary", itertools.product([1, 2, 3, 4], [1, 2, 4]))
def test_nodes_are_the_best_of_all_prefixes(frames, vocabulary, max_nodes):
    for seed in range(5):
        log_probs = random_frames(frames, vocabulary, seed, spread=2)
        scores = every_prefix(log_probs.double())
        tree = native_tree(log_probs, max_nodes)
        check_tree(tree)
        got = dict(zip(paths(tree), tree.log_probs.exp().tolist()))
        got = {path: score for path, score in got.items() if score > 1e-30}  # the rest is impossible text
        assert got == pytest.approx({path: scores[path] for path in got}, rel=1e-4)
        best = sorted(scores.values(), reverse=True)[:max_nodes]
        assert sorted(got.values(), reverse=True) == pytest.approx(best, rel=1e-4)


@pytest.mark.parametrize("spread", [0.5, 3, 8])
def test_the_tree_is_that_of_the_search_in_torch(spread):
    for seed in range(60):
        pick = torch.Generator().manual_seed(seed)
        frames, max_nodes = (int(torch.randint(1, top, (), generator=pick)) for top in (12, 65))
        vocabulary = (10, 50, 1024)[seed % 3]
        max_depth = (None, 2, frames)[seed % 7 % 3]
        log_probs = random_frames(frames, vocabulary, seed, spread)
        tree = native_tree(log_probs, max_nodes, max_depth)
        other = prefix_tree(log_probs.double(), max_nodes, max_depth, labels_considered=vocabulary)
        check_tree(tree)
        assert len(tree) == len(other)
        assert torch.allclose(tree.log_probs.double().exp(), other.log_probs.exp(), rtol=1e-4, atol=1e-9)
        ranked = other.log_probs.sort().values
        if len(tree) < 2 or (ranked.diff() > 1e-4).all():
            assert paths(tree) == paths(other)


def test_labels_in_the_shade_of_no_other_are_found():
    """Many labels, all alike: none may be left out for the sum of its probabilities."""
    log_probs = torch.zeros(5, 2001).log_softmax(-1)
    scores = native_tree(log_probs, 64).log_probs.exp()
    assert torch.allclose(scores, scores[0].expand(64)) and scores[0] == pytest.approx(1 / 2001, rel=2e-3)


def test_certain_frames_leave_the_rest_of_the_budget_to_the_impossible():
    log_probs = torch.full((3, 6), -torch.inf)
    log_probs[range(3), [2, 5, 2]] = 0.0  # 2 ε 2
    tree = native_tree(log_probs, 4)
    check_tree(tree)
    likely = {path for path, score in zip(paths(tree), tree.log_probs.tolist()) if score > -1}
    assert likely == {(2,), (2, 2)} and len(tree) == 4


def test_a_head_that_says_nan_is_refused():
    with pytest.raises(RuntimeError, match="probs must be probabilities; got nan"):
        library.prefix_tree(torch.full((3, 9), torch.nan), 4, 3)


@pytest.mark.parametrize("frames,vocabulary,max_nodes", [(7, 50, 7), (3, 2, 20), (1, 3, 9), (4, 1, 9)])
def test_shapes_are_known_before(frames, vocabulary, max_nodes):
    probs = random_frames(frames, vocabulary, 0).exp()
    torch.library.opcheck(torch.ops.draft_heads.prefix_tree, (probs, max_nodes, min(frames, max_nodes)))
    torch.library.opcheck(
        torch.ops.draft_heads.float_rows, (torch.randn(3, 10), library.in_blocks(torch.ones(20, 10)), 20)
    )


def test_a_compiled_search_is_the_same_search():
    class Searching:
        def tree(self, log_probs):
            return build_tree(log_probs, 7).tensors()

    searching = Searching()
    fast = program(searching.tree, torch.device("cpu"))
    for seed in range(3):
        log_probs = random_frames(7, 100, seed)
        for fresh, own in zip(fast(log_probs), searching.tree(log_probs)):
            assert torch.allclose(fresh, own)


@pytest.mark.parametrize("outputs,inputs", [(1, 1), (32, 64), (33, 5), (70, 512), (100, 513), (31, 2049)])
def test_products_in_float32_are_as_good_as_others(outputs, inputs):
    pick = torch.Generator().manual_seed(outputs)
    weight = torch.randn(outputs, inputs, generator=pick)
    blocks = library.in_blocks(weight)
    rows = torch.randn(20, inputs, generator=pick) * torch.logspace(-3, 3, 20)[:, None]
    exact = rows.double() @ weight.double().T
    size = rows.double().abs() @ weight.double().abs().T
    by_set = []
    for instructions in (0, 1, 2, 3):
        try:
            by_set.append(torch.ops.draft_heads.float_rows_by(rows, blocks, outputs, instructions))
        except RuntimeError:
            continue
        assert ((by_set[-1] - exact).abs() <= 2e-6 * size).all()
    assert len(by_set) >= 2 and torch.equal(library.float_rows(rows, blocks, outputs), by_set[0])
    assert all(torch.equal(by_set[0], other) for other in by_set[2:])  # those that multiply and add in one
    for count in (*range(1, 14), 17):  # a row's result is the same in whatever company
        assert torch.equal(library.float_rows(rows[:count], blocks, outputs), by_set[0][:count])
    strided = rows.repeat(1, 2)[:, :inputs]
    assert torch.equal(library.float_rows(strided, blocks, outputs), by_set[0])
    assert library.float_rows(rows[:0], blocks, outputs).shape == (0, outputs)


def test_a_matrix_made_for_other_rows_is_refused():
    blocks = library.in_blocks(torch.ones(33, 4))
    for rows, outputs in ((torch.ones(2, 5), 33), (torch.ones(2, 4), 32), (torch.ones(2, 4).double(), 33)):
        with pytest.raises(RuntimeError, match="rows"):
            library.float_rows(rows, blocks, outputs)


def test_large_float_products_on_two_threads():
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        rows, blocks = torch.randn(9, 512), library.in_blocks(torch.randn(2000, 512))
        wide = library.float_rows(rows, blocks, 2000)
        torch.set_num_threads(1)
        assert torch.equal(wide, library.float_rows(rows, blocks, 2000))
    finally:
        torch.set_num_threads(threads)


def test_without_a_compiler_it_says_so_and_does_without(monkeypatch, tmp_path):
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    with pytest.warns(UserWarning, match=r"no-such-compiler did not make .*install g\+\+"):
        assert not library.load.__wrapped__()
    monkeypatch.setenv("CXX", "false")
    with pytest.warns(UserWarning, match="false did not make"):
        assert not library.load.__wrapped__()
    assert not any(path.is_file() for path in tmp_path.rglob("*"))
    monkeypatch.setattr(library, "load", lambda: False)
    log_probs = random_frames(7, 100, 0)
    assert paths(build_tree(log_probs, 7)) == paths(prefix_tree(log_probs, 7))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_cache_that_cannot_be_written_is_no_reason_to_stop(monkeypatch, tmp_path):
    tmp_path.chmod(0o500)
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    with pytest.warns(UserWarning, match="did not make"):
        assert not library.load.__wrapped__()
