"""The fused CTC loss against the float64 reference and against enumeration of every alignment."""

import itertools
import math

import pytest
import torch
import torch.nn.functional as F

from draft_heads.heads.accuracy import top_hits
from draft_heads.heads.base import TargetView
from draft_heads.heads.cross_entropy import (
    linear_cross_entropy,
    soft_cross_entropy,
)
from draft_heads.heads.ctc_loss import ctc_loss_fused, ctc_loss_reference, interleave_blank, lattice_log_prob
from draft_heads.inference.drafters.heads.ctc_search import collapsed


def problem(count=48, frames=8, size=4, vocabulary=60, hidden=16, seed=0):
    """Windows cut to 0…U labels, closed and open, with repeats."""
    torch.manual_seed(seed)
    labels = torch.randint(0, vocabulary, (count, size))
    labels[: count // 4, 1] = labels[: count // 4, 0]
    labels[: count // 8, 2] = labels[: count // 8, 0]
    return {
        "frames": torch.randn(count, frames, hidden),
        "blank_weight": 0.1 * torch.randn(hidden),
        "blank_bias": torch.tensor(1.0),
        "lm_head": torch.randn(vocabulary, hidden),
        "labels": labels,
        "lengths": torch.arange(count) % (size + 1),
        "closed": torch.arange(count) % 3 != 0,
    }


def fused(values, **options):
    leaves = [values[name].clone().requires_grad_() for name in ("frames", "blank_weight", "blank_bias")]
    loss, infeasible = ctc_loss_fused(
        *leaves, values["lm_head"], values["labels"], values["lengths"], values["closed"], **options
    )
    loss.backward()
    return loss.detach(), infeasible, [leaf.grad for leaf in leaves]


def reference(values, lm_bias=None):
    leaves = [values[name].double().requires_grad_() for name in ("frames", "blank_weight", "blank_bias")]
    logits = leaves[0] @ values["lm_head"].double().T + (0 if lm_bias is None else lm_bias.double())
    blank = leaves[0] @ leaves[1] + leaves[2]
    log_probs = torch.cat([logits, blank[..., None]], -1).log_softmax(-1)
    loss, infeasible = ctc_loss_reference(log_probs, values["labels"], values["lengths"], values["closed"])
    loss.backward()
    return loss.detach(), infeasible, [leaf.grad for leaf in leaves]


def relative(a, b):
    return float((a.double() - b).abs().max() / b.abs().max())


def assert_same(values, **options):
    loss, infeasible, grads = fused(values, **options)
    expected, expected_infeasible, expected_grads = reference(values, options.get("lm_bias"))
    assert relative(loss, expected) <= 1e-5
    assert torch.equal(infeasible, expected_infeasible)
    for got, want in zip(grads, expected_grads):
        assert relative(got, want) <= 1e-5
    return infeasible


@pytest.mark.parametrize("seed", range(4))
def test_fused_loss_and_gradients_equal_the_float64_reference(seed):
    assert_same(problem(seed=seed))


def test_the_chunk_size_changes_nothing():
    values = problem()
    whole = fused(values)
    pieces = fused(values, chunk_bytes=5 * 8 * 60 * 4)  # five windows at a time, the last chunk smaller
    assert torch.allclose(whole[0], pieces[0])
    for got, want in zip(pieces[2], whole[2]):
        assert torch.allclose(got, want, atol=1e-5)


def test_an_lm_head_with_a_bias_is_read_with_it():
    values = problem()
    assert_same(values, lm_bias=torch.randn(60))


def test_infeasible_windows_add_no_loss_and_no_gradient():
    values = problem(frames=4)
    values["labels"][:8] = 7  # 7 7 7 7 needs seven frames
    values["lengths"][:8] = 4
    values["closed"][:8] = True
    infeasible = assert_same(values)
    assert infeasible[:8].all() and not infeasible[8:].all()
    assert fused(values)[2][0][:8].abs().max() == 0


def test_losses_scale_with_the_upstream_gradient():
    values = problem()
    leaf = values["frames"].clone().requires_grad_()
    loss, _ = ctc_loss_fused(
        leaf, *(values[n] for n in ("blank_weight", "blank_bias", "lm_head", "labels", "lengths", "closed"))
    )
    (3 * loss).backward()
    assert torch.allclose(leaf.grad, 3 * fused(values)[2][0], atol=1e-5)


def test_autocast_changes_neither_the_ctc_loss_nor_a_gradient():
    """Under it the sum of the blank's gradient over all frames would be made in half precision."""
    values = problem()
    plain, _, gradients = fused(values)
    with torch.autocast("cpu", torch.bfloat16):
        loss, _, under_autocast = fused(values)
    assert torch.equal(loss, plain) and all(map(torch.equal, under_autocast, gradients))


def enumerate_probability(log_probs, wanted, prefix):
    """Σ over every alignment whose collapse is (or starts with) `wanted`."""
    frames, classes = log_probs.shape
    total = 0.0
    for alignment in itertools.product(range(classes), repeat=frames):
        text = collapsed(list(alignment), classes - 1)
        if text[: len(wanted)] == wanted if prefix else text == wanted:
            total += math.exp(sum(float(log_probs[t, c]) for t, c in enumerate(alignment)))
    return total


@pytest.mark.parametrize("frames", [1, 2, 3, 4])
@pytest.mark.parametrize("vocabulary", [1, 2, 4])
@pytest.mark.parametrize("prefix", [False, True], ids=["closed", "open"])
def test_the_lattice_equals_enumeration_of_all_alignments(frames, vocabulary, prefix):
    torch.manual_seed(frames * 10 + vocabulary)
    log_probs = torch.randn(frames, vocabulary + 1, dtype=torch.float64).mul(2).log_softmax(-1)
    for wanted in itertools.chain.from_iterable(
        itertools.product(range(vocabulary), repeat=length) for length in range(4)
    ):
        labels = torch.zeros(1, 3, dtype=torch.long)
        labels[0, : len(wanted)] = torch.tensor(wanted, dtype=torch.long)
        emissions = interleave_blank(log_probs[:, labels[0]][None], log_probs[None, :, -1:])
        got = lattice_log_prob(emissions, labels, torch.tensor([len(wanted)]), torch.tensor([not prefix]))
        assert float(got.exp()) == pytest.approx(enumerate_probability(log_probs, list(wanted), prefix), abs=1e-12)


@pytest.mark.parametrize("decay", [0.25, 0.7])
@pytest.mark.parametrize("prefix", [False, True], ids=["closed", "open"])
def test_a_decay_weighs_what_enumeration_says_of_each_label(decay, prefix):
    torch.manual_seed(0)
    log_probs = torch.randn(4, 4, dtype=torch.float64).mul(2).log_softmax(-1)
    for wanted in ([], [2], [0, 1], [1, 1], [2, 0, 2], [1, 1, 1], [0, 1, 2]):
        chain = [math.log(enumerate_probability(log_probs, wanted[:count], True) or 1e-300) for count in range(4)]
        expected = sum(decay**u * (chain[u + 1] - chain[u]) for u in range(len(wanted)))
        if not prefix:
            whole = enumerate_probability(log_probs, wanted, False)
            expected += decay ** len(wanted) * (math.log(whole or 1e-300) - chain[len(wanted)])
        labels = torch.tensor([[*wanted, *[0] * (3 - len(wanted))]])
        emissions = interleave_blank(log_probs[:, labels[0]][None], log_probs[None, :, -1:])
        given = labels, torch.tensor([len(wanted)]), torch.tensor([not prefix])
        got = lattice_log_prob(emissions, *given, decay=decay)
        if lattice_log_prob(emissions, *given) < -1e29:  # three equal labels need five frames
            assert wanted == [1, 1, 1] and got < -1e29
        else:
            assert float(got) == pytest.approx(expected, abs=1e-10)


def test_gradients_of_a_decayed_loss_are_those_of_the_lattice_on_all_log_probabilities():
    values = {name: x.double() if x.is_floating_point() else x for name, x in problem().items()}
    loss, infeasible, grads = fused(values, decay=0.7)
    leaves = [values[name].clone().requires_grad_() for name in ("frames", "blank_weight", "blank_bias")]
    logits = torch.cat([leaves[0] @ values["lm_head"].T, (leaves[0] @ leaves[1] + leaves[2])[..., None]], -1)
    log_probs = logits.log_softmax(-1)
    of_labels = log_probs.gather(2, values["labels"][:, None, :].expand(-1, log_probs.shape[1], -1))
    given = (values[name] for name in ("labels", "lengths", "closed"))
    value = lattice_log_prob(interleave_blank(of_labels, log_probs[:, :, -1:]), *given, decay=0.7)
    (-value[~infeasible].sum()).backward()
    assert torch.allclose(loss, -value[~infeasible].sum()) and loss < fused(values)[0]
    assert all(torch.allclose(got, leaf.grad, atol=1e-9) for got, leaf in zip(grads, leaves))


def test_labels_beyond_the_length_do_not_matter():
    values = problem()
    changed = {**values, "labels": values["labels"].clone()}
    for row, length in enumerate(values["lengths"].tolist()):
        changed["labels"][row, length:] = 59
    assert torch.allclose(fused(values)[0], fused(changed)[0])


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_a_sum_of_gradients_too_large_for_float16_is_scaled_before_it_is_rounded(dtype):
    """Weights of float16, as DeepSpeed keeps them, or products of that type, as autocast makes them."""
    states = torch.full((300, 4), 400.0, dtype=dtype)
    weight = torch.zeros(3, 4, dtype=dtype, requires_grad=True)
    with torch.autocast("cpu", torch.float16, enabled=dtype == torch.float32):
        loss = linear_cross_entropy(states, weight, torch.zeros(300, dtype=torch.long))
    (loss / 300).backward()
    assert torch.allclose(weight.grad[0].float(), torch.full((4,), -400 * 2 / 3), rtol=1e-2)


@pytest.mark.parametrize("count,rows_per_chunk", [(0, 4), (10, 1), (10, 4), (10, 100)])
@pytest.mark.parametrize("biased", [False, True])
def test_chunked_cross_entropies_equal_whole_logits_in_value_and_gradient(count, rows_per_chunk, biased):
    torch.manual_seed(count)
    states, weight, bias = torch.randn(count, 8), torch.randn(13, 8), torch.randn(13) if biased else None
    labels, aims = torch.randint(13, (count,)), torch.randn(count, 8)
    target = TargetView(torch.nn.Embedding(13, 8), torch.randn(13, 8), torch.randn(13))
    wanted = target.logits(aims).softmax(-1)

    def gradients(loss_of):
        leaves = [x.clone().requires_grad_() for x in (states, weight)]
        loss = loss_of(*leaves)
        loss.backward()
        return loss.detach(), *(leaf.grad for leaf in leaves)

    size = {"chunk_bytes": 4 * 13 * rows_per_chunk, "bias": bias}
    pairs = [
        (
            gradients(lambda x, w: linear_cross_entropy(x, w, labels, **size)),
            gradients(lambda x, w: F.cross_entropy(F.linear(x, w, bias), labels, reduction="sum")),
        ),
        (
            gradients(lambda x, w: soft_cross_entropy(x, w, aims, target, **size)[0]),
            gradients(lambda x, w: F.cross_entropy(F.linear(x, w, bias), wanted, reduction="sum")),
        ),
    ]
    for chunked, whole in pairs:
        assert all(torch.allclose(one, other, atol=1e-5) for one, other in zip(chunked, whole))


@pytest.mark.parametrize("rows_per_chunk", [3, 100])
def test_weighted_rows_are_the_weighted_sum_of_their_losses(rows_per_chunk):
    torch.manual_seed(0)
    states, weight, aims, shares = torch.randn(10, 8), torch.randn(13, 8), torch.randn(10, 8), torch.rand(10)
    target = TargetView(torch.nn.Embedding(13, 8), torch.randn(13, 8))
    leaves = [x.clone().requires_grad_() for x in (states, weight)]
    loss, losses = soft_cross_entropy(*leaves, aims, target, shares, chunk_bytes=4 * 13 * rows_per_chunk)
    (2 * loss).backward()
    plain = [x.clone().requires_grad_() for x in (states, weight)]
    each = F.cross_entropy(F.linear(*plain), target.logits(aims).softmax(-1), reduction="none")
    (2 * (each * shares).sum()).backward()
    assert torch.allclose(losses, each.detach(), atol=1e-5) and torch.allclose(loss, (each * shares).sum())
    assert not losses.requires_grad
    assert all(torch.allclose(one.grad, other.grad, atol=1e-5) for one, other in zip(leaves, plain))


def test_under_autocast_products_are_in_its_type_and_sums_in_float32():
    torch.manual_seed(0)
    states, weight, labels = torch.randn(400, 8), torch.randn(13, 8), torch.randint(13, (400,))
    found = []
    for on in (False, True):
        leaves = [x.clone().requires_grad_() for x in (states, weight)]
        with torch.autocast("cpu", torch.bfloat16, enabled=on):
            loss = linear_cross_entropy(*leaves, labels, chunk_bytes=4 * 13 * 50)
        loss.backward()
        found.append((loss.detach(), *(leaf.grad for leaf in leaves)))
    for plain, half in zip(*found):
        assert half.dtype == torch.float32 and not torch.equal(plain, half)
        assert float((plain - half).norm() / plain.norm()) < 1e-2


def test_scores_that_are_no_numbers_are_no_hits():
    nan = float("nan")
    scores = torch.tensor([[nan] * 6, [nan, 3.0, 2.0, 1.0, 0.0, -1.0], [0.0, 3.0, 2.0, 1.0, 0.0, -1.0]])
    for label, hits in ((0, [0, 0, 0, 0, 0]), (1, [0, 1, 1, 1, 1])):  # argmax takes the first nan
        one = slice(label, label + 1)
        found = top_hits(scores[one], torch.tensor([label]), torch.tensor([True]))
        assert found.tolist() == hits
    assert top_hits(scores[2:], torch.tensor([1]), torch.tensor([True])).tolist() == [1, 1, 1, 1, 1]
