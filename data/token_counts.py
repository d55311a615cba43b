"""How often each token is a label in labelled rows (shapes: V vocabulary)."""

from __future__ import annotations

import datasets
import numpy as np
import pyarrow as pa
import torch
from torch import Tensor


def label_counts(dataset: datasets.Dataset, vocab_size: int, max_length: int) -> Tensor:
    """[V] int64, occurrences among the greedy labels of the assistant's tokens, rows cut to `max_length`.

    Worked example: greedy_ids (−100, 4, 4, 2, 9) with mask (0, 0, 1, 1, 1) and max_length 4: one 4 and one 2.
    """
    counts = np.zeros(vocab_size, dtype=np.int64)
    columns = dataset.select_columns(["greedy_ids", "assistant_mask"]).with_format("arrow")
    for batch in columns.iter(batch_size=1000):
        rows = pa.concat_arrays(batch["greedy_ids"].chunks)
        lengths = rows.value_lengths().to_numpy(zero_copy_only=False)
        labels = rows.flatten().to_numpy(zero_copy_only=False)
        mask = pa.concat_arrays(batch["assistant_mask"].chunks).flatten().to_numpy(zero_copy_only=False)
        position = np.arange(len(labels)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        counts += np.bincount(labels[mask & (labels >= 0) & (position < max_length)], minlength=vocab_size)
    return torch.from_numpy(counts)
