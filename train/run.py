"""What every training run does around its head: target, data, trainer, export."""

from __future__ import annotations

import math
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import MISSING, fields
from importlib.metadata import version
from pathlib import Path
from typing import Any

from draft_heads.configs.command_line import on_interrupt

from safetensors import SafetensorError
from transformers import set_seed

from draft_heads.configs.options import memory_explained, use_threads
from draft_heads.data.collate import label_counts
from draft_heads.data.common.files import names_path
from draft_heads.data.labels.shards import DistilledDataset, load_distilled
from draft_heads.heads.base import DraftHead
from draft_heads.heads.card import target_licence
from draft_heads.heads.checkpoint import head_classes
from draft_heads.heads.config import target_sizes
from draft_heads.heads.draft_vocab import frequent_tokens
from draft_heads.inference.target.target import Target
from draft_heads.train.length import too_few_in
from draft_heads.train.loss_plot import save_loss_plot
from draft_heads.train.options import RunOptions, TrainingOptions
from draft_heads.train.run_folder import begin, check_folder, kept, run_settings
from draft_heads.train.trainer import DraftHeadTrainer
from draft_heads.train.training_arguments import HeadTrainingArguments
from draft_heads.train.training_data import load_data


def train_head(kind: str, run: RunOptions, settings: dict[str, Any], args: HeadTrainingArguments) -> None:
    """Train a head of this kind and export it to RUN/head; ValueError or OSError before anything is written."""
    head_type, config_type = head_classes(kind)
    if args.deepspeed and "LOCAL_RANK" not in os.environ:
        raise ValueError(
            f"--deepspeed needs a launcher, on one GPU too; got none; start with: deepspeed train/{kind}.py …"
        )
    use_threads(run.threads)
    set_seed(args.seed)
    every_setting, folder = run_settings(run, settings, args), Path(args.output_dir or "")
    every_setting["data"] = [load_distilled(source).content for source in run.dataset]
    usual = {x.name: x.default for kind in (RunOptions, TrainingOptions, config_type) for x in fields(kind)}
    check_folder(args, every_setting, {name: value for name, value in usual.items() if value is not MISSING})
    target = load_target(run, args)
    layers = settings["target_layers"] or config_type.usual_layers(target.config.num_hidden_layers)
    target.check_layers(layers)
    settings = {**settings, "target_layers": layers}
    if settings["draft_vocab_size"] == target_sizes(target.config)["vocab_size"]:
        settings["draft_vocab_size"] = 0  # the whole vocabulary needs no table, and engines refuse one
    training, held_out, data, collator = load_data(run, target, settings["target_layers"])
    config = config_type(
        **target_sizes(target.config),
        **settings,
        end_token_ids=sorted({token for part in data for token in part.manifest["end_token_ids"]}),
        target=run.target,
        target_fingerprint=target.fingerprint(),
    )
    head = head_type(config)
    if config.draft_vocab_size:
        coverage = choose_draft_vocab(head, training, collator.max_length)
        if args.process_index == 0:
            print(coverage, flush=True)
    resume, lock = begin(args, every_setting)
    with explained(lambda: kept(folder), folder):
        trainer = DraftHeadTrainer(
            head,
            target,
            args,
            collator,
            training,
            held_out,
            simulate_dataset=held_out.select(range(min(run.simulate_rows, len(held_out)))),
            simulate_nodes=run.simulate_nodes,
        )

    def left() -> str:
        trainer.close_progress()
        return kept(folder)

    with lock or nullcontext(), on_interrupt(left), explained(left, folder):
        trainer.start_head()
        plan = trainer.plan()
        if args.process_index == 0:
            print(plan, flush=True)
        if resume is not None:
            trainer.clock.resume(resume)
            if args.process_index == 0:
                print(f"resuming {resume} ({trainer.clock.elapsed:.1f} minutes in)", flush=True)
        with trainer.clock.stopped_by_sigterm():
            trainer.train(resume_from_checkpoint=str(resume) if resume else None)
        if trainer.clock.terminated:
            if args.process_index == 0:
                print(f"stopped by SIGTERM after step {trainer.state.global_step}; {left()}", flush=True)
            return
        trainer.final_metrics = trainer.final_evaluation()
        if args.process_index == 0:
            save_loss_plot(trainer.state.log_history, folder / "loss.png")
        exported = export(trainer, run, settings, data)
    if args.process_index == 0:
        if trainer.clock.progress >= 1:  # by time
            for line in too_few_in(args.max_minutes, trainer.state.global_step):
                print(f"warning: {line}", flush=True)
        print(f"{measured(trainer.final_metrics)}\nhead: {exported}\n{folder / 'loss.png'}", flush=True)


def load_target(run: RunOptions, args: HeadTrainingArguments) -> Target:
    """The frozen target: whole on this process's device, spread, split, or, for cached hidden states, in part."""
    if run.target_device and args.world_size > 1:
        raise ValueError(
            f"--target_device auto spreads the target over the GPUs of one process; this run has {args.world_size}; "
            "start one, or split it among them with --shard_target"
        )
    cached = all(load_distilled(folder).hidden_dtype for folder in run.dataset)
    return Target.from_pretrained(
        *(run.target, run.target_dtype, run.target_device or args.device, run.target_adapter, run.chat_template),
        split=run.shard_target and not cached,
        lend_to=args.device if cached else None,
    )


@contextmanager
def explained(left: Callable[[], str], folder: Path) -> Iterator[None]:
    """ValueErrors with a remedy instead of torch's own errors when memory or the disk is full."""

    def lower() -> str:
        return (
            "lower --per_device_train_batch_size or --tokens_per_batch (raise --gradient_accumulation_steps by as "
            "much), --anchors or --max_length, set --draft_vocab_size, or shard with --deepspeed and --shard_target; "
            f"{left()}"
        )

    def free_some() -> str:
        return f"free some, or lower --save_total_limit; {left()}"

    try:
        with names_path(folder, free_some), memory_explained("training", lower):
            yield
    except SafetensorError as error:
        raise ValueError(f"a checkpoint in {folder} cannot be read ({error}); {left()}") from error


def measured(metrics: dict[str, float]) -> str:
    """The final metrics in a line."""
    accuracies = [f"{value:.3f}" for name, value in metrics.items() if name.startswith("eval_accuracy_")]
    beta = f"{metrics['eval_simulated_beta']:.2f}" if "eval_simulated_beta" in metrics else "not measured"
    figures = f"loss {metrics['eval_loss']:.3f}, simulated β {beta}, top-1 accuracy by offset {' '.join(accuracies)}"
    if (outside := metrics.get("eval_outside_vocabulary")) is not None:
        figures += f"; {outside:.1%} of the labels are outside the draft vocabulary and count in the accuracy alone"
    return f"held-out rows: {figures}"


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
    head = trainer.whole_head()
    if trainer.args.process_index != 0:
        return folder
    known = {key: float(value) for key, value in trainer.final_metrics.items()}
    metrics = {key: round(value, 5) for key, value in known.items() if math.isfinite(value)}
    provenance = {
        "command": shlex.join(_command()),
        "git_commit": _git_commit(),
        "python": platform.python_version(),
        "packages": {name: version(name) for name in ("torch", "transformers", "deepspeed", "datasets")},
        "options": run_settings(run, settings, trainer.args),
        "data": [
            {
                "name": _data_name(part.manifest["data"]["source"]),
                "fingerprint": part.manifest["data"]["fingerprint"],
                "counts": part.manifest["counts"],
            }
            for part in data
        ],
        "steps": trainer.steps,
        "minutes": round(trainer.clock.elapsed, 2),
        "metrics": metrics,
        "target_licence": target_licence(run.target),
    }
    head.save_pretrained(folder, provenance)
    return folder


def _command() -> list[str]:
    """The command as it was typed, without what DeepSpeed's launcher adds to it and where this project's folder is."""
    arguments = [text for text in sys.argv[1:] if not text.startswith("--local_rank")]
    script = "/".join(Path(sys.argv[0]).parts[-2:])  # train/ctc.py
    return [Path(sys.executable).name if arguments == sys.argv[1:] else "deepspeed", script, *arguments]


def _data_name(source: str) -> str:
    """A hub id, or the last part of a path: what a file is called, not where this machine has it."""
    on_hub = source.count("/") == 1 and source[0] not in "./~" and not Path(source).exists()
    return source if on_hub else Path(source).name


def _git_commit() -> str:
    here = Path(__file__).resolve().parent
    try:
        done = subprocess.run(
            ["git", "rev-parse", "HEAD"], cwd=here, capture_output=True, text=True, check=True, timeout=10
        )
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return done.stdout.strip()
