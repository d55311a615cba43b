"""Labelled conversations → padded or packed batches, the held-out split, and how often each token is a label.

Shapes: B rows of the batch, L tokens, H hidden, V vocabulary.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from torch import Tensor

from draft_heads.data.common.processes import Processes
from draft_heads.data.labels.hidden_cache import STATE_COLUMNS, hidden_from_bytes

logger = logging.getLogger(__name__)

NO_LABEL = -100


@dataclass
class DraftCollator:
    """Rows of `load_distilled` → tensors; padding is on the right.

    input_ids    [B, L] int64, `pad_id` on padding
    greedy_ids   [B, L] int64, the target's own tokens in the assistant's turns; -100 elsewhere
    mask         [B, L] bool, the assistant's tokens
    segment_ids  [B, L] int64, 0 on padding, 1, 2, … for the conversations of the row
    position_ids [B, L] int64, 0, 1, … in each conversation; 0 on padding
    hidden       [B, L, H] of `hidden_dtype`, 0 on padding; only where the rows have cached hidden states
    aux_hidden   [B, L, k·H], likewise, with `aux_hidden` set: the outputs of k layers of the target

    With `packing`, each conversation goes into the first row that has room (first fit), so B may shrink. Example,
    max_length 8, lengths 5, 4, 3: rows [1 1 1 1 1 2 2 2] and [1 1 1 1 0 0 0 0]. Conversations longer than
    `max_length` are cut (`labelled_within` says so); L is rounded up to a multiple of 8, at most to `max_length`.

    Without rows it makes one row of padding, for a process whose share is empty; `state_sizes` are the H and k·H of its
    states.
    """

    pad_id: int
    max_length: int
    packing: bool = False
    hidden_dtype: torch.dtype | None = None
    aux_hidden: bool = False
    state_sizes: tuple[int, ...] = ()

    def __call__(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
        bins: list[list[Mapping[str, Any]]] = []
        room: list[int] = []
        for row in rows:
            length = self._length(row)
            slot = next((b for b, free in enumerate(room) if self.packing and free >= length), len(bins))
            if slot == len(bins):
                bins.append([])
                room.append(self.max_length)
            bins[slot].append(row)
            room[slot] -= length
        longest = max((self.max_length - free for free in room), default=1)
        return self._fill(bins or [[]], min(-(-longest // 8) * 8, self.max_length))

    def _length(self, row: Mapping[str, Any]) -> int:
        return min(len(row["input_ids"]), self.max_length)

    def _fill(self, bins: list[list[Mapping[str, Any]]], length: int) -> dict[str, Tensor]:
        shape = (len(bins), length)
        batch = {
            "input_ids": torch.full(shape, self.pad_id),
            "greedy_ids": torch.full(shape, NO_LABEL),
            "mask": torch.zeros(shape, dtype=torch.bool),
            "segment_ids": torch.zeros(shape, dtype=torch.long),
            "position_ids": torch.zeros(shape, dtype=torch.long),
        }
        states = STATE_COLUMNS[: (self.hidden_dtype is not None) * (1 + self.aux_hidden)]
        if not any(bins):
            batch |= {n: torch.zeros(*shape, w, dtype=self.hidden_dtype) for n, w in zip(states, self.state_sizes)}
        for b, segments in enumerate(bins):
            start = 0
            for number, row in enumerate(segments, start=1):
                n = self._length(row)
                span = slice(start, start + n)
                batch["input_ids"][b, span] = torch.as_tensor(row["input_ids"][:n])
                batch["greedy_ids"][b, span] = torch.as_tensor(row["greedy_ids"][:n])
                batch["greedy_ids"][b, start] = NO_LABEL
                batch["mask"][b, span] = torch.as_tensor(row["assistant_mask"][:n]).bool()
                batch["segment_ids"][b, span] = number
                batch["position_ids"][b, span] = torch.arange(n)
                for name in states:
                    assert self.hidden_dtype is not None
                    states_LH = hidden_from_bytes(row[name], len(row["input_ids"]), self.hidden_dtype)[:n]
                    if name not in batch:
                        batch[name] = states_LH.new_zeros(*shape, states_LH.shape[-1])
                    batch[name][b, span] = states_LH
                start += n
        return batch


def split_held_out(dataset: datasets.Dataset, rows: int, seed: int = 0) -> tuple[datasets.Dataset, datasets.Dataset]:
    """(train, held-out): the `rows` whose hash of (seed, conversation) is lowest, whatever the order of the dataset.

    The held-out rows are in the order of their hashes, so that the first few are a sample of them: rows with cached
    states are stored by length. Those to train on keep their order.

    Rows that ask the same stay together: some more are held out, or fewer where otherwise nothing is left to train on,
    which is logged. Datasets of versions that wrote no `conversation` are tied by `id`.
    """
    if not 0 <= rows < len(dataset):
        raise ValueError(f"{rows} held-out rows of {len(dataset)} leave nothing to train on; lower the number")
    keys: list[Any] = list(dataset["conversation"]) if "conversation" in dataset.column_names else [None]
    tied = "conversation"
    if None in keys:
        keys, tied = list(dataset["id"]), "id"
    hashes = [hashlib.sha256(f"{seed}:{key}".encode()).digest()[:8] for key in keys]
    ranked = sorted(range(len(hashes)), key=lambda i: (hashes[i], i))
    # the places in `ranked` at which a conversation begins
    starts = [i for i in range(len(ranked)) if i == 0 or hashes[ranked[i]] != hashes[ranked[i - 1]]]
    cut = next((i for i in starts if i >= rows), starts[-1])
    if rows and not cut:
        raise ValueError(
            f"rows of one {tied} are held out together; all {len(dataset)} have the same; add rows of others"
        )
    if cut != rows and Processes.current().rank == 0:
        logger.warning("%d rows are held out, not %d: rows of one %s stay together", cut, rows, tied)
    return dataset.select(sorted(ranked[cut:])), dataset.select(ranked[:cut])


def row_lengths(dataset: datasets.Dataset) -> list[int]:
    """Tokens of every row."""
    batches = dataset.select_columns(["input_ids"]).with_format("arrow").iter(batch_size=1000)
    return [length for batch in batches for length in pc.list_value_length(batch["input_ids"]).to_pylist()]


def labelled_within(dataset: datasets.Dataset, max_length: int, which: str = "") -> datasets.Dataset:
    """The rows with two labels in their first `max_length` tokens; the first process logs how many are cut there, and
    how many of those are left out. All rows where none has them: there a head says what it needs.

    which: what these conversations are, for the line
    """
    if not len(dataset):
        return dataset
    lengths = np.array(row_lengths(dataset))
    without = lengths > max_length
    if not (cut := int(without.sum())):
        return dataset
    for rows, _ in _labels(dataset, max_length):  # a window has a base token and a label
        without[rows[1:][rows[1:] == rows[:-1]]] = False
    if without.all():
        return dataset
    kept = np.flatnonzero(~without)
    if Processes.current().rank == 0:
        bare = f"; {len(dataset) - len(kept):,} of them have fewer than two labels before it and are left out"
        logger.warning(
            "max_length %d cuts %s of %s %sconversations, of up to %s tokens%s; raise it to train on all of them",
            max_length,
            f"{cut:,}",
            f"{len(dataset):,}",
            which,
            f"{lengths.max():,}",
            bare if len(kept) < len(dataset) else "",
        )
    return dataset if len(kept) == len(dataset) else dataset.select(kept)


def label_counts(dataset: datasets.Dataset, vocab_size: int, max_length: int) -> Tensor:
    """[V] int64, occurrences among the greedy labels of the assistant's tokens, rows cut to `max_length`.

    Worked example: greedy_ids (−100, 4, 4, 2, 9) with mask (0, 0, 1, 1, 1) and max_length 4: one 4 and one 2.
    """
    counts = np.zeros(vocab_size, dtype=np.int64)
    for _, labels in _labels(dataset, max_length):
        counts += np.bincount(labels, minlength=vocab_size)
    return torch.from_numpy(counts)


def _labels(dataset: datasets.Dataset, max_length: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """(row, label) of each label among the assistant's tokens, rows cut to `max_length`, in parts."""
    columns, first = dataset.select_columns(["greedy_ids", "assistant_mask"]).with_format("arrow"), 0
    for batch in columns.iter(batch_size=1000):
        rows = pa.concat_arrays(batch["greedy_ids"].chunks)
        lengths = rows.value_lengths().to_numpy(zero_copy_only=False)
        labels = rows.flatten().to_numpy(zero_copy_only=False)
        mask = pa.concat_arrays(batch["assistant_mask"].chunks).flatten().to_numpy(zero_copy_only=False)
        position = np.arange(len(labels)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        found = mask & (labels >= 0) & (position < max_length)
        yield np.repeat(np.arange(first, first + len(lengths)), lengths)[found], labels[found]
        first += len(lengths)
