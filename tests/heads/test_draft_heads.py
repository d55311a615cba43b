"""What holds for every head: no leak from the future, packed rows apart, windows counted as used, checkpoints."""

import pytest
import torch

from draft_heads.heads.base import Rows
from draft_heads.heads.checkpoint import HEADS, head_classes, load_head
from draft_heads.heads.chimera import ChimeraConfig, ChimeraHead
from draft_heads.heads.ctc import CTCConfig, CTCHead
from draft_heads.heads.eagle3 import Eagle3Config, Eagle3Head
from draft_heads.heads.hydra import HydraConfig, HydraHead
from draft_heads.heads.medusa import MedusaConfig, MedusaHead
from tests.heads.small import FINGERPRINT, SIZES, disturbed, lent_target, text

VARIANTS = {
    "ctc": (CTCHead, CTCConfig, {"labels": 3, "frames": 5}),
    "ctc context": (CTCHead, CTCConfig, {"labels": 3, "frames": 5, "label_context": 4}),
    "ctc context cut": (CTCHead, CTCConfig, {"labels": 3, "frames": 5, "label_context": 4, "draft_vocab_size": 40}),
    "ctc chain": (CTCHead, CTCConfig, {"labels": 2, "frames": 3, "frames_from": "chain", "soft_weight": 0.1}),
    "medusa": (MedusaHead, MedusaConfig, {"heads": 3, "layers": 2}),
    "hydra": (HydraHead, HydraConfig, {"heads": 3}),
    "hydra++": (
        HydraHead,
        HydraConfig,
        {"heads": 3, "layers": 4, "prefix_attention": True, "labels_from": "distribution"},
    ),
    "chimera": (ChimeraHead, ChimeraConfig, {"heads": 3}),
    "eagle3": (Eagle3Head, Eagle3Config, {"passes": 3}),
    "eagle3 cut": (Eagle3Head, Eagle3Config, {"passes": 3, "draft_vocab_size": 40}),
    "chimera bigram": (ChimeraHead, ChimeraConfig, {"heads": 3, "order": 2, "residual": False}),
    "chimera shared": (ChimeraHead, ChimeraConfig, {"heads": 3, "projection": "shared"}),
    "chimera layer": (ChimeraHead, ChimeraConfig, {"heads": 3, "encoder": "target_layer0_finetuned"}),
    "ctc cut": (CTCHead, CTCConfig, {"labels": 3, "frames": 5, "draft_vocab_size": 40}),
    "medusa cut": (MedusaHead, MedusaConfig, {"heads": 3, "draft_vocab_size": 40}),
    "hydra cut": (HydraHead, HydraConfig, {"heads": 3, "labels_from": "distribution", "draft_vocab_size": 40}),
    "chimera cut": (ChimeraHead, ChimeraConfig, {"heads": 3, "projection": "shared", "draft_vocab_size": 40}),
}


@pytest.fixture(params=VARIANTS)
def head(request):
    kind, config, settings = VARIANTS[request.param]
    return disturbed(kind, config, **settings)


@pytest.fixture(scope="module")
def view():
    return lent_target()


def loss_of(head, rows, view, mask=None, **more):
    mask = torch.ones_like(rows.input_ids, dtype=torch.bool) if mask is None else mask
    return head(rows.hidden, rows.input_ids, rows.input_ids, mask, view, rows.segment_ids, rows.position_ids, **more)


def test_every_kind_is_tested_here():
    assert {config.kind for _, config, _ in VARIANTS.values()} == set(HEADS)


def test_nothing_leaks_from_the_future(head, view):
    """The loss of the windows at anchor 4 has no gradient behind the last state its aims are made of."""
    rows = text(rows=1)
    rows.hidden.requires_grad_()
    mask = torch.zeros(1, 20, dtype=torch.bool)
    mask[:, 5 : 6 + head.config.offsets] = True  # base token and labels of anchor 4
    windows = head.windows(rows.input_ids, rows.input_ids, mask, rows.segment_ids)
    assert windows.anchors[windows.valid][0] == 4
    head.eval()  # no sampling of anchors
    first = windows.anchors[:, :1]
    ids = rows.input_ids.clone()
    reference = draft_of(head, rows, first, view)
    reference.sum().backward()
    reach = 4 + 1 + (head.config.frames if hasattr(head.config, "frames") and head.config.chained else 0)
    assert rows.hidden.grad[0, :5].abs().sum() > 0
    assert rows.hidden.grad[0, reach:].abs().max() == 0
    ids[0, 5 + head.config.offsets + head.tokens_after() :] = 7  # text behind the labels
    changed = Rows(rows.hidden, ids, rows.segment_ids, rows.position_ids)
    assert torch.equal(reference, draft_of(head, changed, first, view))


def draft_of(head, rows, anchors, view):
    """What the loss reads of the drafts at some anchors, teacher-forced."""
    if isinstance(head, CTCHead):
        return head.train_frames(rows, anchors, view)
    if isinstance(head, ChimeraHead):
        return head.train_outputs(rows, anchors, view)
    if isinstance(head, Eagle3Head):
        return head.train_states(rows, anchors, view)
    last = rows.hidden[0, anchors[0]]
    if isinstance(head, MedusaHead):
        return head.draft_log_probs(last)
    state = head.row_states(rows)[0, anchors[0]]
    ahead = rows.input_ids[0, anchors[0, 0] + 1 : anchors[0, 0] + 1 + head.config.heads]
    tokens = head.token_states(ahead, view)[None]
    return torch.stack([head.next_log_probs(k, state, tokens[:, : k + 1]) for k in range(head.config.heads)])


def test_packed_conversations_do_not_see_each_other(head, view):
    head.eval()
    apart = text(rows=2, length=12)
    packed = Rows(
        apart.hidden.reshape(1, 24, 32),
        apart.input_ids.reshape(1, 24),
        torch.tensor([[1] * 12 + [2] * 12]),
        torch.arange(12).repeat(2)[None],
    )
    one, two = loss_of(head, packed, view), loss_of(head, apart, view)
    assert int(one.windows) == int(two.windows)
    assert torch.allclose(one.total, two.total, rtol=1e-4)


def test_padding_changes_nothing(head, view):
    head.eval()
    rows = text(rows=1, length=14)
    padded = Rows(
        torch.nn.functional.pad(rows.hidden, (0, 0, 0, 5), value=3.0),
        torch.nn.functional.pad(rows.input_ids, (0, 5)),
        torch.nn.functional.pad(rows.segment_ids, (0, 5)),
        torch.nn.functional.pad(rows.position_ids, (0, 5)),
    )
    mask = padded.segment_ids > 0
    one, two = loss_of(head, rows, view), loss_of(head, padded, view, mask)
    assert int(one.windows) == int(two.windows) and torch.allclose(one.total, two.total, rtol=1e-4)


def test_windows_are_counted_as_the_forward_uses_them(head, view):
    head.config.anchors = 4
    head.train()
    rows = text(rows=2)
    mask = torch.rand(2, 20) < 0.7
    used = int(loss_of(head, rows, view, mask, seed=5).windows)
    counted = head.count_windows(rows.input_ids, rows.input_ids, mask, segment_ids=rows.segment_ids, seed=5)
    assert used == int(counted) > 0


def test_a_batch_without_a_window_has_no_loss_and_zero_gradients(head, view):
    loss = loss_of(head, text(rows=2), view, torch.zeros(2, 20, dtype=torch.bool))
    loss.total.backward()
    assert int(loss.windows) == 0 and loss.total.item() == 0
    assert all(float(p.grad.abs().max()) == 0 for p in head.parameters() if p.requires_grad)


def test_gradients_are_ready_in_one_order_with_and_without_windows(head, view):
    """ZeRO-2 puts them into its buckets in that order, which must be the same on all processes."""
    orders = []
    for mask in (torch.ones(2, 20, dtype=torch.bool), torch.zeros(2, 20, dtype=torch.bool)):
        order: list[str] = []
        hooks = [
            p.register_post_accumulate_grad_hook(lambda _, name=name, order=order: order.append(name))
            for name, p in head.named_parameters()
            if p.requires_grad
        ]
        loss_of(head, text(rows=2), view, mask).total.backward()
        orders.append(order)
        for hook in hooks:
            hook.remove()
    assert orders[0] == orders[1] and len(orders[0]) == len(hooks)


def test_evaluation_counts_the_five_best_of_every_offset(head, view):
    loss = loss_of(head.eval(), text(rows=2), view)
    offsets = head.config.offsets
    assert loss.correct.shape == (offsets, 5) and loss.counted.shape == (offsets,)
    assert (loss.correct.diff(dim=1) >= 0).all() and (loss.correct[:, -1] <= loss.counted).all()


def test_more_offsets_than_the_text_is_long_still_train(head, view):
    rows = text(rows=1, length=2 + head.tokens_after())
    loss = loss_of(head, rows, view)
    if int(loss.windows):
        loss.total.backward()
        assert torch.isfinite(loss.total)


def test_a_saved_head_comes_back_equal(head, view, tmp_path):
    head.eval()
    head.save_pretrained(tmp_path)
    loaded = load_head(tmp_path, FINGERPRINT).eval()
    assert type(loaded) is type(head) and loaded.config == head.config
    assert torch.equal(loss_of(loaded, text(rows=2), view).total, loss_of(head, text(rows=2), view).total)


@pytest.mark.parametrize(
    "kind,settings,told",
    [
        ("medusa", {"heads": 0}, "--heads must be at least 1"),
        ("medusa", {"layers": -1}, "--layers"),
        ("medusa", {"decay": 0.0}, "--decay"),
        ("ctc", {"decay": 1.5}, "--decay"),
        ("medusa", {"anchors": -1}, "--anchors"),
        ("hydra", {"heads": 0}, "--heads"),
        ("hydra", {"labels_from": "air"}, "tokens, distribution"),
        ("hydra", {"dropout": 1.0}, "--dropout"),
        ("chimera", {"order": 0}, "--order must be from 1 to 5; got 0"),
        ("chimera", {"order": 6}, "--order"),
        ("chimera", {"encoder": "lstm"}, "kgram, target_layer0_frozen"),
        ("chimera", {"projection": "none"}, "full, shared"),
        ("chimera", {"ce_weight": 0.0}, "--ce_weight"),
    ],
)
def test_settings_that_cannot_work_are_refused(kind, settings, told):
    with pytest.raises(ValueError, match=told):
        head_classes(kind)[1](**SIZES, **settings)
