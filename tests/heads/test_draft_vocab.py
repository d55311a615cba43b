"""The draft vocabulary: which tokens are in it, how labels and weights are cut to it, what becomes of the others."""

import datasets
import pytest
import torch
import torch.nn.functional as F

from draft_heads.data.collate import label_counts
from draft_heads.heads.base import TargetView
from draft_heads.heads.checkpoint import HEADS, head_classes, load_head
from draft_heads.heads.ctc_loss import ctc_loss_reference
from draft_heads.heads.draft_vocab import check_draft_vocab, classes_of, cut_before_outside, frequent_tokens
from tests.heads.small import FINGERPRINT, disturbed, lent_target, loss_of, text

ODD = torch.tensor([0, *range(1, 60, 2)])  # 31 of 61 tokens, the end token among them


def cut(kind, ids=ODD, **settings):
    """A head that drafts from `ids`."""
    head = disturbed(*head_classes(kind), **settings, draft_vocab_size=len(ids))
    head.set_draft_vocab(ids)
    return head.eval()


# --- which tokens ---------------------------------------------------------------------------------------------------


def test_the_most_frequent_are_chosen_of_equals_the_smaller_id_and_end_tokens_always():
    counts = torch.tensor([0, 3, 9, 3, 1])
    assert frequent_tokens(counts, 3).tolist() == [1, 2, 3]
    assert frequent_tokens(counts, 2).tolist() == [1, 2]
    assert frequent_tokens(counts, 3, always=[4]).tolist() == [1, 2, 4]
    assert frequent_tokens(torch.zeros(5, dtype=torch.long), 2, always=[3]).tolist() == [0, 3]
    assert counts.tolist() == [0, 3, 9, 3, 1]
    with pytest.raises(ValueError, match=r"must be at least 2, as many end tokens .* got 1; raise it"):
        frequent_tokens(counts, 1, always=[3, 4])


def test_labels_are_counted_under_the_mask_and_up_to_the_length_trained_on():
    rows = datasets.Dataset.from_dict(
        {
            "id": ["a", "b", "c"],
            "greedy_ids": [[-100, 4, 4, 2, 9], [-100, 4], [7, 7, 7, 7, 7, 7]],
            "assistant_mask": [[False, False, True, True, True], [False, True], [True] * 6],
        }
    )
    counts = label_counts(rows, 10, max_length=4)
    assert {token: n for token, n in enumerate(counts.tolist()) if n} == {2: 1, 4: 2, 7: 4}
    assert label_counts(rows.select([1, 0]), 10, max_length=4)[[2, 4, 7]].tolist() == [1, 2, 0]


@pytest.mark.parametrize("size,told", [(-1, "got -1"), (62, "from 2 to 61"), (1, "got 1;")])
@pytest.mark.parametrize("kind", HEADS)
def test_sizes_out_of_range_are_refused(kind, size, told):
    with pytest.raises(ValueError, match=f"--draft_vocab_size .*{told}"):
        disturbed(*head_classes(kind), draft_vocab_size=size, end_token_ids=[0, 5])


@pytest.mark.parametrize(
    "ids,told",
    [
        ([0, 1], "shape"),
        ([0, 2, 1], "ascending"),
        ([0, 1, 1], "ascending"),
        ([0, 1, 9], "out of range"),
        ([-1, 0, 1], "out of range"),
        ([1, 2, 3], "no end token 0"),
        ([0.0, 1.0, 2.0], "float32"),
    ],
)
def test_what_is_no_draft_vocabulary_is_refused(ids, told):
    with pytest.raises(ValueError, match=told):
        check_draft_vocab(torch.tensor(ids), 3, 9, always=[0])
    check_draft_vocab(torch.tensor([0, 4, 8]), 3, 9, always=[0])


def test_a_head_comes_back_with_its_vocabulary_and_a_damaged_one_is_refused(tmp_path):
    head, view = cut("medusa"), lent_target()
    head.save_pretrained(tmp_path)
    loaded = load_head(tmp_path, FINGERPRINT)
    assert torch.equal(loaded.draft_vocab, ODD) and loaded.draft_vocab.dtype == torch.int64
    assert torch.equal(loss_of(loaded, text(), view).total, loss_of(head, text(), view).total)
    head.draft_vocab[3] = 60
    head.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"model\.safetensors cannot be used: a draft vocabulary must be 31 ascending"):
        load_head(tmp_path)


# --- the way there and back -----------------------------------------------------------------------------------------


def test_tokens_become_classes_and_come_back():
    vocabulary = torch.tensor([2, 5, 7])
    assert classes_of(torch.tensor([5, 6, 7, 0, 9, 2]), vocabulary).tolist() == [1, -1, 2, -1, -1, 0]
    assert torch.equal(cut("medusa").draft_tokens(classes_of(ODD, ODD)), ODD)


def test_a_window_ends_open_before_a_label_that_cannot_be_drafted():
    vocabulary = torch.tensor([2, 5, 7])
    labels = torch.tensor([[5, 2, 6, 7], [5, 2, 6, 7], [6, 2, 0, 0], [7, 7, 2, 5]])
    lengths, closed = torch.tensor([4, 2, 2, 4]), torch.tensor([True, False, False, True])
    classes, lengths, closed = cut_before_outside(classes_of(labels, vocabulary), lengths, closed)
    assert classes.tolist() == [[1, 0, 0, 0], [1, 0, 0, 0], [0, 0, 0, 0], [2, 2, 0, 1]]
    assert lengths.tolist() == [2, 2, 0, 4] and closed.tolist() == [False, False, False, True]


def test_the_view_is_cut_once_bias_and_all_and_the_embedding_stays_whole():
    head, lent = cut("ctc"), lent_target()
    view = TargetView(lent.embedding, lent.lm_head_weight, torch.randn(61))
    mine, hidden = head.draft_view(view), torch.randn(5, 32)
    assert torch.allclose(mine.logits(hidden), view.logits(hidden)[:, ODD], atol=1e-5)
    assert head.draft_view(mine) is mine and mine.embedding is view.embedding
    assert disturbed(*head_classes("ctc")).draft_view(view) is view


@pytest.mark.parametrize("name", ["medusa", "hydra", "chimera"])
def test_vocabulary_matrices_have_the_cut_size_and_start_as_rows_of_the_lm_head(name):
    head, view = cut(name), lent_target()
    head.start_from(torch.randn(20, 32), view)
    for each in head.offset_heads:
        matrix = each.weight if name == "chimera" else each.vocabulary.weight
        assert torch.equal(matrix[:, -32:], view.lm_head_weight[ODD])


def test_the_blank_starts_against_the_draft_vocabulary_alone():
    view, hidden = lent_target(), torch.randn(20, 32)
    one, other = cut("ctc"), cut("ctc")
    one.start_from(hidden, view)
    other.start_from(hidden, other.draft_view(view))
    assert torch.equal(one.blank_bias, other.blank_bias)


# --- losses and accuracy --------------------------------------------------------------------------------------------


def test_the_loss_is_that_of_the_labels_that_can_be_drafted_under_the_cut_softmax():
    view, rows = lent_target(), text(rows=1)
    head = cut("medusa", decay=1.0)
    loss = loss_of(head, rows, view)
    for k in range(head.config.heads):
        labels = rows.input_ids[0, 2 + k :]
        log_probs = head.draft_log_probs(rows.hidden[0, : len(labels)])[:, k]
        place = {token: c for c, token in enumerate(ODD.tolist())}
        expected = -sum(log_probs[n, place[y]] for n, y in enumerate(labels.tolist()) if y in place)
        assert loss.parts[f"ce_{k}"] == pytest.approx(expected.item(), rel=1e-4)


def test_the_soft_loss_aims_at_the_targets_distribution_over_the_draft_vocabulary():
    view, rows = lent_target(), text(rows=1)
    head = cut("hydra", labels_from="distribution", prefix_attention=True)
    loss = loss_of(head, rows, view)
    kept = [n for n in range(18) if int(rows.input_ids[0, n + 2]) in ODD.tolist()]
    wanted = view.logits(rows.hidden[0])[:, ODD].softmax(-1)
    states, tokens = head.row_states(rows)[0], head.token_states(rows.input_ids[0], view)
    expected = sum(F.cross_entropy(head.next_log_probs(0, states[n], tokens[n + 1][None]), wanted[n + 1]) for n in kept)
    assert loss.parts["soft_0"] == pytest.approx(expected.item(), rel=1e-4)


def test_the_ctc_loss_is_the_reference_on_windows_cut_at_what_cannot_be_drafted():
    view, rows, head = lent_target(), text(rows=2), cut("ctc", labels=3, frames=5)
    mask = torch.ones_like(rows.input_ids, dtype=torch.bool)
    windows = head.windows(rows.input_ids, rows.input_ids, mask, rows.segment_ids)
    frames = head.train_frames(rows, windows.anchors, view)[windows.valid]
    log_probs = head.frame_logits(frames, head.draft_view(view)).log_softmax(-1)
    labels, lengths, closed = [], [], []
    for window, length in zip(windows.labels[windows.valid].tolist(), windows.lengths[windows.valid].tolist()):
        stop = next((u for u in range(length) if window[u] not in ODD.tolist()), length)
        labels.append([ODD.tolist().index(y) for y in window[:stop]] + [0] * (3 - stop))
        lengths.append(stop)
        closed.append(stop == length == 3)
    assert 0 in lengths and 3 in lengths
    expected, _ = ctc_loss_reference(log_probs, torch.tensor(labels), torch.tensor(lengths), torch.tensor(closed))
    assert loss_of(head, rows, view).parts["ctc"] == pytest.approx(expected.item(), rel=1e-4)
