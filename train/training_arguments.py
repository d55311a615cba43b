"""transformers' TrainingArguments with the options of a head's training; loading this module takes seconds."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, field, fields, make_dataclass
from typing import Any, get_type_hints

from draft_heads.configs.command_line import OptionParser, read_config

from transformers import HfArgumentParser, TrainingArguments

from draft_heads.configs.options import add_flags, option_names
from draft_heads.data.common.pretrained import load_config
from draft_heads.heads.config import HeadConfig
from draft_heads.train.inherited import NO_EFFECT, OF_HEADS, OF_RUNS, READ, check_effects, refused
from draft_heads.train.length import settle_end
from draft_heads.train.options import CONFIG_HELP, RunOptions, TrainingOptions, find_recipe, recipe_defaults
from draft_heads.train.schedule import check_schedule


@dataclass
class HeadTrainingArguments(TrainingOptions, TrainingArguments):  # type: ignore[misc]
    """What `DraftHeadTrainer` runs by."""


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


def parse_options(head_config: type[HeadConfig], arguments: list[str] | None = None) -> tuple[Any, Any, Any]:
    """(RunOptions, head settings, HeadTrainingArguments) from the command line and a recipe.

    Raises SystemExit with a sentence for anything invalid. Head settings are the fields that `head_config` adds to
    `HeadConfig`; sizes come from the target and are not options. What ends a run on the command line (minutes, steps
    or epochs) replaces what ends the recipe's.
    """
    parser = TrainerParser((RunOptions, _offered()))  # type: ignore[arg-type]
    group = parser.add_argument_group(f"{head_config.kind} head")
    add_flags(group, head_config)
    parser.add_argument("--config", help=CONFIG_HELP)
    try:
        unset = argparse.Namespace(**{action.dest: None for action in parser._actions if action.dest != "help"})
        known, unknown = parser.parse_known_args(arguments, unset)
        parser.refuse(unknown)
        given = {name: value for name, value in vars(known).items() if value is not None}
        if not known.target and known.config:
            known.target = read_config(find_recipe(head_config.kind, known.config)[0], parser).get("target")
        if not known.target:
            raise ValueError("--target must name a folder or a hub id; got nothing; e.g. --target data/tiny_target")
        load_config(known.target)  # a sentence, should there be none
        defaults, taken, bundled = recipe_defaults(head_config.kind, known, parser)
        settle_end(given, defaults, "" if bundled else f"--config {known.config}: ")
        if known.per_device_train_batch_size is not None and known.tokens_per_batch is None:
            defaults.pop("tokens_per_batch", None)  # batches of the rows asked for
        if known.optim is not None and known.head_optimizer is None:
            defaults.pop("head_optimizer", None)  # the optimizer asked for, in place of the recipe's Muon
        parser.set_defaults(**defaults)
        run, offered, rest = parser.parse_args_into_dataclasses(arguments, look_for_args_file=False)
        if not run.dataset:
            raise ValueError("--dataset must name a folder written by scripts/distill.py; got nothing")
        if not offered.output_dir:
            raise ValueError("--output_dir must name a folder for checkpoints and the head; got nothing")
        training = HeadTrainingArguments(**vars(offered))
        asked = set(given), set() if bundled else set(defaults)
        check_effects(training, NO_EFFECT, *asked)
        check_schedule(training)
        check_effects(run, OF_RUNS, *asked)
        if run.packing and training.tokens_per_batch:
            raise ValueError(
                "--packing would fill batches beyond --tokens_per_batch, whose rows are of similar length already; got "
                f"--packing and --tokens_per_batch {training.tokens_per_batch}; drop the one, or set the other to 0"
            )
        head = {name: getattr(rest, name) for name in option_names(head_config)}
        config = head_config(**head)  # validated here, before anything is loaded
        check_effects(config, OF_HEADS, *asked)
        check_metric(training.metric_for_best_model, config.offsets, bool(run.simulate_rows))
    except (ValueError, OSError) as error:
        parser.exit(2, f"{parser.prog}: {error}\n")
    if training.process_index == 0:
        print(f"recipe: {taken}", flush=True)
    return run, head, training


def check_metric(metric: str | None, offsets: int, simulated: bool) -> None:
    """ValueError for a --metric_for_best_model that an evaluation of a head with so many offsets does not measure."""
    measured = ["loss", *(f"accuracy_{k + 1}" for k in range(offsets)), *["simulated_beta"] * simulated]
    if metric is not None and metric.removeprefix("eval_") not in measured:
        raise ValueError(f"--metric_for_best_model must be one of {', '.join(measured)}; got {metric}")


def transformers_help() -> str:
    """The flags of transformers' own."""
    return HfArgumentParser(_offered(), usage="", add_help=False).format_help()  # type: ignore[arg-type]
