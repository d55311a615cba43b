"""Prefix scores: the worked examples, and the written-out recursions against frame-by-frame ones."""

import pytest
import torch

from draft_heads.heads.prefix_scores import child_scores, empty_prefix, extend, from_entry, runs


def test_the_worked_example_of_runs():
    expected = [[1, 0.5, 0.2], [0, 1, 0.4], [0, 0, 1]]
    assert torch.allclose(runs(torch.tensor([0.5, 0.4, 0.2])), torch.tensor(expected))


def test_the_worked_example_of_the_prefix_scores():
    probs, blank = torch.tensor([[0.6, 0.0], [0.5, 0.5]]), torch.tensor([0.4, 0.0])
    empty = empty_prefix(runs(blank)[None])
    assert child_scores(empty, probs[None])[0, 0].tolist() == pytest.approx([0.8, 0.2])
    own = probs[None, None, :, 0]
    state = extend(empty, torch.tensor([[0]]), torch.tensor([[0]]), from_entry(own, own, runs(blank)[None]))
    assert child_scores(state, probs[None])[0, 0].tolist() == pytest.approx([0.0, 0.3])


@pytest.mark.parametrize("zeros", [False, True])
def test_extending_equals_the_recursion_frame_by_frame(zeros):
    torch.manual_seed(0)
    frames, vocabulary = 7, 3
    table = torch.randn(frames, vocabulary + 1, dtype=torch.float64).softmax(-1)
    if zeros:
        table[2, 1] = table[4, -1] = 0.0
    probs, blank = table[:, :-1], table[:, -1]
    state = empty_prefix(runs(blank)[None])
    last, before = None, [torch.zeros(frames).double(), state.either[0, 0]]  # γⁿ and γᵇ
    for label in (1, 1, 2):
        in_label, in_blank = [torch.zeros(()).double()], [torch.zeros(()).double()]
        for t in range(frames - 1):
            enter = before[1][t] + (0.0 if label == last else before[0][t])
            in_blank.append((in_blank[-1] + in_label[-1]) * blank[t])
            in_label.append((in_label[-1] + enter) * probs[t, label])
        own = probs[None, None, :, label]
        state = extend(state, torch.tensor([[0]]), torch.tensor([[label]]), from_entry(own, own, runs(blank)[None]))
        last, before = label, [torch.stack(in_label), torch.stack(in_blank)]
        assert torch.allclose(state.sums[0, 0, :-1], torch.cat([before[0] + before[1], before[1]]))
        assert torch.allclose(state.repeated[0, 0], before[1] @ probs[:, label])
