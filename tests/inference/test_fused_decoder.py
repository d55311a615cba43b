"""The merged forward of Llama-like decoders computes what transformers' modules compute."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from draft_heads.inference.target import linear
from draft_heads.inference.target.fused_decoder import ARCHITECTURES, FusedDecoder, Norm
from draft_heads.inference.target.linear import (
    MAX_SKINNY_ROWS,
    MergedLinear,
    copy_pays,
)
from draft_heads.inference.target.target import Target
from draft_heads.inference.target.tree_attention import TREE_ATTENTION, faster_way, tree_attention
from draft_heads.inference.tree import ancestor_rows, depths
from draft_heads.scripts.checks.architectures import _SIZES
from draft_heads.scripts.checks.architectures import ARCHITECTURES as SETTINGS
from draft_heads.scripts.checks.lossless_matrix import RANDOM_TARGETS

TREE = torch.tensor([-1, -1, 0, 0, 2, 1])


def decode(target, prompt=21):
    """Hidden states of a prompt longer than the window, then of a tree, then of one more row."""
    cache = target.new_cache(prompt + 43)
    generator = torch.Generator().manual_seed(0)
    pieces = [target.prefill(torch.randint(0, 211, (prompt,), generator=generator), cache, rows_per_forward=8)[0]]
    sees = ancestor_rows(TREE, 4)
    rows = torch.randint(0, 211, (len(sees),), generator=generator)
    pieces.append(target.forward_tree(rows[None], depths(sees)[None], sees[None], cache)[0][0])
    cache.commit(torch.tensor([[0, 1, 3, 5, 5]]), torch.tensor([4]))
    cache.bound = prompt + 4
    pieces.append(
        target.forward_tree(rows[:1, None], torch.zeros(1, 1, dtype=torch.long), torch.ones(1, 1, 1).bool(), cache)[0][
            0
        ]
    )
    return torch.cat(pieces)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-5), (torch.float32, 1e-3)])
@pytest.mark.parametrize("name", RANDOM_TARGETS)
def test_it_equals_the_modules_before_and_after_the_merge(name, dtype, tolerance):
    torch.manual_seed(0)
    model = RANDOM_TARGETS[name]().to(dtype)
    fused, modules = Target(model), Target(copy.deepcopy(model))
    modules.modules_only = True
    with torch.inference_mode():
        expected = decode(modules)
        before, _ = fused.forward_rows(*rows_of(fused))
        assert torch.allclose(decode(fused), expected, atol=tolerance)
        assert fused.fused is not None and modules.fused is None
        after, _ = fused.forward_rows(*rows_of(fused))
    assert torch.allclose(before, after, atol=tolerance)


@pytest.mark.parametrize("bias", [(False,) * 3, (True,) * 3, (True, False, False), (False, True, True)], ids=str)
@pytest.mark.parametrize("copy", [False, True])
def test_a_merged_linear_is_its_linears_side_by_side_for_any_number_of_rows(copy, bias):
    torch.manual_seed(0)
    linears = [torch.nn.Linear(24, size, own) for size, own in zip((40, 8, 9), bias)]
    assert linear.library.load_library()  # as `copy_pays` does before anything is copied
    merged = MergedLinear.of(linears, copy)
    assert (merged.blocks is not None) == copy and merged.weights[0].shape[1] == 24
    for shape in ((1,), (5,), (MAX_SKINNY_ROWS,), (MAX_SKINNY_ROWS + 1,), (2, 3), (0,)):
        x = torch.randn(*shape, 24)
        expected = torch.cat([linear(x) for linear in linears], dim=-1)
        assert torch.allclose(merged(x), expected, atol=1e-5)


def test_weights_are_copied_in_float32_on_a_cpu_where_there_is_a_compiler(monkeypatch):
    weight = torch.ones(3, 4)
    assert copy_pays([weight]) and not copy_pays([weight, weight.double()]) and not copy_pays([weight.to("meta")])
    monkeypatch.setattr(linear, "MAX_COPIED_BYTES", 47)
    assert not copy_pays([weight])
    monkeypatch.setattr(linear, "MAX_COPIED_BYTES", 48)
    assert copy_pays([weight])
    monkeypatch.setattr(linear.library, "load_library", lambda: False)
    assert not copy_pays([weight])


def test_a_rows_states_do_not_depend_on_how_many_are_verified_with_it():
    target = Target(RANDOM_TARGETS["llama"]())
    qkv = target.fused.layers[0].qkv
    x = torch.randn(9, qkv.weights[0].shape[1])
    assert all(torch.equal(qkv(x[:rows]), qkv(x)[:rows]) for rows in range(1, 10))


@pytest.mark.parametrize("path", TREE_ATTENTION)
@pytest.mark.parametrize("name", RANDOM_TARGETS)
def test_every_way_to_attend_gives_the_same_states(name, path):
    torch.manual_seed(0)
    target = Target(RANDOM_TARGETS[name]().double())
    with torch.inference_mode():
        expected = decode(target)
        target.attend(path)
        assert torch.allclose(decode(target), expected, atol=1e-9)


def test_attention_as_products_is_for_one_text_and_few_rows_on_a_gpu():
    for texts, rows, on_gpu, way in ((1, 33, True, "products"), (1, 65, True, "masked"), (2, 1, True, "masked")):
        assert faster_way(texts, 32 * rows, on_gpu) == way
    assert faster_way(1, 32, on_gpu=False) == "masked"
    mask = {"full_attention": torch.ones(1, 3, 8, dtype=torch.bool)}
    ways = [type(tree_attention(way, mask, 4, 2, torch.float32)).__name__ for way in TREE_ATTENTION]
    assert ways == ["MaskedAttention", "MaskedAttention", "ProductAttention"]  # auto here is masked


@pytest.mark.parametrize("way", ["masked", "products"])
def test_scores_of_half_precision_are_not_rounded_before_the_softmax(way):
    """Scores of 16 to 32 in bfloat16 would be off by .06, and weights by 6 %."""
    torch.manual_seed(0)
    queries, keys, values = (torch.randn(1, 2, rows, 16).bfloat16() for rows in (6, 40, 40))
    queries *= 6
    sees = torch.ones(1, 3, 40, dtype=torch.bool)
    attended = tree_attention(way, {"full_attention": sees}, 4, 2, torch.bfloat16)(
        "full_attention", queries, keys, values, 0.3
    )
    exact = (0.3 * queries.double() @ keys.double().mT).softmax(-1) @ values.double()
    assert (attended - exact).abs().max() < 2**-7 * exact.abs().max()


@pytest.mark.parametrize("norm, plus", [(GemmaRMSNorm, 1), (LlamaRMSNorm, 0)])
def test_a_norm_of_large_weights_in_half_precision_is_the_models_own(norm, plus):
    torch.manual_seed(0)
    module = norm(64).bfloat16()
    torch.nn.init.uniform_(module.weight, 130, 200)  # 1 + w and w differ by no more than half precision rounds
    fused = Norm(module)
    states = torch.randn(5, 64).bfloat16()
    exact = torch.nn.functional.rms_norm(states.double(), (64,), module.weight.double() + plus, 1e-6)
    gain = (fused(states).double() * exact).sum() / exact.square().sum()
    assert fused.plus == plus and abs(gain - 1) < 2e-3


@pytest.mark.parametrize("dtype, least", [(torch.bfloat16, 1e-3), (torch.float16, 1e-4)])
def test_one_plus_a_weight_is_not_rounded_to_half_precision(dtype, least):
    """As Gemma's weights are: in bfloat16 1 + .0123 would be 1.0156, at every position alike.

    The gain of each channel over 20,000 states, from which the rounding of single states is averaged out.
    """
    torch.manual_seed(0)
    module = GemmaRMSNorm(32).to(dtype)
    torch.nn.init.uniform_(module.weight, -0.5, 0.9)
    fused, states = Norm(module), torch.randn(20_000, 32).to(dtype)
    normed = states.double() * states.double().square().mean(-1, keepdim=True).add(module.eps).rsqrt()
    gains = (fused(states).double() * normed).sum(0) / normed.square().sum(0)
    assert fused.plus == 1 and fused(states).dtype == dtype
    assert (gains - (1 + module.weight.double())).abs().max() < least / 4


@pytest.mark.parametrize("name", [name for name in ARCHITECTURES if name in SETTINGS])
def test_in_half_precision_it_errs_no_more_than_the_modules(name):
    """Both against the same weights in float64; cos and sin have the type that the model rotates in."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(name, **_SIZES | SETTINGS[name])
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in (weight for path, weight in model.named_parameters() if "norm" in path):
            parameter.add_(torch.empty_like(parameter).uniform_(-0.5, 0.5))
    model = model.bfloat16()
    ids = torch.randint(0, config.vocab_size - 1, (4, 60))
    with torch.inference_mode():
        exact = copy.deepcopy(model).double().model(input_ids=ids).last_hidden_state
        modules = model.model(input_ids=ids).last_hidden_state
        layers = getattr(config, "layer_types", None)
        given = [layers[0]] if hasattr(model.model.rotary_emb, f"{layers and layers[0]}_inv_freq") else []
        own, _ = model.model.rotary_emb(modules, torch.arange(60)[None], *given)
        target = Target(model)
        fused = torch.stack([target.prefill(row, target.new_cache(70))[0] for row in ids])
    errors = [(states.double() - exact).square().mean().sqrt() for states in (fused, modules)]
    assert errors[0] < 1.08 * errors[1]
    rope = next(iter(target.fused.ropes.values()))
    assert target.fused._rotation(torch.arange(60), rope)[0].dtype == own.dtype


def rows_of(target):
    ids = torch.arange(30)[None] % 211
    return ids, torch.ones_like(ids), torch.arange(30)[None]


@pytest.mark.parametrize("copied", [True, False])
def test_a_merged_model_is_saved_as_it_was(tmp_path, monkeypatch, copied):
    monkeypatch.setattr(linear, "MAX_COPIED_BYTES", 2**32 if copied else 0)
    torch.manual_seed(0)
    model = RANDOM_TARGETS["llama"]()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    assert Target(model).fused is not None
    queries, keys = (getattr(model.model.layers[0].self_attn, name).weight for name in ("q_proj", "k_proj"))
    merged = keys.untyped_storage().data_ptr() == queries.untyped_storage().data_ptr()
    assert merged != copied
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path).state_dict()
    assert before.keys() == again.keys() and all(torch.equal(before[name], again[name]) for name in before)


class Int8(torch.Tensor):
    """As quantisers hold weights: a class of its own that names the dtype it stands for."""


@pytest.mark.parametrize(
    "change",
    [
        lambda model: model.config.update({"model_type": "olmo"}),
        lambda model: model.config.update({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4}}),
        lambda model: model.model.layers[1].mlp.add_module("more", nn.Linear(2, 2)),
        lambda model: model.lm_head.to(torch.float64),
        lambda model: setattr(model.lm_head, "weight", nn.Parameter(model.lm_head.weight.detach().as_subclass(Int8))),
    ],
    ids=["architecture", "rope", "module", "dtype", "quantised"],
)
def test_what_is_not_known_in_every_part_runs_through_its_modules(change):
    model = RANDOM_TARGETS["llama"]()
    assert FusedDecoder.can_drive(model)
    change(model)
    assert not FusedDecoder.can_drive(model)


def test_a_fused_forward_that_answers_differently_is_not_used_and_a_warning_says_why(monkeypatch, caplog):
    torch.manual_seed(0)
    target = Target(RANDOM_TARGETS["mistral"]())
    monkeypatch.setattr(FusedDecoder, "_rotation", lambda self, *args: (torch.ones(1), torch.zeros(1)))
    assert target.forward_kind == "modules" and target.window == 16
    (said,) = (record.message for record in caplog.records if record.levelname == "WARNING")
    assert "decodes more slowly, through its modules" in said and "of their spread" in said


@pytest.mark.parametrize("name", RANDOM_TARGETS)
def test_attention_may_lay_out_its_result_in_memory_as_the_kernels_of_a_gpu_do(name, monkeypatch):
    """Theirs lies as [B, Q, N, D], and is handed out transposed."""
    attention = F.scaled_dot_product_attention

    def transposed(*args, **kwargs):
        attended = attention(*args, **kwargs)
        return attended.transpose(1, 2).contiguous().transpose(1, 2)

    torch.manual_seed(0)
    target = Target(RANDOM_TARGETS[name]().double())
    expected = decode(target)
    monkeypatch.setattr(F, "scaled_dot_product_attention", transposed)
    torch.manual_seed(0)
    again = Target(RANDOM_TARGETS[name]().double())
    assert again.forward_kind == "fused" and torch.equal(decode(again), expected)
