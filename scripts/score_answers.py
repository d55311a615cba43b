"""Score recorded answers of a drafter against a baseline's: β, γ and how many texts are equal.

    python scripts/score_answers.py --answers ctc.jsonl --baseline vanilla.jsonl --questions mt_bench.jsonl

Both files are FastChat JSONL with, per turn, steps (`idxs`, counted from 0, or our `decoding_steps`),
`new_tokens` and `wall_time`. Prints a table, writes nothing. With the questions it has a row per category, and where
answers are scored (GSM8K, summaries, HumanEval with --run_code) a column with the score of the drafter's.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from draft_heads.configs.command_line import exit_status, parse_with_config

from draft_heads.data.text.benchmarks import Question
from draft_heads.inference.evaluation.answer_files import (
    Answer,
    QuestionKey,
    check_one_benchmark,
    read_answers,
    some,
)
from draft_heads.inference.evaluation.scores import TITLES, Scorer, mean_scores
from draft_heads.scripts.decoding_options import answered_questions, script_parser

HEADER = ("category", "questions", "β (steps = idxs)", "β (steps = idxs + 1)", "γ", "equal texts")


@dataclass
class AnswerScore:
    """Answers of a drafter, each with a baseline's to the same question; ratios are None without a denominator."""

    pairs: list[tuple[Answer, Answer]] = field(default_factory=list)
    scores: list[dict[str, float]] = field(default_factory=list)  # of the drafter's answers that are scored

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
    questions: Sequence[Question] | None = None,
    run_code: bool = False,
) -> dict[str | None, AnswerScore]:
    """Scores of the whole file (key None) and, with `questions`, of each category in order of appearance.

    run_code: whether code of the answers may be run on this machine

    Ratios are of totals: gamma weighs every token equally, unlike a mean of per-question speeds.
    """
    rule = "both files must answer the same questions"
    if lacking := sorted((id_ for _, id_ in answers.keys() - baseline.keys()), key=str):
        raise ValueError(f"{rule}; the baseline lacks {some(lacking)}")
    if extra := sorted((id_ for _, id_ in baseline.keys() - answers.keys()), key=str):
        raise ValueError(f"{rule}; only the baseline has {some(extra)}")
    asked = {question.question_id: question for question in questions or ()}
    if questions is not None:
        check_one_benchmark(answers)
        if missing := [id_ for _, id_ in answers if id_ not in asked]:
            raise ValueError(f"every answered question must be in the questions file; it lacks {some(missing)}")
    for key, answer in answers.items():
        if len(answer.turns) != (others := len(baseline[key].turns)):
            raise ValueError(
                f"both files must answer the same turns; of question {answer.question_id!r} the answers have "
                f"{len(answer.turns)}, the baseline {others}; leave the question out of both"
            )
    scores: dict[str | None, AnswerScore] = {None: AnswerScore()}
    scorer = Scorer([asked[answer.question_id] for answer in answers.values()] if asked else [], run_code)
    for key, answer in answers.items():
        question, found = asked.get(answer.question_id), dict[str, float]()
        if question is not None and len(answer.turns) == len(question.turns):
            found = scorer(question, answer.turns[-1].text)
        for group in {None, question.group if question is not None else None}:
            score = scores.setdefault(group, AnswerScore())
            score.pairs.append((answer, baseline[key]))
            score.scores.append(found)
    return scores


def format_table(scores: dict[str | None, AnswerScore]) -> str:
    """Aligned columns, categories first and the whole file last."""
    scored = [name for name, value in mean_scores(scores[None].scores).items() if value is not None]
    rows = [(*HEADER, *(TITLES[name] for name in scored))]
    for category in [*(key for key in scores if key is not None), None]:
        score = scores[category]
        ratios = ["-" if x is None else f"{x:.2f}" for x in (score.beta_idxs, score.beta, score.gamma)]
        questions = len(score.pairs)
        means = mean_scores(score.scores)
        figures = ["-" if (value := means[name]) is None else f"{value:.1%}" for name in scored]
        rows.append((category or "all", str(questions), *ratios, f"{score.equal_texts}/{questions}", *figures))
    widths = [max(map(len, column)) for column in zip(*rows)]
    return "\n".join("  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in rows)


def run(arguments: list[str] | None) -> None:
    parser = script_parser(__doc__)
    parser.add_argument("--answers", type=Path, help="the drafter's answers, FastChat JSONL")
    parser.add_argument("--baseline", type=Path, help="the target's own answers to the same questions")
    parser.add_argument("--questions", help="what was answered, a known benchmark or a file: categories and scores")
    parser.add_argument(
        "--run_code", action="store_true", help="run the code of answers here, under limits, to score it"
    )
    options = parse_with_config(parser, arguments, ("answers", "baseline"))
    answers, baseline, asked = read_answers(options.answers), read_answers(options.baseline), None
    if options.questions:
        name, asked = answered_questions(options.questions, answers)
        for reason in Scorer(asked, options.run_code).unscored:
            print(f"{name}: {reason}")
    print(format_table(score_answers(answers, baseline, asked, options.run_code)))


def main(arguments: list[str] | None = None) -> int:
    return exit_status(lambda: run(arguments))


if __name__ == "__main__":
    sys.exit(main())
