"""A paper's table, ours beside the published numbers.

    python scripts/study.py ctc_drafter_table1 --target DIR --dataset runs/distilled --output runs/studies
    python scripts/study.py configs/studies/anpd_grid.yaml --target DIR --benchmarks humaneval=HumanEval.jsonl \\
        --output runs/studies
    python scripts/study.py --all --tiny --output runs/tiny_studies

A study is a file of configs/studies, or one of your own like them. It trains the heads that it needs, or takes those
of --heads, decodes and writes OUTPUT/NAME/study.md and study.json, beside the report of every run. Rows that need
what was not given (a draft model, a benchmark) say so and stay empty. Several studies in one OUTPUT share their heads;
run again, it goes on, and refuses what was measured or trained there with other settings or from other files.

--tiny runs them small, on the target that comes with the project, in minutes: it shows that all works, and the figures
mean nothing.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from draft_heads.configs.command_line import exit_status, parse_with_config

from draft_heads.data.common.files import LOCK, lock_folder
from draft_heads.data.labels.shards import load_distilled
from draft_heads.data.text.benchmarks import load_benchmark
from draft_heads.inference.evaluation.made_from import make_again
from draft_heads.inference.evaluation.studies import Cell, Study, known_studies, read_study
from draft_heads.scripts import tiny_study
from draft_heads.scripts.decoding_options import check_positive, parse_benchmarks, target_parser
from draft_heads.scripts.measure_study import (
    PASSED_ON,
    Inputs,
    check_decoding,
    flags,
    measure,
    measured_in,
    succeed,
    write_study,
)
from draft_heads.scripts.training_arms import ArmTrainer, arms_of, given_heads


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The options, checked."""
    parser = target_parser(__doc__)
    parser.set_defaults(attention=None)  # what is not given is the default of the commands that are called
    add = parser.add_argument
    add("studies", nargs="*", metavar="STUDY", help=f"files, or names: {', '.join(known_studies())}")
    add("--all", action="store_true", help="every study of configs/studies")
    add("--tiny", action="store_true", help="small, on the target that comes with the project")
    add("--output", type=Path, help="folder for the tables, the reports and the heads")
    add("--benchmarks", nargs="+", metavar="NAME[=FILE|ID]", help="default: all that a study names, from the hub")
    add("--draft_model", metavar="DIR", help="draft model of the rows that need one")
    add("--heads", nargs="+", default=[], metavar="NAME=RUN/head", help="trained heads, by their names in the studies")
    add("--dataset", nargs="+", help="output of scripts/distill.py for this target, to train the other heads on")
    add("--minutes", type=float, help="processor minutes of training a head (default: the recipe's length)")
    add("--steps", type=int, help="steps of every head, instead of --minutes")
    add("--jobs", type=int, help="heads that train at once (default 1)")
    add("--overwrite", action="store_true", help="measure again what is in --output; heads stay")
    add("--max_new_tokens", type=int, help="longest answer, in tokens (default: the study's)")
    add("--limit", type=int, help="only the first N questions of each benchmark, or of each part of a mix")
    add("--max_nodes", type=int, help="most nodes of a draft tree (default: the study's, else 32)")
    args = parse_with_config(parser, arguments, ("output",))
    check_positive(args, "steps", "jobs", "max_new_tokens", "limit", "max_nodes")
    if args.minutes is not None and args.steps is not None:
        raise ValueError("--minutes and --steps both say how long a head trains; give one of them")
    if args.minutes is not None and args.minutes <= 0:
        raise ValueError(f"--minutes must be above 0; got {args.minutes:g}; write for example 20")
    if bool(args.studies) == args.all:
        raise ValueError(f"give studies or --all; studies are files, or names: {', '.join(known_studies())}")
    if args.output.is_file():
        raise ValueError(f"--output must be a folder; {args.output} is a file; name another")
    if args.tiny == bool(args.target):
        raise ValueError(f"give --target, or --tiny, which has its own; got {'both' if args.tiny else 'neither'}")
    own = ("benchmarks", "dataset", "draft_model", "target_adapter", "chat_template", "minutes")
    if args.tiny and (extra := [name for name in own if getattr(args, name) is not None]):
        raise ValueError(f"--tiny has its own --{extra[0]}; leave one of them out")
    return args


def run(args: argparse.Namespace) -> None:
    studies = [read_study(name) for name in (known_studies() if args.all else args.studies)]
    if len({study.name for study in studies}) < len(studies):
        raise ValueError(f"studies must have different names, for each has a folder; got {' '.join(args.studies)}")
    arms = arms_of(studies)
    for study in studies:
        check_decoding(study)
    given = given_heads(args.heads, arms)
    to_train = [arms[name] for name in arms if name not in given]
    files = benchmark_files(args.benchmarks, studies)
    check_read(args, [cell for study in studies for cell in study.cells.values()], bool(to_train))
    if args.tiny:
        args.target = args.draft_model = str(tiny_study.TARGET)
        args.steps, args.max_new_tokens = args.steps or tiny_study.STEPS, args.max_new_tokens or tiny_study.NEW_TOKENS
        files = tiny_study.tiny_benchmarks(studies, args.output / "data")
        texts = args.output / "data" / "conversations.jsonl"
        args.dataset = [tiny_study.tiny_labels(texts, args.output / "distilled", succeed)] if arms else []
    if to_train and not args.dataset:
        names = ", ".join(arm.name for arm in to_train)
        raise ValueError(f"the heads {names} must be trained; give --dataset, or them with --heads")
    for folder in args.dataset or []:  # what cannot be read is told before anything is trained
        load_distilled(folder)
    for name, file in files.items():
        load_benchmark(name, file, args.limit)
    decoding = {name: getattr(args, name) for name in (*PASSED_ON, "max_new_tokens", "limit", "max_nodes")}
    decoding = {name: value for name, value in decoding.items() if value}
    rows = tiny_study.HELD_OUT if args.tiny else None
    inputs = Inputs(args.target, given, files, args.draft_model, decoding, args.dataset or [], rows, args.overwrite)
    lock = lock_folder(args.output, "--output")  # held until the process ends
    trainer = arm_trainer(args) if to_train else None
    if trainer is not None:
        trainer.lacking(to_train)  # what was trained otherwise is told before anything is marked
    if args.overwrite:  # also of what an interruption leaves for the same command without it
        for study in studies:
            make_again(measured_in(study, inputs, args.output / study.name))
    if trainer is not None:
        inputs = replace(inputs, heads={**given, **trainer.train(to_train)})
    for study in studies:
        output = args.output / study.name
        output.mkdir(parents=True, exist_ok=True)
        write_study(study, measure(study, inputs, output), inputs, output, args.tiny)
    (args.output / LOCK).unlink(missing_ok=True)
    lock.close()


def check_read(args: argparse.Namespace, cells: Sequence[Cell], trains: bool) -> None:
    """ValueError for an option that none of the cells needs, nor the heads that are trained for them."""
    ranks = any(cell.measure == "accuracy" for cell in cells)
    needs = {
        ("minutes", "steps", "jobs"): ("train a head, for all are given or none is needed", trains),
        ("dataset",): ("train a head, nor measure its accuracy", trains or ranks),
        ("draft_model",): ("have a row with a draft model", any("{draft_model}" in cell.drafter for cell in cells)),
        ("max_new_tokens", "limit", "max_nodes", "attention"): ("decode", any(cell.of_report for cell in cells)),
    }
    for names, (what, is_so) in needs.items():
        if not is_so and (given := [name for name in names if getattr(args, name) is not None]):
            raise ValueError(f"--{given[0]} has no effect: the studies do not {what}; leave it out")


def benchmark_files(words: Sequence[str] | None, studies: Sequence[Study]) -> dict[str, str]:
    """Name → file of --benchmarks, by default of all that the studies name; ValueError for one that none names."""
    named = list(dict.fromkeys(name for study in studies for name in study.benchmarks))
    files = parse_benchmarks(named if words is None else words)
    if unknown := sorted(files.keys() - set(named)):
        raise ValueError(f"--benchmarks are those of the studies, {', '.join(named) or 'none'}; got {unknown[0]!r}")
    return files


def arm_trainer(args: argparse.Namespace) -> ArmTrainer:
    """Trains the heads of --target, loaded as it is for decoding; ValueError for one of several GPUs."""
    if args.device is not None and ":" in args.device:
        raise ValueError(
            f"--device {args.device} names a GPU, and trainings take the first one that they see; leave it out, and "
            f"set CUDA_VISIBLE_DEVICES={args.device.partition(':')[2]}"
        )
    loading = {"target_adapter": args.target_adapter, "chat_template": args.chat_template, "target_dtype": args.dtype}
    loading["use_cpu"] = "true" if args.device == "cpu" else None
    loading["target_device"] = "auto" if args.device == "auto" else None
    options = [*flags(loading), *(tiny_study.TRAINING if args.tiny else ())]
    schedule = {name: getattr(args, name) for name in ("minutes", "steps", "threads")} | {"jobs": args.jobs or 1}
    return ArmTrainer(args.output / "heads", args.target, args.dataset, **schedule, options=options)


def main(arguments: Sequence[str] | None = None) -> int:
    return exit_status(lambda: run(parse(sys.argv[1:] if arguments is None else arguments)))


if __name__ == "__main__":
    sys.exit(main())
