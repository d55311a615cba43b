"""Held-out loss, accuracy at every offset and simulated β of a head; each process takes its share of the rows."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from draft_heads.heads.accuracy import TOP
from draft_heads.heads.base import DraftHead
from draft_heads.train.simulate import simulate_row

Trainer = Any  # a `trainer.DraftHeadTrainer`, whose module imports this one


def shared_batches(trainer: Trainer, dataset: Any, size: int) -> Iterator[tuple[dict[str, Tensor], bool]]:
    """This process's share of held-out rows in batches, and whether a batch counts.

    A split target needs all processes for a forward, so one that has a batch less than others repeats its first.
    """
    own = range(trainer.args.process_index, len(dataset), trainer.args.world_size)
    longest_share = -(-len(dataset) // trainer.args.world_size)
    for start in range(0, longest_share, size):
        rows = own[start : start + size]
        batch = trainer.data_collator([dataset[row] for row in rows or own[:size] or [0]])
        yield trainer._prepare_inputs(batch), bool(rows)


@torch.no_grad()
def loss_metrics(trainer: Trainer, head: DraftHead, dataset: Any) -> dict[str, float]:
    """Loss a window, windows, accuracy at every offset, and the share of labels outside the draft vocabulary."""
    offsets = head.config.offsets
    total = torch.zeros(2, dtype=torch.float64, device=trainer.args.device)
    hits = torch.zeros(offsets, TOP + 2, dtype=torch.float64, device=trainer.args.device)  # …, counted, scored
    for batch, counts in shared_batches(trainer, dataset, trainer.args.per_device_eval_batch_size):
        with trainer.compute_loss_context_manager():
            loss = trainer.head_loss(head, batch)
        if not counts:
            continue
        total += torch.stack([loss.total.double(), loss.windows.double()])
        if loss.correct is not None and loss.counted is not None and loss.scored is not None:
            hits += torch.column_stack([loss.correct, loss.counted, loss.scored]).double()
    summed, windows = trainer.accelerator.reduce(total).tolist()
    every = trainer.accelerator.reduce(hits).tolist()
    labels, scored = (sum(row[column] for row in every) for column in (TOP, TOP + 1))
    # labels outside the draft vocabulary have no loss: each counts as the mean of those that have one
    metrics = {"loss": summed / windows * labels / scored if scored else math.nan, "windows": windows}
    if head.config.draft_vocab_size and labels:
        metrics["outside_vocabulary"] = 1 - scored / labels
    for offset, (top_1, *_, counted, _) in enumerate(every, start=1):
        metrics[f"accuracy_{offset}"] = top_1 / counted if counted else math.nan
    return metrics


@torch.no_grad()
def simulation_metrics(trainer: Trainer, head: DraftHead) -> dict[str, float]:
    """Simulated β; nothing where no answer is the target's own text."""
    if trainer.propose_from is None or not trainer.simulate_dataset:
        return {}
    runs = []
    for batch, counts in shared_batches(trainer, trainer.simulate_dataset, 1):
        with trainer.compute_loss_context_manager():
            states = trainer.target.states_of(batch, head.config.target_layers)
            if counts:
                runs += simulate_row(head, {**batch, **states}, trainer.view, trainer.propose_from)
    totals = torch.tensor(runs, dtype=torch.float64, device=trainer.args.device).reshape(-1, 2).sum(0)
    tokens, steps = trainer.accelerator.reduce(totals).tolist()
    return {"simulated_beta": tokens / steps} if steps else {}
