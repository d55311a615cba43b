"""What every training run does around its head: target, data, trainer, export."""

from __future__ import annotations

import math
import os
import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

from draft_heads.configs.command_line import on_interrupt, own_program

from safetensors import SafetensorError
from transformers import set_seed

from draft_heads.configs.options import explain_out_of_memory, use_threads
from draft_heads.data.collate import label_counts, row_lengths
from draft_heads.data.common.files import names_path
from draft_heads.data.common.processes import own_device
from draft_heads.data.common.program import changes, this_program
from draft_heads.data.labels.shards import DistilledDataset, load_distilled
from draft_heads.heads.base import DraftHead
from draft_heads.heads.card import is_hub_id, target_licence
from draft_heads.heads.checkpoint import head_classes
from draft_heads.heads.config import HeadConfig, target_sizes
from draft_heads.heads.draft_vocab import frequent_tokens
from draft_heads.inference.target.sizes import bytes_in_memory
from draft_heads.inference.target.target import Target
from draft_heads.train.checkpoints import how_to_resume, read_marker, step_of
from draft_heads.train.length import INTERVALS, RunLength, too_few_in
from draft_heads.train.log import check_losses
from draft_heads.train.loss_plot import save_loss_plot
from draft_heads.train.optimizer import is_for_muon
from draft_heads.train.options import RunOptions, TrainingOptions
from draft_heads.train.recipe import with_fitted
from draft_heads.train.run_folder import begin, check_folder, check_same_steps, run_settings
from draft_heads.train.schedule import check_schedule
from draft_heads.train.trainer import DraftHeadTrainer
from draft_heads.train.training_arguments import HeadTrainingArguments
from draft_heads.train.training_data import end_tokens, load_data, warn_of_own_settings


def train_head(kind: str, run: RunOptions, settings: dict[str, Any], args: HeadTrainingArguments) -> None:
    """Train a head of this kind and export it to RUN/head; ValueError or OSError before anything is written."""
    head_type, config_type = head_classes(kind)
    program = this_program()  # before the code is edited or updated under a run
    use_threads(run.threads)
    set_seed(args.seed)
    check_same_steps(run, args)
    every_setting, folder = run_settings(run, settings, args), Path(args.output_dir or "")
    every_setting["data"] = [load_distilled(source).content for source in run.dataset]
    defaults = {x.name: x.default for options in (RunOptions, TrainingOptions, config_type) for x in fields(options)}
    defaults = {name: value for name, value in defaults.items() if value is not MISSING} | {"deepspeed_config": None}
    unknown = set(INTERVALS) - args.own_intervals  # until the run's length is known
    check_folder(args, {name: value for name, value in every_setting.items() if name not in unknown}, defaults)
    target = load_target(run, args)
    settings = settings_for_target(settings, config_type, target)
    training, held_out, data, collator = load_data(run, target, settings["target_layers"])
    config = config_type(
        **target_sizes(target.config),
        **settings,
        end_token_ids=end_tokens(data),
        target=run.target,
        target_fingerprint=target.fingerprint(),
        trained_length=min(max(row_lengths(training)), collator.max_length),
    )
    head = head_type(config)
    warn_of_own_settings(config, target)
    if config.draft_vocab_size:
        print_once(args, choose_draft_vocab(head, training, collator.max_length))
    with explain_errors(lambda: f"{folder} is as it was", folder):
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
    if (rows := len(held_out)) < run.simulate_rows:
        print_once(args, f"simulated β is measured on the {rows} held-out rows at most, fewer than --simulate_rows has")
    length = run_length(trainer)
    fitted = length.fit_intervals(args)
    check_schedule(args, length.steps)
    args.recipe = with_fitted(args.recipe, fitted, f"fitted to {length}")
    intervals = {name: getattr(args, name) for name in INTERVALS if name in every_setting}
    resume, lock = begin(args, every_setting | intervals)

    def outlook() -> str:
        trainer.close_progress()
        return how_to_resume(folder)

    with lock or nullcontext(), on_interrupt(outlook), explain_errors(outlook, folder):
        trainer.programs = programs_of(program, resume)
        fit(trainer, length, resume)
        if trainer.sigterm.stopped:
            print_once(args, f"stopped by SIGTERM after step {trainer.state.global_step}; {outlook()}")
            return
        check_losses(trainer, list(trainer._metrics.batches))  # also where nothing was logged, saved or evaluated
        trainer.final_metrics = trainer.final_evaluation()
        if args.process_index == 0:
            save_loss_plot(trainer.state.log_history, folder / "loss.png")
        exported = export_head(trainer, run, settings, data)
    if trainer.clock.progress >= 1:  # by time
        for line in too_few_in(args, trainer.state.global_step):
            print_once(args, f"warning: {line}")
    print_once(args, f"{metrics_line(trainer.final_metrics)}\nhead: {exported}\n{folder / 'loss.png'}")


def print_once(args: HeadTrainingArguments, text: str) -> None:
    """Print on the first process."""
    if args.process_index == 0:
        print(text, flush=True)


# --- before training ------------------------------------------------------------------------------------------------


def load_target(run: RunOptions, args: HeadTrainingArguments) -> Target:
    """The frozen target: whole on this process's device, spread, split, or, for cached hidden states, in part."""
    if run.target_device and args.world_size > 1:
        raise ValueError(
            f"--target_device auto spreads the target over the GPUs of one process; this run has {args.world_size}; "
            "start one, or split it among them with --shard_target"
        )
    cached = all(load_distilled(folder).hidden_dtype for folder in run.dataset)
    spread = "--shard_target" if run.shard_target else "--target_device auto" if run.target_device else ""
    if cached and spread:
        raise ValueError(f"{spread} has no effect with cached hidden states, for which no target runs; leave it out")
    return Target.from_pretrained(
        run.target,
        dtype=run.target_dtype,
        device=own_device(run.target_device) if run.target_device else args.device,
        adapter=run.target_adapter,
        chat_template=run.chat_template,
        split=run.shard_target,
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


def fit(trainer: DraftHeadTrainer, length: RunLength, resume: Path | None) -> None:
    """Print the plan and train, from the checkpoint `resume` or from the head's start values."""
    trainer.start_head()
    print_once(trainer.args, training_plan(trainer, length))
    if resume is not None:
        trainer.resume(resume)
        print_once(trainer.args, f"resuming {resume} ({trainer.clock.elapsed:.1f} minutes in)")
        if trainer.programs[-1]["from_step"] == step_of(resume):
            print_once(trainer.args, change_of_program(trainer.programs))
    with trainer.sigterm.installed():
        trainer.train(resume_from_checkpoint=str(resume) if resume else None)


def training_plan(trainer: DraftHeadTrainer, length: RunLength) -> str:
    """Parameters, steps or minutes, rows, tokens and memory in a line; then a warning per line."""
    args: Any = trainer.args
    rows = trainer.train_dataset
    trained = sum(p.numel() for p in trainer.model.parameters() if p.requires_grad)
    memory = ", ".join(f"{name} {size / 2**20:,.0f} MiB" for name, size in memory_sizes(trainer, trained).items())
    tokens = sum(min(length, trainer.longest) for length in row_lengths(rows))
    data = f"{len(rows):,} rows of {tokens:,} tokens"
    plan = f"training {trained:,} parameters for {length} on {data}; memory before activations: {memory}"
    if args.zero_config is not None:
        stage, shared = args.zero_config["zero_optimization"]["stage"], ("optimizer", "gradients", "head")
        among = f", which shares {' and '.join(shared[:stage])} among {args.world_size} processes"
        plan += f"; ZeRO stage {stage}{among if stage and args.world_size > 1 else ''}"
    return "\n".join([plan, *(f"warning: {line}" for line in length.warnings(args))])


def run_length(trainer: DraftHeadTrainer) -> RunLength:
    """What ends the run: the steps that transformers' loop will count, or minutes."""
    _, per_epoch, *_, steps = trainer.set_initial_training_values(trainer.args, trainer.get_train_dataloader())
    return RunLength(steps, per_epoch, trainer.args.max_minutes)


def memory_sizes(trainer: DraftHeadTrainer, trained: int) -> dict[str, int]:
    """Bytes of target, head, gradients and optimizer of a head with `trained` parameters in float32."""
    target, args = trainer.target, trainer.args
    moments = {"sgd": 0, "adagrad": 1, "rmsprop": 1, "adafactor": 1}.get(getattr(args.optim, "value", args.optim), 2)

    def kept(name: str, p: Any) -> int:
        """Values that the optimizer keeps of a parameter: Adafactor those of a matrix by row and by column."""
        if args.head_optimizer == "muon":
            return int(p.numel()) * (1 if is_for_muon(name, p, trainer.model.tables) else 2)
        return sum(p.shape) if "adafactor" in args.optim and p.dim() == 2 else int(p.numel()) * moments

    return {
        "target": bytes_in_memory(target),
        "head": 4 * trained,
        "gradients": 4 * trained,
        "optimizer": 4 * sum(kept(name, p) for name, p in trainer.model.named_parameters() if p.requires_grad),
    }


@contextmanager
def explain_errors(outlook: Callable[[], str], folder: Path) -> Iterator[None]:
    """Inside, errors of torch for want of memory or disk become ValueErrors with a remedy and the `outlook`."""

    def lower_memory() -> str:
        return (
            "in an evaluation lower --per_device_eval_batch_size; in training (with --overwrite or another "
            "--output_dir, where there is a checkpoint) lower --per_device_train_batch_size or --tokens_per_batch and "
            "raise --gradient_accumulation_steps by as much, lower --anchors or --max_length, set --draft_vocab_size, "
            f"or shard with --deepspeed and --shard_target; {outlook()}"
        )

    def free_disk() -> str:
        return f"free some; {outlook()}"

    try:
        with names_path(folder, free_disk), explain_out_of_memory("training", lower_memory):
            yield
    except SafetensorError as error:
        raise ValueError(f"a checkpoint in {folder} cannot be read ({error}); {outlook()}") from error


# --- after training -------------------------------------------------------------------------------------------------


def metrics_line(metrics: dict[str, float]) -> str:
    """The final metrics in a line; what no label or answer counts in was not measured."""
    offsets = [int(name.rpartition("_")[2]) for name in metrics if name.startswith("eval_accuracy_")]

    def shown(name: str, form: str, absent: str = "not measured") -> str:
        return format(metrics[f"eval_{name}"], form) if f"eval_{name}" in metrics else absent

    accuracies = " ".join(shown(f"accuracy_{offset}", ".3f", "–") for offset in range(1, max(offsets, default=0) + 1))
    answers = f" of {shown('simulated_answers', ',.0f')} answers" if "eval_simulated_answers" in metrics else ""
    figures = f"loss {shown('loss', '.3f')}, simulated β {shown('simulated_beta', '.2f')}{answers}, "
    figures += "top-1 accuracy by offset "
    figures += accuracies or "not measured"
    if (outside := metrics.get("eval_outside_vocabulary")) is not None:
        figures += (
            f"; {outside:.1%} of the labels, or with CTC one before them in a window, are none that the head can draft"
        )
        figures += ": these count in the accuracy alone"
    return f"held-out rows: {figures}"


def export_head(
    trainer: DraftHeadTrainer, run: RunOptions, settings: dict[str, Any], data: list[DistilledDataset]
) -> Path:
    """Write RUN/head: weights, configuration, provenance and model card. Called on every process."""
    folder = Path(trainer.args.output_dir or "") / "head"
    head = trainer.whole_head()
    if trainer.args.process_index == 0:
        head.save_pretrained(folder, provenance(trainer, run, settings, data))
    return folder


def provenance(
    trainer: DraftHeadTrainer, run: RunOptions, settings: dict[str, Any], data: list[DistilledDataset]
) -> dict[str, Any]:
    """What `provenance.json` holds: command, versions, options, data, steps, minutes and metrics.

    The versions are those of the last program that trained the head, as far as its checkpoints know them, else this
    one's; where others trained before, `programs` lists all.
    """
    known = {key: float(value) for key, value in trainer.final_metrics.items()}
    metrics = {key: round(value, 5) for key, value in known.items() if math.isfinite(value)}
    programs = [one for one in trainer.programs if one["from_step"] < trainer.steps] or trainer.programs[-1:]
    last = dict(programs[-1])
    several = {"programs": programs} if last.pop("from_step") else {}
    return {
        "command": shlex.join(_command()),
        **last,
        **several,
        "options": run_settings(run, settings, trainer.args)
        | {"simulate_rows": len(trainer.simulate_dataset), "simulate_nodes": run.simulate_nodes},
        "data": [
            {
                "name": _data_name(part.manifest["data"]["source"]),
                "fingerprint": part.manifest["data"]["fingerprint"],
                "counts": part.manifest["counts"],
            }
            for part in data
        ],
        "trained": _amount(trainer, trainer.train_dataset),
        "held_out": _amount(trainer, trainer.eval_dataset),
        "steps": trainer.steps,
        "epochs": round(trainer.epochs, 3),
        "minutes": round(trainer.minutes, 2),
        "metrics": metrics,
        "base_model": run.target if is_hub_id(run.target) else "",
        "target_licence": target_licence(run.target),
    }


def _amount(trainer: DraftHeadTrainer, rows: Any) -> dict[str, int]:
    """How many rows, and answer tokens in what of them a head reads."""
    counts = label_counts(rows, trainer.target.config.vocab_size, trainer.longest)
    return {"rows": len(rows), "answer_tokens": int(counts.sum())}


def _command() -> list[str]:
    """The command as it was typed, without what DeepSpeed's launcher adds to it and where this project's folder is; of
    a launcher its processes on a machine."""
    arguments = [text for text in sys.argv[1:] if not text.startswith("--local_rank")]
    program = own_program() or ["/".join(Path(sys.argv[0]).parts[-2:])]  # train/ctc.py
    launcher, processes = [Path(sys.executable).name], os.environ.get("LOCAL_WORLD_SIZE", "1")
    if arguments != sys.argv[1:]:
        launcher = ["deepspeed", "--num_gpus", os.environ.get("LOCAL_SIZE", processes)]
        program = ["--module", *program[1:]] if program[0] == "-m" else program
    elif "ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION" in os.environ:  # which only accelerate's launcher sets
        everywhere = os.environ.get("WORLD_SIZE", processes)  # which is what its flag counts
        launcher = ["accelerate", "launch", "--num_processes", everywhere]
        if (nodes := int(everywhere) // int(processes)) > 1:
            launcher += ["--num_machines", str(nodes)]
    elif "TORCHELASTIC_RUN_ID" in os.environ:
        launcher = ["torchrun", "--nproc_per_node", processes]
    return [*launcher, *program, *arguments]


def _data_name(source: str) -> str:
    """A hub id, or the last part of a path: what a file is called, not where this machine has it."""
    return source if is_hub_id(source) else Path(source).name


def programs_of(program: dict[str, Any], resume: Path | None) -> list[dict[str, Any]]:
    """The programs that train a head, each with the step from which it does: those that the marker of the checkpoint
    `resume` names (of older versions none), then this one where it is another."""
    before = read_marker(resume).get("programs", []) if resume else []
    if before and before[-1] == {"from_step": before[-1]["from_step"], **program}:
        return before
    return [*before, {"from_step": step_of(resume) if resume else 0, **program}]


def change_of_program(programs: list[dict[str, Any]]) -> str:
    """A line: what the last of the programs has other than the one before."""
    before, now = ([{}, *programs])[-2:]
    told = changes(before, now)
    return f"any step after {now['from_step']} is this program's, which provenance.json tells apart: {told}"
