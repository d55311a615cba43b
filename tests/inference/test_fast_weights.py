"""A head that drafts is a copy: the same products in fewer or faster operations; the head itself can be trained on."""

import copy

import pytest
import torch

from draft_heads.heads.attention import causal_attention
from draft_heads.heads.checkpoint import HEADS
from draft_heads.heads.ctc import CTCConfig, CTCHead
from draft_heads.inference.drafters.heads.fast_weights import FastBlock, SkinnyLinear, prepare_for_drafting
from draft_heads.inference.drafters.registry import DrafterBuilder, DrafterSpec, drafter_for
from draft_heads.inference.target.target import Target
from tests.inference.models import RANDOM_TARGETS, make_head

SIZES = dict(hidden_size=32, vocab_size=61, intermediate_size=48, num_attention_heads=4, num_key_value_heads=2)
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["column blocks", "merged"])


def small_head(dtype):
    torch.manual_seed(0)
    head = CTCHead(CTCConfig(**SIZES, head_dim=8)).to(dtype)
    for linear in (head.block.o_proj, head.block.down_proj):
        torch.nn.init.normal_(linear.weight)
    return head


def block_results(head):
    """What the first block makes of three states, and the keys and values of their context."""
    block = head.block
    states = torch.linspace(-1, 1, 96, dtype=block.q_proj.weight.dtype).view(1, 3, 32)
    rotation, attend = block.rotation(torch.arange(3)[None]), causal_attention(torch.ones(1, 3, dtype=torch.long))
    return block(states, rotation, attend), *block.context_keys_values(states, rotation)


def test_merged_projections_change_nothing_but_the_number_of_products():
    head = small_head(torch.float64)
    fast = prepare_for_drafting(head)
    block = fast.block
    assert type(block) is FastBlock and list(fast.state_dict()) == list(head.state_dict())
    q, k, v = (getattr(block, name).weight.untyped_storage().data_ptr() for name in ("q_proj", "k_proj", "v_proj"))
    assert q == k == v  # in memory once
    assert all(torch.allclose(*both, atol=1e-12) for both in zip(block_results(head), block_results(fast)))


@DTYPES
def test_a_head_that_has_a_drafter_is_trained_on_as_if_it_had_none(dtype):
    head = small_head(dtype).train()
    before = [(name, id(x), x.data_ptr(), x.requires_grad) for name, x in head.named_parameters()]
    modules = [(name, id(module)) for name, module in head.named_modules()]
    weights = {name: x.clone() for name, x in head.state_dict().items()}
    fast = prepare_for_drafting(head)
    assert before == [(name, id(x), x.data_ptr(), x.requires_grad) for name, x in head.named_parameters()]
    assert modules == [(name, id(module)) for name, module in head.named_modules()] and head.training
    assert all(torch.equal(weights[name], x) for name, x in head.state_dict().items())
    block_results(head)[0].sum().backward()
    assert all(p.grad is not None for name, p in head.block.named_parameters())
    assert not fast.training and not any(p.requires_grad for p in fast.parameters())


@DTYPES
def test_only_merged_weights_are_held_twice(dtype):
    head = small_head(dtype)
    fast = prepare_for_drafting(head)
    held = {x.data_ptr() for x in head.state_dict().values()}
    apart = {name.split(".")[-2] for name, x in fast.state_dict().items() if x.data_ptr() not in held}
    assert apart == (set() if dtype == torch.float32 else {"q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"})


@pytest.mark.parametrize("changed", [copy.deepcopy, lambda head: head.half().double()], ids=["copied", "converted"])
@DTYPES
def test_a_copy_can_be_copied_and_converted(dtype, changed):
    fast = prepare_for_drafting(small_head(dtype))
    expected = [x.double() for x in block_results(fast)]
    found = block_results(changed(fast).to(dtype))
    assert all(torch.allclose(*both, rtol=2e-2, atol=2e-2) for both in zip(expected, [x.double() for x in found]))


def test_a_copy_of_another_type_shares_nothing_with_the_head():
    head = small_head(torch.float32)
    weights = {name: x.clone() for name, x in head.state_dict().items()}
    fast = prepare_for_drafting(head, torch.bfloat16)
    assert {p.dtype for p in fast.parameters()} == {torch.bfloat16} and {p.dtype for p in head.parameters()} == {
        torch.float32
    }
    assert all(torch.equal(weights[name], x) for name, x in head.state_dict().items())


@pytest.mark.parametrize("cut", [False, True])
@pytest.mark.parametrize("kind", ["ctc", "medusa", "hydra", "chimera"])
def test_a_head_that_drafts_says_what_it_said_and_is_saved_as_it_was(kind, cut):
    target = Target(RANDOM_TARGETS["llama"]())
    head = make_head(target, kind, **({"draft_vocab_size": 32} if cut else {}))
    linears = {name: m for name, m in head.named_modules() if type(m) is torch.nn.Linear}
    assert linears
    fast = prepare_for_drafting(head)
    assert prepare_for_drafting(fast) is fast
    assert all(torch.equal(x, fast.state_dict()[name]) for name, x in head.state_dict().items())
    assert list(fast.state_dict()) == list(head.state_dict())
    for name, before in linears.items():
        after, x = fast.get_submodule(name), torch.randn(3, before.in_features)
        assert type(after) is SkinnyLinear and type(head.get_submodule(name)) is torch.nn.Linear
        assert torch.allclose(after(x), before(x), atol=1e-5)
    hidden = torch.randn(3, target.config.hidden_size)
    view, plain = target.drafting_view(head), head.draft_view(target.view())
    assert view.lm_head.blocks is not None and (view.lm_head is target.fused.logits) == (not cut)
    assert torch.allclose(view.logits(hidden), plain.logits(hidden), atol=1e-5)


@pytest.mark.parametrize("kind", sorted(HEADS))
def test_only_drafters_that_score_with_the_targets_head_hold_its_rows(kind):
    """A view with the rows of the draft vocabulary is a copy of them."""
    target = Target(RANDOM_TARGETS["llama"]())
    drafter = drafter_for(make_head(target, kind, draft_vocab_size=32), target, 8)
    assert len(drafter.view.lm_head_weight) == (32 if kind in ("ctc", "chimera") else 211)


def test_drafters_of_one_checkpoint_share_one_copy(tmp_path, monkeypatch):
    target = Target(RANDOM_TARGETS["llama"]())
    monkeypatch.setattr(target, "fingerprint", dict)  # it has no tokenizer
    make_head(target, "ctc").save_pretrained(tmp_path)
    builder = DrafterBuilder(target)
    one, other = (builder.build(DrafterSpec.parse(f"a={tmp_path}{words}")) for words in ("", ",tree=raw"))
    assert one.head is other.head
