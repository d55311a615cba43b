"""A loss that is no finite number ends training before it is saved, and the rows of its batch are named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from draft_heads.train.checkpoints import how_to_resume

Trainer = Any  # a `trainer.DraftHeadTrainer`, whose module imports this one


def check_losses(trainer: Trainer, batches: list[tuple[Tensor, Tensor, Tensor]]) -> None:
    """ValueError on every process if a loss of `batches`, (loss, tokens, segments), is no finite number on one."""
    finite = torch.stack([loss for loss, _, _ in batches] or [torch.zeros(())]).isfinite().tolist()
    if int(trainer.accelerator.reduce(torch.tensor(finite.count(False), device=trainer.args.device))) == 0:
        return
    rows = "those of another process"
    if False in finite:
        _, input_ids, segment_ids = batches[finite.index(False)]
        rows = ", ".join(row_names(trainer.train_dataset, input_ids, segment_ids, trainer.longest))
    raise ValueError(
        f"the loss became infinite or not a number by step {trainer.state.global_step}; rows of the batch: {rows}; "
        f"{how_to_resume(Path(trainer.args.output_dir or ''))}; lower --learning_rate, or distil without those rows"
    )


def row_names(dataset: Any, input_ids: Tensor, segment_ids: Tensor, longest: int) -> list[str]:
    """The `id` of every row of the dataset, cut to `longest` tokens, that a batch `[B, L]` was made of."""
    batch = {
        tuple(tokens[segments == number].tolist())
        for tokens, segments in zip(input_ids, segment_ids)
        for number in range(1, int(segments.max()) + 1)
    }
    rows = dataset.select_columns(["id", "input_ids"])
    return [row["id"] for row in rows if tuple(row["input_ids"][:longest]) in batch]
