"""Pools that outlive the process: rows of token ids in one safetensors file.

    tokens   [N] int32, the rows one after another
    lengths  [R] int64, tokens of each row

Its metadata name the kind of pool and the tokenizer. The rows of an n-gram pool are texts, counted again when loaded;
those of a phrase pool are its phrases, oldest first.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from draft_heads.data.fingerprint import tokenizer_hash
from draft_heads.inference.drafters.text.base import TextTarget

FORMAT_VERSION = "1"


class PoolFile:
    """The file of one kind of pool for one tokenizer."""

    def __init__(self, path: str | Path, kind: str, target: TextTarget) -> None:
        self.path, self.kind = Path(path), kind
        tokenizer = target.tokenizer
        self.tokens_of = f"{target.vocab_size} tokens" if tokenizer is None else tokenizer_hash(tokenizer)

    def load(self) -> list[list[int]]:
        """The rows, none without a file; ValueError for a damaged file or another kind of pool."""
        if not self.path.exists():
            return []
        remedy = "delete it to start a new pool, or name another file"
        try:
            with safe_open(self.path, framework="pt") as file:
                metadata = file.metadata() or {}
                tokens, lengths = file.get_tensor("tokens"), file.get_tensor("lengths")
        except (SafetensorError, OSError) as error:
            raise ValueError(
                f"a pool is a safetensors file with tokens and lengths; {self.path} is none or is truncated ({error}); "
                f"{remedy}"
            ) from None
        own = {"format_version": FORMAT_VERSION, "kind": self.kind, "tokens_of": self.tokens_of}
        for name, value in own.items():
            if metadata.get(name) != value:
                raise ValueError(
                    f"a {self.kind} pool must have {name} {value}; {self.path} has {metadata.get(name)}; {remedy}"
                )
        if int(lengths.sum()) != len(tokens) or bool((lengths < 1).any()):
            raise ValueError(
                f"the rows of a pool must have all its {len(tokens)} tokens; those of {self.path} have "
                f"{int(lengths.sum())}; {remedy}"
            )
        return [row.tolist() for row in tokens.split(lengths.tolist())]

    def save(self, rows: Iterable[list[int]]) -> None:
        """Replace the file atomically."""
        kept = [row for row in rows if row]
        self.path.parent.mkdir(parents=True, exist_ok=True)
        partial = self.path.with_name(self.path.name + ".partial")
        save_file(
            {
                "tokens": torch.tensor([token for row in kept for token in row], dtype=torch.int32),
                "lengths": torch.tensor([len(row) for row in kept], dtype=torch.int64),
            },
            partial,
            {"format_version": FORMAT_VERSION, "kind": self.kind, "tokens_of": self.tokens_of},
        )
        partial.replace(self.path)
