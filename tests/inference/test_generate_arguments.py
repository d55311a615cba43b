"""Whatever `generate` is asked with `custom_generate`: its own tokens, or one sentence; the model is left as it was."""

import copy
import inspect

import pytest
import torch
from peft import PromptTuningConfig, get_peft_model
from transformers import (
    DynamicCache,
    GenerationConfig,
    GenerationMixin,
    LogitsProcessorList,
    StoppingCriteriaList,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from draft_heads.data.generation_config import APPLIED, NAMED, REFUSED
from draft_heads.inference.drafters.base import VanillaDrafter
from draft_heads.inference.drafters.text.lookahead import LookaheadDrafter
from draft_heads.inference.drafters.text.ngram import NgramDrafter
from draft_heads.inference.drafters.text.prompt_lookup import PromptLookupDrafter
from draft_heads.inference.generate import generate_fn, sampling_options
from draft_heads.inference.generate_arguments import MODES, OUTPUTS, check_config
from draft_heads.inference.sampling import Sampling
from draft_heads.inference.target.library_names import CACHE
from tests.inference.generating import PROMPT, refused, run
from tests.tiny_chat import random_llama


@pytest.fixture(scope="module")
def model():
    return random_llama(vocab_size=211).double()


def test_the_fields_that_choose_a_loop_or_further_outputs_are_those_of_generation_configs():
    listed = MODES.split() + OUTPUTS.split()
    assert len(listed) == len(set(listed))
    assert set(listed) <= {*APPLIED, *NAMED, *REFUSED}


def test_every_argument_of_generate_was_thought_of():
    assert set(inspect.signature(GenerationMixin.generate).parameters) == {
        *("self", "inputs", "generation_config", "logits_processor", "stopping_criteria", "prefix_allowed_tokens_fn"),
        *("synced_gpus", "assistant_model", "streamer", "negative_prompt_ids", "negative_prompt_attention_mask"),
        *("custom_generate", "kwargs"),
    }


def test_a_setting_of_a_newer_transformers_is_refused(monkeypatch):
    config = GenerationConfig(do_sample=False)
    config.thinking_budget = 3
    check_config(config)  # a checkpoint may hold what no transformers reads
    made = GenerationConfig.__init__
    monkeypatch.setattr(
        GenerationConfig,
        "__init__",
        lambda self, **given: (made(self, **given), setattr(self, "thinking_budget", None))[0],
    )
    with pytest.raises(ValueError, match="does not know the setting thinking_budget; got 3"):
        check_config(config)


# ----------------------------------------------------------------------------------------------------
# Processors

T, K, P = TemperatureLogitsWarper(0.7), TopKLogitsWarper(9), TopPLogitsWarper(0.9)


class OwnTemperature(TemperatureLogitsWarper):
    def __call__(self, input_ids, scores):
        return scores


@pytest.mark.parametrize(
    "processors,told",
    [
        ([K, T], "in this order, each once; got TopKLogitsWarper, TemperatureLogitsWarper"),
        ([P, K], "in this order, each once"),
        ([T, TemperatureLogitsWarper(0.7)], "in this order, each once"),
        ([T, K, P, TopPLogitsWarper(0.9)], "in this order, each once"),
        ([OwnTemperature(0.7)], "got OwnTemperature"),
        ([TopPLogitsWarper(0.9, min_tokens_to_keep=3)], "with filter_value -inf and min_tokens_to_keep 3"),
        ([TopPLogitsWarper(0.9, filter_value=-5.0)], "with filter_value -5.0"),
        ([T, TopKLogitsWarper(9, filter_value=-1e4)], r"got a TopKLogitsWarper with filter_value -10000\.0"),
    ],
)
def test_warpers_that_would_sample_another_distribution_are_refused(model, processors, told):
    refused(model, told, logits_processor=LogitsProcessorList(processors), do_sample=True, top_k=0)


@pytest.mark.parametrize("processors", [[], [T], [K], [T, K, P], [TopKLogitsWarper(2, min_tokens_to_keep=6)]])
def test_warpers_in_generates_order_sample_its_distribution(processors):
    options = sampling_options(GenerationConfig(do_sample=True), LogitsProcessorList(processors))
    scores = torch.randn(1, 50, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    expected = LogitsProcessorList(processors)(None, scores)
    assert torch.allclose(Sampling(**options).warped(scores), expected)


def test_a_warper_handed_in_before_a_setting_is_refused(model):
    """`generate` applies top_p first then, and temperature to what is left."""
    refused(model, "in this order", logits_processor=LogitsProcessorList([P]), do_sample=True, top_k=0, temperature=0.5)


@pytest.mark.parametrize(
    "settings,told",
    [
        ({"penalty_alpha": 0.6, "top_k": 4}, r"got penalty_alpha=0\.6, which ask for contrastive_search"),
        ({"dola_layers": "low"}, "got dola_layers=low, which ask for dola_generation"),
        ({"prompt_lookup_num_tokens": 3}, "got prompt_lookup_num_tokens=3, which ask for assisted_generation"),
        ({"num_beams": 3}, "got num_beams=3"),
        ({"guidance_scale": 2.0}, "got UnbatchedClassifierFreeGuidanceLogitsProcessor"),
        ({"do_sample": True, "min_p": 0.1}, "got MinPLogitsWarper"),
        ({"do_sample": True, "typical_p": 0.5}, "got TypicalLogitsWarper"),
        ({"do_sample": True, "epsilon_cutoff": 0.1}, "got EpsilonLogitsWarper"),
        ({"do_sample": True, "watermarking_config": {}}, "got WatermarkLogitsProcessor"),
        ({"output_hidden_states": True}, "token ids only; got output_hidden_states"),
        ({"synced_gpus": True}, "got synced_gpus"),
        ({"past_key_values": DynamicCache()}, f"has its own cache and fills no other; got {CACHE}"),
    ],
)
def test_what_would_be_ignored_is_refused(model, settings, told):
    refused(model, told, **settings)


@pytest.mark.parametrize("beside", [{}, {"input_ids": torch.tensor([PROMPT])}])
def test_what_the_caller_gave_is_refused_by_its_name(model, beside):
    """Not the positions that transformers derives from it."""
    embedded = model.get_input_embeddings()(torch.tensor([PROMPT]))
    with pytest.raises(ValueError, match="needs token ids; got inputs_embeds; pass input_ids"):
        model.generate(
            **beside, inputs_embeds=embedded, max_new_tokens=4, custom_generate=generate_fn(VanillaDrafter())
        )


@pytest.mark.parametrize(
    "settings",
    [
        {"repetition_penalty": 1.2},
        {"no_repeat_ngram_size": 2},
        {"bad_words_ids": [[5]]},
        {"min_new_tokens": 3, "eos_token_id": 9},
        {"forced_eos_token_id": 9},
        {"forced_bos_token_id": 9},
        {"suppress_tokens": [9]},
        {"begin_suppress_tokens": [9]},
        {"sequence_bias": [[[9], 2.0]]},
        {"renormalize_logits": True},
        {"prefix_allowed_tokens_fn": lambda row, ids: [5, 6, 7, int(ids[-1]) % 20]},
        {"logits_processor": LogitsProcessorList([SuppressTokensLogitsProcessor([9], "cpu")])},
    ],
)
def test_processors_of_the_text_are_applied(model, settings):
    assert torch.equal(run(model, generate_fn(NgramDrafter()), **settings), run(model, **settings))
    prompts = [PROMPT, PROMPT]
    refused(model, "supported for one sequence without padding; got 2", prompts=prompts, **settings)


@pytest.mark.parametrize("drafter", [NgramDrafter, PromptLookupDrafter, LookaheadDrafter])
def test_a_constraint_is_asked_only_of_texts_that_it_allows(model, drafter):
    """What it excludes, and an end of text, have drafts behind them: `generate` never asks it what may follow those."""
    answers, unknown = [[7, 8, 9, 7, 8, 2], [7, 8, 2], [7, 9, 8, 2]], []

    def follows(row, ids):
        text = ids[6:].tolist()
        allowed = {answer[len(text)] for answer in answers if answer[: len(text)] == text and len(answer) > len(text)}
        unknown.extend([] if allowed else [text])
        return sorted(allowed)

    for prompt in ([7, 8, 2, 7, 8, 2], [7, 5, 6, 7, 5, 6]):
        asked = {"prompts": [prompt], "eos_token_id": 2, "prefix_allowed_tokens_fn": follows}
        assert torch.equal(run(model, generate_fn(drafter()), **asked), run(model, **asked))
    assert not unknown


@pytest.mark.parametrize("drafter", [NgramDrafter, PromptLookupDrafter, LookaheadDrafter])
def test_a_constraint_fails_where_generate_asks_it_and_only_there(model, drafter):
    """It knows nothing of a ninth token: an error where the answer goes on, none where it ends. Drafts go beyond it."""
    listed = [7, 8, 9] * 4

    def follows(row, ids):
        if len(ids) == 14:
            raise LookupError("a ninth token")
        return [listed[len(ids) - 6]]

    settings = {"prompts": [[9, 7, 8, 9, 7, 8]], "prefix_allowed_tokens_fn": follows}
    stop = StoppingCriteriaList([lambda ids, scores: torch.tensor([ids.shape[1] >= 14])])
    for ending in ({"max_new_tokens": 8}, {"max_new_tokens": 12, "stopping_criteria": stop}):
        assert run(model, generate_fn(drafter()), **settings, **ending).tolist() == [[9, 7, 8, 9, 7, 8, *listed[:8]]]
    for decode in (None, generate_fn(drafter())):
        with pytest.raises(LookupError, match="a ninth token"):
            run(model, decode, **settings, max_new_tokens=12)


def test_a_setting_of_the_call_stands_for_the_checkpoints(model):
    own, model.generation_config.repetition_penalty = model.generation_config.repetition_penalty, 1.5
    try:
        free, penalised = run(model, repetition_penalty=1.0), run(model)
        assert not torch.equal(free, penalised)
        assert torch.equal(run(model, generate_fn(NgramDrafter()), repetition_penalty=1.0), free)
        assert torch.equal(run(model, generate_fn(NgramDrafter())), penalised)
    finally:
        model.generation_config.repetition_penalty = own


def test_a_processor_of_the_text_behind_a_warper_is_refused(model):
    processors = LogitsProcessorList([P, SuppressTokensLogitsProcessor([9], "cpu")])
    refused(model, "got a SuppressTokensLogitsProcessor after", logits_processor=processors, do_sample=True, top_k=0)


def test_an_assistant_model_is_refused(model):
    refused(model, "got assistant_model, which ask for assisted_generation", assistant_model=random_llama(211))


def test_virtual_tokens_of_an_adapter_are_refused_while_it_has_them():
    model = random_llama(vocab_size=211).double()
    plain, drafted = run(model), generate_fn(NgramDrafter())
    torch.manual_seed(0)
    adapted = get_peft_model(model, PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)).eval()
    assert not torch.equal(run(adapted), plain)  # which drafting on the model alone would give
    with pytest.raises(ValueError, match=r"prepare_inputs_for_generation in its place \(PeftModelForCausalLM"):
        run(adapted, drafted)
    assert torch.equal(run(model, drafted), plain)


def test_autocast_is_refused_in_a_sentence(model):
    refusal = pytest.raises(ValueError, match=r"got torch\.autocast; generate without custom_generate")
    with torch.autocast("cpu", torch.bfloat16), refusal:
        run(model, generate_fn(NgramDrafter()))


@pytest.mark.parametrize(
    "settings",
    [
        {"penalty_alpha": 0.6, "top_k": 1},
        {"use_cache": False},
        {"cache_implementation": "static"},
        {"negative_prompt_ids": torch.tensor([[3, 4]])},
        {"num_assistant_tokens": 3, "length_penalty": 2.0, "early_stopping": True},
        {"max_new_tokens": None, "max_length": 12},
        {"max_time": 1000.0},
        {"min_new_tokens": 3},
    ],
)
def test_what_changes_no_token_is_taken(model, settings):
    for drafter in (VanillaDrafter(), NgramDrafter()):
        assert torch.equal(run(model, generate_fn(drafter), **settings), run(model, **settings))


# ----------------------------------------------------------------------------------------------------
# Context, streamers, state


def test_an_answer_that_runs_past_the_context_is_refused(model):
    prompt = [5 + i % 9 for i in range(250)]
    assert run(model, prompts=[prompt]).shape[1] == 262  # of 256 positions
    refused(
        model,
        "drafting ends at the target's 256 positions, .* prompt of 250 tokens and 12 new ones; ask for 6",
        prompts=[prompt],
    )
    assert run(model, generate_fn(VanillaDrafter()), [prompt], max_new_tokens=6).shape[1] == 256
    end = int(run(model, prompts=[prompt])[0, 252])  # an answer that ends in time may be asked for too much
    ended = run(model, generate_fn(VanillaDrafter()), [prompt], max_new_tokens=60, eos_token_id=end)
    assert torch.equal(ended, run(model, prompts=[prompt], max_new_tokens=60, eos_token_id=end))


class Recorder:
    def __init__(self):
        self.put_, self.ended = [], 0

    def put(self, value):
        self.put_.append(value.tolist())

    def end(self):
        self.ended += 1


def wrapped(function):
    """Behind two callables, as in libraries that pass `custom_generate` on."""
    return lambda *args, **given: (lambda: function(*args, **given))()


@pytest.mark.parametrize("wrap", [lambda function: function, wrapped])
def test_a_streamer_sees_what_generate_shows_it(model, wrap):
    theirs, ours = Recorder(), Recorder()
    run(model, streamer=theirs)
    run(model, wrap(generate_fn(NgramDrafter())), streamer=ours)
    assert ours.put_ == theirs.put_ and len(ours.put_) == 13
    assert ours.ended == theirs.ended == 1


def test_a_streamer_is_ended_where_an_answer_is_refused(model):
    recorder = Recorder()
    refused(model, "ends at the target's 256 positions", prompts=[[5] * 250], streamer=recorder)
    assert recorder.ended == 1


@pytest.mark.parametrize("training", [True, False])
def test_a_bare_model_is_left_as_it_was_found(training):
    model = random_llama(211).train(training)
    model.lm_head.weight.requires_grad_(False)
    model.model.layers[0].eval()

    def state():
        return [m.training for m in model.modules()], [p.requires_grad for p in model.parameters()]

    before, function = state(), generate_fn(NgramDrafter())
    for _ in range(2):
        run(model, function)
        assert state() == before
    refused(model, "got num_beams=3", num_beams=3)
    with pytest.raises(ValueError, match="ends at the target's"):
        run(model, function, [[5] * 250])
    assert state() == before
    model(input_ids=torch.tensor([PROMPT]), labels=torch.tensor([PROMPT])).loss.backward()
    assert model.model.layers[1].mlp.up_proj.weight.grad.abs().sum() > 0


def test_dropout_is_refused(model):
    dropping = copy.deepcopy(model)
    for layer in dropping.model.layers:
        layer.self_attn.attention_dropout = 0.1
    dropping.train()
    refused(dropping, r"in training mode with dropout; call model\.eval\(\) first")
    dropping.eval()
    assert torch.equal(run(dropping, generate_fn(VanillaDrafter())), run(model))


def test_a_mask_of_another_shape_is_refused(model):
    run_ = {"logits_processor": LogitsProcessorList(), "stopping_criteria": StoppingCriteriaList(), "model": model}
    run_ |= {"input_ids": torch.tensor([PROMPT]), "generation_config": GenerationConfig(max_length=9)}
    with pytest.raises(ValueError, match=r"a number for each token; got \[1, 3\] for input_ids of \[1, 5\]"):
        generate_fn(VanillaDrafter())(**run_, attention_mask=torch.ones(1, 3, dtype=torch.long))
