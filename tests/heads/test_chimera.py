"""The Chimera head: its training mask, one pass against every anchor alone, start values, the target's first layer."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from draft_heads.heads.attention import dense_anchor_attention, dense_mask, flex_anchor_attention, fusion_mask
from draft_heads.heads.base import Rows, TargetView
from draft_heads.heads.block import grouped_attention
from draft_heads.heads.chimera import ChimeraConfig, ChimeraHead
from draft_heads.inference.target.target import Target
from tests.heads.small import SIZES, disturbed, lent_target, text

VARIANTS = [{}, {"order": 1}, {"order": 5}, {"projection": "shared"}, {"residual": False}]


def make_head(**settings):
    return disturbed(ChimeraHead, ChimeraConfig, **{"heads": 3, **settings})


@pytest.fixture(scope="module")
def view():
    return lent_target()


def whole_mask(anchors, segments, heads):
    queries, keys = torch.arange(anchors.shape[1] * heads), torch.arange(2 * segments.shape[1])
    return dense_mask(fusion_mask(anchors, segments, heads), len(anchors), queries, keys)


def test_the_mask_of_the_worked_examples():
    mask = whole_mask(torch.tensor([[2]]), torch.ones(1, 6, dtype=torch.long), 2)[0].long()
    assert mask.tolist() == [
        [1, 1, 1, 0, 0, 0, 1, 1, 1, 1, 0, 0],
        [1, 1, 1, 0, 0, 0, 1, 1, 1, 1, 1, 0],
    ]
    # n = 4 committed tokens, head k = 1, counted from 1: h_1..h_4 and g_1..g_6. From 0: anchor 3.
    row = whole_mask(torch.tensor([[3]]), torch.ones(1, 8, dtype=torch.long), 2)[0, 1]
    assert row.nonzero()[:, 0].tolist() == [0, 1, 2, 3, 8, 9, 10, 11, 12, 13]


@pytest.mark.parametrize("chunk", [1, 3, 16])
def test_both_attention_paths_equal_one_call_with_the_whole_mask(chunk):
    torch.manual_seed(0)
    heads, anchors = 4, torch.tensor([[1, 4, 5, 9, 11], [0, 2, 3, 7, 8]])
    segments = torch.tensor([[1] * 5 + [2] * 7, [1] * 12])
    past, grams = ((torch.randn(2, 2, 12, 8), torch.randn(2, 2, 12, 8)) for _ in range(2))
    queries = torch.randn(2, 4, 20, 8)
    expected = grouped_attention(
        queries,
        torch.cat([past[0], grams[0]], 2),
        torch.cat([past[1], grams[1]], 2),
        whole_mask(anchors, segments, heads)[:, None],
    )
    drafting = fusion_mask(anchors, segments, heads), anchors, heads, past, grams
    attend = dense_anchor_attention(*drafting, anchors_per_chunk=chunk)
    assert torch.allclose(attend(queries, queries, queries), expected, atol=1e-6)
    with torch.no_grad():  # FlexAttention has no backward on CPU
        flex = flex_anchor_attention(*drafting)(queries, queries, queries)
    assert torch.allclose(flex, expected, atol=1e-5)


def one_alone(head, rows, anchor, k, view):
    """f of head k at one anchor, by a causal block over nothing but [h_0 … h_n ; g_0 … g_{n+1+k}]."""
    past, seen = anchor + 1, anchor + 2 + k
    encoded = head.encode_rows(
        Rows(*(x[:, :seen] for x in (rows.hidden, rows.input_ids, rows.segment_ids, rows.position_ids))), view
    )
    states = torch.cat([rows.hidden[:, :past], encoded], dim=1)
    positions = torch.cat([torch.arange(past), torch.arange(seen)])[None]

    def attend(queries, keys, values):
        return grouped_attention(queries, keys, values)

    return head.fuse(states, head.block.rotation(positions), attend)[0, -1]


@pytest.mark.parametrize("settings", VARIANTS)
def test_all_anchors_in_one_pass_equal_each_anchor_alone(view, settings):
    head, rows = make_head(**settings), text(length=16)
    together = head.train_outputs(rows, torch.arange(16)[None], view)[0]
    for anchor in (0, 1, 6, 11):
        for k in range(3):
            assert torch.allclose(together[anchor, k], one_alone(head, rows, anchor, k, view), atol=1e-5)


@pytest.mark.parametrize("k", [0, 1, 2])
def test_a_masked_state_has_exactly_no_gradient(view, k):
    head, rows = make_head(), text(length=16)
    rows.hidden.requires_grad_()
    head.train_outputs(rows, torch.tensor([[5]]), view)[0, 0, k].sum().backward()
    seen = rows.hidden.grad[0].abs().sum(-1)
    assert (seen[:6] > 0).all() and (seen[6:] == 0).all()


def test_the_loss_is_the_papers_sum(view):
    """Against a loop over windows and heads, in float64."""
    head, rows = make_head(mse_weight=0.5).double().eval(), text(rows=2, length=16)
    double = TargetView(view.embedding.double(), view.lm_head_weight.double())
    rows = Rows(rows.hidden.double(), rows.input_ids, rows.segment_ids, rows.position_ids)
    ids = rows.input_ids
    loss = head(rows.hidden, ids, ids, torch.ones_like(ids, dtype=torch.bool), double)
    total = 0.0
    for row in range(2):
        alone = Rows(*(x[row : row + 1] for x in (rows.hidden, ids, rows.segment_ids, rows.position_ids)))
        for anchor in range(14):
            for k in range(3):
                if anchor + 2 + k < 16:
                    f, last = one_alone(head, alone, anchor, k, double), alone.hidden[0, anchor]
                    logits = head.head_logits(k, last, f, double)
                    total += torch.nn.functional.cross_entropy(logits, ids[row, anchor + 2 + k])
                    total += 0.5 * (f - alone.hidden[0, anchor + 1 + k]).pow(2).mean()
    view.embedding.float()
    assert torch.allclose(loss.total, total, rtol=1e-6)


@pytest.mark.parametrize("projection", ["full", "shared"])
def test_training_starts_as_the_lm_head_on_the_blocks_output(view, projection):
    head = ChimeraHead(ChimeraConfig(**SIZES, projection=projection))
    rows = text(length=16)
    head.start_from(rows.hidden, view)
    f, last = torch.randn(5, 32), torch.randn(5, 32)
    assert torch.allclose(head.head_logits(2, last, f, view), view.logits(f), atol=1e-6)


def test_shared_projection_has_a_fraction_of_the_parameters(view):
    full, shared = (make_head(projection=name) for name in ("full", "shared"))
    sizes = [sum(p.numel() for p in head.heads.parameters()) for head in (full, shared)]
    assert sizes == [3 * 61 * 64, 3 * 32 * 64]


def tiny_llama(**more):
    torch.manual_seed(0)
    sizes = {
        "vocab_size": 61,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
    }
    return Target(LlamaForCausalLM(LlamaConfig(**sizes, **more)))


def test_the_targets_first_layer_as_encoder_is_that_layer():
    target = tiny_llama()
    rows = text(length=16)
    head = make_head(encoder="target_layer0_frozen", rms_norm_eps=1e-6)
    head.start_from(rows.hidden, target.view())
    with torch.no_grad():
        out = target.model(rows.input_ids, output_hidden_states=True).hidden_states[1]
        assert torch.allclose(head.encode_rows(rows, target.view()), out, atol=1e-5)
    assert not any(p.requires_grad for p in head.encoder.parameters())
    assert all(p.requires_grad for p in make_head(encoder="target_layer0_finetuned").encoder.parameters())


def test_a_first_layer_the_encoder_cannot_copy_is_refused():
    target = tiny_llama(attention_bias=True)
    with pytest.raises(ValueError, match=r"q_proj\.bias.*use --encoder kgram"):
        make_head(encoder="target_layer0_frozen").start_from(text(length=16).hidden, target.view())
    target = tiny_llama(rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4})
    with pytest.raises(ValueError, match="rotary positions of type linear; use --encoder kgram"):
        make_head(encoder="target_layer0_frozen").start_from(text(length=16).hidden, target.view())
