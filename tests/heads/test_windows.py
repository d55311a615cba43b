"""Which labels an anchor drafts: the worked example, cuts, turns, packed rows, and stable sampling."""

import torch

from draft_heads.heads.checkpoint import HEADS, head_classes
from draft_heads.heads.ctc import CTCConfig
from draft_heads.heads.windows import IGNORED, choose_windows, label_windows, position_in_segment, rank_in_segment

P, A, B, C, D, Q, E = 9, 1, 2, 3, 4, 5, 0  # E ends a turn


def row(text, greedy, mask=None, segments=None):
    text, greedy = torch.tensor([text]), torch.tensor([greedy])
    mask = torch.tensor([mask]).bool() if mask else (text != P)
    segments = torch.tensor([segments]) if segments else torch.ones_like(text)
    return text, greedy, mask, segments


def windows_of(arguments, size=3, agree=True, reads_base=True):
    found = label_windows(*arguments, size, [E], agree, reads_base)
    return {
        index: (found.labels[0, index, : found.lengths[0, index]].tolist(), bool(found.closed[0, index]))
        for index in found.valid[0].nonzero()[:, 0].tolist()
    }


def select_windows(text, greedy, mask, segments, size, anchors_each=0, seed=0):
    every = label_windows(text, greedy, mask, segments, size, [E])
    return choose_windows(every, text, segments, anchors_each, seed)


EXAMPLE = ([P, A, B, C, D, E], [IGNORED, A, B, C, Q, E])


def test_the_worked_example_of_the_docstring():
    assert windows_of(row(*EXAMPLE)) == {
        0: ([B, C, Q], True),
        1: ([C, Q], False),
        2: ([Q], False),
        3: ([E], True),
    }


def test_without_the_cut_labels_go_on_after_a_disagreement():
    assert windows_of(row(*EXAMPLE), agree=False) == {
        0: ([B, C, Q], True),
        1: ([C, Q, E], True),
        2: ([Q, E], True),
        3: ([E], True),
    }


def test_a_head_that_reads_no_base_token_has_no_window_behind_one_that_is_not_the_targets():
    blind = windows_of(row(*EXAMPLE), reads_base=False)
    assert blind == {n: window for n, window in windows_of(row(*EXAMPLE)).items() if n != 3}
    assert windows_of(row(*EXAMPLE), agree=False, reads_base=False) == windows_of(row(*EXAMPLE), agree=False)
    reading = {kind: head_classes(kind)[1]().reads_base_token for kind in HEADS}
    assert not reading["medusa"] and all(reading[kind] for kind in ("chimera", "ctc", "eagle3", "hydra"))
    assert not CTCConfig(context="hidden").reads_base_token
    assert CTCConfig(context="hidden", label_context=4).reads_base_token


def test_windows_end_behind_the_end_of_turn_token_and_keep_it():
    text = [P, A, B, E, P, C, D, E]
    found = windows_of(row(text, [IGNORED, A, B, E, P, C, D, E]), size=4)
    assert found == {0: ([B, E], True), 1: ([E], True), 4: ([D, E], True), 5: ([E], True)}


def test_a_turn_cut_by_the_length_leaves_open_windows():
    found = windows_of(row([P, A, B, C], [IGNORED, A, B, C]), size=4)
    assert found == {0: ([B, C], False), 1: ([C], False)}


def test_packed_conversations_do_not_reach_into_each_other():
    text = [P, A, B, A, B, C]
    found = windows_of(row(text, [IGNORED, A, B, A, B, C], [0, 1, 1, 1, 1, 1], [1, 1, 1, 2, 2, 2]), size=4)
    assert found == {0: ([B], False), 3: ([C], False)}


def batch(rows=4, length=40, seed=0):
    torch.manual_seed(seed)
    text = torch.randint(1, 9, (rows, length))
    return text, text.clone(), torch.ones_like(text).bool(), torch.ones_like(text)


def test_sampled_anchors_are_the_same_however_rows_are_batched():
    text, greedy, mask, segments = batch()
    together = select_windows(text, greedy, mask, segments, 3, anchors_each=6, seed=5)
    padded = [
        torch.nn.functional.pad(part[2:3], (0, 9)) for part in (text, greedy, mask, segments)
    ]  # alone, in a longer row
    alone = select_windows(*padded, 3, anchors_each=6, seed=5)
    assert together.anchors[2].tolist() == alone.anchors[0].tolist()
    assert len(set(together.anchors[2].tolist())) == 6
    assert together.anchors.tolist() == together.anchors.sort(-1).values.tolist()


def test_a_packed_conversation_has_the_anchors_of_a_row_of_its_own():
    text, greedy, mask, segments = batch(rows=3, length=20)
    apart = select_windows(text, greedy, mask, segments, 3, anchors_each=6, seed=5)
    row, ids = text.reshape(1, 60), torch.arange(1, 4).repeat_interleave(20)[None]
    packed = select_windows(row, row, torch.ones_like(row).bool(), ids, 3, anchors_each=6, seed=5)
    assert packed.anchors.reshape(3, 6).tolist() == (apart.anchors + 20 * torch.arange(3)[:, None]).tolist()


def test_another_seed_samples_other_anchors():
    text, greedy, mask, segments = batch()
    picks = {
        tuple(select_windows(text, greedy, mask, segments, 3, anchors_each=6, seed=s).anchors[0].tolist())
        for s in range(8)
    }
    assert len(picks) > 4


def test_every_anchor_is_used_when_none_are_sampled():
    text, greedy, mask, segments = batch()
    windows = select_windows(text, greedy, mask, segments, 3)
    assert windows.valid.all() and windows.anchors.shape == (4, 38)


def test_each_packed_conversation_has_its_own_number_of_anchors():
    text = torch.tensor([[A, B, C, D] * 4 + [A, B, C, D] * 2])
    segments = torch.tensor([[1] * 16 + [2] * 8])
    arguments = text, text, torch.ones_like(segments).bool(), segments
    windows = select_windows(*arguments, 2, anchors_each=5, seed=3)
    assert windows.anchors.shape == (1, 10) and windows.valid.all()
    assert (windows.anchors < 16).sum() == 5
    assert select_windows(*arguments, 2, anchors_each=0).valid.sum() == 14 + 6


def test_ranks_of_the_docstring():
    scores, segments = torch.tensor([[5, 9, 7, 3, 4]]), torch.tensor([[1, 1, 1, 2, 2]])
    assert rank_in_segment(scores, segments).tolist() == [[2, 0, 1, 1, 0]]
    assert position_in_segment(torch.tensor([[1, 1, 1, 2, 2, 0]])).tolist() == [[0, 1, 2, 0, 1, 0]]
