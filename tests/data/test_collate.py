"""Padding, packing and the held-out split."""

import datasets
import pytest
import torch

from draft_heads.data.collate import NO_LABEL, DraftCollator, labelled_within, split_held_out
from draft_heads.data.labels.hidden_cache import check_disk, hidden_bytes, hidden_from_bytes


def row(first, length):
    ids = list(range(first, first + length))
    return {
        "id": f"r{first}",
        "input_ids": ids,
        "greedy_ids": [-100] + [i + 1 for i in ids[:-1]],
        "assistant_mask": [i % 2 == 1 for i in range(length)],
    }


def test_padding_is_on_the_right_and_carries_no_label():
    batch = DraftCollator(pad_id=9, max_length=64)([row(100, 3), row(200, 2)])
    assert batch["input_ids"].tolist() == [[100, 101, 102, 9, 9, 9, 9, 9], [200, 201, 9, 9, 9, 9, 9, 9]]
    assert batch["greedy_ids"][0].tolist() == [-100, 101, 102, -100, -100, -100, -100, -100]
    assert batch["mask"][0].tolist() == [False, True, False, False, False, False, False, False]
    assert batch["segment_ids"].tolist() == [[1, 1, 1, 0, 0, 0, 0, 0], [1, 1, 0, 0, 0, 0, 0, 0]]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 0, 0, 0, 0, 0], [0, 1, 0, 0, 0, 0, 0, 0]]
    assert {key: value.dtype for key, value in batch.items()} == {
        **dict.fromkeys(("input_ids", "greedy_ids", "segment_ids", "position_ids"), torch.long),
        "mask": torch.bool,
    }


def test_no_rows_are_a_row_of_padding_with_states_of_the_same_sizes():
    batch = DraftCollator(9, 64, hidden_dtype=torch.float16, aux_hidden=True, state_sizes=(3, 6))([])
    assert batch["input_ids"].tolist() == [[9] * 8] and not batch["mask"].any() and not batch["segment_ids"].any()
    assert {name: x.shape[-1] for name, x in batch.items() if x.dtype == torch.float16} == {
        "hidden": 3,
        "aux_hidden": 6,
    }
    assert set(DraftCollator(9, 64)([])) == {"input_ids", "greedy_ids", "mask", "segment_ids", "position_ids"}


def test_packing_fills_the_first_row_with_room_and_restarts_positions():
    last = row(300, 3) | {"greedy_ids": [55, 301, 302]}  # a label at its start would be read as row 100's next token
    batch = DraftCollator(pad_id=0, max_length=8, packing=True)([row(100, 5), row(200, 4), last])
    assert batch["segment_ids"].tolist() == [[1, 1, 1, 1, 1, 2, 2, 2], [1, 1, 1, 1, 0, 0, 0, 0]]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 3, 4, 0, 1, 2], [0, 1, 2, 3, 0, 0, 0, 0]]
    assert batch["input_ids"][0].tolist() == [100, 101, 102, 103, 104, 300, 301, 302]
    assert batch["greedy_ids"][0].tolist() == [-100, 101, 102, 103, 104, -100, 301, 302]


def test_packing_keeps_every_token_once():
    generator = torch.Generator().manual_seed(0)
    rows = [row(100 * i, int(n)) for i, n in enumerate(torch.randint(1, 30, (20,), generator=generator))]
    batch = DraftCollator(pad_id=-1, max_length=32, packing=True)(rows)
    kept = batch["input_ids"][batch["segment_ids"] > 0].tolist()
    assert sorted(kept) == sorted(i for r in rows for i in r["input_ids"])
    assert len(batch["input_ids"]) < len(rows)
    assert batch["mask"].sum() == sum(sum(r["assistant_mask"]) for r in rows)


def test_longer_conversation_is_cut():
    batch = DraftCollator(pad_id=0, max_length=6)([row(100, 10)])
    assert batch["input_ids"].tolist() == [[100, 101, 102, 103, 104, 105]]


def test_rows_without_a_window_before_the_cut_are_left_out_and_said(caplog):
    def answered(length, answer):
        ids = list(range(length))
        mask = [place >= answer for place in ids]
        return {
            "input_ids": ids,
            "greedy_ids": [i if m else NO_LABEL for i, m in zip(ids, mask)],
            "assistant_mask": mask,
        }

    rows = datasets.Dataset.from_list(
        [answered(5, 4), answered(9, 6), answered(9, 5), answered(12, 11), answered(6, 5)] * 500
    )
    assert labelled_within(rows, 12) is rows and not caplog.messages
    kept = labelled_within(rows, 7)
    expected = rows.filter(lambda one: len(one["input_ids"]) <= 7 or sum(one["assistant_mask"][:7]) > 1)
    assert kept["input_ids"] == expected["input_ids"]
    told = (
        "max_length 7 cuts 1,500 of 2,500 conversations, of up to 12 tokens; 1,000 of them have fewer than two labels "
    )
    assert caplog.messages.pop() == told + "before it and are left out; raise it to train on all of them"
    assert len(labelled_within(rows, 8)) == 2000
    assert labelled_within(rows.select([2]), 7)["input_ids"] == [list(range(9))]
    alone = "max_length 7 cuts 1 of 1 conversations, of up to 9 tokens; raise it to train on all of them"
    assert caplog.messages[-1] == alone
    long = rows.select([1, 2, 3])
    assert labelled_within(long, 5) is long


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_cached_hidden_states_come_back_bit_for_bit_where_their_tokens_are(dtype):
    hidden = [torch.randn(n, 3).to(dtype) for n in (5, 3)]
    assert torch.equal(hidden_from_bytes(hidden_bytes(hidden[0]), 5, dtype), hidden[0])
    rows = [row(100, 5) | {"hidden": hidden_bytes(hidden[0])}, row(200, 3) | {"hidden": hidden_bytes(hidden[1])}]
    batch = DraftCollator(pad_id=0, max_length=16, packing=True, hidden_dtype=dtype)(rows)
    assert batch["hidden"].shape == (1, 8, 3)
    assert torch.equal(batch["hidden"][0], torch.cat(hidden))


def test_disk_need_is_told_and_refused_when_it_does_not_fit(tmp_path):
    assert check_disk(10**12, False, 4096, torch.bfloat16, str(tmp_path), freed=10**18)
    line = check_disk(1000, True, 4096, torch.bfloat16, str(tmp_path / "new" / "out"))
    assert line.startswith("H=4096 bfloat16: 8 KiB per token, 1,000 tokens -> 7.82 MiB, free ")
    with pytest.raises(ValueError, match=r"^hidden_states does not fit .* about 1,000,000,000,000 tokens"):
        check_disk(10**12, False, 4096, torch.bfloat16, str(tmp_path))


def ids_of(dataset):
    return list(dataset["id"])


def test_held_out_rows_do_not_depend_on_order():
    dataset = datasets.Dataset.from_dict({"id": [f"c{i}" for i in range(100)]})
    train, held = split_held_out(dataset, rows=10, seed=3)
    _, shuffled_held = split_held_out(dataset.shuffle(seed=1), rows=10, seed=3)
    assert (len(train), len(held)) == (90, 10)
    assert ids_of(held) == ids_of(shuffled_held) != sorted(ids_of(held))
    assert not set(ids_of(train)) & set(ids_of(held))
    assert set(ids_of(held)) != set(ids_of(split_held_out(dataset, rows=10, seed=4)[1]))


@pytest.mark.parametrize("rows", [1, 3, 4])
def test_rows_of_one_id_are_on_one_side(rows):
    dataset = datasets.Dataset.from_dict({"id": [f"c{i % 5}" for i in range(10)]})
    train, held = split_held_out(dataset, rows=rows)
    assert not set(ids_of(train)) & set(ids_of(held)) and len(held) == 2 * -(-rows // 2)
    with pytest.raises(ValueError, match="all 4 have the same; add rows of others"):
        split_held_out(datasets.Dataset.from_dict({"id": ["a"] * 4}), rows=1)


def test_a_held_out_split_that_leaves_nothing_is_refused():
    with pytest.raises(ValueError, match="3 held-out rows of 3 leave nothing to train on"):
        split_held_out(datasets.Dataset.from_dict({"id": ["a", "b", "c"]}), rows=3)
