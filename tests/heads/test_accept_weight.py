"""The weights of a loss by how probable it is that drafts get as far: against enumeration, and dense probabilities."""

import itertools

import pytest
import torch

from draft_heads.heads.accept_weight import FLOOR, accept_weights
from draft_heads.heads.base import Rows, TargetView
from draft_heads.heads.checkpoint import head_classes, head_variants
from draft_heads.heads.ctc_loss import interleave_blank, lattice_log_prob
from draft_heads.inference.drafters.heads.ctc_search import collapsed
from tests.heads.small import disturbed, lent_target, loss_of, text
from tests.heads.test_losses import fused, problem

BY_OFFSET = {name: variant for name, variant in head_variants().items() if variant[0] != "ctc"}
SOME = torch.arange(61)[torch.arange(61) % 3 != 1]


def test_the_worked_example():
    reached = torch.tensor([1.0, 0.8, 0.4, 1e-9]).log()
    assert accept_weights(reached, 0.5).tolist() == pytest.approx([1, 0.8944, 0.6325, FLOOR], abs=1e-4)


def prefix_probability(log_probs, wanted, whole):
    """Σ over every alignment whose collapse starts with `wanted`, or is it; differentiable."""
    frames, classes = log_probs.shape
    total = log_probs.new_zeros(())
    for alignment in itertools.product(range(classes), repeat=frames):
        labels = collapsed(list(alignment), classes - 1)
        if (labels if whole else labels[: len(wanted)]) == wanted:
            total = total + sum(log_probs[t, c] for t, c in enumerate(alignment)).exp()
    return total


@pytest.mark.parametrize("alpha", [0.3, 1.0])
@pytest.mark.parametrize("decay", [1.0, 0.7])
@pytest.mark.parametrize("closed", [True, False])
def test_gradients_of_the_lattice_are_those_of_enumeration_with_fixed_weights(alpha, decay, closed):
    torch.manual_seed(0)
    logits = torch.randn(4, 4, dtype=torch.float64).mul(2)
    for wanted in ([2], [0, 1], [1, 1], [2, 0, 2], [0, 1, 2]):
        ours, theirs = (logits.clone().requires_grad_() for _ in range(2))
        log_probs = ours.log_softmax(-1)
        labels = torch.tensor([[*wanted, *[0] * (3 - len(wanted))]])
        emissions = interleave_blank(log_probs[:, labels[0]][None], log_probs[None, :, -1:])
        given = labels, torch.tensor([len(wanted)]), torch.tensor([closed])
        value = lattice_log_prob(emissions, *given, decay=decay, accept=alpha)
        value.sum().backward()

        log_probs = theirs.log_softmax(-1)
        reached = [prefix_probability(log_probs, wanted[:count], False) for count in range(len(wanted) + 1)]
        steps = [reached[u + 1].log() - reached[u].log() for u in range(len(wanted))]
        if closed:
            steps.append(prefix_probability(log_probs, wanted, True).log() - reached[-1].log())
        weights = [decay**u * max(float(before.detach()) ** alpha, 0.05) for u, before in enumerate(reached)]
        expected = sum(weight * step for weight, step in zip(weights, steps))
        expected.backward()
        assert float(value.detach()) == pytest.approx(float(expected.detach()), abs=1e-10)
        assert torch.allclose(ours.grad, theirs.grad, atol=1e-10)


def test_the_fused_loss_is_the_lattices_on_all_log_probabilities():
    values = {name: x.double() if x.is_floating_point() else x for name, x in problem().items()}
    loss, infeasible, grads = fused(values, decay=0.8, accept=0.5)
    leaves = [values[name].clone().requires_grad_() for name in ("frames", "blank_weight", "blank_bias")]
    logits = torch.cat([leaves[0] @ values["lm_head"].T, (leaves[0] @ leaves[1] + leaves[2])[..., None]], -1)
    log_probs = logits.log_softmax(-1)
    of_labels = log_probs.gather(2, values["labels"][:, None, :].expand(-1, log_probs.shape[1], -1))
    given = (values[name] for name in ("labels", "lengths", "closed"))
    value = lattice_log_prob(interleave_blank(of_labels, log_probs[:, :, -1:]), *given, decay=0.8, accept=0.5)
    (-value[~infeasible].sum()).backward()
    assert torch.allclose(loss, -value[~infeasible].sum()) and loss < fused(values, decay=0.8)[0]
    assert all(torch.allclose(got, leaf.grad, atol=1e-9) for got, leaf in zip(grads, leaves))


def dense_loss(head, rows, view, alpha):
    """Σ_k weight(k) Σ_n w·(cross entropy), with full log-probabilities at every offset, and further terms."""
    lent = head.draft_view(view)
    mask = torch.ones_like(rows.input_ids, dtype=torch.bool)
    windows = head.windows(rows.input_ids, rows.input_ids, mask, rows.segment_ids)
    labels, lengths = head.draft_classes(windows.labels[windows.valid]), windows.lengths[windows.valid]
    offsets = torch.arange(labels.shape[1])
    wanted = (labels >= 0) & (offsets < lengths[:, None])
    soft = head.config.kind == "eagle3" or getattr(head.config, "labels_from", "tokens") == "distribution"
    weight_of = (lambda k: head.config.decay**k) if head.config.kind == "eagle3" else head.config.offset_weight
    reached, loss = [1.0] * len(labels), 0.0
    for k, read in enumerate(head.readouts(rows, windows, wanted, lent)):
        rest = iter(read.logits(read.states).log_softmax(-1))
        aims = windows.gather(rows.hidden, ahead=k + 1) if soft else None
        for n in range(len(labels)):
            if not wanted[n, k]:
                reached[n] = 0.0
                continue
            log_probs = next(rest)
            own = log_probs[labels[n, k]]
            cost = -own if aims is None else -(lent.logits(aims[n]).softmax(-1) * log_probs).sum()
            loss = loss + weight_of(k) * max(reached[n] ** alpha, 0.05) * cost
            reached[n] *= float(own.detach().exp())
        for value, weight in read.terms.values():
            loss = loss + weight * value
    return loss


@pytest.mark.parametrize("cut", [False, True], ids=["whole", "cut"])
@pytest.mark.parametrize("name", BY_OFFSET)
def test_loss_and_gradients_of_heads_by_offset_are_those_of_dense_probabilities(name, cut):
    kind, options = BY_OFFSET[name]
    options = {**options, "accept_weight": 0.5, "draft_vocab_size": len(SOME) if cut else 0}
    head = disturbed(*head_classes(kind), **options).double().train()
    if cut:
        head.set_draft_vocab(SOME)
    lent, given = lent_target(), text(rows=2, length=9)
    view = TargetView(lent.embedding.double(), lent.lm_head_weight.double())
    rows = Rows.of(given.hidden.double(), given.input_ids)
    loss_of(head, rows, view).total.backward()
    ours = {key: p.grad for key, p in head.named_parameters() if p.grad is not None}
    head.zero_grad()
    expected = dense_loss(head, rows, view, 0.5)
    expected.backward()
    # distributions are in float32
    assert float(loss_of(head, rows, view).total.detach()) == pytest.approx(float(expected.detach()), rel=1e-7)
    for key, parameter in head.named_parameters():
        if parameter.grad is not None:
            assert torch.allclose(ours[key], parameter.grad, atol=1e-5), key


@pytest.mark.parametrize("name", head_variants())
def test_it_weighs_in_training_only_and_zero_is_the_plain_loss(name):
    kind, options = head_variants()[name]
    view, rows = lent_target(), text(rows=2, length=16)
    settings = {"dropout": 0.0} if kind == "hydra" else {}
    losses = {}
    for alpha in (0.0, 0.5):
        head = disturbed(*head_classes(kind), **{**options, **settings, "accept_weight": alpha})
        losses[alpha] = tuple(float(loss_of(head.train(mode), rows, view).total.detach()) for mode in (True, False))
    assert losses[0.0][0] == losses[0.0][1]  # to the last bit that of evaluation, which weighs nothing
    assert losses[0.5][1] == losses[0.0][1] and losses[0.5][0] < losses[0.0][0]
