"""A head says once that it drafts too little in texts longer than those it was trained on."""

import logging
from itertools import islice, takewhile

import pytest
import torch

from draft_heads.inference.batch import BatchEngine
from draft_heads.inference.drafters.heads import long_texts
from draft_heads.inference.drafters.heads.long_texts import LongTexts
from draft_heads.inference.drafters.hybrid.hybrid import HybridDrafter
from draft_heads.inference.drafters.models import draft_loop
from draft_heads.inference.drafters.models.draft_model import DraftModelDrafter
from draft_heads.inference.drafters.registry import drafter_for
from draft_heads.inference.drafters.text.ngram import NgramDrafter
from draft_heads.inference.engine import DecodingEngine
from draft_heads.inference.generation import GenerationSettings
from draft_heads.inference.step import verify_step
from tests.inference.models import load_target, make_head, make_prompts


def test_only_steps_beyond_the_training_length_count_and_it_is_said_once(caplog):
    texts = LongTexts("ctc", 100)
    for place in (90, 95, *range(100, 355)):  # 255 of them beyond
        texts.add(place, 5 if place < 100 else 1)
    assert (texts.steps, texts.tokens, texts.told) == (255, 255, False)
    texts.add(100, 2)
    assert (texts.steps, texts.tokens, texts.told) == (256, 257, True)
    texts.add(100, 1)
    (said,) = caplog.messages
    assert said.startswith(
        "the ctc head was trained on texts of up to 100 tokens; beyond them a step gives 1.00 tokens"
    )


@pytest.mark.parametrize(("trained", "tokens"), [(0, 1), (100, 2), (1000, 1)])
def test_nothing_is_said_of_unknown_lengths_accepted_drafts_and_short_texts(trained, tokens, caplog):
    texts = LongTexts("ctc", trained)
    for place in range(100, 100 + 400 * tokens, tokens):
        texts.add(place, tokens)
    assert not caplog.messages


@pytest.mark.parametrize("engine", ["one", "left", "batch", "via"])
def test_every_engine_counts_steps_beyond_the_training_length(engine, caplog, monkeypatch):
    """left: a client or a stop text ends the stream; via: the head drafts for a draft model."""
    monkeypatch.setattr(long_texts, "ENOUGH_STEPS", 8)
    monkeypatch.setattr(long_texts, "LEAST_BETA", 9.0)
    target = load_target("llama", torch.float64)
    head = make_head(target, "medusa")
    head.config.trained_length = 4
    prompts, settings = make_prompts(target, 5), GenerationSettings(24, ())
    with caplog.at_level(logging.WARNING):
        if engine == "batch":
            BatchEngine(target, drafter_for(head, target, slots=2)).generate(prompts, settings)
        else:
            drafter = drafter_for(head, target)
            drafter = DraftModelDrafter(target, drafter) if engine == "via" else drafter
            decoding = DecodingEngine(target, drafter)
            for prompt in prompts:
                steps = decoding.stream(prompt, settings)
                for _ in islice(steps, 9 if engine == "left" else None):
                    pass
                steps.close()
    assert [message[:17] for message in caplog.messages] == ["the medusa head w"]


@pytest.mark.parametrize("first", ["medusa", "ngram"])
def test_a_head_in_a_hybrid_is_judged_by_what_it_drafted_itself(first):
    """The record of whose drafts were accepted, of a hybrid whose first part is the head, says how many tokens each
    step would have had without the others: one more than those of the head that come first. The order of parts
    changes nothing else."""
    target = load_target("llama", torch.float64)
    head = make_head(target, "medusa")
    head.config.trained_length = 12
    parts = [("medusa", drafter_for(head, target)), ("ngram", NgramDrafter())]
    drafter = HybridDrafter(parts, target)
    counted = drafter.parts[0].long_texts
    prompt = [5, 6, 7] * 3
    answer = DecodingEngine(target, drafter).generate(prompt, GenerationSettings(40, ()))
    if first == "ngram":
        other = HybridDrafter([("ngram", NgramDrafter()), ("medusa", drafter_for(head, target))], target)
        DecodingEngine(target, other).generate(prompt, GenerationSettings(40, ()))
        counted = other.parts[1].long_texts
    place, steps, tokens = len(prompt) + 1, 0, 0
    end = 1
    for length in answer.accept_lengths[1:-1]:  # of the last one, nothing is learned
        if place >= 12:
            own = list(takewhile(lambda source: source == 0, answer.sources[end : end + length]))
            steps, tokens = steps + 1, tokens + 1 + len(own)
        place, end = place + length, end + length
    assert (counted.steps, counted.tokens) == (steps, tokens) and steps > 3
    assert sum(source == 1 for source in answer.sources) > 0  # n-grams were accepted and count for nothing here


def test_a_head_that_drafts_for_a_draft_model_is_judged_by_the_trees_that_this_model_verified(monkeypatch):
    """Each verification is a step; what the draft model reads again after the target's choice is none."""
    target = load_target("llama", torch.float64)
    head = make_head(target, "medusa")
    head.config.trained_length = 12
    drafter = DraftModelDrafter(target, drafter_for(head, target))
    verified = []

    def verify(*args, **options):
        step = verify_step(*args, **options)
        verified.append((int(args[1].lengths) - int(step.count), int(step.count)))
        return step

    monkeypatch.setattr(draft_loop, "verify_step", verify)
    engine = DecodingEngine(target, drafter)
    for prompt in ([5, 6, 7] * 3, [9, 8] * 4):  # the counts are those of both texts
        engine.generate(prompt, GenerationSettings(40, ()))
    beyond = [tokens for place, tokens in verified if place >= 12]
    counted = drafter.loop._long_texts
    assert (counted.steps, counted.tokens) == (len(beyond), sum(beyond)) and 3 < len(beyond) < len(verified)


def test_what_several_parts_drafted_counts_for_the_head_wherever_it_stands():
    """Of three accepted tokens both parts drafted the first, n-grams alone the second, the head the third: without
    the n-grams the head's step gives two tokens."""
    target = load_target("llama", torch.float64)
    head = make_head(target, "medusa")
    head.config.trained_length = 12
    drafter = HybridDrafter([("ngram", NgramDrafter()), ("medusa", drafter_for(head, target))], target)
    drafter._credit([(0b11, 0b00), (0b01, 0b01), (0b10, 0b11)], length=12)
    ngram, medusa = drafter.parts
    assert (medusa.long_texts.steps, medusa.long_texts.tokens) == (1, 2)
    assert (ngram.accepted, medusa.accepted) == (2, 1)  # whoever proposed a token first has it
