"""EAGLE-3's training-time test against a plain loop that feeds outputs back one by one."""

import pytest
import torch

from draft_heads.heads.base import Rows, TargetView
from draft_heads.heads.block import grouped_attention
from draft_heads.heads.eagle3 import Eagle3Config, Eagle3Head
from tests.heads.small import disturbed, lent_target, text

PASSES = 4
SOME = torch.arange(61)[torch.arange(61) % 3 != 1]  # a draft vocabulary of 41


@pytest.fixture(scope="module")
def view():
    lent = lent_target()
    return TargetView(lent.embedding.double(), lent.lm_head_weight.double())


def make_head(**settings):
    return disturbed(Eagle3Head, Eagle3Config, passes=PASSES, **settings).double().eval()


def make_text(layers=0, **settings):
    rows = text(**settings)
    batch, length, hidden = rows.hidden.shape
    aux_hidden = torch.randn(batch, length, layers * hidden).double() if layers else None
    return Rows(rows.hidden.double(), rows.input_ids, rows.segment_ids, rows.position_ids, aux_hidden)


def one_alone(head, rows, anchor, view):
    """s of every pass at one anchor of one row, one position after another, without a mask."""
    block, ids = head.block, rows.input_ids[0]
    given = head.target_states(rows.hidden, rows.aux_hidden)[0]
    seen_keys, seen_values, out = [], [], []

    def step(state, token, position):
        def attend(queries, keys, values):
            seen_keys.append(keys)
            seen_values.append(values)
            return grouped_attention(queries, torch.cat(seen_keys, dim=2), torch.cat(seen_values, dim=2))

        tokens = view.embed(ids[token])[None, None]
        return block(state[None, None], block.rotation(torch.tensor([[position]])), attend, tokens)[0, 0]

    for index in range(anchor):
        step(given[index], index + 1, index)
    state = given[anchor]
    for k in range(min(PASSES, len(ids) - anchor - 1)):
        state = step(state, anchor + 1 + k, anchor + k)
        out.append(state)
    return out


@pytest.mark.parametrize("layers", [[], [1, 2, 3]])
def test_all_anchors_in_one_pass_equal_each_anchor_alone(view, layers):
    head, rows = make_head(target_layers=layers), make_text(len(layers), length=14)
    together = head.train_states(rows, torch.arange(14)[None], view)[0]
    for anchor in (0, 1, 5, 11):
        for k, expected in enumerate(one_alone(head, rows, anchor, view)):
            assert torch.allclose(together[anchor, k], expected, atol=1e-10), (anchor, k)


@pytest.mark.parametrize("drafted", [torch.arange(61), SOME], ids=["whole", "cut"])
def test_the_loss_is_the_decayed_sum_of_cross_entropies_to_the_targets_distribution(view, drafted):
    head, rows = make_head(draft_vocab_size=len(drafted) % 61, decay=0.5), make_text(rows=2, length=12)
    if head.draft_vocab is not None:
        head.set_draft_vocab(drafted)
    lent = head.draft_view(view)
    ids = rows.input_ids
    loss = head(rows.hidden, ids, ids, torch.ones_like(ids, dtype=torch.bool), view)
    total = 0.0
    for row in range(2):
        alone = Rows(*(x[row : row + 1] for x in (rows.hidden, ids, rows.segment_ids, rows.position_ids)))
        for anchor in range(10):
            for k, state in enumerate(one_alone(head, alone, anchor, view)):
                at = anchor + 2 + k  # what this pass drafts
                if at < 12 and ids[row, at] in drafted:
                    wanted = lent.logits(alone.hidden[0, at - 1]).softmax(-1)
                    total -= 0.5**k * float((wanted * head.next_log_probs(state)).sum())
    assert float(loss.total) == pytest.approx(total, rel=1e-6)


def test_a_masked_state_has_exactly_no_gradient(view):
    head, rows = make_head(), make_text(length=14)
    rows.hidden.requires_grad_()
    head.train_states(rows, torch.tensor([[5]]), view)[0, 0, -1].sum().backward()
    reached = rows.hidden.grad[0].abs().sum(-1)
    assert (reached[:6] > 0).all() and (reached[6:] == 0).all()


def test_layers_that_are_read_unless_told_otherwise():
    found = {layers: Eagle3Config.usual_layers(layers) for layers in (32, 40, 12, 6, 4, 3, 2, 1)}
    assert found[32] == [2, 16, 29] and found[40] == [2, 20, 37] and found[12] == [2, 6, 9]
    assert found[6] == [3, 4, 5] and found[4] == [1, 2, 3] and found[3] == [1, 2] and found[2] == [1] and found[1] == []


def test_it_starts_at_the_high_layer_and_the_targets_lm_head(view):
    head = Eagle3Head(make_head(target_layers=[1, 2, 3]).config).double()
    rows = make_text(3)
    head.start_from(rows.hidden, view)
    assert torch.equal(head.row_states(rows), rows.aux_hidden[..., -32:])
    assert torch.equal(head.lm_head.weight, view.lm_head_weight)
    states = head.train_states(rows, torch.arange(4)[None], view)[0]
    assert torch.allclose(states[:, 0], rows.aux_hidden[0, :4, -32:])


def test_the_norm_starts_with_the_gains_that_make_h_of_the_high_layer(view):
    head, rows = make_head(target_layers=[1, 2, 3]), make_text(layers=3, rows=2)
    with torch.no_grad():  # g is the high layer's output
        head.layer_projection.weight.copy_(torch.eye(32).repeat(1, 3) * (torch.arange(96) >= 64))
    high = rows.aux_hidden[..., 64:]
    gains = torch.linspace(-0.5, 3, 32).double()
    hidden = gains * high / high.pow(2).mean(-1, keepdim=True).sqrt()
    head.start_from(hidden, view, rows.aux_hidden)
    assert torch.allclose(head.norm.weight, gains, atol=1e-4)
    head.block.start_as_identity()
    started = head.norm(
        head.train_states(
            Rows(hidden, rows.input_ids, rows.segment_ids, rows.position_ids, rows.aux_hidden),
            torch.tensor([[3], [3]]),
            view,
        )
    )[:, 0, 0]
    assert torch.allclose(started, hidden[:, 3], atol=1e-3)


def test_a_cut_lm_head_starts_as_the_rows_of_the_draft_vocabulary(view):
    head = Eagle3Head(make_head(draft_vocab_size=len(SOME)).config).double()
    head.set_draft_vocab(SOME)
    head.start_from(make_text().hidden, view)
    assert torch.equal(head.lm_head.weight, view.lm_head_weight[SOME])


@pytest.mark.parametrize("settings", [{"passes": 0}, {"decay": 0.0}])
def test_settings_that_cannot_work_are_refused(settings):
    with pytest.raises(ValueError, match=f"--{next(iter(settings))}"):
        Eagle3Config(**settings)
