"""Questions from a local file or a hub id, all as `Question`s. The first row says which form the file has:

{"question_id": 81, "category": "writing", "turns": ["…", "…"]}   FastChat, only `turns` is needed
{"question": "…", "answer": "… #### 42"}                          GSM8K, scored by the number
{"task_id": "HumanEval/0", "prompt": "…"}                         HumanEval
{"conversations": [{"from": "human", "value": "…"}, …]}           ShareGPT, or "messages": user turns are asked
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal
from itertools import islice
from typing import Any

from draft_heads.data.conversations import ROLES, turns_of
from draft_heads.data.json_rows import MalformedJson, read_rows
from draft_heads.data.rendering import ConversationError

# A number in running text: optional sign (not the minus of 5-3), currency, thousands separators, decimals. A full stop
# after it is not part of it.
_NUMBER = re.compile(
    r"(?:(?<![\w)%.])[-−](?![$€£][-−]))?[$€£]?(?:(?<=[$€£])[-−])?"
    r"(?:\d{1,3}(?:,\d{3})+(?:\.\d+)?(?!\d)|\d+(?:\.\d+)?|(?<!\d)\.\d+)"
)
# `#### 42`, `#### Answer: **$42**`; not the heading of a step: `#### Step 2`, `#### 2. Total`
_MARKED = re.compile(
    r"####[ \t]*(?:(?:the )?(?:final )?answer(?: is)?:?)?(?:[\s*_`$\\]|boxed\{)*"
    rf"((?>{_NUMBER.pattern}))(?![.):][ \t]*[^\W\d])",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Question:
    """One question: `turns` are the user's messages, `reference` is the correct answer where the file has one."""

    question_id: int | str
    category: str | None
    turns: list[str]
    reference: str | None = None
    numeric: bool = False  # an answer is right if it ends with the reference's number


class BenchmarkError(ValueError):
    """A benchmark that cannot be read; the message names file, line and reason."""


def load_benchmark(name: str, path_or_hub_id: str, limit: int | None = None) -> list[Question]:
    """The first `limit` questions of a file or hub id; BenchmarkError with file, row and reason for a bad row."""
    reader: Callable[[dict[str, Any], int], Question] | None = None
    found: dict[int | str, tuple[str, Question]] = {}
    for row, (place, record) in enumerate(islice(read_rows(path_or_hub_id, config=_HUB_CONFIG.get(name)), limit)):
        try:
            if isinstance(record, MalformedJson):
                raise BenchmarkError(str(record))
            if not isinstance(record, dict):
                raise BenchmarkError(f"a row is an object, received {_describe(record)}")
            reader = reader or _reader_of(record)
            question = reader(record, row)
            if not isinstance(question.question_id, int | str):
                raise BenchmarkError(f"an id is a number or a text, received {_describe(question.question_id)}")
            if question.category is not None and not isinstance(question.category, str):
                raise BenchmarkError(f"'category' is a text, received {_describe(question.category)}")
            if question.question_id in found:
                raise BenchmarkError(
                    f"it has the id {question.question_id!r} of {found[question.question_id][0]}; ids must be unique: "
                    "change one"
                )
        except (BenchmarkError, ConversationError) as error:
            raise BenchmarkError(f"{path_or_hub_id}, {place}: {error}") from None
        found[question.question_id] = place, question
    if not found:
        raise BenchmarkError(f"{path_or_hub_id} holds no question; pass a file with at least one")
    return [question for _, question in found.values()]


def gsm8k_answer(text: str) -> Decimal | None:
    """The last number that a `####` marks, else the last number of the text; None when there is none.

    Example: "5 + 3 = 8\\n#### 1,234.50" → 1234.50; "She pays $-3." → -3; "I do not know" → None.
    """
    text = text.replace("{,}", ",")  # LaTeX's thousands
    numbers = _MARKED.findall(text) or _NUMBER.findall(text)
    return Decimal(re.sub(r"[^\d.-]", "", numbers[-1].replace("−", "-"))) if numbers else None


def _reader_of(record: dict[str, Any]) -> Callable[[dict[str, Any], int], Question]:
    """The reader of the form that a file's first row has."""
    if "turns" in record or isinstance(record.get("prompt"), list):
        return _fastchat
    if "conversations" in record or "messages" in record:
        return _conversation
    for keys, reader in ((("question", "answer"), _gsm8k), (("task_id", "prompt"), _humaneval)):
        if set(keys) <= set(record):
            return reader
    raise BenchmarkError(
        "a file of questions has rows with 'turns' (FastChat), 'question' and 'answer' (GSM8K), 'task_id' and 'prompt' "
        "(HumanEval), 'conversations' or 'messages' (their user turns are asked); received the keys: "
        f'{", ".join(record) or "none"}; write {{"turns": ["…"]}}'
    )


def _fastchat(record: dict[str, Any], row: int) -> Question:
    turns = record.get("turns", record.get("prompt"))
    question_id = record.get("question_id", record.get("prompt_id", row))
    reference = record.get("reference")
    if not isinstance(turns, list) or not turns or not all(isinstance(turn, str) and turn for turn in turns):
        raise BenchmarkError(f"'turns' is a non-empty list of texts, received {_describe(turns)}")
    if isinstance(reference, list):
        reference = "\n\n".join(map(str, reference)) or None
    reference = None if reference is None else str(reference)
    return Question(question_id, record.get("category"), list(turns), reference)


def _gsm8k(record: dict[str, Any], row: int) -> Question:
    question, answer = _text(record, "question"), _text(record, "answer")
    if gsm8k_answer(answer) is None:
        raise BenchmarkError(
            "the answer of a GSM8K problem ends with its number, as in '#### 42', by which answers are scored; this "
            f'one ends with {answer[-40:]!r}; add the number, or write {{"turns": ["…"]}}, which is not scored'
        )
    return Question(record.get("question_id", row), record.get("category"), [question], answer, numeric=True)


def _humaneval(record: dict[str, Any], row: int) -> Question:
    return Question(_text(record, "task_id"), None, [_text(record, "prompt")], record.get("canonical_solution"))


def _conversation(record: dict[str, Any], row: int) -> Question:
    """The user's turns; recorded answers and system turns are not read."""
    turns, role_key, text_key = turns_of(record)
    for turn in turns:
        role = str(turn.get(role_key)) if isinstance(turn, dict) else None
        if role is None or (role not in ROLES and role.lower() in ROLES):
            raise BenchmarkError(
                f"a turn is an object with a role as in {', '.join(ROLES)}, received {_describe(turn)}"
            )
    asked = [turn.get(text_key) for turn in turns if ROLES.get(str(turn.get(role_key))) == "user"]
    texts = [text for text in asked if isinstance(text, str) and text.strip()]
    if not texts or len(texts) < len(asked):
        raise BenchmarkError(f"the user's turns are non-empty texts, received {_describe(asked)}")
    return Question(record.get("id") or f"row-{row + 1}", record.get("category"), texts)


_HUB_CONFIG = {"gsm8k": "main"}


def _text(record: dict[str, Any], key: str) -> str:
    value = record.get(key)
    if not isinstance(value, str) or not value:
        raise BenchmarkError(f"{key!r} is a non-empty text, received {_describe(value)}")
    return value


def _describe(value: Any) -> str:
    return "nothing" if value is None else f"{type(value).__name__} {str(value)[:40]!r}"
