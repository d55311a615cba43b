"""Pools on disk: what is kept comes back, and what is damaged or another's is refused with a sentence."""

import pytest
import torch

from draft_heads.inference.drafters.models.ouroboros import OuroborosDrafter
from draft_heads.inference.drafters.registry import DrafterSpec, build_drafter
from draft_heads.inference.drafters.text.ngram import NgramDrafter
from draft_heads.inference.drafters.text.pool_file import PoolFile
from draft_heads.inference.engine import DecodingEngine
from draft_heads.inference.generation import GenerationSettings
from tests.inference.models import load_target, make_prompts, small_model
from tests.inference.text_drafters import begin, proposal


@pytest.fixture(scope="module")
def target():
    return load_target("llama", torch.float64)


def test_ngrams_are_there_again_in_the_next_process(target, tmp_path):
    def drafter():
        return NgramDrafter(n=4, k=3, pool=PoolFile(tmp_path / "deep" / "pool", "ngram", target))

    first = drafter()
    begin(first, [1, 2, 3, 4])
    begin(first, [7, 8])
    first.close()
    second = drafter()
    begin(second, [9, 1, 2])
    assert proposal(second) == [(3,), (3, 4)]
    second.close()
    third = drafter()
    begin(third, [5, 9, 1])
    assert proposal(third)[0] == (2,)


def test_phrases_are_there_again_in_their_order(target, tmp_path):
    def drafter():
        return OuroborosDrafter(small_model(), gamma=2, w=3, p=3, pool=PoolFile(tmp_path / "pool", "ouroboros", target))

    first = drafter()
    DecodingEngine(target, first).generate(make_prompts(target, 1)[0], GenerationSettings(20))
    first.close()
    assert len(first.pool) > 0 and drafter().pool.phrases() == first.pool.phrases()


def test_the_command_lines_words(target, tmp_path):
    file = tmp_path / "pool"
    for _ in range(2):
        drafter = build_drafter(DrafterSpec.parse(f"h=ngram,pool={file}+prompt_lookup"), target, 8)
        DecodingEngine(target, drafter).generate(make_prompts(target, 1)[0], GenerationSettings(10))
        drafter.close()
    assert len(PoolFile(file, "ngram", target).load()) == 2


def test_a_file_cut_short_is_refused(target, tmp_path):
    file = PoolFile(tmp_path / "pool", "ngram", target)
    file.save([[1, 2, 3], [4, 5]])
    whole = file.path.read_bytes()
    for size in (len(whole) - 3, 20, 0):
        file.path.write_bytes(whole[:size])
        with pytest.raises(ValueError, match="is truncated"):
            file.load()


@pytest.mark.parametrize(
    "kind,other,told", [("ouroboros", 0, "kind ouroboros"), ("ngram", 100, "tokens_of 100 tokens")]
)
def test_another_pools_file_is_refused(target, tmp_path, kind, other, told):
    PoolFile(tmp_path / "pool", "ngram", target).save([[1, 2, 3]])

    class Other:
        tokenizer, device, vocab_size = None, "cpu", other

    with pytest.raises(ValueError, match=told):
        PoolFile(tmp_path / "pool", kind, Other() if other else target).load()


def test_a_pool_without_history_makes_no_sense(target, tmp_path):
    with pytest.raises(ValueError, match="drop one"):
        OuroborosDrafter(small_model(), reuse_history=0, pool=PoolFile(tmp_path / "pool", "ouroboros", target))
