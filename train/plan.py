"""The line that a run begins with: what is trained, for how long, on which data, and the memory that it needs."""

from __future__ import annotations

from typing import Any

from draft_heads.data.collate import row_lengths
from draft_heads.train.length import RunLength
from draft_heads.train.optimizer import is_for_muon

Trainer = Any  # a `trainer.DraftHeadTrainer`


def training_plan(trainer: Trainer) -> str:
    """Parameters, steps or minutes, rows, tokens and memory in a line; then a warning per line."""
    args, rows = trainer.args, trainer.train_dataset
    trained = sum(p.numel() for p in trainer.model.parameters() if p.requires_grad)
    memory = ", ".join(f"{name} {size / 2**20:,.0f} MiB" for name, size in memory_sizes(trainer, trained).items())
    tokens = sum(min(length, trainer.longest) for length in row_lengths(rows))
    data, length = f"{len(rows):,} rows of {tokens:,} tokens", run_length(trainer)
    plan = f"training {trained:,} parameters for {length} on {data}; memory before activations: {memory}"
    if args.zero_config is not None:
        plan += f"; ZeRO stage {args.zero_config['zero_optimization']['stage']}"
    return "\n".join([plan, *(f"warning: {line}" for line in length.warnings(args))])


def run_length(trainer: Trainer) -> RunLength:
    """What ends the run: the steps that transformers' loop will count, or minutes."""
    _, per_epoch, *_, steps = trainer.set_initial_training_values(trainer.args, trainer.get_train_dataloader())
    return RunLength(steps, per_epoch, trainer.args.max_minutes)


def memory_sizes(trainer: Trainer, trained: int) -> dict[str, int]:
    """Bytes of target, head, gradients and optimizer of a head with `trained` parameters in float32."""
    target, named = trainer.target, trainer.model.named_parameters()
    one_moment = 0  # parameters that have one moment, Muon's, instead of AdamW's two
    if trainer.args.head_optimizer == "muon":
        one_moment = sum(p.numel() for name, p in named if is_for_muon(name, p, trainer.model.tables))
    return {
        "target": target.values_in_memory * target.dtype.itemsize,
        "head": 4 * trained,
        "gradients": 4 * trained,
        "optimizer": 4 * (2 * trained - one_moment),
    }
