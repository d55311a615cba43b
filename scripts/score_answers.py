"""Score recorded answers of a drafter against a baseline's: β, γ and how many texts are equal.

    python scripts/score_answers.py --answers ctc.jsonl --baseline vanilla.jsonl --questions mt_bench.jsonl

Both files are FastChat JSONL with, per turn, steps (`idxs`, counted from 0, or our `decoding_steps`),
`new_tokens` and `wall_time`. Prints a table. With the questions it has a row per category (without γ if
answers were decoded together, which share their time), and where answers are scored (GSM8K, summaries, HumanEval
with --run_code) a column with the score of the drafter's.
--json FILE writes the rows of report.json that follow from the files, with intervals; of our own files also acceptance
by position, β by output position, context length and turn, and accepted tokens by source.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from draft_heads.configs.command_line import exit_status, parse_with_config

from draft_heads.data.common.files import checksum
from draft_heads.data.text.benchmarks import Question, questions_checksum
from draft_heads.inference.evaluation.answer_files import (
    Answer,
    QuestionKey,
    check_one_benchmark,
    read_answers,
    some,
)
from draft_heads.inference.evaluation.metrics import score_figures, turn_figures, without_shared_seconds
from draft_heads.inference.evaluation.report import write_json
from draft_heads.inference.evaluation.scores import SCORES, Scorer, mean_scores
from draft_heads.scripts.decoding_options import answered_questions, check_code, script_parser

logger = logging.getLogger(__name__)

HEADER = ("category", "questions", "β (steps = idxs)", "β (steps = idxs + 1)", "γ", "equal texts")


@dataclass
class AnswerScore:
    """Answers of a drafter, each with a baseline's to the same question; ratios are None without a denominator."""

    pairs: list[tuple[Answer, Answer]] = field(default_factory=list)
    scores: list[dict[str, float]] = field(default_factory=list)  # of the drafter's answers that are scored
    seed: int = 0  # of the intervals

    @cached_property
    def figures(self) -> dict[str, Any]:
        """A report's figures that follow from the answers; see `metrics.turn_figures`."""
        turns, plain = ([turn for pair in self.pairs for turn in pair[which].turns] for which in (0, 1))
        sources = next((answer.sources for answer, _ in self.pairs if answer.sources), None)
        return turn_figures(turns, plain, sources, self.seed)

    def row(self, benchmark: str, category: str | None, drafter: str) -> dict[str, Any]:
        """The row of report.json; `lossless` is not judged here."""
        row = {"benchmark": benchmark, "category": category, "drafter": drafter, "questions": len(self.pairs)}
        row |= {**self.figures, "lossless": None, **score_figures(self.scores)}
        together = any(answer.batch_size > 1 for pair in self.pairs for answer in pair)
        row = without_shared_seconds(row) if together else row
        return row | ({"gamma": None, "gamma_ci95": None} if self.other_batches else {})

    @property
    def other_batches(self) -> str:
        """How many texts at once the answers and the baseline were decoded, where these are not the same."""
        sizes = [sorted({answer.batch_size for answer in side}) for side in zip(*self.pairs)]
        alike = all(own.batch_size == plain.batch_size for own, plain in self.pairs)
        return "" if alike else " and ".join(" or ".join(map(str, each)) for each in sizes)

    @property
    def equal_texts(self) -> int:
        """Questions whose turns are all those of the baseline."""
        texts = [[[turn.text for turn in answer.turns] for answer in pair] for pair in self.pairs]
        return sum(own == wanted for own, wanted in texts)

    @property
    def beta_idxs(self) -> float | None:
        """New tokens / idxs: the prefill of every turn left out."""
        tokens, steps, turns = (int(self.figures[key]) for key in ("new_tokens", "target_steps", "turns"))
        return tokens / (steps - turns) if steps > turns else None


def score_answers(
    answers: dict[QuestionKey, Answer],
    baseline: dict[QuestionKey, Answer],
    questions: Sequence[Question] | None = None,
    run_code: bool = False,
    seed: int = 0,
) -> dict[str | None, AnswerScore]:
    """Scores of the whole file (key None) and, with `questions`, of each category in order of appearance.

    run_code: whether code of the answers may be run on this machine
    seed: of the intervals

    Ratios are of totals: gamma weighs every token equally, unlike a mean of per-question speeds.
    """
    rule = "both files must answer the same questions"
    named = [", ".join(sorted({str(benchmark) for benchmark, _ in one})) for one in (answers, baseline)]
    if named[0] != named[1]:
        rule += f" of the same benchmarks; the answers name {named[0]}, the baseline {named[1]}; name them alike"
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
    scores: dict[str | None, AnswerScore] = {None: AnswerScore(seed=seed)}
    short = [key for key, one in answers.items() if asked and len(one.turns) < len(asked[one.question_id].turns)]
    if short:
        left = f"{some([id_ for _, id_ in short])} ({len(short):,} of {len(answers):,})"
        logger.warning("answers that lack a turn of their question have no score, and β and γ of their turns: %s", left)
    scorer = Scorer([asked[answer.question_id] for answer in answers.values()] if asked else [], run_code)
    for key, answer in answers.items():
        question, found = asked.get(answer.question_id), dict[str, float]()
        if question is not None and len(answer.turns) == len(question.turns):
            last = answer.turns[-1]
            found = scorer(question, last.text, last.in_thought, last.finish_reason)
        for group in {None, question.group if question is not None else None}:
            score = scores.setdefault(group, AnswerScore(seed=seed))
            score.pairs.append((answer, baseline[key]))
            score.scores.append(found)
    return scores


def with_names_of(answers: dict[QuestionKey, Answer], baseline: dict[QuestionKey, Answer]) -> dict[QuestionKey, Answer]:
    """The baseline, its benchmark named as the answers name it: where each file is of one, or one file names none.

    As it is where an id then would not say which question is meant.
    """
    names = {id_: benchmark for benchmark, id_ in answers}
    own, others = ({benchmark for benchmark, _ in one} for one in (answers, baseline))
    alike = len(own) == len(others) == 1 or {None} in (own, others)
    if not alike or len(names) < len(answers) or len({id_ for _, id_ in baseline}) < len(baseline):
        return baseline
    renamed = {}
    for (_, id_), answer in baseline.items():
        key = names.get(id_, next(iter(own))), id_
        turns = tuple(replace(turn, question=key) for turn in answer.turns)
        renamed[key] = replace(answer, benchmark=key[0], turns=turns)
    return renamed


def report_rows(
    answers: dict[QuestionKey, Answer],
    baseline: dict[QuestionKey, Answer],
    questions: Sequence[Question] | None,
    run_code: bool,
    seed: int,
    name: str,
    asked: str = "",
) -> list[dict[str, Any]]:
    """The rows of report.json that follow from the answers: of each benchmark, with `questions` also of each category.

    name: of the drafter, and without `asked` of the benchmark, where the answers say neither
    asked: what the questions are called
    """
    found = []
    for benchmark in dict.fromkeys(benchmark for benchmark, _ in answers):
        own, plain = ({key: one[key] for key in one if key[0] == benchmark} for one in (answers, baseline))
        drafter = next((answer.model for answer in own.values() if answer.model), name)
        for category, score in score_answers(own, plain, questions, run_code, seed).items():
            found.append(score.row(benchmark or asked or name, category, drafter))
    return found


def format_table(scores: dict[str | None, AnswerScore]) -> str:
    """Aligned columns, categories first and the whole file last."""
    scored = [name for name, value in mean_scores(scores[None].scores).items() if value is not None]
    rows = [(*HEADER, *(SCORES[name] for name in scored))]
    for category in [*(key for key in scores if key is not None), None]:
        score = scores[category]
        shown = score.row("", category, "")
        given = score.beta_idxs, shown["beta"], shown["gamma"]
        ratios = ["-" if x is None else f"{x:.2f}" for x in given]
        questions = len(score.pairs)
        means = mean_scores(score.scores)
        figures = ["-" if (value := means[name]) is None else f"{value:.1%}" for name in scored]
        rows.append((category or "all", str(questions), *ratios, f"{score.equal_texts}/{questions}", *figures))
    widths = [max(map(len, column)) for column in zip(*rows)]
    return "\n".join("  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in rows)


def check_writable(file: Path) -> None:
    """ValueError unless --json can be written: none yet, or what an earlier call wrote, in a folder."""
    if file.is_dir() or not file.parent.is_dir():
        found = f"{file} is a folder" if file.is_dir() else f"{file.parent} is none"
        raise ValueError(f"--json names a file in a folder; {found}; name another file, or make the folder")
    if file.exists() and not (file.is_file() and _is_own(file)):
        raise ValueError(f"--json replaces none but its own files; {file} is another; name a new one, or remove it")


def _is_own(file: Path) -> bool:
    with suppress(ValueError):  # UnicodeDecodeError is one
        content = json.loads(file.read_text(encoding="utf-8"))
        return isinstance(content, dict) and content.keys() == {"settings", "results"}
    return False


def run(arguments: list[str] | None) -> None:
    parser = script_parser(__doc__)
    parser.add_argument("--answers", type=Path, help="the drafter's answers, FastChat JSONL")
    parser.add_argument("--baseline", type=Path, help="the target's own answers to the same questions")
    parser.add_argument("--questions", help="what was answered: a known benchmark or [NAME=]FILE")
    parser.add_argument(
        "--run_code", action="store_true", help="run the code of answers here, under limits, to score it"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows of report.json that follow from them")
    parser.add_argument("--seed", type=int, help="of the bootstrap over questions, for --json (default 0)")
    options = parse_with_config(parser, arguments, ("answers", "baseline"))
    if options.run_code and not options.questions:
        raise ValueError("--run_code scores answers to --questions, which is not given; give both or neither")
    if options.seed is not None and not options.json:
        raise ValueError(f"--seed is of the intervals in --json, which is not given; got {options.seed}; leave it out")
    if options.json:
        check_writable(options.json)
    answers, asked, name = read_answers(options.answers), None, ""
    baseline = with_names_of(answers, read_answers(options.baseline))
    if options.questions:
        name, asked = answered_questions(options.questions, answers)
        check_code(options.run_code, asked)
        for reason in Scorer(asked, options.run_code).unscored:
            print(f"{name}: {reason}")
    scores = score_answers(answers, baseline, asked, options.run_code)
    print(format_table(scores))
    if sizes := scores[None].other_batches:
        print(f"γ is left out: answers and baseline were decoded {sizes} at once, and such speeds do not compare")
    if options.json:
        named = "" if name == "questions" else name  # which neither the answers nor --questions NAME=FILE say
        rows = report_rows(answers, baseline, asked, options.run_code, options.seed or 0, options.answers.stem, named)
        files = {"answers": options.answers, "baseline": options.baseline}
        settings = {name: file.name for name, file in files.items()}
        settings |= {f"{name}_checksum": checksum(file) for name, file in files.items()} | {"seed": options.seed or 0}
        if asked is not None:
            settings |= {"questions": Path(options.questions).name, "questions_checksum": questions_checksum(asked)}
            settings["run_code"] = options.run_code
        write_json(options.json, {"settings": settings, "results": rows})


def main(arguments: list[str] | None = None) -> int:
    return exit_status(lambda: run(arguments))


if __name__ == "__main__":
    sys.exit(main())
