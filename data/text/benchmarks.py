"""Questions from a local file or a hub id, all as `Question`s. The first row says which form the file has:

{"question_id": 81, "category": "writing", "turns": ["…", "…"]}   FastChat, only `turns` is needed
{"conversations": [{"from": "human", "value": "…"}, …]}           ShareGPT, or "messages": user turns are asked
{"question": "…", "answer": "… #### 42"}, …                       one of `data.text.known_benchmarks`

`data.text.row_keys` says which further keys a row may have: a system text, `tools`, `documents` and the like belong to
every prompt of the question; a key that is unknown, or that nothing reads, is an error.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import islice
from typing import Any

from draft_heads.data.text.conversations import check_encodable, with_system
from draft_heads.data.text.final_number import gsm8k_answer
from draft_heads.data.text.json_files import MalformedJson
from draft_heads.data.text.json_rows import read_rows
from draft_heads.data.text.known_benchmarks import Description, describe, is_description, known_benchmarks, written
from draft_heads.data.text.refused_keys import OF_THE_ANSWER
from draft_heads.data.text.rendering import ConversationError, Messages
from draft_heads.data.text.row_keys import (
    MAY_BE_READ,
    TURN_LISTS,
    further_of_row,
    message_of,
    without_none,
    without_verdicts,
)
from draft_heads.data.text.turn_lists import turns_of
from draft_heads.data.text.turns import without_listed

__all__ = ["BenchmarkError", "Question", "checked_id", "gsm8k_answer", "load_benchmark"]
__all__ += ["prompts_checksum", "questions_checksum"]

_IDS = ("question_id", "prompt_id", "id")
_OF_DECODING = {"max_tokens", "max_new_tokens", "max_completion_tokens", "max_output_tokens", "max_length", "n_predict"}
_OF_DECODING |= {"num_predict", "min_tokens", "min_new_tokens", "budget_tokens", "stop_tokens", "temperature"}


@dataclass(frozen=True)
class CodeTask:
    """A function to write in Python: the beginning of its file, its name, and a text that defines `check(function)`."""

    prompt: str
    entry_point: str
    test: str


@dataclass(frozen=True)
class Question:
    """One question: `turns` are the user's messages, `reference` is the correct answer where the file has one.

    Its prompts begin with the `system` text where it has one, and `extra` are the chat template's further arguments.
    `score` says how the answer to the last turn is scored, of `known_benchmarks.SCORES`; None: not at all.
    """

    question_id: int | str
    category: str | None
    turns: list[str]
    reference: str | None = None
    score: str | None = None
    system: str | None = None
    extra: dict[str, Any] = field(default_factory=dict)
    column: str | None = None  # the row of a report that counts it, where that is not its category
    code: CodeTask | None = None

    @property
    def opening(self) -> Messages:
        """The messages before the first turn."""
        return [] if self.system is None else [{"role": "system", "content": self.system}]

    @property
    def first_messages(self) -> Messages:
        """The messages up to the first turn."""
        return [*self.opening, {"role": "user", "content": self.turns[0]}]

    @property
    def group(self) -> str | None:
        """The row of a report, of those of its benchmark's parts, that counts it."""
        return self.category if self.column is None else self.column


class BenchmarkError(ValueError):
    """A benchmark that cannot be read; the message names file, line and reason."""


def checked_id(value: Any) -> int | str:
    """A question's id: a whole number or a text, `81.0` (of a column of floats) as 81; BenchmarkError for another."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise BenchmarkError(f"an id is a whole number or a text, received {_describe(value)}; write one")
    return value


def questions_checksum(questions: Sequence[Question]) -> str:
    """16 hex digits that change with any field of any question."""
    return _checksum([asdict(question) for question in questions])


def prompts_checksum(prompts: Iterable[Sequence[int]]) -> str:
    """16 hex digits that change with any token of any prompt: with what a tokenizer and a chat template made of the
    questions, on the day if it writes that."""
    return _checksum([list(prompt) for prompt in prompts])


def _checksum(values: list[Any]) -> str:
    return hashlib.sha256(json.dumps(values).encode()).hexdigest()[:16]


def load_benchmark(name: str, path_or_hub_id: str, limit: int | None = None) -> list[Question]:
    """The first `limit` questions of a file, URL or hub id, or of what a YAML file describes (`known_benchmarks`).

    BenchmarkError with file, row and reason for a bad row.
    """
    described, source = describe(name, path_or_hub_id)
    config, split = (described.config, described.split) if described else (None, None)
    reader: Callable[[dict[str, Any]], Question] | None = None
    found: list[Question] = []
    places: dict[Any, str] = {}  # of the ids that rows have
    is_copy = described is not None and source != described.source
    for place, record in islice(read_rows(source, split, config, is_copy=is_copy), limit):
        try:
            if isinstance(record, MalformedJson):
                raise BenchmarkError(str(record))
            if not isinstance(record, dict):
                raise BenchmarkError(f"a row is an object, received {_describe(record)}")
            record = without_none(record)
            reader = reader or _reader_of(record, described, is_description(path_or_hub_id))
            question = reader(record)
            if question.category is not None and not isinstance(question.category, str):
                raise BenchmarkError(f"'category' is a text, received {_describe(question.category)}")
            category = question.category if (question.category or "").strip() else None
            question = replace(question, category=category)
            check_encodable(asdict(question))
            if question.question_id is not None:
                own = checked_id(question.question_id)
                if own in places and reader is _conversation:  # ids of conversations are free text
                    own = f"{own} ({place})"
                if own in places:
                    raise BenchmarkError(f"it has the id {own!r} of {places[own]}; ids must be unique: change one")
                places[own] = place
                question = replace(question, question_id=own)
        except (BenchmarkError, ConversationError) as error:
            raise BenchmarkError(f"{source}, {place}: {error}") from None
        if described:
            question = replace(question, column=described.columns.get(question.category or ""))
        found.append(question)
    if not found:
        raise BenchmarkError(f"{source} holds no question; pass a file with at least one")
    for row, question in enumerate(found):
        if question.question_id is None:
            own = row if reader is not _conversation else f"row-{row + 1}"
            while own in places:
                own = f"row-{row + 1}" if own == row else f"{own}'"
            places[own] = ""
            found[row] = replace(question, question_id=own)
    return found


def _reader_of(
    record: dict[str, Any], described: Description | None, own: bool
) -> Callable[[dict[str, Any]], Question]:
    """The reader of the form that a file's first row has: the benchmark's, if it has one, before any other.

    own: the description was given itself, so that its prompt is meant; BenchmarkError for a row without its keys
    """
    if described and described.has_form_of(record):
        return partial(_described, described)
    if described and described.prompt is not None and own:
        lacking = [key for key in described.keys if key not in described.flattened(record)]
        raise BenchmarkError(
            f"a row has the keys of its description, {', '.join(described.keys)}; this has no {', '.join(lacking)}: "
            "name those that a row may lack under optional, or correct keys"
        )
    turns, prompt = record.get("turns"), record.get("prompt")
    messages = isinstance(prompt, list) and any(isinstance(turn, dict) for turn in prompt)
    if messages or (not isinstance(turns, list) and any(key in record for key in TURN_LISTS)):
        return _conversation
    if "turns" in record or isinstance(prompt, list):
        return _fastchat
    forms = {name: known for name, known in known_benchmarks().items() if known.prompt is not None}
    for known in forms.values():
        if known.has_form_of(record, named=False):
            return partial(_described, known)
    keys = {name: " and ".join(map(repr, (*known.keys, *known.recognised_by))) for name, known in forms.items()}
    listed = ", ".join(f"{each} ({name})" for name, each in keys.items())
    raise BenchmarkError(
        f"a file of questions has rows with 'turns' (FastChat), 'conversations' or 'messages' (their user turns are "
        f"asked), {listed}; received the keys: "
        f'{", ".join(record) or "none"}; write {{"turns": ["…"]}}, or describe the file in a YAML file'
    )


def _fastchat(record: dict[str, Any]) -> Question:
    turns = record.get("turns", record.get("prompt"))
    reference = record.get("reference")
    if not isinstance(turns, list) or not turns or not all(isinstance(turn, str) and turn.strip() for turn in turns):
        raise BenchmarkError(f"'turns' is a non-empty list of texts, received {_describe(turns)}")
    if isinstance(reference, list):
        reference = "\n\n".join(map(str, reference)) or None
    reference = None if reference is None else str(reference)
    used = {"reference", "turns" if "turns" in record else "prompt"}
    rest = _system_and_extra(record, turns, used)
    return Question(_id(record), record.get("category"), list(turns), reference, **rest)


def _described(known: Description, record: dict[str, Any]) -> Question:
    """A row whose keys a known benchmark's file names; what is not scored needs no reference."""
    record = known.flattened(record)
    for key in known.keys:
        if key != known.reference or known.score:
            _text(record, key, number=key == known.reference)
    asked, reference, code, score = known.prompt_of(record), None, None, known.score
    if not asked.strip():
        raise BenchmarkError(f"a question needs a text; {' and '.join(known.optional)} are empty; leave it out")
    if known.reference is not None:
        needed = known.score in ("accuracy", "rouge2")
        reference = _text(record, known.reference, number=True) if needed else record.get(known.reference)
    if score == "accuracy" and not _ends_with_number(str(reference)):
        raise BenchmarkError(
            "the answer of a GSM8K problem ends with its number, as in '#### 42', by which answers are scored; this "
            f'one ends with {str(reference)[-40:]!r}; add the number, or write {{"turns": ["…"]}}, which is not scored'
        )
    if score == "pass_at_1":
        own = known not in known_benchmarks().values()  # whoever described it wants that score
        if own or "test" in record or "entry_point" in record:
            code = CodeTask(*(_text(record, key) for key in ("prompt", "entry_point", "test")))
        else:
            score = None  # nothing to test an answer with
    rest = _system_and_extra(record, [asked], known.used, ", or name it under unread: of a YAML file")
    question_id: Any = record.get(known.id) if known.id else _id(record)
    return Question(question_id, record.get("category"), [asked], reference, score, code=code, **rest)


def _ends_with_number(answer: str) -> bool:
    """Whether an answer has a number after `####` or as its last word; `Yes, 17 is prime.` is no word problem's."""
    ends = "####" in answer or re.search(r"\d\W*$", answer) is not None
    return ends and gsm8k_answer(answer) is not None


def _conversation(record: dict[str, Any]) -> Question:
    """The user's turns after the system text; recorded answers, tools' results after the last question among them, are
    not read."""
    turns, key = turns_of(record)
    messages: Messages = []
    result = False  # whether a tool's result, which the target's own answer may not ask for, came before
    for number, turn in enumerate(turns, start=1):
        message, unknown = message_of(without_verdicts(turn))
        role, further = message["role"], message.keys() - {"role", "content", "trained", MAY_BE_READ}
        result |= role == "tool"
        if (role == "user" and result) or (role == "system" and number > 1):
            found = "a tool turn before a user's" if role == "user" else f"one as turn {number}"
            raise BenchmarkError(
                f"a system turn is the first, and no tool turn stands before a question; received {found}"
            )
        if role == "user" and (further or not message["content"].strip()):
            what = f"the key {sorted(further)[0]!r}" if further else _describe(message["content"])
            raise BenchmarkError(f"the user's turns are non-empty texts and nothing else, received {what}")
        if unknown:
            raise BenchmarkError(f"{unknown[0]}; take it out")
        if role in ("system", "user"):
            messages.append(message)
    rest = _system_and_extra(record, turns, {key, *TURN_LISTS})
    messages = with_system(messages, rest["system"])
    texts = [message["content"] for message in messages if message["role"] == "user"]
    if not texts:
        raise BenchmarkError("the user's turns are non-empty texts, received none")
    rest["system"] = messages[0]["content"] if messages[0]["role"] == "system" else None
    rest["extra"] = without_listed(rest["system"], rest["extra"])
    return Question(_id(record), record.get("category"), texts, **rest)


def _id(record: dict[str, Any]) -> Any:
    """The id of a row of any form, None without one."""
    return next((record[key] for key in _IDS if key in record), None)


def _system_and_extra(
    record: dict[str, Any], turns: Sequence[Any], used: Collection[str], remedy: str = ""
) -> dict[str, Any]:
    """The fields `system` and `extra` of a question, of what its row has beside its id and the keys that are `used`;
    remedy: what else can be done about a key that is unknown."""
    given = {key for key in _OF_DECODING - {*used} if record.get(key) not in (None, "", [])}
    if asked := sorted(given):
        raise BenchmarkError(
            f"the flags say how all questions are decoded, and the key {asked[0]!r} says it of one; take it out{remedy}"
        )
    further = further_of_row(record, turns, {*used, *_IDS, *OF_THE_ANSWER}, answers_anew=True)
    if further.unknown:
        raise BenchmarkError(f"{further.unknown[0]}; take it out{remedy}")
    check_encodable(further.system, further.extra)
    return {"system": further.system, "extra": without_listed(further.system, further.extra)}


def _text(record: dict[str, Any], key: str, number: bool = False) -> str:
    """The text under a key, also of a list, as prompts have it; `number`: or of a number."""
    value = record.get(key)
    entries = value if isinstance(value, list) else [value]
    numbers = (int, float) if number or entries is value else ()
    known = all(isinstance(one, (str, *numbers)) and not isinstance(one, bool) for one in entries)
    if not known or not (text := written(value)).strip():
        remedy = f"write a text or a list of texts{' or a number' if number else ''}"
        raise BenchmarkError(f"{key!r} is a non-empty text, received {_describe(value)}; {remedy}")
    return text


def _describe(value: Any) -> str:
    return "nothing" if value is None else f"{type(value).__name__} {str(value)[:40]!r}"
