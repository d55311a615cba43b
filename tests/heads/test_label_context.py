"""Emissions that depend on the last collapsed label, against a sum over every alignment and against dense tensors."""

import itertools
import math

import pytest
import torch

from draft_heads.heads.base import Rows
from draft_heads.heads.ctc import CTCConfig, CTCHead
from draft_heads.heads.ctc_loss import ctc_loss_fused, lattice_log_prob
from draft_heads.heads.label_context import ctc_loss_with_context
from draft_heads.inference.drafters.heads.ctc import CTCDrafter
from draft_heads.inference.step import VerifiedStep
from tests.heads.small import disturbed, lent_target
from tests.heads.test_losses import problem
from tests.inference.trees import only

RANK = 3


def with_contexts(seed=0, scale=1.0, **settings):
    values = {name: x.double() if x.is_floating_point() else x for name, x in problem(seed=seed, **settings).items()}
    torch.manual_seed(seed + 1)
    count, size = values["labels"].shape
    values["contexts"] = scale * torch.randn(count, size + 1, RANK, dtype=torch.float64)
    values["classes"] = torch.randn(len(values["lm_head"]) + 1, RANK, dtype=torch.float64)
    return values


TRAINED = ("frames", "blank_weight", "blank_bias", "contexts", "classes")
GIVEN = ("lm_head", "labels", "lengths", "closed")


def loss_and_gradients(function, values, **options):
    leaves = [values[name].clone().requires_grad_() for name in TRAINED]
    loss, infeasible = function(*leaves, *(values[name] for name in GIVEN), **options)
    loss.backward()
    return loss.detach(), infeasible, [leaf.grad for leaf in leaves]


def dense(
    frames,
    blank_weight,
    blank_bias,
    contexts,
    classes,
    lm_head,
    labels,
    lengths,
    closed,
    lm_bias=None,
    decay=1.0,
    accept=0.0,
):
    """The loss on log-probabilities [N, K, T, C] of every context."""
    logits = torch.nn.functional.linear(frames, lm_head, lm_bias)
    logits = torch.cat([logits, (frames @ blank_weight + blank_bias)[..., None]], dim=-1)
    log_probs = (logits[:, None] + (contexts @ classes.T)[:, :, None]).log_softmax(-1)
    count, size = labels.shape
    shape = (count, frames.shape[1], 2 * size + 1)
    stay, enter = torch.empty(shape).double(), torch.empty(shape).double()
    window = torch.arange(count)
    for k in range(size + 1):
        stay[:, :, 2 * k] = enter[:, :, 2 * k] = log_probs[:, k, :, -1]
        if k < size:
            enter[:, :, 2 * k + 1] = log_probs[window, k, :, labels[:, k]]
            stay[:, :, 2 * k + 1] = log_probs[window, k + 1, :, labels[:, k]]
    value = lattice_log_prob(stay, labels, lengths, closed, enter, decay, accept)
    possible = value > -1e29
    return -value[possible].sum(), ~possible


def test_autocast_changes_neither_the_loss_nor_a_gradient():
    values = {name: x.float() if x.is_floating_point() else x for name, x in with_contexts().items()}
    plain, _, gradients = loss_and_gradients(ctc_loss_with_context, values)
    with torch.autocast("cpu", torch.bfloat16):
        loss, _, under_autocast = loss_and_gradients(ctc_loss_with_context, values)
    assert torch.equal(loss, plain) and all(map(torch.equal, under_autocast, gradients))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("windows", [1, 5, 100])
def test_loss_and_gradients_equal_those_of_dense_log_probabilities(seed, windows):
    values = with_contexts(seed)
    values["labels"][:4, 1] = values["labels"][:4, 0]  # repeats
    bytes_a_window = 8 * (values["frames"].shape[1] + values["labels"].shape[1] + 1) * len(values["classes"])
    options = ({}, {"decay": 0.7, "accept": 0.5}, {"lm_bias": torch.randn(60).double()})[seed]
    loss, infeasible, grads = loss_and_gradients(
        ctc_loss_with_context, values, chunk_bytes=windows * bytes_a_window, **options
    )
    expected, expected_infeasible, expected_grads = loss_and_gradients(dense, values, **options)
    assert torch.allclose(loss, expected, rtol=1e-12) and torch.equal(infeasible, expected_infeasible)
    for got, want in zip(grads, expected_grads):
        assert torch.allclose(got, want, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("decay", [1.0, 0.7])
def test_of_one_frame_the_loss_and_its_gradients_are_those_of_dense_log_probabilities(decay):
    values = with_contexts(frames=1)
    values |= {name: values[name][:, :most] for name, most in (("labels", 1), ("contexts", 2))}
    values["lengths"] = values["lengths"].clamp(max=1)
    loss, _, grads = loss_and_gradients(ctc_loss_with_context, values, decay=decay)
    expected, _, expected_grads = loss_and_gradients(dense, values, decay=decay)
    assert torch.allclose(loss, expected, rtol=1e-12) and float(loss) > 0
    assert all(torch.allclose(got, want, rtol=1e-9, atol=1e-12) for got, want in zip(grads, expected_grads))


def test_gradients_of_a_half_precision_head_do_not_depend_on_the_chunks():
    values = {name: x.bfloat16() if x.is_floating_point() else x for name, x in with_contexts().items()}
    _, _, whole = loss_and_gradients(ctc_loss_with_context, values)
    _, _, chunked = loss_and_gradients(ctc_loss_with_context, values, chunk_bytes=1)
    assert all(got.dtype == torch.bfloat16 for got in chunked)
    for got, want in zip(chunked, whole):
        assert float((got - want).float().norm() / want.float().norm()) < 5e-3


def test_without_a_bias_it_is_the_plain_loss():
    """Up to the order of sums: 2 units in the last place of float64 for the loss, 32 of the largest for gradients."""
    values = with_contexts(scale=0.0)
    loss, infeasible, grads = loss_and_gradients(ctc_loss_with_context, values)
    leaves = [values[name].clone().requires_grad_() for name in TRAINED[:3]]
    plain, plain_infeasible = ctc_loss_fused(*leaves, *(values[name] for name in GIVEN))
    plain.backward()
    unit = torch.finfo(torch.float64).eps
    assert torch.equal(infeasible, plain_infeasible) and torch.allclose(loss, plain, rtol=2 * unit, atol=0)
    for got, leaf in zip(grads, leaves):
        assert torch.allclose(got, leaf.grad, rtol=0, atol=32 * unit * float(leaf.grad.abs().max()))
    assert grads[3].abs().max() > 0 and grads[4].abs().max() == 0


def enumerated(logits, bias, base, wanted, prefix):
    """Σ over every alignment whose collapse is (or starts with) `wanted`; bias [V + 1, C] by label, `base`'s last."""
    frames, classes = logits.shape
    total = 0.0
    for alignment in itertools.product(range(classes), repeat=frames):
        score, text, before = 0.0, [], None
        for t, emitted in enumerate(alignment):
            score += float((logits[t] + bias[text[-1] if text else base]).log_softmax(-1)[emitted])
            if emitted not in (before, classes - 1):
                text.append(emitted)
            before = emitted
        if text[: len(wanted)] == wanted if prefix else text == wanted:
            total += math.exp(score)
    return total


@pytest.mark.parametrize("frames", [1, 2, 3, 4])
@pytest.mark.parametrize("prefix", [False, True], ids=["closed", "open"])
def test_the_loss_is_that_of_a_sum_over_every_alignment(frames, prefix):
    torch.manual_seed(frames)
    vocabulary = 2
    lm_head, states = torch.randn(vocabulary, 4).double(), torch.randn(1, frames, 4).double()
    blank_weight, blank_bias = torch.randn(4).double(), torch.randn(1).double()
    logits = torch.cat([states[0] @ lm_head.T, (states[0] @ blank_weight + blank_bias)[:, None]], dim=-1)
    table, classes = torch.randn(vocabulary + 1, RANK).double(), torch.randn(vocabulary + 1, RANK).double()
    for wanted in itertools.chain.from_iterable(itertools.product(range(vocabulary), repeat=n) for n in range(1, 4)):
        labels = torch.tensor([wanted])
        contexts = table[torch.cat([torch.tensor([[vocabulary]]), labels], dim=1)]
        loss, infeasible = ctc_loss_with_context(
            *(states, blank_weight, blank_bias, contexts, classes, lm_head, labels),
            *(torch.tensor([len(wanted)]), torch.tensor([not prefix])),
        )
        expected = enumerated(logits, table @ classes.T, vocabulary, list(wanted), prefix)
        assert float(torch.exp(-loss)) * float(~infeasible) == pytest.approx(expected, abs=1e-12)


def test_the_heads_loss_and_its_trees_are_those_of_a_table_of_biases_by_token():
    """Drafted are the tokens 0, 7 and 9 only; base tokens beyond them have a bias too."""
    head = disturbed(CTCHead, CTCConfig, frames=3, labels=2, label_context=RANK, draft_vocab_size=3)
    head.label_proj.weight.data *= 5  # so that each token's bias matters
    known = [0, 7, 9]
    head.set_draft_vocab(torch.tensor(known))
    text = [5, 7, 9, 9, 7, 30, 9, 7, 0, 7, 7, 9]
    ids, view = torch.tensor([text]), lent_target()
    rows, mask = Rows.of(torch.randn(1, 12, 32), ids), torch.ones_like(ids, dtype=torch.bool)
    lent = head.draft_view(view)
    with torch.no_grad():
        loss = head(rows.hidden, ids, ids, mask, view).total
        frames = head.train_frames(rows, torch.arange(12)[None], lent)[0]
        logits, bias = head.frame_logits(frames, lent).double(), head.label_bias(torch.arange(61), view).double()

    windows, expected = head.windows(ids, ids, mask, rows.segment_ids), 0.0
    for anchor, length, closed in zip(*(x[0].tolist() for x in (windows.anchors, windows.lengths, windows.closed))):
        labels = text[anchor + 2 : anchor + 2 + length]
        wanted = [known.index(token) for token in itertools.takewhile(known.__contains__, labels)]
        behind = bias[[*known, text[anchor + 1]]]  # of each class as the label before, then of the base token
        expected -= math.log(enumerated(logits[anchor], behind, 3, wanted, not closed or len(wanted) < length))
    assert float(loss) == pytest.approx(expected, rel=1e-5)

    head.config.tree_temperature = 0.5
    for anchor in (0, 4):  # base tokens 7 and 30
        drafter = CTCDrafter(head, lent, 12)
        drafter.begin(0, ids[0, : anchor + 1], 16)
        hidden = rows.hidden[0, : anchor + 1]
        with torch.no_grad():
            drafter.observe(VerifiedStep.of_prompt(ids[0, : anchor + 1], hidden, ids[0, anchor + 1 : anchor + 2]))
            tree = only(drafter.propose())
        behind, paths = bias[[*known, text[anchor + 1]]], []
        for token, parent, score in zip(tree.tokens.tolist(), tree.parents.tolist(), tree.log_probs.exp().tolist()):
            paths.append([*(paths[parent] if parent >= 0 else ()), known.index(token)])
            assert score == pytest.approx(enumerated(2 * logits[anchor], 2 * behind, 3, paths[-1], True), rel=1e-4)
        assert len(paths) == 12 and max(map(len, paths)) == 3
