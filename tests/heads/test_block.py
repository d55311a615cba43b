"""The block: attention with fewer key heads than query heads, and which targets' layers it can start from."""

import warnings

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from draft_heads.heads.block import DecoderBlock, Norm, folded_attention, grouped_attention
from draft_heads.heads.config import target_sizes
from draft_heads.heads.ctc import CTCConfig


@pytest.mark.parametrize("heads, shared", [(4, 4), (4, 2), (6, 1)])
def test_folding_the_queries_of_a_key_head_into_rows_changes_nothing(heads, shared):
    torch.manual_seed(0)
    rows, slots, size = 3, 7, 8
    queries = torch.randn(2, heads, rows, size, dtype=torch.float64)
    keys, values = torch.randn(2, 2, shared, slots, size, dtype=torch.float64)
    mask = torch.rand(rows, slots) < 0.5
    mask[:, 0] = True
    expected = grouped_attention(queries, keys, values, mask)
    for given in (mask[None, None], mask.expand(1, heads // shared, -1, -1)):
        assert torch.allclose(folded_attention(queries, keys, values, given), expected)


def test_a_norm_takes_the_type_of_its_states_in_one_operation():
    torch.manual_seed(0)
    norm, states = Norm(16, eps=1e-5), torch.randn(3, 16, dtype=torch.bfloat16, requires_grad=True)
    torch.nn.init.uniform_(norm.weight)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # torch warns of weights and states of two types
        normed = norm(states)
    exact = states.double() * (states.double().pow(2).mean(-1, keepdim=True) + 1e-5).rsqrt() * norm.weight.double()
    assert normed.dtype == torch.bfloat16 and torch.allclose(normed.double(), exact, rtol=2**-6)
    normed.float().sum().backward()
    assert norm.weight.grad.dtype == torch.float32


@pytest.mark.parametrize(
    "model_type, different",
    [
        ("llama", []),
        ("mistral", []),
        ("gemma", ["input_layernorm", "mlp.act_fn"]),
        ("granite", ["self_attn.scaling", "residual_multiplier"]),
        ("qwen3", ["self_attn.k_norm.weight", "self_attn.q_norm.weight"]),
        ("helium", ["self_attn.rotation"]),
        ("ernie4_5", ["self_attn.rotation"]),
    ],
)
def test_a_block_differs_from_layers_that_compute_something_else(model_type, different):
    sizes = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4, vocab_size=61)
    extra = dict(attention_multiplier=0.25, residual_multiplier=0.2) if model_type == "granite" else {}
    config = AutoConfig.for_model(model_type, **sizes, num_key_value_heads=2, head_dim=8, **extra)
    layer = AutoModelForCausalLM.from_config(config).get_decoder().layers[0]
    assert DecoderBlock(CTCConfig(**target_sizes(config))).differs_from(layer) == different


def test_a_block_differs_from_a_layer_that_rotates_a_part_of_each_head():
    sizes = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4, vocab_size=61)
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    for given, different in (({}, []), ({"partial_rotary_factor": 0.5}, ["self_attn.rotation"])):
        config = AutoConfig.for_model("llama", **sizes, head_dim=8, rope_parameters=rope | given)
        layer = AutoModelForCausalLM.from_config(config).get_decoder().layers[0]
        assert DecoderBlock(CTCConfig(**target_sizes(config))).differs_from(layer) == different
