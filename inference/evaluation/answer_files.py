"""Answer files in FastChat's JSONL form: what `scripts/evaluate.py` writes and other projects record.

A turn's steps are counted in one of two ways. Our own files say `decoding_steps`: target forwards, the
prefill included. Files recorded by the CTC-drafter authors say `idxs`, which counts from 0: `idxs` 74 is 75
steps. Here a turn always carries target steps; `idxs` is `steps - 1`.
"""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from draft_heads.data.common.files import write_text
from draft_heads.data.text.benchmarks import checked_id
from draft_heads.data.text.json_files import MalformedJson
from draft_heads.data.text.json_rows import read_rows
from draft_heads.inference.evaluation.decoded import TurnRecord
from draft_heads.inference.evaluation.evaluate import Evaluation
from draft_heads.inference.evaluation.metrics import accepted_by_source, shown_name
from draft_heads.inference.evaluation.report import PICTURES

logger = logging.getLogger(__name__)

QuestionId = int | str
QuestionKey = tuple[str | None, QuestionId]  # benchmark (None in files of other projects) and id


LENGTHS, ACCEPTED, PROMPTS = "accept_lengths_per_turn", "accepted_drafts_per_turn", "prompt_tokens"
BY_SOURCE, FINISH_REASONS, IN_THOUGHT = "accepted_by_source_per_turn", "finish_reasons", "in_thought"
TOKEN_IDS, TOKENIZER = "token_ids_per_turn", "tokenizer_hash"
"""What our own files say beside the counts that all have."""


@dataclass(frozen=True)
class AnsweredTurn:
    """One answer: its text, target steps (prefill included), new tokens (EOS included) and seconds.

    `in_thought` is as `TurnRecord` has it, `token_ids` are those that were written, EOS included; the other fields are
    those of `metrics.Turn`. What a file of another project does not say is empty.
    """

    text: str
    target_steps: int
    new_tokens: int
    wall_time: float
    question: QuestionKey = (None, 0)
    turn: int = 0
    accept_lengths: Sequence[int] = ()
    accepted: Sequence[int] = ()
    prompt_tokens: int = 0
    by_source: Mapping[int, int] = field(default_factory=dict)
    finish_reason: str = ""
    in_thought: bool = False
    token_ids: Sequence[int] = ()


@dataclass(frozen=True)
class Answer:
    """All answered turns of one question.

    benchmark   our files name it, because ids may repeat across benchmarks
    model       `model_id`, in our files the drafter as reports name it
    sources     names of the drafter's sources, which `AnsweredTurn.by_source` counts
    batch_size  texts that were decoded together
    tokenizer   the `tokenizer_hash` that `AnsweredTurn.token_ids` are of; None where a file has texts alone
    """

    question_id: QuestionId
    turns: tuple[AnsweredTurn, ...]
    benchmark: str | None = None
    model: str | None = None
    sources: tuple[str, ...] = ()
    batch_size: int = 1
    tokenizer: str | None = None

    @property
    def key(self) -> QuestionKey:
        return self.benchmark, self.question_id


def read_answers(path: Path) -> dict[QuestionKey, Answer]:
    """Answers by question, `choices[0]` of each row (a line counts further ones); ValueError names file, line and
    reason."""
    if not path.is_file():
        raise ValueError(f"{path}: cannot be read (no such file); give a JSONL file")
    answers: dict[QuestionKey, Answer] = {}
    several = 0
    for place, row in read_rows(str(path)):
        try:
            answer = _parse_answer(row)
            if answer.key in answers:
                raise ValueError(f"question_id {answer.question_id!r} appears a second time")
        except ValueError as error:
            raise ValueError(f"{path}, {place}: {error}") from None
        answers[answer.key] = answer
        several += len(row["choices"]) > 1
    if several:
        logger.warning("%s: the first of several choices is read, of %d questions", path, several)
    return answers


def _parse_answer(row: Any) -> Answer:
    if isinstance(row, MalformedJson):
        raise ValueError(str(row))
    if not isinstance(row, dict):
        raise ValueError(f"a row must be a JSON object, got {type(row).__name__}")
    question_id = checked_id(row.get("question_id"))
    choices = row.get("choices")
    if not isinstance(choices, list) or not choices or not isinstance(choices[0], dict):
        raise ValueError("choices must be a list that starts with an object")
    choice = choices[0]
    if "decoding_steps" not in choice and "idxs" not in choice:
        raise ValueError("choices[0] must have decoding_steps or idxs (steps per turn), has neither")
    texts = _column(choice, "turns", str)
    if not texts:
        raise ValueError("choices[0].turns must have a text or more, has none; leave the question out")
    counted, first = ("decoding_steps", 0) if "decoding_steps" in choice else ("idxs", 1)
    steps = [first + count for count in _column(choice, counted, int, len(texts))]
    new_tokens = _column(choice, "new_tokens", int, len(texts))
    wall_time = _column(choice, "wall_time", int | float, len(texts))
    names = "benchmark", "model_id", TOKENIZER
    benchmark, model, tokenizer = (row[key] if isinstance(row.get(key), str) else None for key in names)
    (batch_size,) = _checked([row.get("batch_size", 1)], "batch_size", int)
    counts = _column(choice, BY_SOURCE, dict, len(texts)) if BY_SOURCE in choice else [{}] * len(texts)
    ends = _column(choice, FINISH_REASONS, str, len(texts)) if FINISH_REASONS in choice else [""] * len(texts)
    thoughts = _column(choice, IN_THOUGHT, int, len(texts)) if IN_THOUGHT in choice else [0] * len(texts)
    own = [
        {
            **steps_of_turn,
            "by_source": dict(enumerate(_checked(list(count.values()), f"choices[0].{BY_SOURCE}", int))),
            "finish_reason": end,
            "in_thought": bool(thought),
            "token_ids": ids,
        }
        for steps_of_turn, count, end, thought, ids in zip(
            _steps(choice, steps, new_tokens), counts, ends, thoughts, _token_ids(choice, new_tokens)
        )
    ]
    turns = tuple(
        AnsweredTurn(*turn, question=(benchmark, question_id), turn=index, **own[index])
        for index, turn in enumerate(zip(texts, steps, new_tokens, wall_time))
    )
    sources = tuple(counts[0]) if counts else ()
    known = tokenizer if TOKEN_IDS in choice else None
    return Answer(question_id, turns, benchmark, model, sources, batch_size, known)


def _token_ids(choice: dict[str, Any], new_tokens: Sequence[int]) -> list[list[int]]:
    """The token ids of each turn; empty lists of a file that has none."""
    if TOKEN_IDS not in choice:
        return [[]] * len(new_tokens)
    ids = _column(choice, TOKEN_IDS, list, len(new_tokens))
    for one, count in zip(ids, new_tokens):
        if len(_checked(one, f"choices[0].{TOKEN_IDS}", int)) != count:
            raise ValueError(
                f"choices[0].{TOKEN_IDS} must be the new_tokens of each turn; got {len(one)} ids of a turn with "
                f"{count}; leave them out, and the text is tokenised"
            )
    return ids


def _steps(choice: dict[str, Any], steps: Sequence[int], new_tokens: Sequence[int]) -> list[dict[str, Any]]:
    """What each step of each turn did, as fields of `AnsweredTurn`; none of a file that does not say all of it."""
    if not {LENGTHS, ACCEPTED, PROMPTS} <= choice.keys():
        return [{}] * len(steps)
    lengths, accepted = (
        [_checked(one, f"choices[0].{name}", int) for one in _column(choice, name, list, len(steps))]
        for name in (LENGTHS, ACCEPTED)
    )
    for one, drafts, count, tokens in zip(lengths, accepted, steps, new_tokens):
        if (len(one), sum(one), len(drafts)) != (count, tokens, max(0, count - 1)):
            raise ValueError(
                f"{LENGTHS} and {ACCEPTED} must be those of a turn's decoding_steps ({count}; the prefill accepts no "
                f"drafts) and new_tokens ({tokens}); got {len(one)} and {len(drafts)} steps of {sum(one)} tokens"
            )
    prompts = _column(choice, PROMPTS, int, len(steps))
    names = ("accept_lengths", "accepted", "prompt_tokens")
    return [dict(zip(names, turn)) for turn in zip(lengths, accepted, prompts)]


def _column(choice: dict[str, Any], name: str, kind: Any, turns: int | None = None) -> list[Any]:
    """The list `choice[name]`, one entry per turn, each of `kind` and not negative."""
    values, where = choice.get(name), f"choices[0].{name}"
    if not isinstance(values, list):
        raise ValueError(f"{where} must be a list with one entry per turn; got {type(values).__name__}; write one")
    if turns is not None and len(values) != turns:
        raise ValueError(f"{where} must have one entry per turn: {turns} turns, {len(values)} entries")
    return _checked(values, where, kind)


def _checked(values: list[Any], where: str, kind: Any) -> list[Any]:
    """The values, each of `kind` and not negative."""
    for value in values:
        if isinstance(value, bool) or not isinstance(value, kind):
            named = " or ".join(one.__name__ for one in getattr(kind, "__args__", (kind,)))
            raise ValueError(f"{where} must hold {named}; got {value!r}; write the answers again")
        if isinstance(value, (int, float)) and not 0 <= value < math.inf:
            raise ValueError(f"{where} must be 0 or more, and finite; got {value!r}; write the answers again")
    return values


def check_answers(output: Path, overwrite: bool, answers: bool = True) -> None:
    """ValueError for parts of a report in `output`, and for `answers` where they are written, that are of no run there
    and would be replaced."""
    known = overwrite or any((output / name).exists() for name in ("report.json", "parts/run.json"))
    found = [path for name in ("report.md", "report.html", *PICTURES) if (path := output / name).exists()]
    if answers:
        found = [*sorted((output / "answers").glob("*.jsonl")), *found]
    if not known and found:
        raise ValueError(
            f"--output replaces {'the answers and ' * answers}the report in its folder; {found[0]} is there without a "
            "report.json; choose another folder, move it away or add --overwrite"
        )


def _is_of_a_run(answers: Path) -> bool:
    """Whether `write_answers` wrote a file, also one without answers; others that stand beside are someone's."""
    with answers.open(encoding="utf-8", errors="replace") as lines:
        first = lines.readline()
    return not first or f'"{LENGTHS}":' in first


def write_answers(output: Path, evaluation: Evaluation, batch_size: int = 1, tokenizer: str | None = None) -> None:
    """`answers/NAME.jsonl` of every drafter in FastChat form, one line per question; deletes those of an earlier run.
    Other files stay, but for one that has a drafter's name.

    tokenizer: the `tokenizer_hash` of the target, without which nobody can read the token ids

    A question without an answered turn gets no line.
    """
    folder = output / "answers"
    folder.mkdir(parents=True, exist_ok=True)
    for stale in filter(_is_of_a_run, folder.glob("*.jsonl")):
        stale.unlink()
    turns: dict[str, dict[tuple[str, int], list[TurnRecord]]] = {name: {} for name in evaluation.drafters}
    for record in evaluation.records:
        turns[record.drafter].setdefault((record.benchmark, record.question), []).append(record)
    for name, questions in turns.items():
        shown = shown_name({"drafter": name, "lossy": name in evaluation.lossy})
        facts = {"model_id": shown, TOKENIZER: tokenizer} | ({"batch_size": batch_size} if batch_size > 1 else {})
        sources = evaluation.sources.get(name)
        rows = [
            json.dumps(answer_row(answered, sources) | facts, ensure_ascii=False) + "\n"
            for answered in questions.values()
        ]
        write_text(folder / f"{name}.jsonl", "".join(rows))


def answer_row(turns: Sequence[TurnRecord], sources: Sequence[str] | None = None) -> dict[str, Any]:
    """One question in FastChat form, with the counts that Spec-Bench's `speed.py` reads; sources: the drafter's."""
    first, generations = turns[0], [turn.generation for turn in turns]
    choice: dict[str, Any] = {
        "index": 0,
        "turns": [turn.text for turn in turns],
        "decoding_steps": [generation.target_steps for generation in generations],
        "new_tokens": [len(generation.tokens) for generation in generations],
        "wall_time": [generation.seconds["total"] for generation in generations],
        "accept_lengths": [length for generation in generations for length in generation.accept_lengths],
        LENGTHS: [list(generation.accept_lengths) for generation in generations],
        ACCEPTED: [generation.accepted for generation in generations],
        PROMPTS: [len(turn.prompt) for turn in turns],
        FINISH_REASONS: [generation.finish_reason for generation in generations],
        TOKEN_IDS: [list(generation.tokens) for generation in generations],
    }
    if any(turn.in_thought for turn in turns):
        choice[IN_THOUGHT] = [int(turn.in_thought) for turn in turns]
    if sources:
        choice[BY_SOURCE] = [accepted_by_source([turn], sources) for turn in turns]
    return {
        "question_id": first.question_id,
        "category": first.category or first.benchmark,
        "benchmark": first.benchmark,
        "answer_id": f"{first.drafter}-{first.benchmark}-{first.question_id}",
        "model_id": first.drafter,
        "choices": [choice],
        "tstamp": time.time(),
    }


def check_one_benchmark(answers: Iterable[QuestionKey]) -> None:
    """ValueError for answers of several benchmarks, whose questions may have the same ids."""
    if len(names := {str(benchmark) for benchmark, _ in answers}) > 1:
        raise ValueError(
            f"the questions are those of one benchmark; the answers are of {', '.join(sorted(names))}; put "
            "the lines of one of them into a file of their own"
        )


def some(keys: Sequence[QuestionId]) -> str:
    """The first five of `keys` and how many more there are."""
    listed = ", ".join(repr(key) for key in keys[:5])
    return f"{listed} and {len(keys) - 5} more" if len(keys) > 5 else listed
