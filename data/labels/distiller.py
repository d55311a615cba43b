"""Conversations → labelled rows, in memory: rendered or generated turn by turn, then labelled by the target."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import datasets
import torch

from draft_heads.configs.options import DTYPES
from draft_heads.data.labels.answer_journal import AnswerJournal
from draft_heads.data.labels.answer_server import AnswerServer
from draft_heads.data.labels.answers import Answer, Answerer
from draft_heads.data.labels.distill_options import DistillOptions
from draft_heads.data.labels.hidden_cache import STATE_COLUMNS, cast_for_storage, hidden_bytes
from draft_heads.data.labels.labeller import Labelled, Labeller, checked_ids
from draft_heads.data.labels.questions import NAMED_BY, QuestionNames, with_answer
from draft_heads.data.text.chat_template import tell_of_the_date
from draft_heads.data.text.conversations import conversation_of
from draft_heads.data.text.rendering import ChatRenderer, ConversationError, Messages

logger = logging.getLogger(__name__)
_OVERFLOW = (
    "the target's states of this text are no finite numbers in its type: take --dtype bfloat16 or float32, and another "
    "output"
)


@dataclass
class Row:
    """A conversation in progress; `pending` are the indices of the user turns without an answer yet."""

    number: int
    place: str
    id: str
    conversation: str  # `QuestionNames.opening`
    messages: Messages
    extra: dict[str, Any]
    ids: list[int] = field(default_factory=list)
    mask: list[bool] = field(default_factory=list)
    pending: list[int] = field(default_factory=list)
    answer: tuple[str, bool] = ("", True)  # text of the last answer, and whether that is all of it
    skipped: str | None = None
    trimmed: str | None = None  # why turns at its end were left out
    cut: bool = False
    finish: str = "end"
    without_end: int = 0  # recorded answers whose last token ends none
    shortened: int = 0  # recorded answers to earlier questions that the template renders without a part
    begun: bool = False  # whether its earlier turns are a row already
    trained: bool = True  # whether the answer that is being written is to be trained on
    own: bool = False  # whether the target itself wrote all its answers, which are their own labels
    labelled: Labelled | None = None  # of `ids`, where what wrote the answer has them

    def own_labels(self) -> list[int]:
        """[L], the labels of answers that the target itself wrote: their tokens, -100 elsewhere."""
        return [token if trained else -100 for token, trained in zip(self.ids, self.mask, strict=True)]


class Distiller:
    """Turns conversations into labelled rows; `distill` adds the files."""

    def __init__(self, target: Labeller, options: DistillOptions, answerer: Answerer | None = None) -> None:
        """answerer: writes the answers of `labels="generate"`; None: the server of `options`"""
        target.refresh()
        if not target.end_token_ids:
            raise ValueError(
                f"neither the tokenizer nor the config of {target.name} names an end-of-turn token; set eos_token"
            )
        self.max_length = options.max_length or min(2048, target.max_positions)
        if self.max_length > target.max_positions:
            raise ValueError(
                f"max_length {self.max_length} exceeds the target's {target.max_positions} positions; lower it or "
                "pick another target"
            )
        self.target = target
        self.options = options
        self.renderer = ChatRenderer(target.tokenizer, target.end_token_ids)
        self._names = QuestionNames(target.tokenizer)
        self.named_by: str | None = NAMED_BY  # as the manifest says it of all rows
        tell_of_the_date(
            target.tokenizer,
            "rows written on another day have another one, and answers that an interrupted run kept are then written "
            "again",
        )
        if options.labels == "generate" and options.max_new_tokens >= self.max_length:
            logger.warning(
                "a prompt and its answer have at most %d tokens together (max_length), so no answer reaches "
                "max_new_tokens %d: raise max_length where answers are to end by themselves",
                self.max_length,
                options.max_new_tokens,
            )
        self.hidden_dtype: torch.dtype | None = None
        if options.hidden_states is not None:
            self.hidden_dtype = target.dtype if options.hidden_states == "target" else DTYPES[options.hidden_states]
        target.check_layers(options.target_layers)
        if answerer is None and options.engine == "openai":
            answerer = AnswerServer(target, options)
        self.answerer = answerer
        self.unasked = 0  # questions after an answer that did not end, or without room for one
        self.unit = "answers" if options.labels == "generate" else "conversations"
        self.advance: Callable[[int], None] = lambda units: None  # called with the number of new units
        self.show_labelled: Callable[[int, int], None] = lambda rows, of: None  # after a server wrote the answers

    def count_units(self, record: dict[str, Any]) -> int:
        """The units of work, named by `unit`, of a conversation that is answered to its end."""
        return sum(turn["role"] == "user" for turn in record["messages"]) if self.unit == "answers" else 1

    def rows(self, conversations: datasets.Dataset, first: int = 0, journal: Path | None = None) -> Iterator[Row]:
        """Rendered or generated rows, skipped ones included, as they end; numbered from `first`.

        journal: a file that keeps the answers until all rows are written; None: nothing does.

        A conversation is one row, but for templates that rewrite earlier turns in later prompts (they drop thoughts):
        there each turn that is answered after such a change begins a row, of the same number and id.
        """
        asked: list[tuple[Row, list[int]]] = []  # a prompt each, for the next answer
        for index, record in enumerate(conversations):
            yield from self._ended(self._new_row(first + index, record), asked)
        answerer = self.answerer
        if answerer is not None and journal is not None:
            answerer = AnswerJournal(answerer, journal)
        while asked:
            answering, asked = asked, []
            prompts = [prompt for _, prompt in answering]
            limits = [min(self.options.max_new_tokens, self.max_length - len(prompt)) for prompt in prompts]
            if answerer is None:
                raise ValueError("labels generate needs an answerer; got none; pass inference.answers.TargetAnswerer")
            for index, answer in answerer(prompts, limits):
                self.advance(1)
                row, prompt = answering[index]
                if answer.finish == "overflow":
                    yield from self._overflowed(row)
                    continue
                self._add_answer(row, prompt, answer)
                yield from self._ended(row, asked)

    def records(self, rows: Iterable[Row]) -> Iterator[dict[str, Any]]:
        """What a shard has of its rows, in source order; with hidden states as they come: of those a shard may not
        fit in memory."""
        records = self._label(row for row in rows if row.skipped is None)
        in_order = records if self.hidden_dtype is not None else sorted(records, key=lambda found: found[0])
        yield from (record for _, record in in_order)

    def _label(self, rows: Iterable[Row]) -> Iterator[tuple[int, dict[str, Any]]]:
        """(number of the row, its record)"""
        unlabelled = []
        for row in rows:
            if row.labelled is None:
                unlabelled.append(row)
            else:
                yield row.number, self._record(row, row.labelled)
                row.labelled = None
        unlabelled.sort(key=lambda row: len(row.ids))
        for start in range(0, len(unlabelled), self.options.batch_size):
            batch = unlabelled[start : start + self.options.batch_size]
            texts, masks = [row.ids for row in batch], [row.mask for row in batch]
            keep_hidden, layers = self.hidden_dtype is not None, self.options.target_layers
            try:
                every = self.target.label(texts, keep_hidden, layers, masks)
            except ValueError as error:
                if (bad := getattr(error, "row", None)) is None:
                    raise
                raise ValueError(f"{batch[bad].place} (id {batch[bad].id}): {_OVERFLOW}, or leave it out") from None
            for row, labelled in zip(batch, every, strict=True):
                # what a forward chooses may differ: a processor may depend on how long the answer might have become
                own = labelled._replace(greedy_ids=row.own_labels()) if row.own else labelled
                yield row.number, self._record(row, own)
            if self.unit == "conversations":
                self.advance(len(batch))
            else:
                self.show_labelled(start + len(batch), len(unlabelled))

    def _record(self, row: Row, labelled: Labelled) -> dict[str, Any]:
        greedy, *states = labelled
        record: dict[str, Any] = dict(id=row.id, conversation=row.conversation)
        record |= dict(input_ids=row.ids, assistant_mask=row.mask, greedy_ids=greedy)
        if self.hidden_dtype is None:
            return record
        columns = zip(STATE_COLUMNS[: 1 + bool(self.options.target_layers)], states)
        stored = {name: cast_for_storage(x, self.hidden_dtype, row.id) for name, x in columns if x is not None}
        return record | {name: hidden_bytes(x) for name, x in stored.items()}

    def count_tokens(self, conversations: datasets.Dataset) -> int:
        """Tokens of the rows: exact for argmax; for generate of answers that are all as long as they may be.

        Rows that begin anew since another token than the template's ended an answer are not foreseen.
        """
        total = 0
        for i, record in enumerate(conversations):
            row = self._new_row(i, record)
            try:
                total += len(row.ids) + sum(self._longest_rows(row))
            except ConversationError as error:
                self._reject(row, error)
        return total

    @cached_property
    def _closes(self) -> bool:
        """Whether the template closes an answer with one of the target's ends, or begins the next turn with it."""
        try:
            answered = self.renderer.prompt(_SAMPLE[:1]) + self.renderer.answer_after(_SAMPLE[:1], "Hi")
            return any(self._goes_on([*answered, end], _SAMPLE) for end in self.target.end_token_ids)
        except ConversationError:  # it refuses the sample
            return False

    def _longest_rows(self, row: Row) -> Iterator[int]:
        """The most tokens of every row that the generated answers of a conversation may be in; none without `pending`.

        A row goes on while the next prompt begins with the prompt and the answer before it; short answers show that.
        """
        messages = with_answer(row.messages, "a")
        texts = [self.renderer.text(messages[: turn + 1], True, row.extra) for turn in row.pending]
        for answers, (turn, text, later) in enumerate(zip(row.pending, texts, [*texts[1:], None]), start=1):
            goes_on = later is not None and later.startswith(text) and later[len(text) :].lstrip().startswith("a")
            if self.renderer.probe.may_rewrite or not goes_on or not self._closes:
                prompt = len(self.renderer.prompt(messages[: turn + 1], row.extra))
                yield min(self.max_length, prompt + answers * self.options.max_new_tokens)

    # ---- one conversation ----------------------------------------------------------------------------------

    def _new_row(self, number: int, record: dict[str, Any]) -> Row:
        conversation = conversation_of(record)
        messages, extra = conversation
        name = self._names.opening(conversation) if self.named_by == NAMED_BY else conversation.opening
        row = Row(number, record["place"], record["id"], name, messages, extra)
        try:
            generate, skip = self.options.labels == "generate", self.options.skip_bad_rows
            messages, row.trimmed = self.renderer.sound_part(messages, skip, generate, extra)
            row.messages = messages
            if self.options.labels == "argmax":
                row.ids, row.mask, spans = self.renderer.spans(messages, extra)
                kept = {turn: last for turn, (first, last) in spans.items() if first < min(last, self.max_length)}
                row.without_end = sum(
                    last <= self.max_length and row.ids[last - 1] not in self.target.end_token_ids
                    for last in kept.values()
                )
                row.shortened = len(kept.keys() & self.renderer.shortened(messages, extra))
                row.cut = len(row.ids) > self.max_length
                row.ids, row.mask = row.ids[: self.max_length], row.mask[: self.max_length]
                checked_ids(self.target, row.ids, "the conversation")
            else:
                row.pending = [i for i, turn in enumerate(messages) if turn["role"] == "user"]
                self.renderer.check_read(with_answer(messages, "a"), extra)
        except ConversationError as error:
            self._reject(row, error)
        return row

    def _reject(self, row: Row, error: ConversationError) -> None:
        if not self.options.skip_bad_rows:
            raise ConversationError(
                f"{row.place} (id {row.id}): {error}; or set skip_bad_rows to leave such rows out and list them"
            ) from None
        row.pending, row.mask, row.skipped, row.labelled = [], [], str(error), None

    def _ended(self, row: Row, asked: list[tuple[Row, list[int]]]) -> Iterator[Row]:
        """Ask a conversation's next question, which goes to `asked`; the row that ends before it, if one does."""
        if not row.pending:
            yield from self._finished(row)
            return
        turn = row.pending.pop(0)
        row.trained = all(recorded.get("trained", True) for recorded in row.messages[turn + 1 : turn + 2])
        if row.ids:
            trained = {"trained": False} if row.messages[turn - 1].get("trained") is False else {}
            row.messages[turn - 1] = {"role": "assistant", "content": row.answer[0], **trained}
        messages = row.messages[: turn + 1]
        try:
            whole = row.answer[1] and "\ufffd" not in row.answer[0]  # bytes of no letter are read as another token
            kept = self._goes_on(row.ids, messages, row.extra) if row.ids and whole else None
            prompt = self.renderer.prompt(messages, row.extra) if kept is None else kept
            checked_ids(self.target, prompt, "the conversation")
        except ConversationError as error:
            if row.ids and self._asks(with_answer(messages, "a"), row.extra):
                logger.warning("%s (id %s): no question follows an answer of the target: %s", row.place, row.id, error)
                self.unasked += 1 + len(row.pending)
                row.pending = []
                if not any(row.mask):
                    row.skipped = str(error)
                yield from self._finished(row)
            else:
                self._reject(row, error)
                yield row
            return
        if len(prompt) >= self.max_length:
            self.unasked += bool(row.ids) + len(row.pending)  # of a first one without room the row is skipped
            row.pending, row.cut = [], bool(row.ids)
            yield from self._finished(row)
            return
        if row.ids and kept is None:  # the template rewrote the turns before
            if any(row.mask):
                yield replace(row, pending=[])
                row.begun = True
            row.ids, row.mask = [], []
        row.labelled = None
        asked.append((row, prompt))

    def _overflowed(self, row: Row) -> Iterator[Row]:
        """The row without its last question, whose answer is none; rejected where no answer comes before."""
        if not (row.ids or row.begun):
            self._reject(row, ConversationError(_OVERFLOW))
            yield row
            return
        logger.warning("%s (id %s): no further question is answered: %s", row.place, row.id, _OVERFLOW)
        self.unasked += 1 + len(row.pending)
        row.pending = []
        if not any(row.mask):
            row.skipped = _OVERFLOW
        elif row.own and self.hidden_dtype is None:
            row.labelled = Labelled(row.own_labels(), None, None)
        yield from self._finished(row)

    def _asks(self, messages: Messages, extra: dict[str, Any]) -> bool:
        """Whether a conversation can be asked its last question."""
        try:
            checked_ids(self.target, self.renderer.prompt(messages, extra), "the conversation")
        except ConversationError:
            return False
        return True

    def _finished(self, row: Row) -> Iterator[Row]:
        """The row, skipped where nothing of it can be trained on; none where nothing can but in earlier turns."""
        if any(row.mask) or not row.begun:
            yield self._checked(row)

    def _checked(self, row: Row) -> Row:
        if row.skipped is None and not any(row.mask):
            all_trained = all(turn.get("trained", True) for turn in row.messages)
            answer = "first answer" if all_trained else "first answer to train on"
            beyond = f"begins beyond max_length {self.max_length}"
            unfinished = bool(row.ids) and not row.cut  # an earlier answer, which is not to be trained on
            row.skipped = f"its {answer} {'follows an unfinished one' if unfinished else beyond}"
        return row

    def _add_answer(self, row: Row, prompt: list[int], answer: Answer) -> None:
        row.own = answer.is_own and (row.own or not row.ids)
        row.mask += [False] * (len(prompt) - len(row.ids)) + [row.trained] * len(answer.tokens)
        row.ids = prompt + answer.tokens
        row.answer = self.renderer.answer_text(answer.tokens, self.target.end_token_ids)
        row.finish = answer.finish
        kept = answer.hidden is not None and (answer.aux_hidden is not None or not self.options.target_layers)
        if row.own and (kept or self.hidden_dtype is None):
            row.labelled = Labelled(row.own_labels(), answer.hidden, answer.aux_hidden)
        if answer.finish != "end":
            self.unasked += len(row.pending)
            row.pending = []
            row.cut = answer.finish == "limit" and len(row.ids) == self.max_length

    def _goes_on(self, ids: list[int], messages: Messages, extra: dict[str, Any] | None = None) -> list[int] | None:
        """A row's own tokens and what follows them in the next prompt; None unless they are that prompt, as text.

        They are not where the template rewrites earlier turns, strips an answer, or writes another end or a blank
        before it: inference has its prompt there, so a row begins.
        """
        following = ids + self.renderer.next_turn(messages, extra, ids[-1])
        texts = [
            self.target.tokenizer.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False)
            for tokens in (following, self.renderer.prompt(messages, extra))
        ]
        return following if texts[0] == texts[1] else None


_SAMPLE: Messages = [
    {"role": role, "content": text} for role, text in (("user", "Hi"), ("assistant", "Hi"), ("user", "Bye"))
]
