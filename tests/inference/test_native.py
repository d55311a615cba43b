"""The operations in C++ against the same in torch."""

import os
import sys

import pytest
import torch

from draft_heads.heads.checkpoint import head_variants
from draft_heads.inference.drafters.registry import drafter_for
from draft_heads.inference.engine import DecodingEngine
from draft_heads.inference.generation import GenerationSettings
from draft_heads.inference.native import library
from tests.inference.models import load_target, make_head


@pytest.fixture(scope="module", autouse=True)
def loaded():
    assert library.load_library(), "the tests need a C++ compiler"


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


def test_a_terminals_ctrl_c_does_not_reach_the_compiler(tmp_path):
    """Its signal goes to one session; the program, which goes on after it, would keep that nothing was compiled."""
    session = "import os, sys; open(sys.argv[-1], 'w').write(str(os.getsid(0)))"
    library._compile([sys.executable, "-c", session], tmp_path / "made")
    assert int((tmp_path / "made").read_text()) != os.getsid(0)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_cache_that_cannot_be_written_is_no_reason_to_stop(monkeypatch, tmp_path, caplog):
    tmp_path.chmod(0o500)
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    assert not library.load_library.__wrapped__() and "did not compile" in caplog.text


@pytest.mark.parametrize(("kind", "settings"), head_variants().values(), ids=head_variants())
def test_no_head_drafts_by_the_product_that_is_slow_for_few_rows(monkeypatch, kind, settings):
    """torch's own takes more than twice as long for a few rows of a large matrix, as the vocabulary's is."""
    target, linear, slow = load_target("llama", torch.float32), torch.nn.functional.linear, []
    assert target.fused is not None
    engine = DecodingEngine(target, drafter_for(make_head(target, kind, **settings), target, 8))

    def spy(states, weight, *bias):
        if states.numel() // states.shape[-1] <= 8:
            slow.append(tuple(weight.shape))
        return linear(states, weight, *bias)

    propose = engine.drafter.propose
    with monkeypatch.context() as patch:
        patch.setattr(
            engine.drafter, "propose", lambda: (patch.setattr(torch.nn.functional, "linear", spy), propose())[1]
        )
        engine.generate(list(range(3, 40)), GenerationSettings(8, ()))
    large = target.vocab_size, target.config.hidden_size
    assert not [shape for shape in slow if shape[0] >= large[0] and shape[1] >= large[1]]
