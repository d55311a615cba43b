"""What every training run does around its head: options, data, target, trainer, export."""

from __future__ import annotations

import platform
import subprocess
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import datasets
import torch
from transformers import set_seed

from draft_heads.data.collate import DraftCollator, label_counts, split_held_out
from draft_heads.data.fingerprint import check_fingerprint
from draft_heads.data.shards import DistilledDataset, load_distilled
from draft_heads.heads.base import DraftHead, Rows, TargetView
from draft_heads.heads.checkpoint import head_classes, save_head
from draft_heads.heads.config import target_sizes
from draft_heads.heads.draft_vocab import frequent_tokens
from draft_heads.inference.target.target import Target
from draft_heads.train.options import RunOptions, parse_options
from draft_heads.train.run_folder import prepare_folder, run_settings
from draft_heads.train.simulate import ProposeAt
from draft_heads.train.trainer import DraftHeadTrainer

ProposeFrom = Callable[[Any, Rows, TargetView, int], ProposeAt]
"""(head, one row of text, the target's view, node budget) → how the head's drafter drafts at each anchor of the row."""


def train_head(kind: str, propose_from: ProposeFrom) -> None:
    """The whole of an entry point: train a head of this kind as the command line says and export it to RUN/head."""
    head_type, config_type = head_classes(kind)
    run, settings, args = parse_options(config_type)
    try:
        if run.threads:
            torch.set_num_threads(run.threads)
        set_seed(args.seed)
        resume = prepare_folder(args, run_settings(run, settings, args))
        target = Target.from_pretrained(
            run.target, run.target_dtype, args.device, run.target_adapter, run.chat_template
        )
        target.check_layers(settings["target_layers"])
        training, held_out, data, collator = load_data(run, target, settings["target_layers"])
        config = config_type(
            **target_sizes(target.config),
            **settings,
            end_token_ids=sorted({token for part in data for token in part.manifest["end_token_ids"]}),
            target=run.target,
            target_fingerprint=target.fingerprint(),
        )
    except (ValueError, OSError) as error:
        sys.exit(f"train/{kind}.py: {error}")

    head = head_type(config)
    if config.draft_vocab_size:
        coverage = choose_draft_vocab(head, training, collator.max_length)
        if args.process_index == 0:
            print(coverage, flush=True)
    trainer = DraftHeadTrainer(
        head,
        target,
        args,
        collator,
        training,
        held_out,
        simulate_dataset=held_out.select(range(min(run.simulate_rows, len(held_out)))),
        propose_from=lambda head, rows, view: propose_from(head, rows, view, run.simulate_nodes),
    )
    trainer.start_head()
    if resume is not None:
        trainer.clock.resume(resume)
        print(f"resuming {resume} ({trainer.clock.elapsed:.1f} minutes in)", flush=True)
    trainer.train(resume_from_checkpoint=str(resume) if resume else None)
    trainer.final_metrics = trainer.evaluate()
    print(f"head: {export(trainer, run, settings, data)}", flush=True)


def load_data(
    run: RunOptions, target: Target, target_layers: Sequence[int] = ()
) -> tuple[Any, Any, list[DistilledDataset], DraftCollator]:
    """(rows to train on, held-out rows, the datasets they come from, their collator) for a head of these layers.

    Rows are held out by their id, so a conversation that several datasets hold is on one side in all of them.
    """
    parts = [_load_labelled(folder, run, target) for folder in run.dataset]
    cached = {part.hidden_dtype for part in parts}
    if len(cached) > 1:
        found = ", ".join(f"{folder}: {part.hidden_dtype or 'none'}" for folder, part in zip(run.dataset, parts))
        raise ValueError(
            f"datasets trained on together must all have cached hidden states of one type, or none; got {found}; "
            "distil them alike"
        )
    for folder, part in zip(run.dataset, parts):
        if target_layers and part.hidden_dtype and part.target_layers != list(target_layers):
            raise ValueError(
                f"cached states must be those of the head's --target_layers {' '.join(map(str, target_layers))}; "
                f"--dataset {folder} has {' '.join(map(str, part.target_layers)) or 'the last layer only'}; distil "
                "with the same --target_layers, or without --hidden_states"
            )
    dataset = datasets.concatenate_datasets([part.dataset for part in parts])
    if len(dataset) <= run.held_out:
        raise ValueError(
            f"--held_out {run.held_out} must leave rows to train on; --dataset {' '.join(run.dataset)} has "
            f"{len(dataset)}; lower it or distil more conversations"
        )
    training, held_out = split_held_out(dataset, rows=run.held_out)
    longest = run.max_length or max(int(part.manifest["settings"]["max_length"]) for part in parts)
    hidden = getattr(torch, parts[0].hidden_dtype) if parts[0].hidden_dtype else None
    collator = DraftCollator(target.tokenizer.pad_token_id or 0, longest, run.packing, hidden, bool(target_layers))
    return training, held_out, parts, collator


def _load_labelled(folder: str, run: RunOptions, target: Target) -> DistilledDataset:
    """One dataset, checked to be this target's."""
    distilled = load_distilled(folder)
    check_fingerprint(distilled.manifest["target"]["fingerprint"], target.fingerprint(), f"--dataset {folder}")
    labelled_by = distilled.manifest["settings"].get("target_adapter")
    if labelled_by != run.target_adapter:
        raise ValueError(
            f"labels and head must be made with the same adapter; --dataset {folder} was distilled with "
            f"{labelled_by or 'none'}, --target_adapter is {run.target_adapter or 'none'}; pass the same to both"
        )
    return distilled


def choose_draft_vocab(head: DraftHead, training: Any, max_length: int) -> str:
    """Make the head draft from the most frequent labels of its training rows; returns a line with their coverage.

    Every process counts the same rows, so all choose alike.
    """
    config = head.config
    counts = label_counts(training, config.vocab_size, max_length)
    chosen = frequent_tokens(counts, config.draft_vocab_size, config.end_token_ids)
    head.set_draft_vocab(chosen)
    covered = float(counts[chosen].sum() / counts.sum().clamp(min=1))
    return (
        f"draft vocabulary: {len(chosen)} of {config.vocab_size} tokens, {covered:.2%} of the {int(counts.sum())} "
        "training answer tokens"
    )


def export(trainer: DraftHeadTrainer, run: RunOptions, settings: dict[str, Any], data: list[DistilledDataset]) -> Path:
    """Write RUN/head: weights, configuration, provenance and model card. Called on every process."""
    folder = Path(trainer.args.output_dir or "") / "head"
    if trainer.args.process_index != 0:
        return folder
    head: DraftHead = trainer.accelerator.unwrap_model(trainer.model_wrapped)
    metrics = {key: round(float(value), 5) for key, value in trainer.final_metrics.items()}
    provenance = {
        "command": " ".join([Path(sys.executable).name, *sys.argv]),
        "git_commit": _git_commit(),
        "python": platform.python_version(),
        "packages": {name: version(name) for name in ("torch", "transformers", "deepspeed", "datasets")},
        "options": run_settings(run, settings, trainer.args),
        "data": [
            {"fingerprint": part.manifest["data"]["fingerprint"], "counts": part.manifest["counts"]} for part in data
        ],
        "steps": trainer.state.global_step,
        "minutes": round(trainer.clock.elapsed, 2),
        "metrics": metrics,
    }
    save_head(head, folder, provenance, model_card(head, provenance))
    return folder


def model_card(head: DraftHead, provenance: dict[str, Any]) -> str:
    """README.md of a head: what it is for, how it was trained, what was measured at the end."""
    rows = "\n".join(f"| {name} | {value} |" for name, value in sorted(provenance["metrics"].items()))
    return f"""# A {head.config.kind} draft head for {head.config.target}

{sum(p.numel() for p in head.parameters()):,} parameters, for lossless speculative decoding with the target named
above; another target is refused when the head is loaded.

Trained with

    {provenance["command"]}

for {provenance["steps"]} steps. Measured on held-out rows at the end:

| metric | value |
| --- | --- |
{rows}
"""


def _git_commit() -> str:
    here = Path(__file__).resolve().parent
    try:
        done = subprocess.run(
            ["git", "rev-parse", "HEAD"], cwd=here, capture_output=True, text=True, check=True, timeout=10
        )
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return done.stdout.strip()
