"""Conversations → what the frozen target says at every position (METHODS: labels), in resumable Arrow shards.

A row: `id`; `input_ids` [L]; `assistant_mask` [L], true on the tokens heads are trained on; `greedy_ids` [L], the
target's own token at each position given the text before it (-100 at position 0); `hidden` [L, H] when cached.

`labels="argmax"` keeps the recorded conversations. `labels="generate"` lets the target answer every user turn
itself, greedily; the ids it generates are kept as they are, and the next turn's prompt is those ids followed by
what the chat template puts behind them.

The manifest: format_version, target {path, fingerprint}, labels, settings, data {source, split, rows,
fingerprint, bad_rows}, end_token_ids, shards [{file, rows, first_row, source_rows, skipped, cut, …}], counts
{rows, tokens, trained_tokens, agreeing_tokens, agreement, skipped, cut, unfinished, loops}, complete.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import datasets
import torch

from data.answers import Answer, answer_prompts
from data.conversations import ConversationError, Conversations, read_conversations
from data.fingerprint import check_fingerprint, target_fingerprint
from data.frozen_target import DTYPES, FrozenTarget, load_target
from data.hidden_cache import check_disk, hidden_bytes
from data.progress import DistillProgress
from data.rendering import ChatRenderer
from data.shards import DistilledDataset, ShardFolder, load_distilled

__all__ = [
    "DistillOptions",
    "DistilledDataset",
    "Distiller",
    "check_fingerprint",
    "distill",
    "load_distilled",
    "target_fingerprint",
]

logger = logging.getLogger(__name__)

# (prompts, most new tokens of each, progress) → an answer each
Answerer = Callable[[list[list[int]], list[int], Callable[[int], None]], list[Answer]]


@dataclass
class DistillOptions:
    """Everything but target, source and output; those marked * change the rows and so cannot change on resume.

    labels          * argmax (recorded text) or generate (the target's own answers)
    split           * split of a hub dataset
    limit           * only the first so many conversations, None for all
    shuffle_seed    * shuffle the conversations before `limit`, None for file order
    max_length      * longest row in tokens, None for the target's positions or 2048, whichever is less
    max_new_tokens  * longest generated answer
    cut_loops       * end a generated answer where it begins to loop (`data.loops`)
    hidden_states   * cache the target's hidden states: None, `target` (its own type) or a type's name
    shard_rows      * conversations per shard
    skip_bad_rows   * list unusable rows instead of stopping
    dtype           * the target's precision, None for float32 on CPU and the checkpoint's on GPU
    chat_template   * a .jinja file for a tokenizer that has none
    engine          * who generates: local, or openai (a /v1/completions server that returns token ids)
    batch_size        rows generated together and labelled together
    device            cpu, cuda, …; None takes a GPU where there is one
    base_url          the server of `engine="openai"`
    model_name        the model's name there, None for the first it lists
    """

    labels: str = "argmax"
    split: str = "train"
    limit: int | None = None
    shuffle_seed: int | None = None
    max_length: int | None = None
    max_new_tokens: int = 512
    cut_loops: bool = False
    hidden_states: str | None = None
    shard_rows: int = 1024
    skip_bad_rows: bool = False
    dtype: str | None = None
    chat_template: str | None = None
    engine: str = "local"
    batch_size: int = 32
    device: str | None = None
    base_url: str | None = None
    model_name: str | None = None

    def __post_init__(self) -> None:
        for name, valid in (("labels", ("argmax", "generate")), ("engine", ("local", "openai"))):
            if getattr(self, name) not in valid:
                raise ValueError(f"--{name} {getattr(self, name)} is unknown; pass one of {', '.join(valid)}")
        for name in ("limit", "max_length", "max_new_tokens", "shard_rows", "batch_size"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"--{name} must be at least 1, received {value}")
        if self.hidden_states not in (None, "target", *DTYPES):
            raise ValueError(
                f"--hidden_states {self.hidden_states} is unknown; pass target or one of {', '.join(DTYPES)}"
            )
        if (self.engine == "openai") != (self.base_url is not None):
            raise ValueError("--engine openai and --base_url URL go together; pass both or neither")
        if self.engine == "openai" and self.labels != "generate":
            raise ValueError("--engine openai generates answers; pass --labels generate with it")


@dataclass
class _Row:
    """A conversation on its way: `pending` user turns are still to be answered."""

    number: int
    id: str
    messages: list[dict[str, str]]
    ids: list[int]
    mask: list[bool]
    pending: list[int]
    skipped: str | None = None
    cut: bool = False
    finish: str = "end"


class Distiller:
    """Turns conversations into labelled rows; `distill` adds the files."""

    def __init__(self, target: FrozenTarget, options: DistillOptions, answerer: Answerer | None = None) -> None:
        positions = target.max_positions
        self.max_length = options.max_length or min(2048, positions or 2048)
        if positions is not None and self.max_length > positions:
            raise ValueError(
                f"--max_length {self.max_length} exceeds the target's {positions} positions; lower it or pick "
                "another target"
            )
        self.target = target
        self.options = options
        self.renderer = ChatRenderer(target.tokenizer)
        self.hidden_dtype: torch.dtype | None = None
        if options.hidden_states is not None:
            own = next(target.model.parameters()).dtype
            self.hidden_dtype = own if options.hidden_states == "target" else DTYPES[options.hidden_states]
        self._answerer = answerer or (
            lambda prompts, limits, progress: answer_prompts(
                target, prompts, limits, options.batch_size, options.cut_loops, progress
            )
        )
        self.progress = DistillProgress(show=False)

    def rows(self, conversations: datasets.Dataset, first: int = 0) -> list[_Row]:
        """Rendered or generated rows of `conversations`, skipped ones included, unlabelled; `first` numbers them."""
        rows = [self._start(first + i, record) for i, record in enumerate(conversations)]
        while waiting := [row for row in rows if row.pending]:
            self._answer_next_turn(waiting)
        for row in rows:
            if row.skipped is None and not any(row.mask):
                row.skipped = f"its first answer begins beyond max_length {self.max_length}"
        return rows

    def label(self, rows: list[_Row]) -> Iterator[dict[str, Any]]:
        """The shard's rows in source order."""
        rows = [row for row in rows if row.skipped is None]
        order = sorted(range(len(rows)), key=lambda i: len(rows[i].ids))
        keep = self.hidden_dtype is not None
        # With hidden states, rows are written as they are labelled (in length order): a shard of them may not fit
        # in memory.
        labelled: dict[int, dict[str, Any]] = {}
        for start in range(0, len(order), self.options.batch_size):
            batch = order[start : start + self.options.batch_size]
            for i, (greedy, hidden) in zip(batch, self.target.label([rows[i].ids for i in batch], keep)):
                row = rows[i]
                record = {
                    "id": row.id,
                    "input_ids": row.ids,
                    "assistant_mask": row.mask,
                    "greedy_ids": greedy,
                }
                if hidden is None:
                    labelled[i] = record
                else:
                    yield record | {"hidden": hidden_bytes(hidden.to(self.hidden_dtype))}
            self.progress.rows(len(batch))
        for i in sorted(labelled):
            yield labelled[i]

    def count_tokens(self, conversations: datasets.Dataset) -> int:
        """Tokens the rows will have: exact for argmax; for generate, as if every answer were as long as it may be."""
        if self.options.labels == "argmax":
            return sum(len(self._start(i, record).ids) for i, record in enumerate(conversations))
        total = 0
        for i, record in enumerate(conversations):
            try:
                ids, mask = self.renderer.conversation(record["messages"])
            except ConversationError as error:
                self._unusable(_Row(i, record["id"], [], [], [], []), error)
                continue
            asked = sum(turn["role"] == "user" for turn in record["messages"])
            total += min(self.max_length, len(ids) - sum(mask) + asked * self.options.max_new_tokens)
        return total

    # ---- one conversation ----------------------------------------------------------------------------------

    def _start(self, number: int, record: dict[str, Any]) -> _Row:
        messages = record["messages"]
        row = _Row(number, record["id"], messages, [], [], [])
        try:
            if self.options.labels == "argmax":
                row.ids, row.mask = self.renderer.conversation(messages)
                row.cut = len(row.ids) > self.max_length
                row.ids, row.mask = row.ids[: self.max_length], row.mask[: self.max_length]
            else:
                row.pending = [i for i, turn in enumerate(messages) if turn["role"] == "user"]
        except ConversationError as error:
            self._unusable(row, error)
        return row

    def _unusable(self, row: _Row, error: ConversationError) -> None:
        if not self.options.skip_bad_rows:
            raise ConversationError(
                f"row {row.number} (id {row.id}): {error}; or pass --skip_bad_rows to list it"
            ) from None
        row.pending, row.mask, row.skipped = [], [], str(error)

    def _answer_next_turn(self, rows: list[_Row]) -> None:
        """Answer the first pending turn of every row, or end the conversation where there is no room for it."""
        asked, prompts = [], []
        for row in rows:
            turn = row.pending.pop(0)
            try:
                prompt = self._prompt(row, turn)
            except ConversationError as error:
                self._unusable(row, error)
                continue
            if len(prompt) < self.max_length:
                asked.append(row)
                prompts.append(prompt)
            else:
                row.pending, row.cut = [], bool(row.ids)
        limits = [min(self.options.max_new_tokens, self.max_length - len(prompt)) for prompt in prompts]
        self.progress.turn(len(prompts))
        for row, prompt, answer in zip(asked, prompts, self._answerer(prompts, limits, self.progress.answers)):
            row.mask += [False] * (len(prompt) - len(row.ids)) + [True] * len(answer.tokens)
            row.ids = prompt + answer.tokens
            row.finish = answer.finish
            if answer.finish != "end":
                row.pending = []
                row.cut = answer.finish == "limit" and len(row.ids) == self.max_length

    def _prompt(self, row: _Row, turn: int) -> list[int]:
        if not row.ids:
            return self.renderer.prompt(row.messages[: turn + 1])
        return row.ids + self.renderer.next_turn(row.messages[: turn + 1])


def distill(
    target_path: str,
    source: str,
    output: str,
    labels: str = "argmax",
    overwrite: bool = False,
    show_progress: bool = True,
    **options: Any,
) -> dict[str, Any]:
    """Label the conversations of `source` with `target_path` into `output`; returns the finished manifest.

    `options` are those of `DistillOptions`. Killed and called again with the same arguments it goes on with the
    next shard. ValueError for a finished output or one made otherwise, unless `overwrite`.
    """
    settings = DistillOptions(labels=labels, **options)
    target = load_target(target_path, settings.dtype, settings.device, settings.chat_template)
    distiller = Distiller(target, settings, _server_answerer(target, settings))
    loaded = select_conversations(source, settings)
    folder = ShardFolder.open(output, _header(target_path, source, distiller, loaded), overwrite)
    rest = loaded.dataset.select(range(folder.next_row, len(loaded.dataset)))
    if distiller.hidden_dtype is not None:
        hidden_size = folder.manifest["target"]["fingerprint"]["hidden_size"]
        tokens = distiller.count_tokens(rest)
        print(check_disk(tokens, labels == "argmax", hidden_size, distiller.hidden_dtype, output))
    with DistillProgress(show_progress) as distiller.progress:
        distiller.progress.start(folder.next_row, len(loaded.dataset))
        while folder.next_row < len(loaded.dataset):
            _write_shard(folder, distiller, loaded.dataset)
            counts = folder.manifest["counts"]
            distiller.progress.note(f"{counts['trained_tokens']:,} trained tokens, agreement {counts['agreement']}")
    folder.finish()
    return folder.manifest


def select_conversations(source: str, options: DistillOptions) -> Conversations:
    """The conversations `options` ask for: read, shuffled, limited."""
    loaded = read_conversations(source, options.split, options.skip_bad_rows)
    if options.shuffle_seed is not None:
        loaded.dataset = loaded.dataset.shuffle(seed=options.shuffle_seed)
    if options.limit is not None:
        loaded.dataset = loaded.dataset.select(range(min(options.limit, len(loaded.dataset))))
    return loaded


def _write_shard(folder: ShardFolder, distiller: Distiller, conversations: datasets.Dataset) -> None:
    first = folder.next_row
    last = min(first + distiller.options.shard_rows, len(conversations))
    rows = distiller.rows(conversations.select(range(first, last)), first)
    kept = [row for row in rows if row.skipped is None]
    distiller.progress.rows(len(rows) - len(kept))
    counts = {
        "rows": len(kept),
        "tokens": sum(len(row.ids) for row in kept),
        "trained_tokens": sum(map(sum, (row.mask for row in kept))),
        "agreeing_tokens": 0,
        "skipped": len(rows) - len(kept),
        "cut": sum(row.cut for row in kept),
        "unfinished": sum(row.finish == "limit" and not row.cut for row in kept),
        "loops": sum(row.finish == "loop" for row in kept),
    }

    def counted() -> Iterator[dict[str, Any]]:
        for record in distiller.label(kept):
            counts["agreeing_tokens"] += sum(
                m and x == y for m, x, y in zip(record["assistant_mask"], record["input_ids"], record["greedy_ids"])
            )
            yield record

    entry = {
        "first_row": first,
        "source_rows": len(rows),
        "skipped": [
            {"row": row.number, "id": row.id, "reason": row.skipped} for row in rows if row.skipped is not None
        ],
        "cut": [row.id for row in kept if row.cut],
    }
    folder.write(counted(), entry, counts, hidden=distiller.hidden_dtype is not None)


def _header(target_path: str, source: str, distiller: Distiller, loaded: Conversations) -> dict[str, Any]:
    """What a second run must share to continue this one (see the module's docstring)."""
    target, options = distiller.target, distiller.options
    settings = asdict(options)
    for name in ("labels", "split", "batch_size", "device", "base_url", "model_name", "chat_template"):
        del settings[name]
    settings["max_length"] = distiller.max_length
    settings["dtype"] = str(next(target.model.parameters()).dtype).removeprefix("torch.")
    if distiller.hidden_dtype is not None:
        settings["hidden_states"] = str(distiller.hidden_dtype).removeprefix("torch.")
    return {
        "target": {
            "path": target_path,
            "fingerprint": target_fingerprint(target.model, target.tokenizer),
        },
        "labels": options.labels,
        "settings": settings,
        "data": {
            "source": source,
            "split": options.split,
            "rows": len(loaded.dataset),
            "fingerprint": _data_fingerprint(loaded.dataset),
            "bad_rows": [str(bad) for bad in loaded.bad_rows],
        },
        "end_token_ids": target.end_ids,
    }


def _data_fingerprint(dataset: datasets.Dataset) -> str:
    digest = hashlib.sha256()
    for record in dataset:
        digest.update(json.dumps([record["id"], record["messages"]], ensure_ascii=True).encode())
    return digest.hexdigest()[:16]


def _server_answerer(target: FrozenTarget, options: DistillOptions) -> Answerer | None:
    if options.engine == "local":
        return None
    from data.answer_server import AnswerServer

    assert options.base_url is not None
    server = AnswerServer(options.base_url, target.end_ids, options.model_name, options.batch_size, options.cut_loops)
    return server.answers
