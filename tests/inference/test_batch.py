"""Several sequences at once answer as one by one, whatever each accepts and whenever each ends."""

import pytest
import torch

from draft_heads.heads.checkpoint import HEADS
from draft_heads.inference.batch import BatchEngine
from draft_heads.inference.drafters.base import VanillaDrafter
from draft_heads.inference.drafters.hybrid.hybrid import HybridDrafter
from draft_heads.inference.drafters.registry import drafter_for
from draft_heads.inference.drafters.text.ngram import NgramDrafter
from draft_heads.inference.engine import DecodingEngine
from draft_heads.inference.evaluation.lossless import Oracle
from draft_heads.inference.generation import ContextError, GenerationSettings
from draft_heads.inference.verify import TypicalAcceptance
from draft_heads.scripts.checks.lossless_matrix import trained_head
from tests.inference.models import in_slots, load_target, make_prompts


@pytest.fixture(scope="module", params=["llama", "mistral"])
def target(request):
    return load_target(request.param, torch.float64)


@pytest.fixture(scope="module")
def prompts(target):
    return make_prompts(target, 5)


@pytest.fixture(scope="module")
def make_drafters(target, prompts):
    oracle = Oracle(target, GenerationSettings(40))
    texts = [(prompt, oracle.answer(prompt)) for prompt in prompts]
    heads = {kind: trained_head(target, texts, 30, kind) for kind in HEADS}
    return {
        "vanilla": lambda slots: VanillaDrafter(target.device, slots),
        **{kind: lambda slots, head=head: drafter_for(head, target, 8, slots=slots) for kind, head in heads.items()},
        "ngram": lambda slots: in_slots(lambda: NgramDrafter(branches=2), slots),
        "hybrid": lambda slots: HybridDrafter(
            [("ctc", drafter_for(heads["ctc"], target, 8, slots=slots)), ("ngram", in_slots(NgramDrafter, slots))],
            target,
            8,
        ),
    }


@pytest.mark.parametrize("kind", ["vanilla", *HEADS, "ngram", "hybrid"])
def test_a_batch_answers_as_one_by_one(target, prompts, make_drafters, kind):
    oracle = Oracle(target, GenerationSettings(40))
    ends = tuple({oracle.answer(prompt)[place] for place, prompt in enumerate(prompts[:3], start=5)})
    rules = [{}, {"eos_token_ids": ends}, {"temperature": 1.0}, {"typical": TypicalAcceptance()}]
    for settings in [GenerationSettings(40, **rule) for rule in (rules[:3] if kind == "hybrid" else rules)]:
        alone = DecodingEngine(target, make_drafters[kind](1))
        one_by_one = [alone.generate(prompt, settings) for prompt in prompts]
        batches = (1, 3, 16) if settings == GenerationSettings(40) else (3,)  # in 3 slots, texts follow others
        together = [
            answer
            for batch in batches
            for answer in BatchEngine(target, make_drafters[kind](batch)).generate(prompts, settings)
        ]
        for expected, answer in zip(len(batches) * one_by_one, together, strict=True):
            assert answer.tokens == expected.tokens and answer.finish_reason == expected.finish_reason
            if kind == "hybrid":  # its calibration depends on the answers before
                assert len(answer.sources) == len(answer.tokens) and sum(answer.accept_lengths) == len(answer.tokens)
            else:
                assert answer.accept_lengths == expected.accept_lengths and answer.sources == expected.sources
    assert kind in ("vanilla", "ngram") or any(len(set(answer.accept_lengths)) > 1 for answer in together)


def test_an_answer_of_one_token_leaves_nothing_behind(target):
    short, long = [3] * 10, [7] * 190
    first = Oracle(target, GenerationSettings(1)).answer(long)
    settings = GenerationSettings(40, tuple(first))
    expected = [Oracle(target, settings).answer(prompt) for prompt in (short, long)]
    engine = BatchEngine(target, VanillaDrafter(target.device, 2))
    assert [answer.tokens for answer in engine.generate([short, long], settings)] == expected
    assert [answer.tokens for answer in engine.generate([long, short], settings)] == expected[::-1]


def test_what_cannot_be_batched_is_refused(target, prompts):
    engine = BatchEngine(target, VanillaDrafter(target.device, 2))
    assert engine.generate([]) == []
    assert engine.generate_or_none([[1] * target.max_positions]) == [None]
    with pytest.raises(ContextError, match="positions"):
        engine.generate([prompts[0], [1] * target.max_positions])
    with pytest.raises(ValueError, match="got 999999"):
        engine.generate([prompts[0], [1, 999_999]])
