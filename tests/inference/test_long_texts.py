"""A head says once that it drafts too little in texts longer than those it was trained on."""

import logging

import pytest
import torch

from draft_heads.inference.batch import BatchEngine
from draft_heads.inference.drafters.heads import long_texts
from draft_heads.inference.drafters.heads.long_texts import LongTexts
from draft_heads.inference.drafters.registry import drafter_for
from draft_heads.inference.engine import DecodingEngine
from draft_heads.inference.generation import GenerationSettings
from tests.inference.models import load_target, make_head, make_prompts


def test_only_steps_beyond_the_training_length_count_and_it_is_said_once(caplog):
    texts = LongTexts("ctc", 100)
    texts.add(90, [1, 5, 5, *[1] * 255])  # places 90, 91, 96, 101, …: 255 steps beyond
    assert (texts.steps, texts.tokens, texts.told) == (255, 255, False)
    texts.add(100, [1, 2])  # the prefill's token is no step
    assert (texts.steps, texts.tokens, texts.told) == (256, 257, True)
    texts.add(100, [1, *[1] * 300])
    (said,) = caplog.messages
    assert said.startswith(
        "the ctc head was trained on texts of up to 100 tokens; beyond them a step gives 1.00 tokens"
    )


@pytest.mark.parametrize(("trained", "lengths"), [(0, [1] * 400), (100, [1, *[2] * 400]), (1000, [1] * 400)])
def test_nothing_is_said_of_unknown_lengths_accepted_drafts_and_short_texts(trained, lengths, caplog):
    LongTexts("ctc", trained).add(100, lengths)
    assert not caplog.messages


@pytest.mark.parametrize("batch", [False, True])
def test_engines_tell_the_drafter_of_every_answer(batch, caplog, monkeypatch):
    monkeypatch.setattr(long_texts, "ENOUGH_STEPS", 8)
    monkeypatch.setattr(long_texts, "LEAST_BETA", 9.0)
    target = load_target("llama", torch.float64)
    head = make_head(target, "medusa")
    head.config.trained_length = 4
    prompts, settings = make_prompts(target, 2), GenerationSettings(24)
    with caplog.at_level(logging.WARNING):
        if batch:
            BatchEngine(target, drafter_for(head, target, slots=2)).generate(prompts, settings)
        else:
            engine = DecodingEngine(target, drafter_for(head, target))
            for prompt in prompts:
                engine.generate(prompt, settings)
    assert [message[:17] for message in caplog.messages] == ["the medusa head w"]
