"""Measure the β of drafters that read only text (ngram, prompt_lookup, rest, …) on recorded answers; no target runs.

The β is that of greedy decoding of the same answers.

    python scripts/replay.py --answers mt_bench_answers.jsonl --tokenizer TOKENIZER --questions mt_bench.jsonl \\
        --drafters ngram tree=ngram,branches=2 kept=ngram,keep=1 prompt_lookup rest=DATASTORE --output runs/replay

A prompt is the conversation so far in the tokenizer's chat template; a tokenizer without one takes Vicuna's. Without
--questions the prompt is only the earlier answers of the conversation. The answers are replayed in the order of the
file, so a drafter that keeps earlier texts (keep=1) profits from them. Writes report.html,
report.md, report.json and accepted_length.png to --output.
"""

from __future__ import annotations

import argparse
import sys
from itertools import islice
from pathlib import Path

from draft_heads.configs.command_line import exit_status, own_command, parse_with_config

from draft_heads.configs.options import add_threads, use_threads
from draft_heads.data.common.console import plain_console
from draft_heads.data.common.files import checksum
from draft_heads.data.common.progress import progress_bar
from draft_heads.data.text.benchmarks import questions_checksum
from draft_heads.data.text.chat_template import CHAT_TEMPLATE_HELP, load_chat_tokenizer, load_tokenizer
from draft_heads.data.text.rendering import ChatRenderer
from draft_heads.inference.evaluation.answer_files import read_answers
from draft_heads.inference.evaluation.comparison import CHECKSUMS, LOADED
from draft_heads.inference.evaluation.replay import match_questions, recorded_turns, replay_all, text_drafters
from draft_heads.inference.evaluation.report import build_report, check_output, clear_output
from draft_heads.scripts.decoding_options import (
    MAX_NODES_HELP,
    answered_questions,
    check_positive,
    distinct_specs,
    loaded_by,
    loaded_checksums,
    script_parser,
)
from draft_heads.scripts.terminal import show_report


def run(options: argparse.Namespace) -> None:
    console = plain_console()
    check_positive(options, "limit", "max_nodes")
    if options.chat_template and not options.questions:
        raise ValueError(
            f"--chat_template renders the prompts of --questions, which is not given; got {options.chat_template}; "
            "give both or neither"
        )
    use_threads(options.threads)
    specs = distinct_specs(options.drafters)
    check_output(options.output, options.overwrite)
    answers = dict(islice(read_answers(options.answers).items(), options.limit))
    asked = answered_questions(options.questions, answers)[1] if options.questions else None
    questions = match_questions(answers, asked)
    if options.questions:
        tokenizer = load_chat_tokenizer(options.tokenizer, options.chat_template)
    else:  # nothing is rendered
        tokenizer = load_tokenizer(options.tokenizer, option="--tokenizer")
    drafters = text_drafters(specs, tokenizer, options.max_nodes)
    render = ChatRenderer(tokenizer).prompt if options.questions else None
    clear_output(options.output)
    with progress_bar(console, "tokenising") as progress:
        name = options.answers.stem
        turns = list(recorded_turns(name, answers, questions, tokenizer, render))
        evaluation = replay_all(name, drafters, questions, turns, progress)
    files = {name: Path(path).name if (path := getattr(options, name)) else None for name in ("answers", "questions")}
    files["answers_checksum"] = checksum(options.answers)
    given = {name: getattr(options, name) for name in ("tokenizer", "chat_template", "max_nodes", "limit")}
    given |= {CHECKSUMS: {name: questions_checksum(questions)}} if options.questions else {}
    loaded = {drafter: loaded_by(drafter) for drafter in options.drafters}
    given |= {"drafters": " ".join(options.drafters), LOADED: loaded_checksums(loaded)}
    settings = {**files, **given, "max_new_tokens": None, "temperature": None, "seed": None}
    show_report(console, options.output, build_report(evaluation, None, settings, 0, own_command()))


def main(arguments: list[str] | None = None) -> int:
    parser = script_parser(__doc__)
    add = parser.add_argument
    add("--answers", type=Path, metavar="FILE.jsonl", help="recorded answers in FastChat form")
    add("--tokenizer", metavar="DIR|ID", help="the tokenizer of the target that wrote them")
    add("--chat_template", metavar="NAME|FILE", help=CHAT_TEMPLATE_HELP)
    add("--questions", metavar="FILE.jsonl|NAME", help="the questions that were answered")
    add("--drafters", nargs="+", metavar="NAME[=[KIND:]PATH[,key=value…]]", help="as in scripts/evaluate.py")
    add("--output", type=Path, help="folder for the results")
    add("--overwrite", action="store_true", help="replace a finished run in --output")
    add("--limit", type=int, help="only the first N answered questions")
    add("--max_nodes", type=int, default=32, help=MAX_NODES_HELP)
    add_threads(parser)
    required = ("answers", "tokenizer", "drafters", "output")
    return exit_status(lambda: run(parse_with_config(parser, arguments, required)))


if __name__ == "__main__":
    sys.exit(main())
