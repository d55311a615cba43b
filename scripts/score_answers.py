"""Score recorded answers of a drafter against a baseline's: β, γ and how many texts are equal.

    python scripts/score_answers.py --answers ctc.jsonl --baseline vanilla.jsonl --questions mt_bench.jsonl

Both files are FastChat JSONL with, per turn, steps (`idxs`, counted from 0, or our `decoding_steps`),
`new_tokens` and `wall_time`. Prints a table, writes nothing.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path

from draft_heads.configs.command_line import exit_status, parse_with_config

from draft_heads.data.text.benchmarks import load_benchmark
from draft_heads.inference.evaluation.answer_files import (
    Answer,
    QuestionId,
    QuestionKey,
    check_one_benchmark,
    read_answers,
    some,
)
from draft_heads.scripts.decoding_options import script_parser

HEADER = ("category", "questions", "β (steps = idxs)", "β (steps = idxs + 1)", "γ", "equal texts")


@dataclass
class AnswerScore:
    """Answers of a drafter, each with a baseline's to the same question; ratios are None without a denominator."""

    pairs: list[tuple[Answer, Answer]] = field(default_factory=list)

    def total(self, figure: str, baseline: bool = False) -> float:
        """The sum of one figure of `AnsweredTurn` over all turns, the drafter's or the baseline's."""
        return sum(getattr(turn, figure) for pair in self.pairs for turn in pair[baseline].turns)

    @property
    def equal_texts(self) -> int:
        """Questions whose turns are all those of the baseline."""
        texts = [[[turn.text for turn in answer.turns] for answer in pair] for pair in self.pairs]
        return sum(own == wanted for own, wanted in texts)

    @property
    def beta(self) -> float | None:
        """New tokens / target steps (idxs + 1 per turn)."""
        steps = self.total("steps")
        return self.total("new_tokens") / steps if steps else None

    @property
    def beta_idxs(self) -> float | None:
        """New tokens / idxs: the prefill of every turn left out."""
        idxs = self.total("steps") - sum(len(answer.turns) for answer, _ in self.pairs)
        return self.total("new_tokens") / idxs if idxs > 0 else None

    @property
    def gamma(self) -> float | None:
        """Baseline seconds per token / drafter seconds per token, each over all tokens of the file."""
        tokens, seconds = self.total("new_tokens"), self.total("wall_time")
        wanted = self.total("new_tokens", baseline=True)
        if not (tokens and seconds and wanted):
            return None
        return (self.total("wall_time", baseline=True) / wanted) / (seconds / tokens)


def score_answers(
    answers: dict[QuestionKey, Answer],
    baseline: dict[QuestionKey, Answer],
    categories: dict[QuestionId, str | None] | None = None,
) -> dict[str | None, AnswerScore]:
    """Scores of the whole file (key None) and, with `categories`, of each category in order of appearance.

    Ratios are of totals: gamma weighs every token equally, unlike a mean of per-question speeds.
    """
    rule = "both files must answer the same questions"
    if lacking := sorted((id_ for _, id_ in answers.keys() - baseline.keys()), key=str):
        raise ValueError(f"{rule}; the baseline lacks {some(lacking)}")
    if extra := sorted((id_ for _, id_ in baseline.keys() - answers.keys()), key=str):
        raise ValueError(f"{rule}; only the baseline has {some(extra)}")
    if categories is not None:
        check_one_benchmark(answers)
        if missing := [id_ for _, id_ in answers if id_ not in categories]:
            raise ValueError(f"every answered question must be in the questions file; it lacks {some(missing)}")
    for key, answer in answers.items():
        if len(answer.turns) != (others := len(baseline[key].turns)):
            raise ValueError(
                f"both files must answer the same turns; of question {answer.question_id!r} the answers have "
                f"{len(answer.turns)}, the baseline {others}; leave the question out of both"
            )
    scores: dict[str | None, AnswerScore] = {None: AnswerScore()}
    for key, answer in answers.items():
        for group in {None, categories[answer.question_id] if categories is not None else None}:
            scores.setdefault(group, AnswerScore()).pairs.append((answer, baseline[key]))
    return scores


def format_table(scores: dict[str | None, AnswerScore]) -> str:
    """Aligned columns, categories first and the whole file last."""
    rows = [HEADER]
    for category in [*(key for key in scores if key is not None), None]:
        score = scores[category]
        ratios = ["-" if x is None else f"{x:.2f}" for x in (score.beta_idxs, score.beta, score.gamma)]
        questions = len(score.pairs)
        rows.append((category or "all", str(questions), *ratios, f"{score.equal_texts}/{questions}"))
    widths = [max(map(len, column)) for column in zip(*rows)]
    return "\n".join("  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in rows)


def run(arguments: list[str] | None) -> None:
    parser = script_parser(__doc__)
    parser.add_argument("--answers", type=Path, help="the drafter's answers, FastChat JSONL")
    parser.add_argument("--baseline", type=Path, help="the target's own answers to the same questions")
    parser.add_argument("--questions", type=Path, help="questions with categories, for one row per category")
    options = parse_with_config(parser, arguments, ("answers", "baseline"))
    asked = load_benchmark("questions", str(options.questions)) if options.questions else None
    categories = {question.question_id: question.category for question in asked} if asked else None
    print(format_table(score_answers(read_answers(options.answers), read_answers(options.baseline), categories)))


def main(arguments: list[str] | None = None) -> int:
    return exit_status(lambda: run(arguments))


if __name__ == "__main__":
    sys.exit(main())
