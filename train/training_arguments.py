"""transformers' TrainingArguments with the options of a head's training; loading this module takes seconds."""

from __future__ import annotations

import argparse
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, make_dataclass
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, get_type_hints

from draft_heads.configs.command_line import OptionParser

from transformers import HfArgumentParser, TrainingArguments

from draft_heads.configs.options import add_flags, option_names
from draft_heads.heads.config import HeadConfig
from draft_heads.train.inherited import READ, check_effects, refused, without_effect
from draft_heads.train.length import INTERVALS, settle_end
from draft_heads.train.options import RunOptions, TrainingOptions, check_training, needs_gloo, settle
from draft_heads.train.recipe import Recipe, add_recipe_flags, choose_recipe, has_gpu, replaced_recipe
from draft_heads.train.schedule import check_schedule
from draft_heads.train.zero_config import check_build_locks, free_buffers_at_the_end, zero_config

logger = logging.getLogger(__name__)


@dataclass
class HeadTrainingArguments(TrainingOptions, TrainingArguments):  # type: ignore[misc]
    """What `DraftHeadTrainer` runs by."""

    recipe: str = field(default="", init=False)  # YAML of what it was made from, kept in the run's folder
    own_intervals: set[str] = field(default_factory=lambda: set(INTERVALS), init=False)  # those that no recipe chose

    def __post_init__(self) -> None:
        self.torch_compile = self.torch_compile or bool(self.torch_compile_backend or self.torch_compile_mode)
        if self.torch_compile and self.tf32 is None:
            self.tf32 = False  # transformers would turn it on, which rounds the products of float32
        super().__post_init__()


class TrainerParser(OptionParser, HfArgumentParser):
    """transformers' parser of dataclasses, its errors without the usage of some hundred flags."""

    refused_flag = staticmethod(refused)


def _offered() -> type:
    """The options of `HeadTrainingArguments` that are flags, as a dataclass: ours, and those of `READ`."""
    hints, ours = get_type_hints(HeadTrainingArguments), option_names(TrainingOptions)
    chosen: list[Any] = [
        (f.name, hints[f.name], field(default=f.default, default_factory=f.default_factory, metadata=f.metadata))
        for f in fields(HeadTrainingArguments)
        if f.name in READ or f.name in ours
    ]
    return make_dataclass("OfferedArguments", chosen)


def options_parser(head_config: type[HeadConfig]) -> TrainerParser:
    """The parser of every flag of a head's trainer."""
    parser = TrainerParser((RunOptions, _offered()))  # type: ignore[arg-type]
    add_flags(parser.add_argument_group(f"{head_config.kind} head"), head_config)
    add_recipe_flags(parser)
    return parser


def parse_options(head_config: type[HeadConfig], arguments: list[str] | None = None) -> tuple[Any, Any, Any]:
    """(RunOptions, head settings, HeadTrainingArguments) from the command line and a recipe.

    Raises SystemExit with a sentence for anything invalid, and after --print_recipe. Head settings are the fields that
    `head_config` adds to `HeadConfig`; sizes come from the target and are not options.
    """
    parser = options_parser(head_config)
    try:
        unset = argparse.Namespace(**{action.dest: None for action in parser._actions if action.dest != "help"})
        known, unknown = parser.parse_known_args(arguments, unset)
        parser.refuse(unknown)
        given = {name: value for name, value in vars(known).items() if value is not None}
        recipe = choose_recipe(head_config.kind, given, parser)
        defaults = defaults_beside(given, recipe, parser)
        if not recipe.bundled:
            recipe.line += left_out(recipe, {**defaults, **given}, parser)
        if known.print_recipe:
            print(f"{recipe.memory(defaults, given)}\n{recipe.text(defaults, given)}", end="")
            parser.exit()
        parser.set_defaults(**defaults)
        run, offered, rest = parser.parse_args_into_dataclasses(arguments, look_for_args_file=False)
        if not run.dataset:
            raise ValueError("--dataset must name a folder written by scripts/distill.py; got nothing")
        if not offered.output_dir:
            raise ValueError("--output_dir must name a folder for checkpoints and the head; got nothing")
        check_training(offered)
        start_processes(offered)
        training = HeadTrainingArguments(**vars(offered))
        head = {name: getattr(rest, name) for name in option_names(head_config)}
        check_together(run, head_config(**head), training, given, given if recipe.bundled else defaults | given)
    except (ValueError, OSError) as error:
        parser.exit(2, f"{parser.prog}: {error}\n")
    training.recipe = recipe.text(defaults, given)
    training.own_intervals = set(INTERVALS) & (given.keys() | (set() if recipe.bundled else defaults.keys()))
    if training.process_index == 0:
        print(f"recipe: {recipe.line}", flush=True)
    return run, head, training


def start_processes(options: Any) -> None:
    """Make DeepSpeed's processes ready, which `HeadTrainingArguments` connect: wait for builds of its operators, and on
    CPUs start the process group, with gloo."""
    if options.deepspeed is None:
        return
    check_build_locks()
    if os.environ.get("RANK", "0") == "0":
        for line in zero_config(options.deepspeed, options)[1]:
            print(line, flush=True)
    if needs_gloo(options.deepspeed):
        from accelerate import PartialState

        os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
        PartialState(backend="gloo", timeout=timedelta(seconds=options.ddp_timeout))
        free_buffers_at_the_end()
        del os.environ["ACCELERATE_USE_DEEPSPEED"]


def defaults_beside(given: dict[str, Any], recipe: Recipe, parser: TrainerParser) -> dict[str, Any]:
    """The recipe's settings that stand beside the flags `given`.

    What ends a run on the command line (minutes, steps or epochs) replaces what ends the recipe's; so do batches of
    rows its batches of tokens, --fp16 its bf16, and another optimizer its Muon, with the learning rate of the head's
    base: Muon's are several times larger. Settings that have no effect then are left out, so that the recipe that a run
    writes is one that may be written.
    """
    defaults = dict(recipe.settings)
    settle_end(given, defaults, "" if recipe.bundled else f"--config {given['config']}: ")
    if "per_device_train_batch_size" in given and "tokens_per_batch" not in given:
        defaults.pop("tokens_per_batch", None)
    for other, own in (("bf16", "fp16"), ("fp16", "bf16")):
        if given.get(own) and other not in given:  # a run has one of them
            defaults.pop(other, None)
    if "optim" in given and "head_optimizer" not in given:
        defaults.pop("head_optimizer", None)
    usual = {action.dest: action.default for action in reversed(parser._actions)}  # of two of a name the first counts
    if (usual | defaults | given).get("layers") == 0 and "head_optimizer" not in given:
        defaults["head_optimizer"] = "adamw"  # Medusa's tables alone, which are none of Muon's matrices
    values, alone = (SimpleNamespace(**{**usual, **x}) for x in (defaults | given, recipe.settings))
    settle(values)
    settle(alone)
    meant_for = alone.head_optimizer
    if values.head_optimizer != meant_for and "learning_rate" in defaults.keys() - given.keys():
        rate = defaults["learning_rate"]
        recipe.line += f"; its learning rate {rate:g} is for {meant_for}, the optimizer is {values.head_optimizer}: "
        if recipe.bundled and meant_for == "muon":
            values.learning_rate = defaults["learning_rate"] = recipe.take_base_rate()
            recipe.line += f"{values.learning_rate:g} is taken, by the head's base_learning_rate"
        else:
            recipe.line += "give another as --learning_rate"
    idle = without_effect(values, defaults | given)
    asked = set() if recipe.bundled else without_effect(alone, recipe.settings)  # a file's own mistake is refused later
    dropped = {name for name, other in idle if other in given or (name, other) not in asked}
    return {name: value for name, value in defaults.items() if name not in dropped}


def left_out(recipe: Recipe, used: Mapping[str, Any], parser: TrainerParser) -> str:
    """What the line about a user's own file says of the recipe that it replaces: the settings that are in neither the
    file nor the command line; "" if there is none."""
    if (replaced := replaced_recipe(recipe, parser, has_gpu(used))) is None:
        return ""
    missing = defaults_beside(dict(used), replaced, parser).keys() - used.keys()
    if not missing:
        return ""
    return (
        f"; it replaces the recipe {recipe.kind}/{replaced.name}, of which it lacks {', '.join(sorted(missing))}: they "
        "have the defaults that --help_all shows"
    )


def check_together(
    run: RunOptions,
    head: HeadConfig,
    training: HeadTrainingArguments,
    given: Mapping[str, Any],
    asked: Mapping[str, Any],
) -> None:
    """ValueError for options that do not go together; given: the command line's; asked: those and a user's file's."""
    if training.idle_gpus and not run.target_device:
        logger.warning(
            "one of %s GPUs is used; start the same command with deepspeed, accelerate launch or `torchrun "
            "--nproc_per_node %s` to use all, or hide the others with CUDA_VISIBLE_DEVICES",
            1 + training.idle_gpus,
            1 + training.idle_gpus,
        )
    check_effects(SimpleNamespace(**{**vars(head), **vars(run), **vars(training)}), asked)
    if training.world_size == 1 and (alone := [name for name in given if name.startswith("ddp_")]):
        raise ValueError(
            f"--{alone[0]} {given[alone[0]]} has no effect in one process; leave it out, or start several with torchrun"
        )
    check_schedule(training)
    if run.packing and training.tokens_per_batch:
        raise ValueError(
            "--packing would fill batches beyond --tokens_per_batch, whose rows are of similar length already; got "
            f"--packing and --tokens_per_batch {training.tokens_per_batch}; drop the one, or set the other to 0"
        )
    metric, offsets = training.metric_for_best_model, range(1, head.offsets + 1)
    measured = ["loss", *(f"accuracy_{offset}" for offset in offsets), *["simulated_beta"] * bool(run.simulate_rows)]
    if metric is not None and metric.removeprefix("eval_") not in measured:
        raise ValueError(f"--metric_for_best_model must be one of {', '.join(measured)}; got {metric}")


def transformers_help() -> str:
    """The flags of transformers' own."""
    return HfArgumentParser(_offered(), usage="", add_help=False).format_help()  # type: ignore[arg-type]
