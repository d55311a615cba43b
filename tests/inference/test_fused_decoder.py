"""The merged forward of Llama-like decoders computes what transformers' modules compute."""

import copy

import pytest
import torch

from inference import fused_decoder
from inference.fused_decoder import FusedDecoder
from inference.target import Target
from inference.tree import ancestor_rows, depths
from inference.tree_attention import TREE_ATTENTION
from scripts.lossless_matrix import RANDOM_TARGETS

TREE = torch.tensor([-1, -1, 0, 0, 2, 1])


def decode(target, prompt=21):
    """Hidden states of a prompt longer than the window, then of a tree, then of one more row."""
    cache = target.new_cache(prompt + 43)
    generator = torch.Generator().manual_seed(0)
    pieces = [target.prefill(torch.randint(0, 211, (prompt,), generator=generator), cache, rows_per_forward=8)[0]]
    sees = ancestor_rows(TREE, 4)
    rows = torch.randint(0, 211, (len(sees),), generator=generator)
    pieces.append(target.forward_tree(rows, depths(sees), sees, cache)[0])
    cache.commit(torch.tensor([[0, 1, 3, 5, 5]]), torch.tensor([4]))
    cache.settle(prompt + 4)
    pieces.append(target.forward_tree(rows[:1], torch.zeros(1, dtype=torch.long), torch.ones(1, 1).bool(), cache)[0])
    return torch.cat(pieces)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-5), (torch.float32, 1e-3)])
@pytest.mark.parametrize("name", RANDOM_TARGETS)
def test_it_equals_the_modules_before_and_after_the_merge(name, dtype, tolerance):
    torch.manual_seed(0)
    model = RANDOM_TARGETS[name]().to(dtype)
    fused, modules = Target(model), Target(copy.deepcopy(model))
    modules._modules_only = True
    with torch.inference_mode():
        expected = decode(modules)
        before = fused.forward_rows(*rows_of(fused))
        assert torch.allclose(decode(fused), expected, atol=tolerance)
        assert fused.fused is not None and modules.fused is None
        after = fused.forward_rows(*rows_of(fused))
    assert torch.allclose(before, after, atol=tolerance)


@pytest.mark.parametrize("path", TREE_ATTENTION)
@pytest.mark.parametrize("name", RANDOM_TARGETS)
def test_every_way_to_attend_gives_the_same_states(name, path):
    torch.manual_seed(0)
    target = Target(RANDOM_TARGETS[name]().double())
    with torch.inference_mode():
        expected = decode(target)
        target.attend(path)
        assert torch.allclose(decode(target), expected, atol=1e-9)


def rows_of(target):
    ids = torch.arange(30)[None] % 211
    return ids, torch.ones_like(ids), torch.arange(30)[None]


@pytest.mark.parametrize("copied", [True, False])
def test_a_merged_model_is_saved_as_it_was(tmp_path, monkeypatch, copied):
    monkeypatch.setattr(fused_decoder, "_COPIED_UP_TO", 2**32 if copied else 0)
    torch.manual_seed(0)
    model = RANDOM_TARGETS["llama"]()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    layer = Target(model).fused.layers[0]
    merged = layer.qkv_weight.data_ptr() == model.model.layers[0].self_attn.q_proj.weight.data_ptr()
    assert merged != copied
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path).state_dict()
    assert before.keys() == again.keys() and all(torch.equal(before[name], again[name]) for name in before)


def test_other_decoders_run_through_their_modules():
    model = RANDOM_TARGETS["llama"]()
    assert FusedDecoder.can_drive(model)
    model.config.hidden_act = "gelu"
    assert not FusedDecoder.can_drive(model)
    model.config.hidden_act = "silu"
    model.config.rope_parameters = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    assert not FusedDecoder.can_drive(model)
