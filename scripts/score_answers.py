"""Score recorded answers of a drafter against a baseline's: β, γ and how many texts are equal.

    python scripts/score_answers.py --answers ctc.jsonl --baseline vanilla.jsonl --questions mt_bench.jsonl

Both files are FastChat JSONL with, per turn, steps (`idxs`, counted from 0, or our `decoding_steps`),
`new_tokens` and `wall_time`. Prints a table, writes nothing.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from draft_heads.inference.evaluation.answers import AnswerScore, QuestionId, read_answers, read_jsonl, score_answers

HEADER = ("category", "questions", "β (steps = idxs)", "β (steps = idxs + 1)", "γ", "equal texts")


def parse_options(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--answers", type=Path, required=True, help="the drafter's answers, FastChat JSONL")
    parser.add_argument("--baseline", type=Path, required=True, help="the baseline's answers to the same questions")
    parser.add_argument("--questions", type=Path, help="questions with categories, for one row per category")
    return parser.parse_args(arguments)


def read_categories(path: Path) -> dict[QuestionId, str | None]:
    """Category by question id; rows without an id (GSM8K) are numbered from 0, as recorded files do."""
    return {row.get("question_id", index): row.get("category") for index, (_, row) in enumerate(read_jsonl(path))}


def format_table(scores: dict[str | None, AnswerScore]) -> str:
    """Aligned columns, categories first and the whole file last."""
    rows = [HEADER]
    for category in [*(key for key in scores if key is not None), None]:
        score = scores[category]
        ratios = (score.beta_idxs, score.beta, score.gamma)
        rows.append(
            (
                category or "all",
                str(score.questions),
                *("-" if ratio is None else f"{ratio:.2f}" for ratio in ratios),
                f"{score.equal_texts}/{score.questions}",
            )
        )
    widths = [max(map(len, column)) for column in zip(*rows)]
    lines = (
        [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:]))] for row in rows
    )
    return "\n".join("  ".join(line) for line in lines)


def main(arguments: list[str] | None = None) -> int:
    options = parse_options(arguments)
    try:
        categories = read_categories(options.questions) if options.questions else None
        scores = score_answers(read_answers(options.answers), read_answers(options.baseline), categories)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(format_table(scores))
    return 0


if __name__ == "__main__":
    sys.exit(main())
