"""Held-out loss, accuracy at every offset and simulated β of a head; each process takes its share of the rows."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from draft_heads.heads.accuracy import TOP
from draft_heads.heads.base import DraftHead, TargetView
from draft_heads.inference.drafters.base import Drafter
from draft_heads.inference.drafters.heads.base import HeadDrafter
from draft_heads.inference.drafters.heads.fast_weights import prepare_for_drafting
from draft_heads.inference.drafters.registry import HEAD_DRAFTERS
from draft_heads.inference.evaluation.replay import replay
from draft_heads.inference.target.target import Target
from draft_heads.train.checkpoints import how_to_resume
from draft_heads.train.inherited import BY_METRIC
from draft_heads.train.log import row_names

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
    """Loss per window, windows, accuracy at every offset, and the share of labels that cannot be drafted: they are
    outside the draft vocabulary or, for CTC, come after such a label in their window. What no label counts in is
    left out: no loss, or no accuracy at an offset. ValueError on every process for a loss that is no finite number;
    after training, if the head's weights are finite, a line."""
    offsets = head.config.offsets
    total = torch.zeros(2, dtype=torch.float64, device=trainer.args.device)
    hits = torch.zeros(offsets, TOP + 2, dtype=torch.float64, device=trainer.args.device)  # …, counted, scored
    losses = []
    for batch, counts in shared_batches(trainer, dataset, trainer.args.per_device_eval_batch_size):
        with trainer.compute_loss_context_manager():
            loss = trainer.head_loss(head, batch)
        if not counts:
            continue
        total += loss.sums()
        losses.append((loss.total, batch["input_ids"], batch["segment_ids"]))
        if loss.correct is not None and loss.counted is not None and loss.scored is not None:
            hits += torch.column_stack([loss.correct, loss.counted, loss.scored]).double()
    summed, windows = trainer.accelerator.reduce(total).tolist()
    if not math.isfinite(summed):
        bad = next(((ids, segments) for loss, ids, segments in losses if not loss.isfinite()), None)
        names = [] if bad is None else row_names(dataset, *bad, trainer.longest)
        where = f"a batch of the rows {', '.join(names)}" if names else "a batch of another process"
        told = (
            f"the held-out loss must be a finite number; after step {trainer.state.global_step} it is {summed}, "
            f"first in {where}"
        )
        sound = all(bool(parameter.isfinite().all()) for parameter in head.parameters())
        if not (trainer.trained and sound):
            args = trainer.args
            decides = args.load_best_model_at_end or args.save_strategy == "best" or args.lr_scheduler_type in BY_METRIC
            without = f"{how_to_resume(Path(args.output_dir or ''))}, with --eval_strategy no for --eval_steps"
            without += f"{', without --eval_on_start' * args.eval_on_start}; or "
            raise ValueError(
                f"{told}; {'' if decides else without}begin anew (--overwrite) with a lower --learning_rate, another "
                "--target_dtype or without those rows"
            )
        if trainer.args.process_index == 0:
            print(f"warning: {told}; the head is exported without it", flush=True)
    every = trainer.accelerator.reduce(hits).tolist()
    labels, scored = (sum(row[column] for row in every) for column in (TOP, TOP + 1))
    metrics = {"windows": windows}
    if scored:  # a label that cannot be drafted has no loss: it counts as the mean of those that have one
        metrics = {"loss": summed / windows * labels / scored, **metrics}
    if head.config.draft_vocab_size and labels:
        metrics["outside_vocabulary"] = 1 - scored / labels
    for offset, (top_1, *_, counted, _) in enumerate(every, start=1):
        if counted:
            metrics[f"accuracy_{offset}"] = top_1 / counted
    return metrics


@torch.no_grad()
def simulation_metrics(trainer: Trainer, head: DraftHead) -> dict[str, float]:
    """Simulated β: the drafter of a copy of the head is replayed along answers that are the target's own text; nothing
    where none is, else also how many are."""
    if not trainer.simulate_dataset:
        return {}
    drafter = replay_drafter(head, trainer.target, trainer.view, trainer.simulate_nodes)
    runs = []
    for batch, counts in shared_batches(trainer, trainer.simulate_dataset, 1):
        states = trainer.target.states_of(batch, head.config.target_layers)
        if counts:
            runs += replay_answers(drafter, {**batch, **states})
    totals = torch.tensor(runs, dtype=torch.float64, device=trainer.args.device).reshape(-1, 2).sum(0)
    counted = torch.cat([totals, totals.new_tensor([len(runs)])])
    tokens, steps, answers = trainer.accelerator.reduce(counted).tolist()
    return {"simulated_beta": tokens / steps, "simulated_answers": answers} if steps else {}


def replay_drafter(head: DraftHead, target: Target, view: TargetView, max_nodes: int) -> HeadDrafter:
    """The drafter that decodes with the head in the target's type, made without the target's fused decoder."""
    make: Any = HEAD_DRAFTERS[head.config.kind]
    drafter: HeadDrafter = make(prepare_for_drafting(head, target.dtype), view, max_nodes)
    return drafter


@torch.inference_mode()
def replay_answers(drafter: Drafter, batch: dict[str, Tensor]) -> list[tuple[int, int]]:
    """(new tokens, target steps) of every greedy answer in a batch of one row, its states `[1, L, …]` in it."""
    row = {name: values[0] for name, values in batch.items()}
    ids, aux_hidden = row["input_ids"].tolist(), row.get("aux_hidden")
    runs = []
    for begin, start, end in greedy_answers(row):
        aux = None if aux_hidden is None else aux_hidden[begin:end]
        done = replay(drafter, ids[begin:start], ids[start:end], row["hidden"][begin:end], aux)
        runs.append((len(done.tokens), done.target_steps))
    return runs


def greedy_answers(row: dict[str, Tensor]) -> Iterator[tuple[int, int, int]]:
    """(begin, start, end) of every assistant turn of a row `[L]` that is the target's own greedy text throughout.

    Its conversation begins at `begin`, what is before `start` is its prompt, other turns included.
    """
    turns = F.pad(row["mask"] * row["segment_ids"], (1, 1))
    borders = turns.diff().nonzero()[:, 0].tolist()
    for start, end in pairwise(borders):
        begin = start - int(row["position_ids"][start])
        own = row["input_ids"][start:end] == row["greedy_ids"][start:end]
        if turns[start + 1] and begin < start and bool(own.all()):
            yield begin, start, end
