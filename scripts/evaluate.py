"""Measure drafters on benchmarks: β, γ, losslessness, time shares, accuracy.

    python scripts/evaluate.py --target DIR --drafters transformers ctc=RUN/head ctc_raw=RUN/head,tree=raw \\
        --benchmarks mt_bench=mt_bench.jsonl gsm8k=gsm8k.jsonl --output runs/report

Writes report.json, report.md, speedup.png, accepted_length.png, time_share.png and answers/NAME.jsonl to
--output. Among the drafters, the name `transformers` stands for the target's own `generate`: a second baseline beside
vanilla, timed in turn with the drafters, with a row of its own and every row's speed over it. `transformers_lookup` and
`transformers_assisted=DIR` are its own prompt lookup and assisted generation.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial

from rich.console import Console

from draft_heads.data.benchmarks import gsm8k_answer, load_benchmark
from draft_heads.data.loops import LoopDetector
from draft_heads.data.rendering import render_prompt
from draft_heads.inference.batch import BatchEngine
from draft_heads.inference.engine import DecodingEngine
from draft_heads.inference.evaluation.answers import AnswerFiles
from draft_heads.inference.evaluation.evaluate import BASELINES, VANILLA, Benchmark, Engine, ManyAtOnce, evaluate
from draft_heads.inference.evaluation.hf_generate import PlainGenerate, baseline_words
from draft_heads.inference.evaluation.lossless import Oracle
from draft_heads.inference.evaluation.options import (
    decoding_parser,
    describe_settings,
    describe_target,
    drafter_specs,
    generation_settings,
    load_engines,
    load_target,
    named_files,
    parse_options,
    questions_at_once,
)
from draft_heads.inference.evaluation.report import build_report, check_output, clear_output, write_report
from draft_heads.inference.evaluation.terminal import progress_bar, summary_table
from draft_heads.inference.target.target import Target


def load_benchmarks(options: argparse.Namespace) -> list[Benchmark]:
    """The first --limit questions of every file; GSM8K answers are scored by their number."""
    return [
        Benchmark(name, load_benchmark(name, path)[: options.limit], same_number if name == "gsm8k" else None)
        for name, path in named_files(options.benchmarks).items()
    ]


def same_number(answer: str, reference: str) -> bool:
    """Whether an answer to a word problem ends with the reference's number."""
    wanted = gsm8k_answer(reference)
    return wanted is not None and gsm8k_answer(answer) == wanted


def run(options: argparse.Namespace) -> None:
    console = Console()
    benchmarks = load_benchmarks(options)
    named = [text for text in options.drafters if text.partition("=")[0] in BASELINES]
    baselines = {baseline_words(text)[0]: text for text in named}
    if baselines and options.batch_size > 1:
        raise ValueError(
            f"transformers' own generate is timed one answer at a time; got {', '.join(baselines)} with --batch_size "
            f"{options.batch_size}; leave one of them out"
        )
    specs = drafter_specs([text for text in options.drafters if text not in named])
    check_output(options.output, options.overwrite)
    target = load_target(options)
    engines = load_engines(specs, target, options.max_nodes, options.batch_size)
    with ExitStack() as at_the_end:  # what drafters keep is written even if something fails
        for engine in engines.values():
            at_the_end.callback(engine.drafter.close)
        measure(options, target, engines, baselines, benchmarks, console)


def measure(
    options: argparse.Namespace,
    target: Target,
    drafting: dict[str, DecodingEngine | BatchEngine],
    baselines: dict[str, str],
    benchmarks: list[Benchmark],
    console: Console,
) -> None:
    """Decode, judge, write the report."""
    engines: dict[str, Engine | ManyAtOnce] = {VANILLA: drafting[VANILLA]}
    engines |= {name: PlainGenerate.from_words(text, target) for name, text in baselines.items()}
    engines |= drafting
    clear_output(options.output)
    answers = AnswerFiles(options.output, list(engines))
    with progress_bar(console) as progress:
        evaluation = evaluate(
            engines,
            Oracle(target, generation_settings(options, target, LoopDetector)),
            benchmarks,
            partial(render_prompt, target.tokenizer),
            progress,
            answers.add,
            questions_at_once(options.batch_size),
        )
    report = build_report(evaluation, describe_target(target), describe_settings(options), options.seed)
    pictures = write_report(options.output, report)
    console.print(summary_table(report))
    for path in [*pictures, options.output / "report.md", options.output / "report.json"]:
        console.print(f"  {path}", highlight=False, soft_wrap=True)


def main(arguments: Sequence[str] | None = None) -> int:
    try:
        run(parse_options(decoding_parser(__doc__), arguments))
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
