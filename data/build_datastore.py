"""Builds a datastore (`data.datastore`) from conversations: tokens, suffix array, manifest."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from draft_heads.data.conversations import load_conversations
from draft_heads.data.datastore import DEPTH, FORMAT_VERSION, MANIFEST, unsigned
from draft_heads.data.files import write_text
from draft_heads.data.fingerprint import tokenizer_hash
from draft_heads.data.suffix_array import suffix_array

Progress = Callable[[str, int, int], None]  # stage, done, of

_BATCH = 256  # conversations tokenised at once


def build_datastore(
    dataset: str,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    limit: int | None = None,
    progress: Progress = lambda stage, done, of: None,
) -> dict[str, Any]:
    """Write the conversations of a file, folder or hub id as a datastore; returns its manifest.

    `tokenizer` has a chat template, with which conversations are rendered as the target sees them. ConversationError
    with file, row and reason for a bad row, ValueError for a source without rows.
    """
    rows = load_conversations(dataset)
    if limit is not None:
        rows = rows.select(range(min(limit, len(rows))))
    if not len(rows):
        raise ValueError(f"--dataset {dataset} holds no conversation; pass a file with at least one")
    vocabulary = 1 + max(tokenizer.get_vocab().values())
    digest = hashlib.sha256()
    parts: list[NDArray[Any]] = []
    conversations = rows["messages"]
    for first in range(0, len(rows), _BATCH):
        progress("conversations", first, len(rows))
        batch = conversations[first : first + _BATCH]
        digest.update(json.dumps(batch).encode())
        texts: Any = [tokenizer.apply_chat_template(messages, tokenize=False) for messages in batch]
        for ids in tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]:
            parts.append(np.array([*ids, vocabulary], unsigned(vocabulary)))
    progress("conversations", len(rows), len(rows))
    tokens = np.concatenate(parts)
    del parts
    suffixes = suffix_array(tokens, DEPTH, lambda done, of: progress("suffix array", done, of))
    starts = np.concatenate([[0], np.cumsum(np.bincount(tokens, minlength=vocabulary + 1))])
    manifest = {
        "format_version": FORMAT_VERSION,
        "tokens": len(tokens),
        "conversations": len(rows),
        "vocab_size": vocabulary,
        "tokenizer_hash": tokenizer_hash(tokenizer),
        "depth": DEPTH,
        "dataset": {"name": Path(dataset).name, "limit": limit, "fingerprint": digest.hexdigest()[:16]},
    }
    arrays = {"tokens": tokens, "suffixes": suffixes.astype(unsigned(len(tokens))), "starts": starts.astype("<u8")}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / MANIFEST).unlink(missing_ok=True)  # written last: a folder without one is not a datastore
    for name, array in arrays.items():
        np.save(folder / f"{name}.npy", array, allow_pickle=False)
    write_text(folder / MANIFEST, json.dumps(manifest, indent=2, ensure_ascii=False) + "\n")
    return manifest
