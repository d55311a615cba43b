"""The command-line options of the decoding scripts, and what is built from them."""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from draft_heads.configs.command_line import OptionParser, parse_with_config

from draft_heads.configs.options import DTYPES, add_threads, check_whole, dtype_name, use_threads
from draft_heads.data.common.files import write_text
from draft_heads.data.common.processes import own_device
from draft_heads.data.generation_config import processor_settings, unapplied_settings
from draft_heads.data.labels.loops import IncrementalStop
from draft_heads.data.text.benchmarks import Question, load_benchmark
from draft_heads.data.text.chat_template import CHAT_TEMPLATE_HELP
from draft_heads.data.text.known_benchmarks import known_benchmarks, named_benchmark
from draft_heads.inference.batch import BatchEngine
from draft_heads.inference.drafters.options import MADE_FOR, made_for
from draft_heads.inference.drafters.registry import DrafterSpec, build_drafter
from draft_heads.inference.drafters.table import drafters_table
from draft_heads.inference.drafters.words import is_loadable
from draft_heads.inference.engine import DecodingEngine
from draft_heads.inference.evaluation.answer_files import QuestionKey
from draft_heads.inference.evaluation.evaluate import TRANSFORMERS
from draft_heads.inference.evaluation.hf_assisted import parse_hf_row
from draft_heads.inference.evaluation.made_from import content_of
from draft_heads.inference.evaluation.meter import devices_of
from draft_heads.inference.evaluation.report import environment
from draft_heads.inference.generation import GenerationSettings
from draft_heads.inference.sampling import check_seed
from draft_heads.inference.target.sizes import parameters
from draft_heads.inference.target.target import Target
from draft_heads.inference.target.tree_attention import TREE_ATTENTION
from draft_heads.inference.verify import TypicalAcceptance

ACCEPTANCE = ("exact", "typical")
MAX_NODES_HELP = (
    "most nodes of a draft tree, a hybrid's too; lookahead and ouroboros have one of their own (default 32)"
)
REPORTED = (
    *("max_new_tokens", "temperature", "top_k", "top_p", "acceptance", "seed"),
    *("max_nodes", "limit", "stop_at_loops", "batch_size", "attention"),
    *("drafters", "chat_template", "target_adapter"),
)


def script_parser(description: str | None, config: bool = True) -> argparse.ArgumentParser:
    """A parser whose help shows the script's docstring as written; with --config, which `parse_with_config` reads."""
    parser = OptionParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    if config:
        parser.add_argument("--config", type=Path, help="YAML file with values for these flags, without dashes")
    return parser


def check_positive(options: argparse.Namespace, *names: str) -> None:
    """ValueError for a number, or a list with one, below 1; None is allowed."""
    for name in names:
        given = getattr(options, name)
        if given is not None:
            check_whole(f"--{name}", min(given) if isinstance(given, list) else given, least=1)


def tell_of_another_target(head: str, made_for: str, target: str) -> None:
    """Print a note where a head says that it is for a target of another name than the given one, or for none: sizes are
    compared then, and no weights."""
    paths = Path(target), Path(target).resolve()
    names = {path.name.lower() for path in paths}
    names |= {part.rpartition("--")[2].lower() for part in paths[1].parts if part.startswith("models--")}
    if not made_for or Path(made_for).name.lower() not in names:  # in the hub's cache models--OWNER--NAME
        known = f"says that it is for {made_for}" if made_for else "does not say what it is for"
        print(f"note: {head} {known}; {target} has its sizes, the weights may differ")


def check_new_folder(output: Path) -> None:
    """ValueError unless --output is new, or an empty folder."""
    if output.exists() and (output.is_file() or any(output.iterdir())):
        found = "is a file; pick another" if output.is_file() else "has files; pick another, or empty it"
        raise ValueError(f"--output must be a new or empty folder; {output} {found}")


def target_parser(description: str | None, attention: bool = True) -> argparse.ArgumentParser:
    """The flags that `load_target` reads, and --config.

    attention: also --attention, for trees that are verified
    """
    parser = script_parser(description)
    add = parser.add_argument
    add("--target", help="folder or hub id of the target")
    add("--target_adapter", help="folder or hub id of a PEFT adapter to merge into the target")
    add("--chat_template", metavar="NAME|FILE", help=CHAT_TEMPLATE_HELP)
    add("--dtype", choices=tuple(DTYPES), help="default: float32 on CPU, the checkpoint's own on GPU")
    add("--device", help="cpu, cuda, …, or auto: layers on all GPUs (default cuda if present)")
    if attention:
        add("--attention", choices=tuple(TREE_ATTENTION), help="attention over draft trees (default auto)")
    parser.set_defaults(attention="auto")
    add_threads(parser)
    return parser


def parse_options(description: str | None, arguments: Sequence[str] | None, scored: bool = False) -> argparse.Namespace:
    """The flags of `scripts/evaluate.py` and `scripts/lossless.py`, over the defaults of --config, checked.

    scored: also those of answers that are scored. ValueError says rule, value and remedy.
    """
    parser = target_parser(description)
    add = parser.add_argument
    add(
        "--drafters",
        nargs="+",
        metavar="NAME[=[KIND:]PATH[,key=value…][+…]]",
        help="--list_drafters shows them; vanilla always runs",
    )
    add(
        "--list_drafters",
        action="version",
        version=drafters_table(),
        help="print all drafters and their options, as Markdown, and end",
    )
    known = f"{', '.join(known_benchmarks())}; or question files, named as you like (docs/decoding.md)"
    add("--benchmarks", nargs="+", metavar="NAME[=FILE|ID]", help=known)
    if scored:
        add("--run_code", action="store_true", help="run the code of answers (HumanEval) on this machine, under limits")
        shown = "benchmarks whose first answers the report shows token by token (default: all)"
        add("--samples_of", nargs="+", metavar="NAME", help=shown)
    add("--output", type=Path, help="folder for the results")
    add("--overwrite", action="store_true", help="replace a finished run in --output")
    add("--max_new_tokens", type=int, default=128, help="longest answer, in tokens (default 128)")
    add("--limit", type=int, help="only the first N questions of each benchmark")
    add("--max_nodes", type=int, default=32, help=MAX_NODES_HELP)
    add("--batch_size", type=int, default=1, help="sequences decoded together, for every drafter (default 1)")
    add(
        "--stop_at_loops",
        action="store_true",
        help="end an answer at the third copy of a block, or a later one, where its copies are 12 tokens",
    )
    add("--temperature", type=float, default=0.0, help="above 0: sample, losslessly; 0: greedy (default)")
    add("--top_k", type=int, default=0, help="sample from the k most probable tokens only; 0: all")
    add("--top_p", type=float, default=1.0, help="sample from the top tokens that make up this share; 1: all")
    add("--acceptance", choices=ACCEPTANCE, default="exact", help="typical is LOSSY: answers are not the target's own")
    add(
        "--seed",
        type=int,
        default=0,
        help="of sampling, the same for every question, and of the bootstrap over questions (default 0)",
    )
    options = parse_with_config(parser, arguments, ("target", "drafters", "benchmarks", "output"))
    check_positive(options, "max_new_tokens", "max_nodes", "limit", "batch_size")
    check_seed("--seed", options.seed)
    GenerationSettings(**_acceptance(options))  # checked before anything is loaded
    return options


def _acceptance(options: argparse.Namespace) -> dict[str, Any]:
    """The fields of `GenerationSettings` that decide which tokens are kept."""
    sampling = {name: getattr(options, name) for name in ("temperature", "top_k", "top_p", "seed")}
    return {**sampling, "typical": TypicalAcceptance() if options.acceptance == "typical" else None}


def tell_how_targets_run() -> None:
    """Show the lines on how a target runs, what of its own generation settings is applied, what of an adapter's
    tokenizer is taken, and what graphs engines capture."""
    logging.basicConfig(format="%(message)s")
    for name in ("draft_heads.inference", "draft_heads.data.generation_config"):
        logging.getLogger(name).setLevel(logging.INFO)


def load_target(options: argparse.Namespace) -> Target:
    """Load the target as the options say, with `tell_how_targets_run`."""
    tell_how_targets_run()
    target = Target.from_pretrained(
        options.target,
        dtype=options.dtype,
        device=own_device(options.device),
        adapter=options.target_adapter,
        chat_template=options.chat_template,
    )
    return configure_target(target, options)


def configure_target(target: Target, options: argparse.Namespace) -> Target:
    """Apply --threads and --attention; returns the target."""
    use_threads(options.threads)
    if options.attention != "auto":
        target.attend(options.attention)
    return target


def check_names(what: str, names: Iterable[str]) -> None:
    """ValueError for two equal names, also where only case differs: some disks have one file for both; and for a name
    that is too long for a file's."""
    known: dict[str, str] = {}
    for name in names:
        if (size := len(quote(name, safe="", errors="replace"))) > 200:
            raise ValueError(f"{what} must have names of 200 bytes at most, as in an address; {name!r:.60} has {size}")
        if (other := known.get(name.casefold())) is not None:
            found = f"{name!r} is given twice" if other == name else f"{other!r} and {name!r} differ only in case"
            raise ValueError(f"{what} must have different names, {found}; rename one")
        known[name.casefold()] = name


def distinct_specs(texts: Sequence[str]) -> list[DrafterSpec]:
    """The drafters of the command line; ValueError for a duplicate name."""
    specs = [DrafterSpec.parse(text) for text in texts]
    check_names("drafters", (spec.name for spec in specs))
    return specs


def drafter_specs(texts: Sequence[str]) -> list[DrafterSpec]:
    """The drafters of the command line, vanilla always first; ValueError for a duplicate or reserved name."""
    for text in texts:
        if text.partition("=")[0] == TRANSFORMERS:
            raise ValueError(
                f"the name {TRANSFORMERS!r} is reserved for the target's own generate, a baseline of "
                f"scripts/evaluate.py and no drafter; got {text!r}; rename the drafter or leave it out"
            )
    return distinct_specs(["vanilla", *(text for text in texts if text != "vanilla")])


def load_engines(
    specs: Sequence[DrafterSpec], target: Target, max_nodes: int, batch_size: int
) -> dict[str, DecodingEngine | BatchEngine]:
    """An engine for every drafter, by the names that reports use; batch engines if `batch_size` is above 1."""
    engine = DecodingEngine if batch_size == 1 else BatchEngine
    return {spec.name: engine(target, build_drafter(spec, target, max_nodes, batch_size)) for spec in specs}


def generation_settings(options: argparse.Namespace) -> GenerationSettings:
    """Stop rules (--max_new_tokens, --stop_at_loops, the target's end tokens) and how tokens are chosen."""
    return GenerationSettings(
        max_new_tokens=options.max_new_tokens,
        stop=IncrementalStop() if options.stop_at_loops else None,
        **_acceptance(options),
    )


def parse_benchmarks(arguments: Sequence[str]) -> dict[str, str]:
    """["own=FILE", "gsm8k"] -> {"own": "FILE", "gsm8k": the path of its description}, for `load_benchmark`.

    ValueError for an unknown name without a file, for another form and for a duplicate name.
    """
    files: list[tuple[str, str]] = []
    for text in arguments:
        name, equals, path = text.partition("=")
        if not equals or Path(text).is_file():  # a description
            name, path = named_benchmark(text) or (name, path)
        if not name or not path or any(map(str.isspace, name)):
            raise ValueError(
                f"--benchmarks takes NAME=FILE, or a known name alone: {', '.join(known_benchmarks())}; got {text!r}; "
                f"write for example mt_bench={text}"
            )
        files.append((name, path))
    check_names("benchmarks", (name for name, _ in files))
    return dict(files)


def answered_questions(given: str, answers: Iterable[QuestionKey]) -> tuple[str, list[Question]]:
    """(benchmark, its questions) of the --questions of recorded answers: a known benchmark's name, or [NAME=]FILE.

    A file without a name is read as one of the benchmark that the answers name, for its categories and scores; those of
    other projects name none.
    """
    named, equals, file = given.partition("=")
    if equals and named and "/" not in named and not Path(given).exists():  # as DIR and URLs have it
        return named, load_benchmark(named, file)
    benchmark = next((name for name, _ in answers), None) or "questions"
    name, source = named_benchmark(given) or (benchmark, given)
    return name, load_benchmark(name, source)


def check_code(run_code: bool, questions: Iterable[Question]) -> None:
    """ValueError for --run_code without a question whose answer is code."""
    if run_code and not any(question.score == "pass_at_1" for question in questions):
        raise ValueError("--run_code runs the code of answers (HumanEval); no question asks for any; leave it out")


def write_tuned(path: Path, tuned: dict[str, Any], kind: str, loaded: str, loaded_hash: str, target: Target) -> None:
    """Write what a tuning script measured, with what it was measured on, for a drafter's option tuned=FILE.

    kind, loaded, loaded_hash: see `inference.drafters.options.made_for`
    """
    tuned = {**tuned, MADE_FOR: made_for(kind, loaded, loaded_hash, target)}
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, json.dumps({**tuned, "environment": environment(str(target.device))}, indent=1) + "\n")


def describe_run(options: argparse.Namespace, target: Target) -> dict[str, Any]:
    """The `target` and `settings` entries of a report."""
    model = {"path": target.name, "parameters": parameters(target), "dtype": dtype_name(target.dtype)}
    model |= {"device": ", ".join(map(str, devices_of(target))), "fingerprint": target.fingerprint()}
    lossy = {"acceptance": "typical (LOSSY)"} if options.acceptance == "typical" else {}
    settings = {name: getattr(options, name) for name in REPORTED} | {"forward": target.forward_kind}
    own = target.model.generation_config
    settings |= {"own_settings_applied": processor_settings(own), "own_settings_not_applied": unapplied_settings(own)}
    settings |= {"end_token_ids": sorted(target.end_token_ids), "max_positions": target.max_positions}
    return {"target": model, "settings": settings | lossy}


def loaded_by(drafter: str) -> dict[str, Any]:
    """path → content, of all that a drafter's words, or those of a row of `generate`, load."""
    row = parse_hf_row(drafter)
    parts = [] if row else DrafterSpec.parse(drafter).parts
    paths = [row[1].get("assistant", "")] if row else [part.path for part in parts]  # or hub ids
    words = [word for part in parts for word in part.options.values()]
    paths += [path for word in words for path in (word, word.partition(":")[2]) if is_loadable(path)]  # via=KIND:PATH
    return {path: content_of(path, whole=True) for path in paths if path}


def loaded_checksums(loaded: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """Name of a drafter → 16 hex digits that change with what it loads, and not with the place; none of nothing.

    loaded: the drafters' words → `loaded_by`
    """
    return {
        re.split("[=,]", drafter)[0]: hashlib.sha256(json.dumps([*contents.values()]).encode()).hexdigest()[:16]
        for drafter, contents in loaded.items()
        if contents
    }
