"""Build a datastore (`data/datastore.py`) from conversations, or from the rows of a distilled folder."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from draft_heads.data.common.files import LOCK, checksum, lock_folder, replacing, write_text
from draft_heads.data.datastore import ARRAYS, DEPTH, FORMAT_VERSION, MANIFEST, unsigned
from draft_heads.data.fingerprint import tokenizer_hash
from draft_heads.data.labels.manifest import MANIFEST as DISTILLED
from draft_heads.data.labels.shards import load_distilled
from draft_heads.data.text.conversations import (
    BadRow,
    DatasetOptions,
    conversation_of,
    count_by_reason,
    read_conversations,
    render_row,
)
from draft_heads.data.text.rendering import ChatRenderer, ConversationError, Extra, Messages

logger = logging.getLogger(__name__)

_BATCH = 256  # conversations tokenised at once
Progress = Callable[[str, int, int], None]


def build_datastore(
    dataset: str,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    limit: int | None = None,
    progress: Progress = lambda stage, done, of: None,
    options: DatasetOptions | None = None,
    overwrite: bool = True,
) -> dict[str, Any]:
    """Write the conversations of a file, folder or hub id, or the rows of a distilled folder, as a datastore; returns
    its manifest.

    `tokenizer` has a chat template, with which conversations are rendered as the target sees them; `progress` is called
    with stage, done, of. ConversationError with file, row and reason for a bad row, ValueError for no rows and for
    rows that were distilled with another tokenizer, while another run writes the folder, and without `overwrite` where
    one has finished it meanwhile.
    """
    options = options or DatasetOptions()
    read = _distilled_tokens if is_distilled(dataset) else _conversation_tokens
    parts, kept, digest, bad_rows = read(dataset, tokenizer, limit, options, progress)
    # a padded vocabulary's targets may write ids that the tokenizer does not have
    vocabulary = 1 + max(*tokenizer.get_vocab().values(), *(int(part.max()) for part in parts if len(part)))
    separator = np.array([vocabulary], unsigned(vocabulary))
    tokens = np.concatenate([array for part in parts for array in (part.astype(separator.dtype), separator)])
    del parts
    suffixes = suffix_array(tokens, DEPTH, lambda done, of: progress("suffix array", done, of))
    starts = np.concatenate([[0], np.cumsum(np.bincount(tokens, minlength=vocabulary + 1))])
    manifest = {
        "format_version": FORMAT_VERSION,
        "tokens": len(tokens),
        "conversations": kept,
        "vocab_size": vocabulary,
        "tokenizer_hash": tokenizer_hash(tokenizer),
        "depth": DEPTH,
        "dataset": {"name": Path(dataset).name, "limit": limit, "fingerprint": digest},
        "bad_rows": [asdict(bad) for bad in bad_rows],
    }
    arrays = {"tokens": tokens, "suffixes": suffixes.astype(unsigned(len(tokens))), "starts": starts.astype("<u8")}
    with lock_folder(folder, "--output"):
        try:
            if not overwrite and (folder / MANIFEST).exists():
                raise ValueError(f"{folder} was finished by another run meanwhile; use it, or add --overwrite")
            _write(folder, arrays, manifest)
        finally:
            (folder / LOCK).unlink(missing_ok=True)
    return manifest


def _write(folder: Path, arrays: dict[str, NDArray[Any]], manifest: dict[str, Any]) -> None:
    """The files of a datastore; their checksums go into `manifest`."""
    with ExitStack() as written:  # whose end renames them: who has read the old ones goes on with those
        for name, array in arrays.items():
            with written.enter_context(replacing(folder / f"{name}.npy")).open("wb") as file:
                np.save(file, array, allow_pickle=False)
        (folder / MANIFEST).unlink(missing_ok=True)  # written last: a folder without one is not a datastore
    manifest["checksums"] = {name: checksum(folder / f"{name}.npy") for name in ARRAYS}
    write_text(folder / MANIFEST, json.dumps(manifest, indent=2, ensure_ascii=False) + "\n")


def is_distilled(dataset: str) -> bool:
    """Whether it is the output of scripts/distill.py."""
    return (Path(dataset) / DISTILLED).is_file()


def _distilled_tokens(
    folder: str,
    tokenizer: PreTrainedTokenizerBase,
    limit: int | None,
    options: DatasetOptions,
    progress: Progress,
) -> tuple[list[NDArray[Any]], int, str, list[BadRow]]:
    """Those of the rows that a target has answered or read, of how many conversations, the digest of the rows, and
    nothing refused. A conversation whose turns the chat template rewrites has several rows, not always in a row.

    limit: of rows with cached states the conversations are those of the lowest hashes, of others the first"""
    if options != DatasetOptions():
        raise ValueError(
            "split, dataset_config and skip_bad_rows say what is read of conversations; "
            f"{folder} holds distilled rows; leave them out"
        )
    distilled = load_distilled(folder)
    theirs, ours = distilled.manifest["target"]["fingerprint"]["tokenizer_hash"], tokenizer_hash(tokenizer)
    if theirs != ours:
        settings = distilled.manifest["settings"]
        made_with = [distilled.manifest["target"]["path"], *filter(None, [settings.get("target_adapter")])]
        raise ValueError(
            f"a datastore has the tokenizer of the rows that it is made of; {folder} was distilled with {theirs}, got "
            f"{ours}; pass {', or for its own tokens the adapter '.join(made_with)}"
        )
    rows = distilled.dataset
    names = [name for name in ("id", "conversation") if name in rows.column_names]  # older versions wrote the first
    keys = list(zip(*(rows[name] for name in names)))
    order = list(dict.fromkeys(keys))
    if distilled.hidden_dtype is not None:  # such rows are stored by length, whose first would be the shortest
        order.sort(key=lambda key: hashlib.sha256(repr(key).encode()).digest())
    kept = dict.fromkeys(order[:limit])
    progress("conversations", len(kept), len(kept))
    chosen = rows.select_columns(["input_ids"]).select([row for row, key in enumerate(keys) if key in kept])
    return [np.array(row["input_ids"]) for row in chosen], len(kept), distilled.content, []


def _conversation_tokens(
    dataset: str,
    tokenizer: PreTrainedTokenizerBase,
    limit: int | None,
    options: DatasetOptions,
    progress: Progress,
) -> tuple[list[NDArray[Any]], int, str, list[BadRow]]:
    """Those of the conversations as the chat template writes them, how many these are, their digest, and what was
    refused."""
    loaded = read_conversations(dataset, options.split, options.skip_bad_rows, limit, config=options.dataset_config)
    rows, refused = loaded.dataset, list[BadRow]()
    digest = hashlib.sha256()
    parts: list[NDArray[Any]] = []
    renderer = ChatRenderer(tokenizer)

    shortened = 0

    def text_of_row(messages: Messages, extra: Extra) -> str:
        nonlocal shortened
        messages = renderer.answered(messages, extra)
        text = renderer.checked_text(messages, extra=extra)
        renderer.check_answers(text, messages, extra)
        shortened += len(renderer.shortened(messages, extra))
        return text

    for first in range(0, len(rows), _BATCH):
        progress("conversations", first, len(rows))
        batch = rows.select(range(first, min(first + _BATCH, len(rows)))).to_list()
        conversations = [conversation_of(row) for row in batch]
        digest.update(json.dumps([messages for messages, _ in conversations]).encode())
        digest.update(json.dumps([extra for _, extra in conversations if extra]).removeprefix("[]").encode())
        texts: list[str] = []
        for place, row in zip([row["place"] for row in batch], conversations):
            text, bad = render_row(renderer, row, dataset, place, options.skip_bad_rows, text_of_row)
            texts += [] if text is None else [text]
            refused += bad
        for ids in tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"] if texts else ():
            parts.append(np.array(ids, np.int64))
    progress("conversations", len(rows), len(rows))
    for line in count_by_reason(refused):
        logger.warning("%s: %s", dataset, line)
    if shortened:
        logger.warning("%s: %d answers lack a part that the chat template leaves out, as thoughts", dataset, shortened)
    if not parts:
        raise ConversationError(
            f"{dataset}: the chat template refuses all {len(rows)} conversations, the first: {refused[0]}; pass "
            "others, or another chat_template"
        )
    return parts, len(parts), digest.hexdigest()[:16], [*loaded.bad_rows, *refused]


def suffix_array(
    tokens: NDArray[np.integer], depth: int = 32, progress: Callable[[int, int], None] = lambda done, of: None
) -> NDArray[np.int64]:
    """[N] int64, the positions in `tokens [N]` sorted by the first `depth` tokens of the suffix that begins there.

    For the tokens 1 2 1 2 3 the suffixes in order are 1 2 1 2 3, 1 2 3, 2 1 2 3, 2 3, 3: the array is 0 2 1 3 4.
    Prefix doubling: each round sorts by pairs of ranks and so doubles the sorted depth. `depth` is a power of two.
    Equal suffixes keep the order of the text; a shorter suffix sorts before a longer one that begins with it. Needs 32
    bytes of memory per token. `progress(done, of)` is called with the number of rounds.
    """
    if depth < 1 or depth & (depth - 1):
        raise ValueError(f"the depth of a suffix array is a power of two; got {depth}; choose 16, 32 or 64")
    rounds = depth.bit_length()
    progress(0, rounds)
    order = np.argsort(tokens, kind="stable")
    rank = _ranks(np.asarray(tokens)[order], order)
    for done in range(1, rounds):
        progress(done, rounds)
        if len(rank) == 0 or rank.max() == len(rank):
            break  # all ranks differ
        half = 1 << (done - 1)
        second = np.zeros_like(rank)
        second[:-half] = rank[half:]
        pair = rank * (len(rank) + 1) + second
        order = np.argsort(pair, kind="stable")
        rank = _ranks(pair[order], order)
    progress(rounds, rounds)
    return order


def _ranks(ordered: NDArray[np.integer], order: NDArray[np.int64]) -> NDArray[np.int64]:
    """[N] int64 from 1, equal keys have equal ranks: `ordered` are the sorted keys, `order` their positions."""
    rank = np.empty(len(order), dtype=np.int64)
    rank[order] = np.cumsum(np.concatenate([[True], ordered[1:] != ordered[:-1]])[: len(order)])
    return rank
