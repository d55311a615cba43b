"""What every training run does around its head: target, data, trainer, export."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

from draft_heads.configs.command_line import on_interrupt

from safetensors import SafetensorError
from transformers import set_seed

from draft_heads.configs.options import explain_out_of_memory, use_threads
from draft_heads.data.collate import label_counts
from draft_heads.data.common.files import names_path
from draft_heads.data.labels.shards import DistilledDataset, load_distilled
from draft_heads.heads.base import DraftHead
from draft_heads.heads.checkpoint import head_classes
from draft_heads.heads.config import HeadConfig, target_sizes
from draft_heads.heads.draft_vocab import frequent_tokens
from draft_heads.inference.target.target import Target
from draft_heads.train.checkpoints import how_to_resume
from draft_heads.train.entry_points import trainer_script
from draft_heads.train.length import too_few_in
from draft_heads.train.loss_plot import save_loss_plot
from draft_heads.train.options import RunOptions, TrainingOptions
from draft_heads.train.plan import training_plan
from draft_heads.train.provenance import export_head
from draft_heads.train.run_folder import begin, check_folder, run_settings
from draft_heads.train.trainer import DraftHeadTrainer
from draft_heads.train.training_arguments import HeadTrainingArguments
from draft_heads.train.training_data import load_data


def train_head(kind: str, run: RunOptions, settings: dict[str, Any], args: HeadTrainingArguments) -> None:
    """Train a head of this kind and export it to RUN/head; ValueError or OSError before anything is written."""
    head_type, config_type = head_classes(kind)
    check_launched(kind, args)
    use_threads(run.threads)
    set_seed(args.seed)
    every_setting, folder = run_settings(run, settings, args), Path(args.output_dir or "")
    every_setting["data"] = [load_distilled(source).content for source in run.dataset]
    check_folder(args, every_setting, option_defaults(config_type))
    target = load_target(run, args)
    settings = settings_for_target(settings, config_type, target)
    training, held_out, data, collator = load_data(run, target, settings["target_layers"])
    head = head_type(head_config(config_type, settings, run, target, data))
    if head.config.draft_vocab_size:
        print_once(args, choose_draft_vocab(head, training, collator.max_length))
    resume, lock = begin(args, every_setting)
    with explain_errors(lambda: how_to_resume(folder), folder):
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

    def outlook() -> str:
        trainer.close_progress()
        return how_to_resume(folder)

    with lock or nullcontext(), on_interrupt(outlook), explain_errors(outlook, folder):
        fit(trainer, resume)
        if trainer.sigterm.stopped:
            print_once(args, f"stopped by SIGTERM after step {trainer.state.global_step}; {outlook()}")
            return
        trainer.final_metrics = trainer.final_evaluation()
        if args.process_index == 0:
            save_loss_plot(trainer.state.log_history, folder / "loss.png")
        exported = export_head(trainer, run, settings, data)
    if trainer.clock.progress >= 1:  # by time
        for line in too_few_in(args.max_minutes, trainer.state.global_step):
            print_once(args, f"warning: {line}")
    print_once(args, f"{metrics_line(trainer.final_metrics)}\nhead: {exported}\n{folder / 'loss.png'}")


def print_once(args: HeadTrainingArguments, text: str) -> None:
    """Print on the first process."""
    if args.process_index == 0:
        print(text, flush=True)


# --- before training ------------------------------------------------------------------------------------------------


def check_launched(kind: str, args: HeadTrainingArguments) -> None:
    """ValueError for --deepspeed in a process that no launcher started."""
    if args.deepspeed and "LOCAL_RANK" not in os.environ:
        raise ValueError(
            "--deepspeed needs a launcher, on one GPU too; got none; start with: deepspeed "
            f"{' '.join(trainer_script(kind))} …"
        )


def option_defaults(config_type: type[HeadConfig]) -> dict[str, Any]:
    """The defaults of all options of a run that have one."""
    found = {x.name: x.default for kind in (RunOptions, TrainingOptions, config_type) for x in fields(kind)}
    return {name: value for name, value in found.items() if value is not MISSING}


def load_target(run: RunOptions, args: HeadTrainingArguments) -> Target:
    """The frozen target: whole on this process's device, spread, split, or, for cached hidden states, in part."""
    if run.target_device and args.world_size > 1:
        raise ValueError(
            f"--target_device auto spreads the target over the GPUs of one process; this run has {args.world_size}; "
            "start one, or split it among them with --shard_target"
        )
    cached = all(load_distilled(folder).hidden_dtype for folder in run.dataset)
    return Target.from_pretrained(
        run.target,
        dtype=run.target_dtype,
        device=run.target_device or args.device,
        adapter=run.target_adapter,
        chat_template=run.chat_template,
        split=run.shard_target and not cached,
        lend_to=args.device if cached else None,
    )


def settings_for_target(settings: dict[str, Any], config_type: type[HeadConfig], target: Target) -> dict[str, Any]:
    """The head's settings with the target layers that it reads; ValueError if the target lacks one."""
    layers = settings["target_layers"] or config_type.usual_layers(target.config.num_hidden_layers)
    target.check_layers(layers)
    settings = {**settings, "target_layers": layers}
    if settings["draft_vocab_size"] == target_sizes(target.config)["vocab_size"]:
        settings["draft_vocab_size"] = 0  # the whole vocabulary needs no table, and engines refuse one
    return settings


def head_config(
    config_type: type[HeadConfig],
    settings: dict[str, Any],
    run: RunOptions,
    target: Target,
    data: list[DistilledDataset],
) -> HeadConfig:
    """Settings, sizes and fingerprint of the target, and the end tokens of the data."""
    return config_type(
        **target_sizes(target.config),
        **settings,
        end_token_ids=sorted({token for part in data for token in part.manifest["end_token_ids"]}),
        target=run.target,
        target_fingerprint=target.fingerprint(),
    )


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


# --- training -------------------------------------------------------------------------------------------------------


def fit(trainer: DraftHeadTrainer, resume: Path | None) -> None:
    """Print the plan and train, from the checkpoint `resume` or from the head's start values."""
    trainer.start_head()
    print_once(trainer.args, training_plan(trainer))
    if resume is not None:
        trainer.resume(resume)
        print_once(trainer.args, f"resuming {resume} ({trainer.clock.elapsed:.1f} minutes in)")
    with trainer.sigterm.installed():
        trainer.train(resume_from_checkpoint=str(resume) if resume else None)


@contextmanager
def explain_errors(outlook: Callable[[], str], folder: Path) -> Iterator[None]:
    """Inside, errors of torch for want of memory or disk become ValueErrors with a remedy and the `outlook`."""

    def lower_memory() -> str:
        return (
            "lower --per_device_train_batch_size or --tokens_per_batch (raise --gradient_accumulation_steps by as "
            "much), --anchors or --max_length, set --draft_vocab_size, or shard with --deepspeed and --shard_target; "
            f"{outlook()}"
        )

    def free_disk() -> str:
        return f"free some, or lower --save_total_limit; {outlook()}"

    try:
        with names_path(folder, free_disk), explain_out_of_memory("training", lower_memory):
            yield
    except SafetensorError as error:
        raise ValueError(f"a checkpoint in {folder} cannot be read ({error}); {outlook()}") from error


# --- after training -------------------------------------------------------------------------------------------------


def metrics_line(metrics: dict[str, float]) -> str:
    """The final metrics in a line."""
    accuracies = [f"{value:.3f}" for name, value in metrics.items() if name.startswith("eval_accuracy_")]
    beta = f"{metrics['eval_simulated_beta']:.2f}" if "eval_simulated_beta" in metrics else "not measured"
    figures = f"loss {metrics['eval_loss']:.3f}, simulated β {beta}, top-1 accuracy by offset {' '.join(accuracies)}"
    if (outside := metrics.get("eval_outside_vocabulary")) is not None:
        figures += f"; {outside:.1%} of the labels are outside the draft vocabulary and count in the accuracy alone"
    return f"held-out rows: {figures}"
