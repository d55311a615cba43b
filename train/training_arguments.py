"""transformers' TrainingArguments with the options of a head's training; loading this module takes seconds."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import Any

from draft_heads.data.config_file import OptionParser, read_config

from transformers import HfArgumentParser, TrainingArguments

from draft_heads.data.options import add_flags, option_names
from draft_heads.data.pretrained import load_config
from draft_heads.heads.config import HeadConfig
from draft_heads.train.options import CONFIG_HELP, RunOptions, TrainingOptions, find_recipe, recipe_defaults


@dataclass
class HeadTrainingArguments(TrainingOptions, TrainingArguments):  # type: ignore[misc]
    """What `DraftHeadTrainer` runs by."""


class TrainerParser(OptionParser, HfArgumentParser):
    """transformers' parser of dataclasses, its errors without the usage of some hundred flags."""


def parse_options(head_config: type[HeadConfig], arguments: list[str] | None = None) -> tuple[Any, Any, Any]:
    """(RunOptions, head settings, HeadTrainingArguments) from the command line and a recipe.

    Raises SystemExit with a sentence for anything invalid. Head settings are the fields that `head_config` adds to
    `HeadConfig`; sizes come from the target and are not options. A recipe's max_minutes gives way to --max_steps and
    --num_train_epochs, as those of a recipe do to --max_minutes.
    """
    parser = TrainerParser((RunOptions, HeadTrainingArguments))  # type: ignore[arg-type]
    group = parser.add_argument_group(f"{head_config.kind} head")
    add_flags(group, head_config)
    parser.add_argument("--config", help=CONFIG_HELP)
    try:
        # what the command line does not give stays
        unset = argparse.Namespace(
            **dict.fromkeys(("max_steps", "num_train_epochs", "max_minutes")),
            **dict.fromkeys(("per_device_train_batch_size", "tokens_per_batch")),
        )
        known, unknown = parser.parse_known_args(arguments, unset)
        parser.refuse(unknown)
        if not known.target and known.config:
            known.target = read_config(find_recipe(head_config.kind, known.config)[0], parser).get("target")
        if not known.target:
            raise ValueError("--target must name a folder or a hub id; got nothing; e.g. --target data/tiny_target")
        for name in ("max_steps", "num_train_epochs"):
            given = getattr(known, name)
            if given is not None and not given > 0 and (name, given) != ("max_steps", -1):  # -1: by epochs
                raise ValueError(f"--{name} must be above 0; got {given}")
        load_config(known.target)  # a sentence, should there be none
        defaults, taken = recipe_defaults(head_config.kind, known, parser)
        if known.max_steps is not None or known.num_train_epochs is not None:
            defaults.pop("max_minutes", None)  # the schedule ends with the steps asked for
            if known.max_steps is None:
                defaults.pop("max_steps", None)
        elif known.max_minutes or (known.max_minutes is None and defaults.get("max_minutes")):
            defaults |= {"max_steps": -1, "num_train_epochs": 1e6}  # it ends with the time
        if known.per_device_train_batch_size is not None and known.tokens_per_batch is None:
            defaults.pop("tokens_per_batch", None)  # batches of the rows asked for
        parser.set_defaults(**defaults)
        run, training, rest = parser.parse_args_into_dataclasses(arguments, look_for_args_file=False)
        if run.packing and training.tokens_per_batch:
            raise ValueError(
                "--packing would fill batches beyond --tokens_per_batch, whose rows are of similar length already; got "
                f"--packing and --tokens_per_batch {training.tokens_per_batch}; drop the one, or set the other to 0"
            )
        if not run.dataset:
            raise ValueError("--dataset must name a folder written by scripts/distill.py; got nothing")
        if not known.output_dir and not defaults.get("output_dir"):
            raise ValueError("--output_dir must name a folder for checkpoints and the head; got nothing")
        head = {name: getattr(rest, name) for name in option_names(head_config)}
        head_config(**head)  # validated here, before anything is loaded
    except (ValueError, OSError) as error:
        parser.exit(2, f"{parser.prog}: {error}\n")
    if training.process_index == 0:
        print(f"recipe: {taken}", flush=True)
    return run, head, training


def transformers_help() -> str:
    """The flags of transformers' own."""
    return HfArgumentParser(TrainingArguments, usage="", add_help=False).format_help()  # type: ignore[arg-type]
