"""A target whose config, modules' numbers or end tokens are set anew between two answers, as in a notebook."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from draft_heads.inference.batch import BatchEngine
from draft_heads.inference.drafters.base import VanillaDrafter
from draft_heads.inference.drafters.text.ngram import NgramDrafter
from draft_heads.inference.engine import DecodingEngine
from draft_heads.inference.generation import GenerationSettings
from draft_heads.inference.target.target import Target
from tests.inference.models import RANDOM_TARGETS, in_slots
from tests.inference.test_changed_weights import PROMPT, SETTINGS, expected_tokens
from tests.tiny_chat import random_llama

DYNAMIC = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}


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


def test_fewer_layers_that_the_config_asks_for_are_noticed():
    """How `generate` is made to leave early: models run as many layers as their config says."""
    model = random_llama(num_hidden_layers=3).double()
    engine = DecodingEngine(Target(model), VanillaDrafter())
    whole, tokens = engine.generate(PROMPT, SETTINGS).tokens, []
    for layers in (1, 3):
        model.config.num_hidden_layers = layers
        tokens.append(engine.generate(PROMPT, SETTINGS).tokens)
        assert tokens[-1] == expected_tokens(model)
    assert tokens[1] == whole != tokens[0]


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


def test_other_rotary_frequencies_are_a_change_but_not_those_that_a_forward_sets_itself():
    """A captured step reads the address of the old ones."""
    target = Target(random_llama(211))
    engine, rotary = DecodingEngine(target, NgramDrafter()), target.model.model.rotary_emb
    before = engine.generate(PROMPT, SETTINGS).tokens
    rotary.inv_freq = rotary.inv_freq / 4
    after = expected_tokens(target.model)
    assert engine.generate(PROMPT, SETTINGS).tokens == after != before and target.changes == 1
    rotary.inv_freq.mul_(3)
    assert engine.generate(PROMPT, SETTINGS).tokens == expected_tokens(target.model) and target.changes == 2
    stretched = random_llama(211, max_position_embeddings=16, rope_parameters=DYNAMIC)
    target = Target(stretched)
    engine, inv_freq = DecodingEngine(target, VanillaDrafter()), stretched.model.rotary_emb.inv_freq
    stretched(torch.arange(5, 45)[None])
    assert stretched.model.rotary_emb.inv_freq is not inv_freq
    engine.generate(PROMPT, GenerationSettings(4, ()))
    assert target.changes == 0


def test_a_target_that_drops_values_out_is_refused_until_it_is_evaluated():
    target = Target(random_llama(211))
    engines = DecodingEngine(target, NgramDrafter()), BatchEngine(target, in_slots(NgramDrafter, 2))
    before = engines[0].generate(PROMPT, SETTINGS).tokens
    target.model.train()  # without dropout this changes nothing
    assert engines[0].generate(PROMPT, SETTINGS).tokens == before
    target.model.model.layers[0].self_attn.attention_dropout = 0.1
    for engine, asked in zip(engines, (PROMPT, [PROMPT] * 2)):
        with pytest.raises(ValueError, match=r"those without dropout; .* is in training mode; call model.eval\(\)"):
            engine.generate(asked, SETTINGS)
    target.model.eval()
    assert engines[0].generate(PROMPT, SETTINGS).tokens == before
