"""Answer files in FastChat's JSONL form: what `scripts/evaluate.py` writes and other projects record.

A turn's steps are counted in one of two ways. Our own files say `decoding_steps`: target forwards, the
prefill included. Files recorded by the CTC-drafter authors say `idxs`, which counts from 0: `idxs` 74 is 75
steps. Here a turn always carries target steps; `idxs` is `steps - 1`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

QuestionId = int | str


@dataclass(frozen=True)
class AnsweredTurn:
    """One answer: its text, target steps (prefill included), new tokens (EOS included) and seconds."""

    text: str
    steps: int
    new_tokens: int
    wall_time: float


@dataclass(frozen=True)
class Answer:
    """All answered turns of one question."""

    question_id: QuestionId
    turns: tuple[AnsweredTurn, ...]
    category: str | None = None

    @property
    def texts(self) -> tuple[str, ...]:
        return tuple(turn.text for turn in self.turns)


# ----------------------------------------------------------------------------------------------------
# Reading


def read_jsonl(path: Path) -> list[tuple[int, dict[str, Any]]]:
    """(line number, object) of every line that is not blank; ValueError names file, line and reason."""
    rows: list[tuple[int, dict[str, Any]]] = []
    try:
        lines = path.read_text(encoding="utf-8").split("\n")  # splitlines also cuts at U+2028
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror}); give a JSONL file") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: must be UTF-8, byte {error.start} is not; re-encode it") from None
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}:{number}: not JSON ({error.msg} at column {error.colno})") from None
        if not isinstance(row, dict):
            raise ValueError(f"{path}:{number}: a row must be a JSON object, got {type(row).__name__}")
        rows.append((number, row))
    if not rows:
        raise ValueError(f"{path}: has no rows; give a JSONL file with one object a line")
    return rows


def read_answers(path: Path) -> dict[QuestionId, Answer]:
    """Answers by question id, `choices[0]` of each row; ValueError names file, line and reason."""
    answers: dict[QuestionId, Answer] = {}
    for number, row in read_jsonl(path):
        try:
            answer = _parse_answer(row)
        except ValueError as error:
            raise ValueError(f"{path}:{number}: {error}") from None
        if answer.question_id in answers:
            raise ValueError(f"{path}:{number}: question_id {answer.question_id!r} appears a second time")
        answers[answer.question_id] = answer
    return answers


def _parse_answer(row: dict[str, Any]) -> Answer:
    question_id = row.get("question_id")
    if isinstance(question_id, bool) or not isinstance(question_id, (int, str)):
        raise ValueError(f"question_id must be a number or a string, got {question_id!r}")
    choices = row.get("choices")
    if not isinstance(choices, list) or not choices or not isinstance(choices[0], dict):
        raise ValueError("choices must be a list that starts with an object")
    choice = choices[0]
    if "decoding_steps" not in choice and "idxs" not in choice:
        raise ValueError("choices[0] must have decoding_steps or idxs (steps per turn), has neither")
    texts = _column(choice, "turns", (str,))
    if "decoding_steps" in choice:
        steps = _column(choice, "decoding_steps", (int,), len(texts))
    else:
        steps = [index + 1 for index in _column(choice, "idxs", (int,), len(texts))]
    new_tokens = _column(choice, "new_tokens", (int,), len(texts))
    wall_time = _column(choice, "wall_time", (int, float), len(texts))
    category = row.get("category")
    turns = tuple(AnsweredTurn(*turn) for turn in zip(texts, steps, new_tokens, wall_time))
    return Answer(question_id, turns, category if isinstance(category, str) else None)


def _column(
    choice: dict[str, Any], name: str, kinds: tuple[type, ...], turns: int | None = None
) -> list[Any]:
    """The list `choice[name]`, one entry a turn, each of one of `kinds` and not negative."""
    values, where = choice.get(name), f"choices[0].{name}"
    if not isinstance(values, list):
        raise ValueError(f"{where} must be a list with one entry a turn, got {type(values).__name__}")
    if turns is not None and len(values) != turns:
        raise ValueError(f"{where} must have one entry a turn: {turns} turns, {len(values)} entries")
    for value in values:
        if isinstance(value, bool) or not isinstance(value, kinds):
            raise ValueError(
                f"{where} must hold {' or '.join(kind.__name__ for kind in kinds)}, got {value!r}"
            )
        if isinstance(value, (int, float)) and not value >= 0:
            raise ValueError(f"{where} must not be negative, got {value!r}")
    return values


# ----------------------------------------------------------------------------------------------------
# Scoring


@dataclass
class AnswerScore:
    """Totals over questions of one drafter against a baseline; ratios are None without a denominator."""

    questions: int = 0
    turns: int = 0
    equal_texts: int = 0
    steps: int = 0
    tokens: int = 0
    seconds: float = 0.0
    baseline_tokens: int = 0
    baseline_seconds: float = 0.0

    def add(self, answer: Answer, baseline: Answer) -> None:
        """Count one question."""
        self.questions += 1
        self.turns += len(answer.turns)
        self.equal_texts += answer.texts == baseline.texts
        self.steps += sum(turn.steps for turn in answer.turns)
        self.tokens += sum(turn.new_tokens for turn in answer.turns)
        self.seconds += sum(turn.wall_time for turn in answer.turns)
        self.baseline_tokens += sum(turn.new_tokens for turn in baseline.turns)
        self.baseline_seconds += sum(turn.wall_time for turn in baseline.turns)

    @property
    def beta(self) -> float | None:
        """New tokens / target steps (idxs + 1 a turn)."""
        return self.tokens / self.steps if self.steps else None

    @property
    def beta_idxs(self) -> float | None:
        """New tokens / idxs: the prefill of every turn left out."""
        idxs = self.steps - self.turns
        return self.tokens / idxs if idxs > 0 else None

    @property
    def gamma(self) -> float | None:
        """Baseline seconds per token / drafter seconds per token, each over all tokens of the file."""
        if not (self.tokens and self.seconds and self.baseline_tokens):
            return None
        return (self.baseline_seconds / self.baseline_tokens) / (self.seconds / self.tokens)


def score_answers(
    answers: dict[QuestionId, Answer],
    baseline: dict[QuestionId, Answer],
    categories: dict[QuestionId, str | None] | None = None,
) -> dict[str | None, AnswerScore]:
    """Scores of the whole file (key None) and, with `categories`, of each category in order of appearance.

    Ratios are of totals: gamma weighs every token the same, a mean of per-question speeds would not.
    """
    _same_questions("the baseline", answers, baseline)
    if categories is not None and (missing := [key for key in answers if key not in categories]):
        raise ValueError(f"every answered question must be in the questions file; it lacks {_some(missing)}")
    scores: dict[str | None, AnswerScore] = {None: AnswerScore()}
    for key, answer in answers.items():
        groups = {None, categories[key]} if categories is not None else {None}
        for group in groups:
            scores.setdefault(group, AnswerScore()).add(answer, baseline[key])
    return scores


def _same_questions(name: str, answers: Iterable[QuestionId], other: Iterable[QuestionId]) -> None:
    wanted, got = set(answers), set(other)
    if missing := sorted(wanted - got, key=str):
        raise ValueError(f"both files must answer the same questions; {name} lacks {_some(missing)}")
    if extra := sorted(got - wanted, key=str):
        raise ValueError(f"both files must answer the same questions; only {name} has {_some(extra)}")


def _some(keys: Sequence[QuestionId]) -> str:
    listed = ", ".join(repr(key) for key in keys[:5])
    return f"{listed} and {len(keys) - 5} more" if len(keys) > 5 else listed
