"""Conversations → labelled rows, in memory: rendered or generated turn by turn, then labelled by the target."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import datasets
import torch

from draft_heads.data.answers import Answer, answer_prompts
from draft_heads.data.distill_options import DistillOptions
from draft_heads.data.hidden_cache import STATE_COLUMNS, hidden_bytes, stored_as
from draft_heads.data.labeller import Labeller, checked_ids
from draft_heads.data.options import DTYPES
from draft_heads.data.rendering import ChatRenderer, ConversationError

# (prompts, most new tokens of each, progress) → an answer each
Answerer = Callable[[list[list[int]], list[int], Callable[[int], None]], list[Answer]]


@dataclass
class Row:
    """A conversation in progress; `pending` are the user turns that are still to be answered."""

    number: int
    place: str
    id: str
    messages: list[dict[str, str]]
    ids: list[int]
    mask: list[bool]
    pending: list[int]
    text: str = ""  # rendering of the last prompt, when answers are generated
    answer: tuple[str, bool] = ("", True)  # text of the last answer, and whether that is all of it
    skipped: str | None = None
    cut: bool = False
    finish: str = "end"


class Distiller:
    """Turns conversations into labelled rows; `distill` adds the files."""

    def __init__(self, target: Labeller, options: DistillOptions, answerer: Answerer | None = None) -> None:
        target.refresh()
        if not target.end_token_ids:
            raise ValueError(
                f"neither the tokenizer nor the config of {target.name} names an end-of-turn token; set eos_token"
            )
        self.max_length = options.max_length or min(2048, target.max_positions)
        if self.max_length > target.max_positions:
            raise ValueError(
                f"--max_length {self.max_length} exceeds the target's {target.max_positions} positions; lower it or "
                "pick another target"
            )
        self.target = target
        self.options = options
        self.renderer = ChatRenderer(target.tokenizer)
        self.hidden_dtype: torch.dtype | None = None
        if options.hidden_states is not None:
            self.hidden_dtype = target.dtype if options.hidden_states == "target" else DTYPES[options.hidden_states]
        target.check_layers(options.target_layers)
        self._answerer = answerer or (
            lambda prompts, limits, progress: answer_prompts(
                target, prompts, limits, options.batch_size, options.cut_loops, progress
            )
        )
        self.counted = "answers" if options.labels == "generate" else "conversations"
        self.advance: Callable[[int], None] = lambda units: None  # called with the number of new units of `counted`

    def units(self, record: dict[str, Any]) -> int:
        """How many units a conversation has that is answered to its end."""
        return sum(turn["role"] == "user" for turn in record["messages"]) if self.counted == "answers" else 1

    def rows(self, conversations: datasets.Dataset, first: int = 0) -> list[Row]:
        """Rendered or generated rows, skipped ones included, not yet labelled; numbered from `first`.

        A conversation is one row, but for templates that rewrite earlier turns in later prompts (they drop thoughts):
        there each turn that is answered after such a change begins a row, of the same number and id.
        """
        rows = [self._new_row(first + i, record) for i, record in enumerate(conversations)]
        ended: list[Row] = []
        while waiting := [row for row in rows if row.pending]:
            ended += self._answer_next_turn(waiting)
        rows = sorted(ended + rows, key=lambda row: row.number)
        for row in rows:
            if row.skipped is None and not any(row.mask):
                row.skipped = f"its first answer begins beyond max_length {self.max_length}"
        return rows

    def label(self, rows: list[Row]) -> Iterator[dict[str, Any]]:
        """The shard's rows in source order."""
        rows = [row for row in rows if row.skipped is None]
        order = sorted(range(len(rows)), key=lambda i: len(rows[i].ids))
        dtype = self.hidden_dtype
        # With hidden states, rows are written as they are labelled (in length order): a shard of them may not fit
        # in memory.
        labelled: dict[int, dict[str, Any]] = {}
        for start in range(0, len(order), self.options.batch_size):
            batch = order[start : start + self.options.batch_size]
            texts, masks, layers = (
                [rows[i].ids for i in batch],
                [rows[i].mask for i in batch],
                self.options.target_layers,
            )
            for i, (greedy, *states) in zip(batch, self.target.label(texts, dtype is not None, layers, masks)):
                row = rows[i]
                record = dict(id=row.id, input_ids=row.ids, assistant_mask=row.mask, greedy_ids=greedy)
                if dtype is not None:
                    columns = zip(STATE_COLUMNS[: 1 + bool(layers)], states)
                    kept = {name: stored_as(x, dtype, row.id) for name, x in columns if x is not None}
                    yield record | {name: hidden_bytes(x) for name, x in kept.items()}
                else:
                    labelled[i] = record
            self.advance(len(batch) if self.counted == "conversations" else 0)
        for i in sorted(labelled):
            yield labelled[i]

    def count_tokens(self, conversations: datasets.Dataset) -> int:
        """Tokens of the rows: exact for argmax; for generate an upper bound, every answer as long as it may be.

        Where the template may drop thoughts, every turn counts as a row of its own.
        """
        if self.options.labels == "argmax":
            return sum(len(self._new_row(i, record).ids) for i, record in enumerate(conversations))
        total = 0
        for i, record in enumerate(conversations):
            try:
                ids, mask = self.renderer.conversation(record["messages"])
            except ConversationError as error:
                self._reject(Row(i, record["place"], record["id"], [], [], [], []), error)
                continue
            turns = sum(turn["role"] == "user" for turn in record["messages"])
            asked, answer = len(ids) - sum(mask), self.options.max_new_tokens
            rows = range(1, turns + 1) if self.renderer.may_rewrite else (turns,)
            total += sum(min(self.max_length, asked + answers * answer) for answers in rows)
        return total

    # ---- one conversation ----------------------------------------------------------------------------------

    def _new_row(self, number: int, record: dict[str, Any]) -> Row:
        messages = record["messages"]
        row = Row(number, record["place"], record["id"], messages, [], [], [])
        try:
            if self.options.labels == "argmax":
                row.ids, row.mask = self.renderer.conversation(messages)
                row.cut = len(row.ids) > self.max_length
                row.ids, row.mask = row.ids[: self.max_length], row.mask[: self.max_length]
                checked_ids(self.target, row.ids, "the conversation")
            else:
                row.pending = [i for i, turn in enumerate(messages) if turn["role"] == "user"]
        except ConversationError as error:
            self._reject(row, error)
        return row

    def _reject(self, row: Row, error: ConversationError) -> None:
        if not self.options.skip_bad_rows:
            raise ConversationError(
                f"{row.place} (id {row.id}): {error}; or pass --skip_bad_rows to leave such rows out and list them"
            ) from None
        row.pending, row.mask, row.skipped = [], [], str(error)

    def _answer_next_turn(self, rows: list[Row]) -> list[Row]:
        """Answer the first pending turn of every row, or end the conversation where its prompt does not fit.

        Returns the rows that ended because the template rewrote them; their conversations go on in `rows`.
        """
        answering, prompts, ended = [], [], []
        for row in rows:
            turn = row.pending.pop(0)
            if row.ids:
                row.messages[turn - 1] = {"role": "assistant", "content": row.answer[0]}
            messages = row.messages[: turn + 1]
            try:
                text = self.renderer.text(messages, add_generation_prompt=True)
                kept = self._kept_tokens(row, messages, text)
                prompt = self.renderer.prompt(messages) if kept is None else kept
                checked_ids(self.target, prompt, "the conversation")
            except ConversationError as error:
                self._reject(row, error)
                continue
            if len(prompt) >= self.max_length:
                row.pending, row.cut = [], bool(row.ids)
                continue
            if row.ids and kept is None:
                ended.append(replace(row, pending=[]))
                row.ids, row.mask = [], []
            row.text = text
            answering.append(row)
            prompts.append(prompt)
        limits = [min(self.options.max_new_tokens, self.max_length - len(prompt)) for prompt in prompts]
        answers = self._answerer(prompts, limits, self.advance)
        for row, prompt, answer in zip(answering, prompts, answers):
            row.mask += [False] * (len(prompt) - len(row.ids)) + [True] * len(answer.tokens)
            row.ids = prompt + answer.tokens
            row.answer = self.renderer.answer_text(answer.tokens, self.target.end_token_ids)
            row.finish = answer.finish
            if answer.finish != "end":
                row.pending = []
                row.cut = answer.finish == "limit" and len(row.ids) == self.max_length
        return ended

    def _kept_tokens(self, row: Row, messages: list[dict[str, str]], text: str) -> list[int] | None:
        """The row's own tokens with the next prompt behind them; None where its `text` rewrites what was there."""
        answer, complete = row.answer
        behind = text[len(row.text) :].lstrip()
        if not row.ids or not complete or not text.startswith(row.text) or not behind.startswith(answer):
            return None
        more = self.renderer.next_turn(messages)
        return row.ids + (more[1:] if more[:1] == row.ids[-1:] else more)  # one token ends a turn and begins the next
