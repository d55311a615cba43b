"""What a checkpoint's own generation_config.json asks is applied, named or refused; nothing is left out in silence."""

import json
import logging
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, GenerationConfig

from draft_heads.data.generation_config import (
    APPLIED,
    NAMED,
    PROCESSORS,
    REFUSED,
    fields,
    processor_settings,
    unapplied_settings,
)
from draft_heads.inference.answers import answer_prompts
from draft_heads.inference.batch import BatchEngine
from draft_heads.inference.drafters.base import VanillaDrafter
from draft_heads.inference.drafters.hybrid.hybrid import HybridDrafter
from draft_heads.inference.drafters.models.draft_model import load_draft_model
from draft_heads.inference.drafters.registry import drafter_for
from draft_heads.inference.drafters.text.lookahead import LookaheadDrafter
from draft_heads.inference.drafters.text.ngram import NgramDrafter
from draft_heads.inference.engine import DecodingEngine
from draft_heads.inference.evaluation.hf_generate import HFGenerate, sampling_processors
from draft_heads.inference.evaluation.lossless import Oracle
from draft_heads.inference.generation import GenerationSettings
from draft_heads.inference.processors import TextProcessors
from draft_heads.inference.target.cuda_graphs import CapturedSteps
from draft_heads.inference.target.target import Target
from draft_heads.inference.tree import ancestor_rows
from tests.inference.models import ForkedDrafter, Rerun, in_slots, load_target, make_head
from tests.tiny_chat import render_prompt

PROMPT = [5, 6, 7, 5, 6, 30, 31, 7, 5, 6]
ENDS = (3, 5)

ASKED = {
    "repetition_penalty": {"repetition_penalty": 1.3},
    "no_repeat_ngram": {"no_repeat_ngram_size": 2},
    "encoder": {"encoder_repetition_penalty": 2.0, "encoder_no_repeat_ngram_size": 2},
    "words": {"bad_words_ids": [[108], [129, 129]], "sequence_bias": [[[9], 1.5], [[6, 7], -4.0]]},
    "suppressed": {"suppress_tokens": [7, 8, 9], "begin_suppress_tokens": list(range(100))},
    "lengths": {"min_new_tokens": 9, "exponential_decay_length_penalty": [4, 1.2]},
    "min_length": {"min_length": 25, "forced_eos_token_id": 3},
    "last": {"forced_bos_token_id": 9, "renormalize_logits": True, "remove_invalid_values": True, "top_p": 0.5},
}

DRAFTERS = {
    "ngram": lambda target, answer: NgramDrafter(branches=2),
    "ctc": lambda target, answer: drafter_for(make_head(target), target, 8),
    "hybrid": lambda target, answer: HybridDrafter(
        [("ctc", drafter_for(make_head(target), target, 8)), ("ngram", NgramDrafter())], target, 8
    ),
    "lookahead": lambda target, answer: LookaheadDrafter(n=3, w=4),
    "forked": lambda target, answer: ForkedDrafter(answer, 4),
}


@pytest.fixture
def target():
    return load_target("llama", torch.float64)


def ask(target, **settings):
    """Give the checkpoint these settings of its own."""
    target.model.generation_config = GenerationConfig(**settings)


def generated(target, prompt, count, settings=None, ends=ENDS):
    """What transformers' `generate` itself says with the checkpoint's own config, by its own prefill and cache."""
    sampling = None if settings is None else settings.sampling
    with torch.no_grad():
        output = target.model.generate(
            torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt), dtype=torch.long), max_new_tokens=count,
            do_sample=False, eos_token_id=list(ends), pad_token_id=0, logits_processor=sampling_processors(sampling),
        )  # fmt: skip
    return output[0, len(prompt) :].tolist()


# ---- the tables


def test_every_field_of_transformers_generation_config_is_in_one_table():
    in_tables = [*APPLIED, *NAMED, *REFUSED]
    assert len(in_tables) == len(set(in_tables))
    assert fields() - set(in_tables) == set(), "decide: is it applied, named when a target is loaded, or refused?"


def test_a_field_of_a_newer_version_is_named_and_left_out_of_the_oracles_config(monkeypatch, target):
    plain = Oracle(target, GenerationSettings(8)).answer(PROMPT)
    monkeypatch.setitem(PROCESSORS, "repetition_penalty", (1.0, 1.3))  # as if nobody had ever applied it
    monkeypatch.setattr("draft_heads.data.generation_config.APPLIED", APPLIED - {"repetition_penalty"}, raising=True)
    ask(target, repetition_penalty=1.3)
    assert unapplied_settings(target.model.generation_config) == {"repetition_penalty": 1.3}
    assert DecodingEngine(target, VanillaDrafter()).generate(PROMPT, GenerationSettings(8)).tokens == plain
    assert Oracle(target, GenerationSettings(8)).answer(PROMPT) == plain


def test_values_that_ask_for_nothing_cost_nothing(target, monkeypatch):
    neutral = dict(repetition_penalty=1.0, no_repeat_ngram_size=0, min_length=0, renormalize_logits=False, num_beams=1)
    neutral |= dict(temperature=1.0, top_p=1.0, top_k=0, do_sample=False, use_cache=True, pad_token_id=0)
    neutral |= dict(cache_implementation="static", length_penalty=1.0, max_new_tokens=None)
    ask(target, **neutral)
    assert not processor_settings(target.model.generation_config)
    assert not unapplied_settings(target.model.generation_config)
    monkeypatch.setattr(target.model, "generate", lambda *args, **options: pytest.fail("processors are made"))
    monkeypatch.setattr(TextProcessors, "_process", lambda *args: pytest.fail("logits are changed"))
    DecodingEngine(target, NgramDrafter()).generate(PROMPT, GenerationSettings(8))


# ---- every way to decode says what generate says


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("asked", ASKED)
def test_drafts_do_not_change_what_generate_says_with_the_checkpoints_own_settings(target, asked, drafter, temperature):
    sampled = dict(temperature=temperature, top_k=20, seed=3) if temperature else {}
    settings = GenerationSettings(24, eos_token_ids=ENDS, **sampled)
    ask(target, **ASKED[asked])
    answer = generated(target, PROMPT, 24, settings)
    made = DRAFTERS[drafter](target, answer + [11] * 20)
    result = DecodingEngine(target, made).generate(PROMPT, settings)
    assert result.tokens == answer
    if drafter == "forked" and len(answer) > 5:
        assert max(result.accept_lengths) == 5  # drafts are judged by the changed logits, each after its own path


@pytest.mark.parametrize("asked", ["repetition_penalty", "no_repeat_ngram", "words", "suppressed"])
def test_the_settings_do_change_the_text(target, asked):
    plain = generated(target, PROMPT, 24)
    ask(target, **ASKED[asked])
    assert generated(target, PROMPT, 24) != plain


@pytest.mark.parametrize("asked", ASKED)
def test_batches_generated_labels_and_the_timed_generate_agree(target, asked):
    ask(target, **ASKED[asked])
    prompts = [PROMPT, PROMPT[:1], PROMPT[::-1]]
    answers = [generated(target, prompt, 20) for prompt in prompts]
    settings = GenerationSettings(20, eos_token_ids=ENDS)
    target.end_token_ids = ENDS
    batch = BatchEngine(target, in_slots(lambda: NgramDrafter(branches=2), 2)).generate(prompts, settings)
    assert [answer.tokens for answer in batch] == answers
    assert [answer.tokens for answer in answer_prompts(target, prompts, [20] * 3, 2)] == answers
    assert [HFGenerate(target).generate(prompt, settings).tokens for prompt in prompts] == answers


def test_steps_that_start_ahead_and_captured_ones_wait_for_the_text(target):
    ask(target, repetition_penalty=1.3, min_length=60, forced_eos_token_id=ENDS[0])  # the last token is counted to
    settings = GenerationSettings(24, eos_token_ids=ENDS)
    engine = DecodingEngine(
        target, drafter_for(make_head(target), target, 8), ahead=True, captured=CapturedSteps(Rerun)
    )
    assert engine.generate(PROMPT, settings).tokens == generated(target, PROMPT, 24)
    ask(target)  # the next text has no processors: graphs again
    assert engine.generate(PROMPT, settings).tokens == generated(target, PROMPT, 24)


def test_a_node_is_judged_after_its_own_path():
    """The worked example of `inference.tree`: x and y after the base token, z after x."""
    seen = []

    def collect(ids, scores):
        seen.append(ids.tolist())
        return scores

    parents, tokens = torch.tensor([[-1, -1, 0]]), torch.tensor([[10, 11, 12, 13]])
    processors = TextProcessors([collect], [[1, 2, 10]], ())
    assert processors(torch.zeros(1, 4, 20), tokens, ancestor_rows(parents, 2))[0].shape == (1, 4, 20)
    assert seen == [[[1, 2, 10]], [[1, 2, 10, 11]], [[1, 2, 10, 12]], [[1, 2, 10, 11, 13]]]


# ---- labels


@pytest.mark.parametrize("asked", [name for name in ASKED if name != "min_length"])
def test_labels_of_a_turn_are_what_decoding_writes_there(target, asked):
    """`min_length` forces a token at the limit of an answer, which recorded text does not have."""
    ask(target, **ASKED[asked])
    target.end_token_ids = ENDS
    first = generated(target, PROMPT, 8)
    then = [*PROMPT, *first, 40, 41]
    second = generated(target, then, 12)
    row = [*then, *second]
    mask = [False] * len(PROMPT) + [True] * len(first) + [False] * 2 + [True] * len(second)
    other = [9, 8, 7]
    labels, _ = target.label([row, other], False, (), [mask, [False] * 3])
    turns = [token for token, trained in zip(labels.greedy_ids, mask) if trained]
    assert turns == [*first, *second]
    assert {token for token, trained in zip(labels.greedy_ids, mask) if not trained} == {-100}


# ---- files


@pytest.fixture
def checkpoint(tmp_path):
    """A copy of the tests' target; a function that writes its generation_config.json."""
    folder = tmp_path / "target"
    shutil.copytree("tests/tiny_target", folder)

    def write(text):
        (folder / "generation_config.json").write_text(text if isinstance(text, str) else json.dumps(text))
        return str(folder)

    return write


def test_a_copy_with_a_penalty_decodes_as_generate_does(checkpoint, caplog):
    path = checkpoint({"eos_token_id": 2, "repetition_penalty": 1.3})
    with caplog.at_level(logging.INFO):
        target = Target.from_pretrained(path, torch.float64, "cpu")
    assert (
        "ask for repetition_penalty=1.3, which is applied to each token's logits" in caplog.text
        and "not applied" not in caplog.text
    )
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64)
    prompt = render_prompt(target.tokenizer, [{"role": "user", "content": "Name a fruit."}])
    ids, ends = torch.tensor([prompt]), list(target.end_token_ids)
    expected = model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=40, eos_token_id=ends
    )
    result = DecodingEngine(target, NgramDrafter()).generate(prompt, GenerationSettings(40))
    assert result.tokens == expected[0, len(prompt) :].tolist()


def test_what_is_not_applied_is_named_in_one_line(checkpoint, caplog):
    own = {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "max_length": 4096, "num_beams": 4, "eos_token_id": 2}
    path = checkpoint(own)
    target = Target.from_pretrained(path, device="cpu")
    lines = [record.getMessage() for record in caplog.records if "not applied" in record.getMessage()]
    assert len(lines) == 1
    asked = ("do_sample=True", "temperature=0.6", "top_p=0.9", "max_length=4096", "num_beams=4", "temperature, top_k")
    for said in asked:
        assert said in lines[0]
    assert "eos_token_id" not in lines[0] and target.end_token_ids == (2,)
    caplog.clear()
    load_draft_model("draft_model", path, target)
    assert "not applied" not in caplog.text  # it only drafts


@pytest.mark.parametrize(
    "text,told",
    [
        ("{broken", "cannot be read .*correct the file"),
        ("[1]", "it holds a list, not an object"),
        ('{"max_new_tokens": 0}', "max_new_tokens"),
        ('{"max_new_tokens": "many"}', "cannot be read"),
        ('{"eos_token_id": ["</s>"]}', r"eos_token_id is a token id or a list of them, not \['</s>'\]"),
        ('{"repetition_penalty": 0.0}', "are repetition_penalty=0.0, which transformers cannot apply .*positive"),
        ('{"suppress_tokens": "none"}', "are suppress_tokens=none, which transformers cannot apply"),
        ('{"forced_eos_token_id": 100000}', "forced_eos_token_id=100000, which transformers cannot apply"),
        ('{"sequence_bias": [[[100000], 1.0]]}', "which transformers cannot apply"),
        ('{"watermarking_config": {"bias": 2.0}}', "watermarking_config .*must be unset"),
    ],
)
def test_files_that_cannot_be_followed_are_refused_in_a_sentence(checkpoint, text, told):
    with pytest.raises(ValueError, match=told):
        Target.from_pretrained(checkpoint(text), device="cpu")


def test_no_file_and_one_that_was_made_from_the_models_config_ask_nothing(checkpoint, caplog):
    legacy = checkpoint(
        {"_from_model_config": True, "bos_token_id": 1, "eos_token_id": 2, "transformers_version": "4.30"}
    )
    ends = Target.from_pretrained(legacy, device="cpu").end_token_ids
    Path(legacy, "generation_config.json").unlink()
    target = Target.from_pretrained(legacy, device="cpu")
    assert target.end_token_ids == ends and not processor_settings(target.model.generation_config)
    assert "not applied" not in caplog.text


def test_penalties_in_the_models_config_are_the_checkpoints_own_too(checkpoint):
    """Before generation_config.json there was config.json for this; transformers reads it where the other is none."""
    path = checkpoint({})
    Path(path, "generation_config.json").unlink()
    config = Path(path, "config.json")
    config.write_text(json.dumps({**json.loads(config.read_text()), "repetition_penalty": 1.3}))
    target = Target.from_pretrained(path, torch.float64, "cpu")
    reference = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64).generation_config
    assert processor_settings(target.model.generation_config) == processor_settings(reference)
    own = {"repetition_penalty": reference.repetition_penalty} if reference.repetition_penalty else {}
    ask(target, **own)
    expected = generated(target, PROMPT, 12)
    settings = GenerationSettings(12, eos_token_ids=ENDS)
    assert DecodingEngine(target, VanillaDrafter()).generate(PROMPT, settings).tokens == expected
