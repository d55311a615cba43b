"""The block: attention with fewer key heads than query heads, and which targets' layers it can start from."""

import copy

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from draft_heads.heads.attention import causal_attention
from draft_heads.heads.block import DecoderBlock, folded_attention, grouped_attention
from draft_heads.heads.config import target_sizes
from draft_heads.heads.ctc import CTCConfig, CTCHead
from draft_heads.inference.target.linear import prepare_for_drafting


@pytest.mark.parametrize("heads, shared", [(4, 4), (4, 2), (6, 1)])
def test_folding_the_queries_of_a_key_head_into_rows_changes_nothing(heads, shared):
    torch.manual_seed(0)
    rows, slots, size = 3, 7, 8
    queries = torch.randn(2, heads, rows, size, dtype=torch.float64)
    keys, values = torch.randn(2, 2, shared, slots, size, dtype=torch.float64)
    mask = torch.rand(rows, slots) < 0.5
    mask[:, 0] = True
    expected = grouped_attention(queries, keys, values, mask)
    for given in (mask, mask.expand(heads // shared, -1, -1)):
        assert torch.allclose(folded_attention(queries, keys, values, given), expected)


def test_merged_projections_change_nothing_but_the_number_of_products():
    torch.manual_seed(0)
    sizes = dict(hidden_size=32, vocab_size=61, intermediate_size=48, num_attention_heads=4, num_key_value_heads=2)
    head = CTCHead(CTCConfig(**sizes, head_dim=8)).double()
    block, states = head.block, torch.randn(1, 3, 32, dtype=torch.float64)
    for linear in (block.o_proj, block.down_proj):
        torch.nn.init.normal_(linear.weight)

    def results():
        rotation = block.rotation(torch.arange(3)[None])
        attend = causal_attention(torch.ones(1, 3, dtype=torch.long))
        return block(states, rotation, attend), *block.context_keys_values(states, rotation)

    with torch.no_grad():
        apart = results()
        weights = {name: weight.clone() for name, weight in head.state_dict().items()}
        prepare_for_drafting(head)
        assert block.qkv is not None and block.gate_up is not None
        assert all(torch.allclose(*both, atol=1e-12) for both in zip(apart, results()))
    assert all(torch.equal(weights[name], weight) for name, weight in head.state_dict().items())
    results()[0].sum().backward()
    assert block.q_proj.weight.grad is not None and block.up_proj.weight.grad is not None


@pytest.mark.parametrize("changed", [copy.deepcopy, lambda head: head.half().double()], ids=["copied", "converted"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["column blocks", "merged"])
def test_a_head_that_has_drafted_can_be_copied_and_converted(dtype, changed):
    torch.manual_seed(0)
    sizes = dict(hidden_size=32, vocab_size=61, intermediate_size=48, num_attention_heads=4, num_key_value_heads=2)
    head = prepare_for_drafting(CTCHead(CTCConfig(**sizes, head_dim=8)).to(dtype))
    other = changed(head)
    block = other.block.double()
    with torch.no_grad():
        for weight in block.parameters():
            weight.copy_(torch.randn_like(weight))

    def output():
        attend = causal_attention(torch.ones(1, 3, dtype=torch.long))
        states = torch.ones(1, 3, 32, dtype=torch.float64)
        return block(states, block.rotation(torch.arange(3)[None]), attend)

    with torch.no_grad():
        drafted = output()
    assert torch.allclose(drafted, output().detach())


@pytest.mark.parametrize(
    "model_type, different",
    [
        ("llama", []),
        ("mistral", []),
        ("gemma", ["input_layernorm", "mlp.act_fn"]),
        ("granite", ["self_attn.scaling", "residual_multiplier"]),
        ("qwen3", ["self_attn.k_norm.weight", "self_attn.q_norm.weight"]),
    ],
)
def test_a_block_differs_from_layers_that_compute_something_else(model_type, different):
    sizes = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4, vocab_size=61)
    extra = dict(attention_multiplier=0.25, residual_multiplier=0.2) if model_type == "granite" else {}
    config = AutoConfig.for_model(model_type, **sizes, num_key_value_heads=2, head_dim=8, **extra)
    layer = AutoModelForCausalLM.from_config(config).get_decoder().layers[0]
    assert DecoderBlock(CTCConfig(**target_sizes(config))).differs_from(layer) == different
