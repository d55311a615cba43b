"""A target whose layers lie on two devices, rehearsed with fake tensors: they have devices, which must not be mixed."""

import pytest
import torch
from accelerate.hooks import AlignDevicesHook, ModelHook, add_hook_to_module
from torch import nn
from torch._subclasses import FakeTensorMode
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from draft_heads.inference.target.kv_cache import PerLayerKVCache
from draft_heads.inference.target.labels import own_logits
from draft_heads.inference.target.linear import half_precision_product
from draft_heads.inference.target.probe import _gaps
from draft_heads.inference.target.target import Target

FIRST, LAST = torch.device("cpu", 0), torch.device("cpu", 1)


@pytest.fixture(autouse=True)
def fake_devices():
    with FakeTensorMode(), torch.no_grad():
        yield


def spread_target(tied):
    """As accelerate spreads one: the last layer and norm lie on the second device, as does an LM head of its own."""
    sizes = dict(hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, vocab_size=64)
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**sizes, num_key_value_heads=1, tie_word_embeddings=tied))
    last = (model.model.layers[1], model.model.norm, *[model.lm_head] * (not tied))
    on_last = {part for module in last for part in module.modules()}
    for module in model.modules():
        device = LAST if module in on_last else FIRST
        for name, weight in module.named_parameters(recurse=False):
            setattr(module, name, nn.Parameter(torch.empty(weight.shape, device=device)))
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, torch.empty(buffer.shape, device=device))
    model.tie_weights()
    for module in {*on_last, model.lm_head}:
        add_hook_to_module(module, AlignDevicesHook(LAST if module in on_last else FIRST))
    return Target(model, runs=False)


@pytest.mark.parametrize("tied", [False, True])
def test_states_and_logits_come_back_to_the_first_device(tied):
    target = spread_target(tied)
    assert target.layer_devices == [FIRST, LAST] and target.device == FIRST
    ids = torch.zeros(2, 8, dtype=torch.long, device=FIRST)
    hidden, aux_hidden = target.modules(ids, ids, target_layers=[1])  # as rows are trained on
    assert hidden.device == aux_hidden.device == FIRST
    assert own_logits(target, hidden[0]).argmax(-1).shape == (8,)

    cache = target.new_cache(32)
    assert all(value.device == FIRST for value in target.prefill(ids[0], cache, [1]))
    sees = torch.ones(1, 3, 3, dtype=torch.bool, device=FIRST)
    tree = target.forward_tree(ids[:1, :3], ids[:1, :3], sees, cache, [1])
    assert tree.logits.shape == (1, 3, 64) and all(value.device == FIRST for value in tree)
    cache.commit(ids[:1, :2], ids[:1, 0])


def test_a_target_wholly_on_another_device_than_its_embedding_has_a_cache_there():
    target = spread_target(tied=False)
    target.layer_devices, target.one_size = [LAST, LAST], True
    assert isinstance(target.new_cache(32), PerLayerKVCache)


def test_layers_are_found_whatever_a_decoder_calls_them():
    with torch.device("meta"):
        model = GPT2LMHeadModel(GPT2Config(n_embd=16, n_layer=3, n_head=2, vocab_size=64))
    assert Target(model, runs=False).layer_devices == [torch.device("meta")] * 3


def test_the_probe_compares_logits_of_two_devices():
    gaps = [_gaps(torch.empty(2, 8, device=one), torch.empty(2, 8, device=FIRST)) for one in (FIRST, LAST)]
    assert torch.cat(gaps).shape == (4,)


def test_the_half_precision_product_is_made_where_the_weight_lies():
    linear = nn.Linear(8, 4, bias=False, device="meta")
    linear.weight = nn.Parameter(torch.empty(4, 8, dtype=torch.bfloat16, device="cuda:0"))
    product = half_precision_product(linear, torch.empty(2, 3, 8, dtype=torch.bfloat16, device="cuda:1"))
    assert product.device == torch.device("cuda:0") and product.shape == (2, 3, 4)
    assert product.dtype == torch.float32
    states = torch.empty(3, 8, dtype=torch.bfloat16, device="cuda:1")
    add_hook_to_module(linear, ModelHook())  # accelerate's, as of a spread target
    assert half_precision_product(linear, states) is not None
    linear.register_forward_hook(lambda *args: None)  # a user's beside it
    assert half_precision_product(linear, states) is None
    linear = nn.Linear(8, 4, bias=False, device="meta")
    linear.weight = nn.Parameter(torch.empty(4, 8, dtype=torch.bfloat16, device="cuda:0"))
    linear.forward = lambda states: states
    add_hook_to_module(linear, ModelHook())
    assert half_precision_product(linear, states) is None


@pytest.mark.parametrize("how", ["hook", "pre_hook", "forward"])
def test_what_is_laid_on_the_lm_head_is_not_passed_over(how):
    """As a bias on some tokens: the module computes."""
    linear = nn.Linear(8, 4, bias=False, device="meta")
    linear.weight = nn.Parameter(torch.empty(4, 8, dtype=torch.bfloat16, device="cuda:0"))
    if how == "forward":
        linear.forward = lambda states: states
    else:
        register = linear.register_forward_hook if how == "hook" else linear.register_forward_pre_hook
        register(lambda *args: None)
    assert half_precision_product(linear, torch.empty(3, 8, dtype=torch.bfloat16, device="cuda:0")) is None
