"""The command line of every trainer; transformers' Trainer takes seconds to load, so help is given without it."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from draft_heads.configs.command_line import OptionParser, exit_status

from draft_heads.configs.options import add_flags
from draft_heads.heads.checkpoint import HEADS, head_classes
from draft_heads.train.options import RunOptions, TrainingOptions
from draft_heads.train.recipe import add_recipe_flags

TRANSFORMERS_FLAGS = {
    "output_dir": "folder for checkpoints and logs, and for head/ at the end",
    "max_steps": "optimizer steps; overrides --num_train_epochs",
    "num_train_epochs": "passes over the rows",
    "learning_rate": "peak rate",
    "per_device_train_batch_size": "rows of a batch on each process; conversations, with --packing",
    "save_steps": "steps from one checkpoint to the next",
    "deepspeed": "ZeRO configuration, e.g. configs/deepspeed/zero2.json",
}
"""The flags of transformers that most runs need."""


def trainer_script(kind: str) -> list[str]:
    """What to run, seen from the project's folder, to train a head of this kind: its own entry point if it has one."""
    own = Path(__file__).with_name(f"{kind}.py").is_file()
    return [f"train/{kind}.py"] if own else ["train/head.py", "--head", kind]


def answer_help(kind: str, arguments: list[str]) -> None:
    """Print the flags and exit where --help or --help_all is given; all but the latter comes without transformers'."""
    every = "--help_all" in arguments
    if not every and not {"-h", "--help"}.intersection(arguments):
        return
    parser = OptionParser(
        usage="%(prog)s --target TARGET --dataset OUT --output_dir RUN [flag …]",
        epilog="" if every else "Other TrainingArguments of transformers are flags too: --help_all lists them.",
        add_help=False,
    )
    data = parser.add_argument_group("what to train on")
    add_flags(data, RunOptions)
    add_recipe_flags(data)
    add_flags(parser.add_argument_group(f"the {kind} head"), head_classes(kind)[1])
    training = parser.add_argument_group("how long, and where to")
    for name, text in TRANSFORMERS_FLAGS.items():
        training.add_argument(f"--{name}", help=text)
    add_flags(training, TrainingOptions)
    parser.print_help()
    if every:
        from draft_heads.train.training_arguments import transformers_help

        print(transformers_help())
    sys.exit()


def train_named_head() -> None:
    """The entry point of all heads: `--head NAME`, then what the entry point of that head takes."""
    parser = OptionParser(usage="%(prog)s --head NAME [flag …]", add_help=False, allow_abbrev=False)
    parser.add_argument("--head", choices=sorted(HEADS), help="the head to train; with it, --help lists its flags")
    known, arguments = parser.parse_known_args()
    if known.head is None:
        if {"-h", "--help", "--help_all"}.intersection(arguments):
            parser.print_help()
            sys.exit()
        parser.error(f"--head must name the head to train, one of {', '.join(sorted(HEADS))}; got none")
    train(known.head, arguments)


def train(kind: str, arguments: list[str] | None = None) -> None:
    """The whole of an entry point: train a head of this kind as the command line says and export it to RUN/head.

    arguments: in place of those of the command line.
    """
    given = sys.argv[1:] if arguments is None else arguments

    def run() -> None:
        answer_help(kind, given)
        from draft_heads.train.run import train_head
        from draft_heads.train.training_arguments import parse_options

        options, settings, training = parse_options(head_classes(kind)[1], given)
        if training.deepspeed and "LOCAL_RANK" not in os.environ:
            raise ValueError(
                "--deepspeed needs a launcher, on one GPU too; got none; start with: deepspeed "
                f"{' '.join(trainer_script(kind))} …"
            )
        train_head(kind, options, settings, training)

    sys.exit(exit_status(run))
