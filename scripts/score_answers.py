"""Score recorded answers of a drafter against a baseline's: β, γ and how many texts are equal.

    python scripts/score_answers.py --answers ctc.jsonl --baseline vanilla.jsonl --questions mt_bench.jsonl

Both files are FastChat JSONL with, per turn, steps (`idxs`, counted from 0, or our `decoding_steps`),
`new_tokens` and `wall_time`. Prints a table, writes nothing.
"""

from __future__ import annotations

import sys
from pathlib import Path

from draft_heads.inference.evaluation.answers import AnswerScore, QuestionId, read_answers, read_jsonl, score_answers
from draft_heads.scripts.decoding_options import script_parser

HEADER = ("category", "questions", "β (steps = idxs)", "β (steps = idxs + 1)", "γ", "equal texts")


def read_categories(path: Path) -> dict[QuestionId, str | None]:
    """Category by question id; rows without an id (GSM8K) are numbered from 0, as recorded files do."""
    return {row.get("question_id", index): row.get("category") for index, (_, row) in enumerate(read_jsonl(path))}


def format_table(scores: dict[str | None, AnswerScore]) -> str:
    """Aligned columns, categories first and the whole file last."""
    rows = [HEADER]
    for category in [*(key for key in scores if key is not None), None]:
        score = scores[category]
        ratios = ["-" if x is None else f"{x:.2f}" for x in (score.beta_idxs, score.beta, score.gamma)]
        equal = f"{score.equal_texts}/{score.questions}"
        rows.append((category or "all", str(score.questions), *ratios, equal))
    widths = [max(map(len, column)) for column in zip(*rows)]
    return "\n".join("  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in rows)


def main(arguments: list[str] | None = None) -> int:
    parser = script_parser(__doc__, config=False)
    parser.add_argument("--answers", type=Path, required=True, help="the drafter's answers, FastChat JSONL")
    parser.add_argument("--baseline", type=Path, required=True, help="the target's own answers to them")
    parser.add_argument("--questions", type=Path, help="questions with categories, for one row per category")
    options = parser.parse_args(arguments)
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
