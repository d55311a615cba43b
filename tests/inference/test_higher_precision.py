"""Judging one precision higher: mixtures of experts, packed weights, and the logits that exist at once."""

import copy

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    LogitsProcessorList,
)

from draft_heads.inference.evaluation import lossless
from draft_heads.inference.evaluation.lossless import (
    Oracle,
    gap_noise,
    higher_precision,
)
from draft_heads.scripts.checks.architectures import _SIZES, ARCHITECTURES
from tests.inference.test_lossless import PROMPT, make_target, settings


def test_a_mixture_of_experts_is_judged_one_precision_higher():
    """Whose grouped product has no float64; afterwards it computes as before."""
    torch.manual_seed(0)
    config = AutoConfig.for_model("mixtral", **_SIZES | ARCHITECTURES["mixtral"])
    model = AutoModelForCausalLM.from_config(config).eval()
    ids, before = torch.tensor([[5, 6, 7, 8]]), model.get_experts_implementation()
    exact = copy.deepcopy(model).double()
    exact.set_experts_implementation("eager")
    with torch.no_grad():
        own = model(input_ids=ids).logits
        with higher_precision(model, torch.float64):
            assert torch.allclose(model(input_ids=ids).logits, exact(input_ids=ids).logits, rtol=0, atol=1e-6)
        assert model.get_experts_implementation() == before and torch.equal(model(input_ids=ids).logits, own)
    assert gap_noise(model, [5, 6, 7, 8], "cpu") > 0


class Float8Linear(torch.nn.Module):
    """As transformers' for fine-grained FP8: weights of 8 bits are scaled, any other are taken for unpacked ones."""

    def __init__(self, linear):
        super().__init__()
        self.scale = linear.weight.abs().max() / 400
        self.weight = torch.nn.Parameter((linear.weight / self.scale).to(torch.float8_e4m3fn), requires_grad=False)

    def forward(self, states):
        if self.weight.element_size() > 1:
            return states @ self.weight.T
        assert states.dtype == torch.bfloat16  # as kernels that know half precision only
        return states @ (self.weight.bfloat16() * self.scale.bfloat16()).T


def test_packed_weights_are_judged_as_they_are():
    target = make_target(torch.bfloat16)
    for layer in target.model.model.layers:
        layer.mlp.up_proj = Float8Linear(layer.mlp.up_proj.float())
    model, ids = target.model, torch.tensor([PROMPT])
    with torch.no_grad():
        own = model(input_ids=ids).logits.float()
        with higher_precision(model, torch.float32):
            judged = model(input_ids=ids).logits
        assert torch.equal(model(input_ids=ids).logits.float(), own)
    assert judged.dtype == torch.float32 and 0 < (judged - own).abs().max() < 0.05 * own.abs().max()
    assert gap_noise(model, PROMPT, "cpu") < 0.1 * own.abs().max()


@pytest.mark.parametrize("changed", [False, True])
def test_the_noise_of_a_long_text_is_measured_in_pieces(monkeypatch, changed):
    target, rows = make_target(), []
    given = (LogitsProcessorList(), 3) if changed else None  # of a prompt of three tokens
    whole, whole_noise = target.model.forward, gap_noise(target.model, PROMPT, "cpu", given)

    def forward(*args, logits_to_keep=0, **options):
        rows.append(logits_to_keep if isinstance(logits_to_keep, int) else logits_to_keep.tolist())
        return whole(*args, logits_to_keep=logits_to_keep, **options)

    monkeypatch.setattr(target.model, "forward", forward)
    monkeypatch.setattr(lossless, "LOGIT_ROWS", 2)
    assert 0.3 < gap_noise(target.model, PROMPT, "cpu", given) / whole_noise < 3
    assert rows[:6] == [[0, 1], [2, 3], [4]] * 2 and set(map(str, rows[6:])) == {"0"}


def test_a_gap_is_measured_on_the_logits_of_one_row(monkeypatch):
    target, rows = make_target(), []
    whole = target.model.forward

    def forward(*args, logits_to_keep=0, **options):
        rows.append(logits_to_keep)
        return whole(*args, logits_to_keep=logits_to_keep, **options)

    monkeypatch.setattr(target.model, "forward", forward)
    Oracle(target, settings()).gap(PROMPT, (), 3, 39)
    assert rows == [1]
