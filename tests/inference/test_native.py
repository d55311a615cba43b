"""The operations in C++ against the same in torch."""

import itertools
import os

import pytest
import torch

from draft_heads.inference.drafters.heads.ctc_search import build_tree, prefix_tree
from draft_heads.inference.native import library
from tests.inference.test_ctc_search import every_prefix, paths
from tests.inference.trees import check_tree, only


@pytest.fixture(scope="module", autouse=True)
def loaded():
    assert library.load_library(), "the tests need a C++ compiler"


def random_frames(frames, vocabulary, seed, spread=3.0):
    noise = torch.randn(frames, vocabulary + 1, generator=torch.Generator().manual_seed(seed))
    return (noise * spread).log_softmax(-1)


def native_tree(log_probs, max_nodes, max_depth=None):
    assert log_probs.dtype == torch.float32
    return only(build_tree(log_probs[None], max_nodes, max_depth=max_depth))


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
        other = only(prefix_tree(log_probs[None].double(), max_nodes, max_depth, labels_considered=vocabulary))
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
        library.ctc_prefix_tree(torch.full((3, 9), torch.nan), 4, 3)


@pytest.mark.parametrize("outputs,inputs", [(1, 1), (32, 64), (33, 5), (70, 512), (100, 513), (31, 2049)])
def test_a_rows_product_is_right_and_the_same_among_any_number_of_rows(outputs, inputs):
    pick = torch.Generator().manual_seed(outputs)
    weight = torch.randn(outputs, inputs, generator=pick)
    blocks = library.column_blocks(weight)
    rows = torch.randn(20, inputs, generator=pick) * torch.logspace(-3, 3, 20)[:, None]
    exact = rows.double() @ weight.double().T
    size = rows.double().abs() @ weight.double().abs().T
    product = library.skinny_matmul(rows, blocks, outputs)
    assert ((product - exact).abs() <= 2e-6 * size).all()
    for count in (*range(1, 14), 17):
        assert torch.equal(library.skinny_matmul(rows[:count], blocks, outputs), product[:count])
    strided = rows.repeat(1, 2)[:, :inputs]
    assert torch.equal(library.skinny_matmul(strided, blocks, outputs), product)
    assert library.skinny_matmul(rows[:0], blocks, outputs).shape == (0, outputs)


def test_a_column_block_holds_32_outputs_input_by_input():
    weight = torch.arange(99.0).view(33, 3)
    blocks = library.column_blocks(weight)
    assert blocks.shape == (2, 3, 32)
    assert blocks[0, 2, 5] == weight[5, 2] and blocks[1, 1, 0] == weight[32, 1] and blocks[1, :, 1:].eq(0).all()


def test_a_matrix_made_for_other_rows_is_refused():
    blocks = library.column_blocks(torch.ones(33, 4))
    for rows, outputs in ((torch.ones(2, 5), 33), (torch.ones(2, 4), 32), (torch.ones(2, 4).double(), 33)):
        with pytest.raises(RuntimeError, match="rows"):
            library.skinny_matmul(rows, blocks, outputs)


def test_large_products_on_two_threads():
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        rows, blocks = torch.randn(9, 512), library.column_blocks(torch.randn(2000, 512))
        wide = library.skinny_matmul(rows, blocks, 2000)
        torch.set_num_threads(1)
        assert torch.equal(wide, library.skinny_matmul(rows, blocks, 2000))
    finally:
        torch.set_num_threads(threads)


def test_without_a_compiler_it_says_so_in_one_line_and_does_without(monkeypatch, tmp_path, caplog):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    for compiler in ("no-such-compiler", "false"):
        monkeypatch.setenv("CXX", compiler)
        assert not library.load_library.__wrapped__()
        said = caplog.messages[-1]
        assert f"{compiler} did not compile" in said and "install g++" in said and "\n" not in said
    assert len(caplog.messages) == 2
    assert not any(path.is_file() for path in tmp_path.rglob("*"))
    monkeypatch.setattr(library, "load_library", lambda: False)
    log_probs = random_frames(7, 100, 0)
    assert paths(only(build_tree(log_probs[None], 7))) == paths(only(prefix_tree(log_probs[None], 7)))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_cache_that_cannot_be_written_is_no_reason_to_stop(monkeypatch, tmp_path, caplog):
    tmp_path.chmod(0o500)
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    assert not library.load_library.__wrapped__() and "did not compile" in caplog.text
