"""Measure drafters on benchmarks: β, γ, losslessness, time shares, scores.

    python scripts/evaluate.py --target DIR --drafters transformers ctc=RUN/head ctc_raw=RUN/head,tree=raw \\
        --benchmarks mt_bench=mt_bench.jsonl gsm8k --output runs/report

Writes report.html (for a browser, one file), report.md, report.json, speedup.png, accepted_length.png, time_share.png
and answers/NAME.jsonl to --output.
Repeat the command to go on with an interrupted run; `torchrun --nproc_per_node N scripts/evaluate.py …` shares the
questions among N processes. The drafter name `transformers` is the target's own `generate`: a second baseline beside
vanilla, which takes turns with the drafters and has its own row; the report then has every row's speed over it. So do
`hf_lookup=transformers,prompt_lookup=10` and `hf_draft=transformers,assistant=DIR`, with drafts of its own.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from draft_heads.configs.command_line import exit_status, on_interrupt, own_command

from rich.console import Console

from draft_heads.configs.options import explain_out_of_memory
from draft_heads.data.common.console import plain_console
from draft_heads.data.common.processes import Processes
from draft_heads.data.common.progress import progress_bar
from draft_heads.data.text.benchmarks import load_benchmark, prompts_checksum, questions_checksum
from draft_heads.data.text.chat_template import tell_of_the_date
from draft_heads.data.text.errors import ConversationError
from draft_heads.data.text.known_benchmarks import known_benchmarks
from draft_heads.inference.evaluation.answer_files import check_answers, write_answers
from draft_heads.inference.evaluation.comparison import CHECKSUMS, LOADED, PROMPTS
from draft_heads.inference.evaluation.decoded import DecodedFolder
from draft_heads.inference.evaluation.evaluate import (
    VANILLA,
    AnyEngine,
    Benchmark,
    Evaluation,
    decode,
    groups_of,
    judge_decoded,
)
from draft_heads.inference.evaluation.hf_assisted import hf_engine, parse_hf_row
from draft_heads.inference.evaluation.lossless import Oracle
from draft_heads.inference.evaluation.made_from import content_of
from draft_heads.inference.evaluation.meter import devices_of
from draft_heads.inference.evaluation.report import build_report, check_output, clear_output, environment
from draft_heads.inference.evaluation.samples import sample_answers
from draft_heads.inference.evaluation.scores import Scorer
from draft_heads.inference.target.target import Target
from draft_heads.scripts.decoding_options import (
    check_code,
    check_names,
    describe_run,
    drafter_specs,
    generation_settings,
    load_engines,
    load_target,
    loaded_by,
    loaded_checksums,
    parse_benchmarks,
    parse_options,
)
from draft_heads.scripts.terminal import show_report


def load_benchmarks(options: argparse.Namespace) -> list[Benchmark]:
    """The first --limit questions of every benchmark."""
    files = parse_benchmarks(options.benchmarks)
    return [Benchmark(name, load_benchmark(name, path, options.limit)) for name, path in files.items()]


def with_scores(benchmarks: Sequence[Benchmark], run_code: bool, console: Console) -> list[Benchmark]:
    """The benchmarks with scorers of their answers; a line for each that is not scored though its name is that of one
    that is."""
    found = []
    for benchmark in benchmarks:
        scorer = Scorer(benchmark.questions, run_code)
        found.append(replace(benchmark, score=scorer))
        known = known_benchmarks().get(benchmark.name)
        missing = not any(question.score for question in benchmark.questions) and known is not None and known.score
        form = ["its answers are not scored: its rows do not have the published form"] if missing else []
        for reason in [*scorer.unscored, *form] if Processes.from_environment().rank == 0 else ():
            console.print(f"{benchmark.name}: {reason}", soft_wrap=True)
    return found


def sampled_benchmarks(names: Sequence[str] | None, benchmarks: Sequence[Benchmark]) -> list[Benchmark]:
    """Those of --samples_of, by default all; ValueError for a name that --benchmarks lacks."""
    known = [benchmark.name for benchmark in benchmarks]
    if unknown := sorted(set(names or ()).difference(known)):
        raise ValueError(f"--samples_of names benchmarks of --benchmarks, {', '.join(known)}; got {unknown[0]!r}")
    return [benchmark for benchmark in benchmarks if names is None or benchmark.name in names]


def checksums_of_prompts(target: Target, benchmarks: Sequence[Benchmark]) -> dict[str, str]:
    """The checksum of the first prompts of each benchmark.

    ValueError for a question that holds a control token of the target, or what its chat template does not read.
    """
    found = {}
    for benchmark in benchmarks:
        prompts = []
        for question in benchmark.questions:
            try:
                asked = [*question.opening, *({"role": "user", "content": text} for text in question.turns)]
                target.renderer.check_texts(asked, extra=question.extra)
                prompts.append(target.renderer.prompt(asked[: len(question.opening) + 1], question.extra))
            except ConversationError as error:
                raise ValueError(f"{benchmark.name}, question {question.question_id}: {error}") from None
        found[benchmark.name] = prompts_checksum(prompts)
    return found


def decode_and_judge(
    options: argparse.Namespace,
    target: Target,
    engines: Mapping[str, AnyEngine],
    benchmarks: Sequence[Benchmark],
    console: Console,
    parts: DecodedFolder,
    finished: str = "report.json",
) -> Evaluation | None:
    """An evaluation under a progress bar, with the target's chat template and stop rules, its `parts` kept in --output.

    Processes that torchrun started share the questions; the first one judges, the others get None.
    """
    prompts = checksums_of_prompts(target, benchmarks)
    tell_of_the_date(target.tokenizer, "on another day other ones are asked, and an interrupted run does not go on")
    processes = Processes.from_environment()
    # several batches, because slots are refilled and only the last ones run empty
    group_size = 1 if options.batch_size == 1 else 4 * options.batch_size
    run = identity(options, target, benchmarks) | {"prompts": prompts}
    processes.check_same(
        {name: value for name, value in run.items() if name not in ("environment", "target_files", "adapter_files")}
    )
    with processes.first_alone() as first:
        if first:
            parts.begin(run, options.overwrite)
            try:  # again: a run that held the folder may have ended while this one loaded its target
                check_output(options.output, options.overwrite, finished)
            except ValueError:
                parts.clear()
                raise
            clear_output(options.output, finished)
    processes.check_shared(parts.folder, "--output")
    parts.join()
    groups = len(groups_of(benchmarks, group_size))
    memory = explain_out_of_memory(
        "decoding",
        lambda: (
            f"lower --batch_size or --max_nodes, or use a smaller --dtype, each with another --output; "
            f"{parts.resume_hint(groups)}"
        ),
    )
    with (
        memory,
        on_interrupt(lambda: parts.resume_hint(groups)),
        progress_bar(console, show=processes.rank == 0) as progress,
    ):
        oracle, render = Oracle(target, generation_settings(options)), target.renderer.prompt
        decode(engines, oracle, benchmarks, render, parts, progress, group_size, processes)
        processes.wait()
        evaluation = None if processes.rank else judge_decoded(engines, oracle, benchmarks, parts, group_size, progress)
    if evaluation is not None and not evaluation.records:
        parts.clear()
        raise ValueError(
            f"a prompt and its answer must fit the target's {target.max_positions} positions; none of the "
            f"{sum(len(benchmark.questions) for benchmark in benchmarks)} questions does; shorten them"
        )
    return evaluation


def identity(options: argparse.Namespace, target: Target, benchmarks: Sequence[Benchmark]) -> dict[str, Any]:
    """What an evaluation measures: an interrupted one goes on only if all of it is the same. The target's and its
    adapter's files are a part of it, as a fingerprint does not see all weights; they and the environment are each
    node's own."""
    described = describe_run(options, target)
    model = {name: value for name, value in described["target"].items() if name not in ("path", "device")}
    model["device"] = [device.type for device in devices_of(target)]
    machine = environment(str(target.device))  # a launcher may change the default of threads
    machine = {key: value for key, value in machine.items() if key not in ("time", "threads", "waiting_threads")}
    return {
        "target": model,
        "target_files": content_of(target.name),
        "adapter_files": options.target_adapter and content_of(options.target_adapter),
        "settings": described["settings"] | {"threads": options.threads},
        "environment": machine,
        "drafters": options.drafters,
        "files": {drafter: loaded_by(drafter) for drafter in options.drafters},
        "questions": list(checksums(benchmarks).items()),
    }


def checksums(benchmarks: Sequence[Benchmark]) -> dict[str, str]:
    """The checksum of each benchmark's questions."""
    return {benchmark.name: questions_checksum(benchmark.questions) for benchmark in benchmarks}


def split_rows(words: Sequence[str]) -> tuple[dict[str, dict[str, str]], list[str]]:
    """The rows of `generate` among --drafters, by name, and the drafters; ValueError for a name given twice."""
    parsed = [(text, parse_hf_row(text)) for text in words]
    rows = [row for _, row in parsed if row is not None]
    check_names("drafters", (name for name, _ in rows))
    return dict(rows), [text for text, row in parsed if row is None]


def run(options: argparse.Namespace) -> None:
    console = plain_console()
    check_output(options.output, options.overwrite)
    check_answers(options.output, options.overwrite)
    loaded = load_benchmarks(options)
    check_code(options.run_code, (question for benchmark in loaded for question in benchmark.questions))
    benchmarks = with_scores(loaded, options.run_code, console)
    sampled = sampled_benchmarks(options.samples_of, benchmarks)
    hf_rows, drafters = split_rows(options.drafters)
    if hf_rows and options.batch_size > 1:
        raise ValueError(
            f"transformers' own generate is timed one answer at a time; got {', '.join(hf_rows)} with --batch_size "
            f"{options.batch_size}; leave one of them out"
        )
    specs = drafter_specs(drafters)
    check_names("drafters", [*hf_rows, *(spec.name for spec in specs)])
    target = load_target(options)
    drafting = load_engines(specs, target, options.max_nodes, options.batch_size)
    hf_engines = {name: hf_engine(target, words) for name, words in hf_rows.items()}
    engines: dict[str, AnyEngine] = {VANILLA: drafting[VANILLA], **hf_engines, **drafting}
    parts = DecodedFolder(options.output)
    evaluation = decode_and_judge(options, target, engines, benchmarks, console, parts)
    if evaluation is None:
        return
    with on_interrupt(lambda: parts.resume_hint(parts.kept)):
        evaluation = replace(evaluation, options=evaluation.options | hf_rows)
        write_answers(options.output, evaluation, options.batch_size, target.fingerprint()["tokenizer_hash"])
        facts = {"seed": options.seed, "command": own_command()}
        samples = sample_answers(replace(evaluation, benchmarks=sampled), engines, target, generation_settings(options))
        described = describe_run(options, target)
        described["settings"] |= {"benchmarks": options.benchmarks, CHECKSUMS: checksums(benchmarks)}
        described["settings"] |= {PROMPTS: parts.settings["prompts"], LOADED: loaded_checksums(parts.settings["files"])}
        report = build_report(evaluation, **described, **facts, samples=samples)
        show_report(console, options.output, report)
    parts.clear()


def main(arguments: Sequence[str] | None = None) -> int:
    return exit_status(lambda: run(parse_options(__doc__, arguments, scored=True)))


if __name__ == "__main__":
    sys.exit(main())
