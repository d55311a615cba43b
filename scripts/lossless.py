"""Check that drafters are lossless: every answer against transformers' own `generate`, vanilla's included.

    python scripts/lossless.py --target DIR --drafters ctc=RUN/head --benchmarks mt_bench=mt_bench.jsonl \\
        --output runs/lossless --dtype float64

Writes lossless.json to --output. Exit status 0 only when no difference is unexplained, 1 when one is, 2 when
it cannot run or nothing could be compared. A near tie counts as explained: in the next higher precision the two logits
are almost equal. A turn whose prompt does not fit the context, or which the chat template refuses, is skipped, with
those after it: it is counted aloud and changes no exit status while other turns were compared. Where every answer is
equal, and one drafter skipped more turns than another, the status is 1.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from typing import Any

from draft_heads.configs.command_line import exit_status

from rich.table import Table

from draft_heads.data.common.console import plain_console
from draft_heads.inference.evaluation.decoded import DecodedFolder, TurnRecord
from draft_heads.inference.evaluation.metrics import lossless_counts, shown_name
from draft_heads.inference.evaluation.report import check_output, environment, write_json
from draft_heads.inference.evaluation.report_text import WHY_SKIPPED
from draft_heads.inference.target.target import Target
from draft_heads.scripts.decoding_options import describe_run, drafter_specs, load_engines, load_target, parse_options
from draft_heads.scripts.evaluate import decode_and_judge, load_benchmarks

SHOWN = 5  # unexplained differences printed; lossless.json has all
CONTEXT_TOKENS = 20


def run(options: argparse.Namespace) -> bool:
    """True when no difference is unexplained."""
    console = plain_console()
    benchmarks = load_benchmarks(options)
    specs = drafter_specs(options.drafters)
    check_output(options.output, options.overwrite, "lossless.json")
    target = load_target(options)
    engines = load_engines(specs, target, options.max_nodes, options.batch_size)
    parts = DecodedFolder(options.output)
    evaluation = decode_and_judge(options, target, engines, benchmarks, console, parts, "lossless.json")
    if evaluation is None:
        return True  # the first process judges
    asked = sum(len(question.turns) for benchmark in benchmarks for question in benchmark.questions)
    results = []
    for name in evaluation.drafters:
        counts = lossless_counts([record for record in evaluation.records if record.drafter == name])
        figures = {"tokens": counts.tokens, "flips_per_1000_tokens": counts.flips_per_1000_tokens}
        named = {"drafter": name, "kind": evaluation.kinds.get(name), "lossy": name in evaluation.lossy}
        results.append({**named, "asked": asked, "skipped": asked - len(counts.judged), **counts.as_dict(), **figures})
    differences = [describe_difference(record, target) for record in evaluation.records if record.difference]
    measured = {"noise": finite(evaluation.noise), "results": results, "differences": differences}
    report = {**describe_run(options, target), **measured, "environment": environment(str(target.device))}
    write_json(options.output / "lossless.json", report)
    parts.clear()
    console.print(table(results))
    if skipped := max(row["skipped"] for row in results):
        console.print(
            f"{skipped} of {asked} turns were skipped and not compared: {WHY_SKIPPED}; the target has "
            f"{target.max_positions} positions",
            soft_wrap=True,
        )
    unexplained = [difference for difference in differences if not difference["near_tie"]]
    for difference in unexplained[:SHOWN]:
        console.print(sentence(difference))
    if len(unexplained) > SHOWN:
        console.print(f"… and {len(unexplained) - SHOWN} more")
    if uneven := len({row["skipped"] for row in results}) > 1 and not differences:
        console.print("Every answer is equal, and yet some drafters skipped more turns than others: these were lost.")
    console.print(f"  {options.output / 'lossless.json'}", soft_wrap=True)
    return not (unexplained or uneven)


def describe_difference(record: TurnRecord, target: Target) -> dict[str, Any]:
    """Where a turn first differs from the oracle's, with the text before it."""
    difference = record.difference
    assert difference is not None
    before = (*record.prompt, *record.generation.tokens[: difference.position])[-CONTEXT_TOKENS:]
    texts = {
        f"{name}_text": "(the answer has ended)" if token is None else target.tokenizer.decode([token])
        for name, token in (("expected", difference.expected), ("received", difference.received))
    }
    return {
        **{key: getattr(record, key) for key in ("drafter", "benchmark", "question_id")},
        "turn": record.turn + 1,
        **{key: getattr(difference, key) for key in ("position", "near_tie", "expected", "received")},
        **texts,
        **{name: finite(getattr(difference, name)) for name in ("gap", "noise")},
        "context": target.tokenizer.decode(before),
    }


def finite(value: float | None) -> float | None:
    """The value; None where JSON has no number for it: a logits processor excluded one of two tokens."""
    return value if value is not None and math.isfinite(value) else None


def sentence(difference: dict[str, Any]) -> str:
    """One unexplained difference for the terminal."""
    sizes = {name: difference[name] for name in ("gap", "noise") if difference[name] is not None}
    size = "".join(f", {name} {value:.3g}" for name, value in sizes.items())
    return (
        f"{difference['drafter']}: {difference['benchmark']} question {difference['question_id']}, turn "
        f"{difference['turn']}, new token {difference['position']}: expected {difference['expected']} "
        f"{difference['expected_text']!r}, received {difference['received']} {difference['received_text']!r}"
        f"{size}\n    after {difference['context']!r}"
    )


def table(rows: Sequence[dict[str, Any]]) -> Table:
    """Counts per drafter."""
    shown = Table("drafter", "turns", "skipped", "identical", "near ties", "unexplained", "tokens", "flips per 1,000")
    for row in rows:
        keys = ("turns", "skipped", "identical_turns", "near_ties", "unexplained", "tokens")
        cells = [shown_name(row), *(str(row[key]) for key in keys), f"{row['flips_per_1000_tokens']:.2f}"]
        shown.add_row(*cells, style="red" if row["unexplained"] else None)
    return shown


def main(arguments: Sequence[str] | None = None) -> int:
    return exit_status(lambda: run(parse_options(__doc__, arguments)))


if __name__ == "__main__":
    sys.exit(main())
