"""Benchmark questions from a local file or a hub id, all as `Question`s.

mt_bench, vicuna_bench, spec_bench   FastChat rows: question_id, category, turns, optional reference
gsm8k                                question, answer ("… #### 42")
humaneval                            task_id, prompt, canonical_solution
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

from draft_heads.data.json_rows import MalformedJson, hub_rows, read_json_rows

# A number in running text: optional sign (not the minus of 5-3), currency, thousands separators, decimals. A full stop
# after it is not part of it.
_NUMBER = re.compile(
    r"(?:(?<![\w)%.])[-−])?[$€£]?(?:(?<=[$€£])[-−])?"
    r"(?:\d{1,3}(?:,\d{3})+(?:\.\d+)?(?!\d)|\d+(?:\.\d+)?|(?<!\d)\.\d+)"
)


@dataclass(frozen=True)
class Question:
    """One question: `turns` are the user's messages, `reference` is the correct answer where the file has one."""

    question_id: int | str
    category: str | None
    turns: list[str]
    reference: str | None = None


class BenchmarkError(ValueError):
    """A benchmark that cannot be read; the message names file, line and reason."""


def load_benchmark(name: str, path_or_hub_id: str) -> list[Question]:
    """The questions of benchmark `name`; BenchmarkError with file, line and reason, ValueError for unknown names."""
    if name not in READERS:
        raise ValueError(f"benchmark {name!r} is unknown; the known ones: {', '.join(READERS)}")
    reader = READERS[name]
    questions = []
    for row, (where, record) in enumerate(_records(name, path_or_hub_id)):
        try:
            questions.append(reader(record, row))
        except BenchmarkError as error:
            raise BenchmarkError(f"{where}: {error}") from None
    if not questions:
        raise BenchmarkError(f"{path_or_hub_id} holds no question of {name}; pass a file with at least one")
    seen: dict[int | str, int] = {}
    for row, question in enumerate(questions):
        if question.question_id in seen:
            raise BenchmarkError(
                f"{path_or_hub_id}: rows {seen[question.question_id]} and {row} have the same question_id "
                f"{question.question_id!r}; ids must be unique"
            )
        seen[question.question_id] = row
    return questions


def gsm8k_answer(text: str) -> Decimal | None:
    """The number after the last `####`, else the last number of the text; None when there is none.

    Example: "5 + 3 = 8\\n#### 1,234.50" → 1234.50; "She pays $-3." → -3; "I do not know" → None.
    """
    _, mark, after = text.rpartition("####")
    found = _NUMBER.search(after) if mark else None
    if found is None:
        for found in _NUMBER.finditer(text):  # noqa: B007  the last one is wanted
            pass
    return None if found is None else Decimal(re.sub(r"[^\d.-]", "", found.group().replace("−", "-")))


def _fastchat(record: dict[str, Any], row: int) -> Question:
    turns = record.get("turns", record.get("prompt"))
    question_id = record.get("question_id", record.get("prompt_id"))
    category = record.get("category")
    reference = record.get("reference")
    if not isinstance(turns, list) or not turns or not all(isinstance(turn, str) and turn for turn in turns):
        raise BenchmarkError(f"'turns' is a non-empty list of texts, received {_describe(turns)}")
    if not isinstance(question_id, int | str):
        raise BenchmarkError(f"'question_id' is a number or a text, received {_describe(question_id)}")
    if category is not None and not isinstance(category, str):
        raise BenchmarkError(f"'category' is a text, received {_describe(category)}")
    if isinstance(reference, list):
        reference = "\n\n".join(map(str, reference)) or None
    return Question(question_id, category, list(turns), None if reference is None else str(reference))


def _gsm8k(record: dict[str, Any], row: int) -> Question:
    question, answer = _text(record, "question"), _text(record, "answer")
    if gsm8k_answer(answer) is None:
        raise BenchmarkError(f"'answer' ends with '#### number', received {_describe(answer[-40:])}")
    return Question(record.get("question_id", row), record.get("category"), [question], answer)


def _humaneval(record: dict[str, Any], row: int) -> Question:
    return Question(_text(record, "task_id"), None, [_text(record, "prompt")], record.get("canonical_solution"))


READERS: dict[str, Callable[[dict[str, Any], int], Question]] = {
    "mt_bench": _fastchat,
    "gsm8k": _gsm8k,
    "vicuna_bench": _fastchat,
    "humaneval": _humaneval,
    "spec_bench": _fastchat,
}
_HUB_CONFIG = {"gsm8k": "main"}


def _records(name: str, source: str) -> Iterator[tuple[str, dict[str, Any]]]:
    rows = read_json_rows(Path(source)) if Path(source).is_file() else hub_rows(source, None, _HUB_CONFIG.get(name))
    for where, record in rows:
        if isinstance(record, MalformedJson):
            raise BenchmarkError(f"{where}: {record}")
        if not isinstance(record, dict):
            raise BenchmarkError(f"{where}: a row is an object, received {_describe(record)}")
        yield where, record


def _text(record: dict[str, Any], key: str) -> str:
    value = record.get(key)
    if not isinstance(value, str) or not value:
        raise BenchmarkError(f"{key!r} is a non-empty text, received {_describe(value)}")
    return value


def _describe(value: Any) -> str:
    return "nothing" if value is None else f"{type(value).__name__} {str(value)[:40]!r}"
