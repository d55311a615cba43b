"""An engine decodes one text at a time, and says so."""

import pytest
import torch

from draft_heads.inference.batch import BatchEngine
from draft_heads.inference.drafters.base import VanillaDrafter
from draft_heads.inference.drafters.text.ngram import NgramDrafter
from draft_heads.inference.engine import DecodingEngine
from draft_heads.inference.evaluation.lossless import Oracle
from draft_heads.inference.generation import ContextError, Generation, GenerationSettings
from tests.inference.models import load_target

PROMPT = list(range(3, 40))


def test_a_second_text_in_an_engine_ends_the_first_and_a_second_thread_is_refused():
    target = load_target("llama", torch.float64)
    answer = Oracle(target, GenerationSettings(max_new_tokens=60)).answer(PROMPT)
    engine = DecodingEngine(target, VanillaDrafter())
    first = engine.stream(PROMPT, GenerationSettings(60))
    next(first)
    assert engine.generate(PROMPT, GenerationSettings(60)).tokens == answer
    with pytest.raises(RuntimeError, match=r"another text was begun .*; make an engine with a drafter of its own"):
        next(first)
    first = engine.stream(PROMPT, GenerationSettings(60))
    next(first)
    with pytest.raises(ContextError):
        engine.generate([], GenerationSettings(60))  # touches nothing
    ended = Generation()
    for _ in engine.stream(PROMPT, GenerationSettings(60), ended):
        if ended.finish_reason:
            engine.generate(PROMPT, GenerationSettings(1))
    assert ended.tokens == answer
    within_a_step = GenerationSettings(60, stop=lambda tokens: engine.generate(PROMPT))  # as another thread may call it
    with pytest.raises(RuntimeError, match="one thread at a time; make an engine with a drafter of its own"):
        engine.generate(PROMPT, within_a_step)
    assert engine.generate(PROMPT, GenerationSettings(60)).tokens == answer


@pytest.mark.parametrize("other", [DecodingEngine, BatchEngine])
def test_a_drafter_that_another_engine_began_with_ends_the_first_text_unless_it_had_ended(other):
    target, drafter = load_target("llama", torch.float64), NgramDrafter()
    engine, second = DecodingEngine(target, drafter), other(target, drafter)
    settings = GenerationSettings(24, ())

    def answer():
        return second.generate(PROMPT if isinstance(second, DecodingEngine) else [PROMPT], settings)

    text = engine.stream(PROMPT, settings)
    next(text)
    answer()
    with pytest.raises(RuntimeError, match="another engine began a text with this one's drafter"):
        next(text)
    ended = Generation()
    for _ in engine.stream(PROMPT, settings, ended):
        if ended.finish_reason:
            answer()
    assert len(ended.tokens) == 24
