"""Conversations from ShareGPT or messages JSON(L), or a hub id, as rows that `conversation_of` reads.

    [{"id": "a", "conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello."}]}]
    {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello."}]}

`data.text.row_keys` says which further keys a row and a turn may have, and what becomes of them. The first bad row
stops the load with file, row and reason. With `skip_bad_rows` its sound turns are kept: assistant turns before the
first user turn and unknown keys are left out, and the conversation ends before the first bad turn. A row without a
question and its answer is dropped, as is one with a key that changes its text and that nothing reads. Every row that
was trimmed or dropped is listed. `data.text.rendering` turns messages into token ids.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar
from unicodedata import normalize

from draft_heads.configs.options import option
from draft_heads.data.text.json_files import MalformedJson
from draft_heads.data.text.json_rows import is_file, read_rows
from draft_heads.data.text.metadata_keys import notes_of, notes_of_turns
from draft_heads.data.text.refused_keys import OF_THE_ANSWER, TRAINED
from draft_heads.data.text.rendering import ChatRenderer, ConversationError, Extra, Messages
from draft_heads.data.text.roles import ROLE_KEYS, is_answer
from draft_heads.data.text.row_keys import (
    ANSWERS,
    MAY_BE_READ,
    TEXT_KEYS,
    TOOL_CALLS,
    TURN_LISTS,
    TURN_TEXTS,
    further_of_row,
    message_of,
    without_none,
    without_verdicts,
)
from draft_heads.data.text.turn_lists import turns_of
from draft_heads.data.text.turns import without_listed

if TYPE_CHECKING:  # decoding and benchmarks need no `datasets`
    import datasets

logger = logging.getLogger(__name__)

Rendered = TypeVar("Rendered")

_EARLY_ANSWER = "an assistant turn before the first user turn"
_ARGUMENTS = "chat_template_kwargs"


@dataclass
class DatasetOptions:
    """What is read of --dataset, for every command that has it."""

    split: str = option("train", "split of a hub dataset or a folder (train)")
    dataset_config: str | None = option(None, "configuration of a hub dataset or a folder, where it has several")
    skip_bad_rows: bool = option(
        False, "keep the sound turns of bad rows, and list what is left out, instead of stopping"
    )


class Conversation(NamedTuple):
    """Messages as chat templates read them, and the template's further arguments (`tools`, `documents`, …)."""

    messages: Messages
    extra: dict[str, Any]

    @property
    def key(self) -> str:
        """Names conversations by all that is asked in them: the target answers those of one key alike."""
        return self._hash([turn for turn in self.messages if turn["role"] in ("system", "user")])

    @property
    def opening(self) -> str:
        """Names conversations by what is asked first: they have a first answer in common and are held out together."""
        return self._hash(self.first_asked)

    @property
    def first_asked(self) -> Messages:
        """The turns up to the first question, white space around them and how accents are written (NFC, NFD) made one:
        some chat templates trim, and some tokenizers compose."""
        asked = [number for number, turn in enumerate(self.messages) if turn["role"] == "user"]
        first = self.messages[: asked[0] + 1] if asked else self.messages
        return [{**turn, "content": normalize("NFC", turn["content"]).strip()} for turn in first]

    def _hash(self, questions: Messages) -> str:
        return hashlib.sha256(json.dumps([questions, self.extra], sort_keys=True).encode()).hexdigest()[:16]

    @property
    def untrained(self) -> tuple[int, ...]:
        """Which of its answers are not to be trained on."""
        answers = [turn for turn in self.messages if turn["role"] == "assistant"]
        return tuple(number for number, turn in enumerate(answers) if not turn.get("trained", True))


@dataclass(frozen=True)
class BadRow:
    """One fault of one row."""

    place: str  # "line 3" of a JSONL file, else "row 3"
    reason: str  # "an empty answer"
    detail: str = ""  # "turn 4", or what is wrong with the JSON
    kept_turns: int = 0  # 0: the row is dropped

    @classmethod
    def of(cls, place: str, error: object, kept_turns: int = 0) -> BadRow:
        """The fault that an error's text `reason: detail` names."""
        reason, _, detail = str(error).partition(": ")
        return cls(place, reason, detail, kept_turns)

    @property
    def outcome(self) -> str:
        return "trimmed" if self.kept_turns else "dropped"

    def __str__(self) -> str:
        return f"{self.place}: {self.reason}" + (f" ({self.detail})" if self.detail else "")


@dataclass
class Conversations:
    """What was read of a source, and what is wrong with its rows."""

    source: str
    dataset: datasets.Dataset  # `conversation_of` reads its rows; also id, and place in its file: "line 3" or "row 3"
    bad_rows: list[BadRow] = field(default_factory=list)  # in the order of the file
    repeated: int = 0  # rows left out because an earlier one would give the same (`generate`)


def read_conversations(
    source: str,
    split: str = "train",
    skip_bad_rows: bool = False,
    limit: int | None = None,
    asked: Callable[[Conversation], str] | None = None,
    config: str | None = None,
) -> Conversations:
    """Read `source` up to the `limit`th sound row; ConversationError at the first bad row unless `skip_bad_rows`.

    asked: names what is asked in a conversation, where the target will write the answers: rows need none, and those
    that ask what an earlier row asks, with the same turns to train on, are left out and counted
    config: of a dataset that has several configurations, the one to read; a file has neither them nor splits
    """
    for name, value in (("split", None if split == "train" else split), ("dataset_config", config)):
        if value is not None and is_file(source):
            raise ValueError(f"{name} names a part of a dataset, and {source} is a file; got {value!r}; leave it out")
    kept: list[tuple[str, str, Conversation]] = []
    bad_rows: list[BadRow] = []
    seen: set[tuple[str, tuple[int, ...]]] = set()  # what is asked, and which answers are not to be trained on
    repeated, in_system, unread, notes = 0, 0, Counter[str](), Counter[str]()
    for place, record in read_rows(source, split, config, option="--dataset"):
        row_id, conversation, faults = _sound_part(place, record, asked is not None)
        if faults and not skip_bad_rows:
            raise ConversationError(
                f"{source}, {faults[0]}; repair the row, or set skip_bad_rows to keep the sound turns of such rows "
                "and list what is left out"
            )
        bad_rows += faults
        if not conversation.messages:
            continue
        notes.update(notes_of(record))
        notes.update(f"{key} of a turn" for key in notes_of_turns(turns_of(record)[0]))
        conversation, listed_before = _with_tools_once(conversation)
        in_system += listed_before
        if asked is not None:
            unread.update(key for key in sorted(ANSWERS & record.keys()) if record[key])
            if (same := (asked(conversation), conversation.untrained)) in seen:
                repeated += 1
                continue
            seen.add(same)
        kept.append((row_id, place, conversation))
        if len(kept) == limit:
            break
    for line in count_by_reason(bad_rows):
        logger.warning("%s: %s", source, line)
    for key, rows in unread.items():
        logger.warning("%s: rows with %r: %s; it is not read, for the target writes the answers", source, key, rows)
    if listed := ", ".join(f"{key!r} of {rows:,}" for key, rows in notes.most_common()):
        logger.warning("%s: taken for notes on the texts of rows, and not read: %s", source, listed)
    if in_system:
        logger.warning("%s: rows whose system text lists the tools, and nothing else does: %s", source, in_system)
    if not kept:
        reason = (
            f"all {len({bad.place for bad in bad_rows})} rows are bad, the first: {bad_rows[0]}"
            if bad_rows
            else "no rows"
        )
        raise ConversationError(f"{source} holds no conversation: {reason}; pass a file with at least one")
    return Conversations(source, _to_dataset(kept), bad_rows, repeated)


def _to_dataset(kept: list[tuple[str, str, Conversation]]) -> datasets.Dataset:
    """Rows with the keys that occur as columns; what is no text is JSON, which Arrow neither fills up nor converts.

    kept: (id, place, conversation) of each
    """
    import datasets

    ids, places, conversations = (list(column) for column in zip(*kept))
    text = datasets.Value("large_string")  # a column of "string" ends at 2 GiB
    types = {"role": text, "content": text, **dict.fromkeys((*TURN_TEXTS, MAY_BE_READ, TOOL_CALLS), text)}
    types["trained"] = datasets.Value("bool")
    occurring = {key for conversation in conversations for turn in conversation.messages for key in turn}
    turn_types = {key: types[key] for key in sorted(occurring, key=[*types].index)}

    def cell(turn: dict[str, Any], key: str) -> Any:
        return json.dumps(turn[key]) if key == TOOL_CALLS and key in turn else turn.get(key)

    rows = [[{key: cell(turn, key) for key in turn_types} for turn in one.messages] for one in conversations]
    columns: dict[str, list[Any]] = {"id": ids, "place": places, "messages": rows}
    features: dict[str, Any] = {"id": text, "place": text, "messages": datasets.List(turn_types)}
    if any(conversation.extra for conversation in conversations):
        columns[_ARGUMENTS] = [json.dumps(one.extra) if one.extra else None for one in conversations]
        features[_ARGUMENTS] = text
    return datasets.Dataset.from_dict(columns, features=datasets.Features(features))


def conversation_of(row: Mapping[str, Any]) -> Conversation:
    """The conversation of a row that `read_conversations` stored."""
    messages = [without_none(turn) for turn in row["messages"]]
    for turn in messages:
        if TOOL_CALLS in turn:
            turn[TOOL_CALLS] = json.loads(turn[TOOL_CALLS])
    return Conversation(messages, json.loads(row.get(_ARGUMENTS) or "{}"))


def count_by_reason(bad_rows: Sequence[BadRow]) -> list[str]:
    """`3 rows trimmed: an empty answer (line 4, line 9, …)` for each outcome and reason, the most frequent first."""
    places: dict[tuple[str, str], list[str]] = defaultdict(list)
    for bad in bad_rows:
        places[bad.outcome, bad.reason].append(bad.place)
    return [
        f"{len(rows):,} {'row' if len(rows) == 1 else 'rows'} {outcome}: {reason} ({', '.join(rows[:3])}"
        f"{', …' if len(rows) > 3 else ''})"
        for (outcome, reason), rows in sorted(places.items(), key=lambda item: -len(item[1]))
    ]


def parse_record(record: Any) -> Conversation:
    """The conversation of one ShareGPT or messages record; ConversationError with the reason if it is bad."""
    _, conversation, faults = _sound_part("row 1", record)
    if faults:
        raise ConversationError(str(faults[0]).removeprefix("row 1: "))
    return _with_tools_once(conversation)[0]


def _with_tools_once(conversation: Conversation) -> tuple[Conversation, bool]:
    """The conversation without `tools` that its system text lists, which the chat template would list again; whether
    it has such."""
    messages, extra = conversation
    system = messages[0]["content"] if messages and messages[0]["role"] == "system" else None
    rest = without_listed(system, extra)
    return Conversation(messages, rest), rest != extra


def _sound_part(place: str, record: Any, generate: bool = False) -> tuple[str, Conversation, list[BadRow]]:
    """(id, sound part, faults) of a record; no messages: it is dropped. A sound record has no faults."""
    faults: dict[str, str] = {}  # reason → detail
    unknown: dict[str, str] = {}  # the same for what is left out of turns that are kept
    try:
        if isinstance(record, MalformedJson):
            raise ConversationError(str(record))
        turns, key = turns_of(record)
        names = ("from", "value") if key == "conversations" else ("role", "content")
        messages = _sound_turns(turns, names, generate, faults, unknown)
        used = (key, *TURN_LISTS, *(ANSWERS | OF_THE_ANSWER if generate else ()))
        further = further_of_row(record, turns, used, answers_anew=generate)
        unknown |= dict.fromkeys(further.unknown, "")
        messages = with_system(messages, further.system)
        check_encodable(further.system, further.extra)
    except ConversationError as error:
        return "", Conversation([], {}), [BadRow.of(place, error)]
    if missing := _missing_part(messages, generate):
        messages, unknown = [], {}  # a row that is dropped is so for its faults
        if not faults:
            faults[missing] = ""
    name = f"row-{place.split()[1]}" if record.get("id") is None else _encodable(str(record["id"]))
    found = [BadRow(place, *fault, len(messages)) for fault in (faults | unknown).items()]
    return name, Conversation(messages, further.extra), found


def _sound_turns(
    turns: list[Any], names: tuple[str, str], generate: bool, faults: dict[str, str], unknown: dict[str, str]
) -> Messages:
    """The messages of the sound turns; what is wrong with others, and which keys are left out, goes into the dicts."""
    messages: Messages = []
    for number, turn in enumerate(turns, start=1):
        try:
            if generate and isinstance(turn, dict):  # whose answer is not read, nor what is said of it
                turn = without_verdicts(turn)
                if is_answer(turn):
                    turn = {name: turn[name] for name in (*ROLE_KEYS, *TEXT_KEYS, *TRAINED) if name in turn}
                    turn |= {name: "" for name in TEXT_KEYS if not isinstance(turn.get(name), str | None)}
            message, left_out = message_of(turn, names)
            check_encodable(message)
            fault = _fault(message, messages, generate)
        except ConversationError as error:
            fault = str(error)
        if fault is None:
            messages.append(message)
            for reason in left_out:
                unknown.setdefault(reason, f"turn {number}")
        else:
            faults.setdefault(fault, f"turn {number}")
            if fault != _EARLY_ANSWER:
                break
    return messages


def _fault(message: dict[str, Any], before: Messages, generate: bool) -> str | None:
    """Why a message cannot follow the sound messages `before` it; None if it can."""
    role, last = message["role"], before[-1]["role"] if before else "system"
    if role == "assistant" and last == "system":
        return _EARLY_ANSWER
    if role == "system" and before:
        return "a system turn that is not the first turn"
    if role == "tool" and last not in ("assistant", "tool"):
        return "a tool turn that follows no assistant turn"
    if role == "tool" and generate:
        return "a tool turn: the target, which answers anew, may call no tool or another"
    if role == "user" and not message["content"].strip():
        return "an empty question"
    if role == last in ("user", "assistant"):
        return f"two {role} turns in a row"
    if role == "assistant" and not (generate or message["content"].strip() or TOOL_CALLS in message):
        return "an empty answer"
    return None


def with_system(messages: Messages, system: str | None) -> Messages:
    """The messages after the system text that the row has beside its turns."""
    if system is None or not messages:
        return messages
    if messages[0]["role"] != "system":
        return [{"role": "system", "content": system}, *messages]
    if messages[0]["content"].strip() != system.strip():
        raise ConversationError(
            "a row has one system text, received one beside the turns and another in the first turn"
        )
    return messages


def _missing_part(messages: Messages, generate: bool) -> str | None:
    """What a conversation lacks to be trained on; None for nothing."""
    if not messages:
        return "the conversation is empty"
    answers = [turn for turn in messages if turn["role"] == "assistant"]
    if generate:  # an answer follows every question
        questions = sum(turn["role"] == "user" for turn in messages)
        answers += [{} for _ in range(questions - len(answers))]
    if not answers:
        return f"the conversation has no {'user' if generate else 'assistant'} turn"
    return None if any(turn.get("trained", True) for turn in answers) else "no answer is to be trained on"


def check_encodable(*values: Any) -> None:
    def other(value: Any) -> Any:
        raise ConversationError(f"a value that JSON has not, a {type(value).__name__}; write it as a text")

    try:
        text = json.dumps(values, ensure_ascii=False, default=other, allow_nan=False)
    except ConversationError:
        raise
    except ValueError:
        raise ConversationError("a number that JSON has not, infinite or NaN; write it as a text") from None
    if _encodable(text) != text:
        raise ConversationError("half a surrogate pair, which is no character")


def _encodable(text: str) -> str:
    """`text` with half surrogate pairs, which JSON escapes can hold and UTF-8 cannot, replaced by `?`."""
    return text.encode(errors="replace").decode()


def render_row(
    renderer: ChatRenderer,
    row: Conversation,
    source: str,
    place: str,
    skip_bad_rows: bool,
    render: Callable[[Messages, Extra], Rendered],
) -> tuple[Rendered | None, list[BadRow]]:
    """(what `render` makes of a row's sound messages, what is left out of them); (None, the row) for one left out.

    ConversationError with source and place for a bad row, unless `skip_bad_rows`.
    """
    try:
        sound, why = renderer.sound_part(row.messages, skip_bad_rows, extra=row.extra)
        return render(sound, row.extra), [] if why is None else [BadRow.of(place, why, len(sound))]
    except ConversationError as error:
        if not skip_bad_rows:
            raise ConversationError(
                f"{source}, {place}: {error}; or set skip_bad_rows to leave such rows out"
            ) from None
        return None, [BadRow.of(place, error)]
