"""A target whose config, modules' numbers or end tokens are set anew between two answers, as in a notebook."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from draft_heads.inference.batch import BatchEngine
from draft_heads.inference.drafters.base import VanillaDrafter
from draft_heads.inference.engine import DecodingEngine
from draft_heads.inference.generation import GenerationSettings
from draft_heads.inference.target.target import Target
from tests.inference.models import RANDOM_TARGETS
from tests.inference.test_changed_weights import PROMPT, SETTINGS, expected_tokens
from tests.tiny_chat import random_llama


@pytest.mark.parametrize("change", ["window", "no window", "scaling"])
def test_a_window_or_a_scaling_that_is_set_anew_is_noticed(change):
    model = RANDOM_TARGETS["mistral"]()
    prompt, engine = [7 + 3 * number % 90 for number in range(40)], DecodingEngine(Target(model), VanillaDrafter())
    before = engine.generate(prompt, SETTINGS).tokens
    assert before == expected_tokens(model, prompt)
    if change == "scaling":
        for layer in model.model.layers:
            layer.self_attn.scaling *= 3.0
    else:
        model.config.sliding_window = {"window": 5, "no window": None}[change]
    after = expected_tokens(model, prompt)
    assert engine.generate(prompt, SETTINGS).tokens == after != before


@pytest.mark.parametrize(
    ("architecture", "number"),
    [
        ("gemma2", "final_logit_softcapping"),  # greedy text stays, samples do not
        ("granite", "logits_scaling"),
        ("granite", "residual_multiplier"),
        ("granite", "embedding_multiplier"),
    ],
)
def test_a_number_of_a_module_or_of_the_logits_that_is_set_anew_is_noticed(architecture, number):
    torch.manual_seed(0)
    sizes = {"vocab_size": 211, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 8}
    config = AutoConfig.for_model(architecture, **sizes, num_attention_heads=4, num_key_value_heads=2)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float64).eval()
    model.lm_head.weight.data *= 50
    target, prompt = Target(model), torch.tensor(PROMPT)
    engine = DecodingEngine(target, VanillaDrafter())
    engine.generate(PROMPT, SETTINGS)
    before = model(input_ids=prompt[None]).logits[0, -1]
    if number in ("final_logit_softcapping", "logits_scaling"):
        setattr(model.config, number, None if number == "final_logit_softcapping" else 0.25)
    for module in model.modules():
        if isinstance(vars(module).get(number), float):
            setattr(module, number, 0.3)
    assert engine.generate(PROMPT, SETTINGS).tokens == expected_tokens(model)
    own = model(input_ids=prompt[None]).logits[0, -1]
    assert not torch.allclose(own, before)
    assert torch.allclose(target.prefill(prompt, target.new_cache(64)).logits, own)


def test_end_tokens_that_are_set_anew_end_the_next_answer():
    model = random_llama(211)
    target, settings = Target(model), GenerationSettings(24)
    alone, batched = DecodingEngine(target, VanillaDrafter()), BatchEngine(target, VanillaDrafter())
    model.generation_config.eos_token_id = None
    model.config.eos_token_id = None
    before = alone.generate(PROMPT, settings).tokens
    assert len(before) == 24
    places = [number for number, token in enumerate(before) if token not in before[:number]]
    for place in (places[-1], places[1]):  # one after the other, in the same list
        ends = model.generation_config.eos_token_id or []
        ends.append(before[place])
        model.generation_config.eos_token_id = ends
        (of_batch,) = batched.generate([PROMPT], settings)
        assert alone.generate(PROMPT, settings).tokens == of_batch.tokens == before[: place + 1]
