"""Measure text-only drafters on recorded answers: the β that greedy decoding would have reached, without a target.

    python scripts/replay.py --answers mt_bench_answers.jsonl --tokenizer TOKENIZER --questions mt_bench.jsonl \\
        --drafters ngram tree=ngram,branches=2 kept=ngram,keep=1 prompt_lookup rest=DATASTORE --output runs/replay

Prompts are the conversation so far in the tokenizer's chat template; a tokenizer without one takes Vicuna's. Without
--questions a prompt is what was answered before in the same conversation. Each drafter replays the answers in order, so
that earlier texts count where it keeps them (keep=1). Writes report.json, report.md and
accepted_length.png to --output.
"""

from __future__ import annotations

import argparse
import sys
from functools import partial
from itertools import islice
from pathlib import Path

from rich.console import Console

from draft_heads.data.benchmarks import Question, load_benchmark
from draft_heads.data.chat_template import CHAT_TEMPLATE_HELP, load_chat_tokenizer
from draft_heads.data.config_file import exit_status, parse_with_config
from draft_heads.data.json_rows import read_json_rows
from draft_heads.data.rendering import render_prompt
from draft_heads.inference.drafters.registry import DrafterSpec
from draft_heads.inference.evaluation.answers import read_answers
from draft_heads.inference.evaluation.replay import match_questions, recorded_turns, replay_all, text_drafters
from draft_heads.inference.evaluation.report import build_report, check_output, clear_output
from draft_heads.scripts.terminal import progress_bar, show_report


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--config", type=Path, help="YAML file with defaults for any of these flags, without the dashes")
    p.add_argument("--answers", type=Path, metavar="FILE.jsonl", help="recorded answers in FastChat form")
    p.add_argument("--tokenizer", metavar="DIR|ID", help="the tokenizer of the target that wrote them")
    p.add_argument("--chat_template", metavar="NAME|FILE", help=CHAT_TEMPLATE_HELP)
    p.add_argument("--questions", type=Path, metavar="FILE.jsonl", help="the questions: FastChat or GSM8K rows")
    p.add_argument("--drafters", nargs="+", metavar="NAME[=[KIND:]PATH[,key=value…]]", help="as in scripts/evaluate.py")
    p.add_argument("--output", type=Path, help="folder for the results")
    p.add_argument("--overwrite", action="store_true", help="replace a finished run in --output")
    p.add_argument("--limit", type=int, help="only the first N answered questions")
    p.add_argument("--max_nodes", type=int, default=32, help="most nodes of a draft tree (default 32)")
    return p


def parse_options(arguments: list[str] | None) -> argparse.Namespace:
    """Flags over the defaults of --config; ValueError says rule, value and remedy."""
    options = parse_with_config(parser(), arguments, ("answers", "tokenizer", "drafters", "output"))
    for name in ("limit", "max_nodes"):
        if (value := getattr(options, name)) is not None and value < 1:
            raise ValueError(f"--{name} must be at least 1, got {value}")
    return options


def read_questions(path: Path) -> list[Question]:
    """FastChat questions, or GSM8K problems, whose ids count from 0 as in recorded files."""
    first = next((record for _, record in read_json_rows(path)), None)
    fastchat = isinstance(first, dict) and "turns" in first
    return load_benchmark("mt_bench" if fastchat else "gsm8k", str(path))


def drafter_specs(texts: list[str]) -> list[DrafterSpec]:
    """The drafters of the command line; ValueError for a duplicate name."""
    specs = [DrafterSpec.parse(text) for text in texts]
    names = [spec.name for spec in specs]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"drafters must have different names, {name!r} is given twice; rename one")
    return specs


def run(options: argparse.Namespace) -> None:
    console = Console()
    specs = drafter_specs(options.drafters)
    check_output(options.output, options.overwrite)
    answers = dict(islice(read_answers(options.answers).items(), options.limit))
    questions = match_questions(answers, read_questions(options.questions) if options.questions else None)
    tokenizer = load_chat_tokenizer(options.tokenizer, options.chat_template)
    drafters = text_drafters(specs, tokenizer, options.max_nodes)
    render = partial(render_prompt, tokenizer) if options.questions else None
    clear_output(options.output)
    with progress_bar(console, "tokenising") as progress:
        turns = list(recorded_turns(answers, questions, tokenizer, render))
        evaluation = replay_all(options.answers.stem, drafters, questions, turns, progress)
    report = build_report(evaluation, None, described(options), seed=0)
    show_report(console, options.output, report)


def described(options: argparse.Namespace) -> dict[str, object]:
    """The `settings` entry of the report; settings of decoding are None."""
    given = {name: getattr(options, name) for name in ("tokenizer", "max_nodes", "limit")}
    given["drafters"] = " ".join(options.drafters)
    files = {name: path.name if (path := getattr(options, name)) else None for name in ("answers", "questions")}
    return {**files, **given, "max_new_tokens": None, "temperature": None, "seed": None}


def main(arguments: list[str] | None = None) -> int:
    return exit_status(lambda: run(parse_options(arguments)))


if __name__ == "__main__":
    sys.exit(main())
