"""Datastores for REST: the tokens of a corpus and their suffix array, in a folder that is mapped into memory.

    datastore.json  format_version, tokens, conversations, vocab_size, tokenizer_hash, depth, dataset
    tokens.npy      [N] the conversations one after another, a separator (the value vocab_size) behind each
    suffixes.npy    [N] the places of `tokens` in the order of the `depth` tokens that stand there
    starts.npy      [vocab_size + 2] where in `suffixes` each first token begins

Numbers are little-endian and unsigned. No phrase that is looked up holds a separator, so no match spans two
conversations. `python scripts/build_datastore.py` makes the folder (`data/build_datastore.py`).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from draft_heads.data.fingerprint import tokenizer_hash

FORMAT_VERSION = 1
MANIFEST = "datastore.json"
DEPTH = 32  # tokens: the longest phrase looked up and what is read behind it


@dataclass(frozen=True)
class Datastore:
    """An opened folder; see the module. The arrays are read where they are touched."""

    tokens: NDArray[np.unsignedinteger]
    suffixes: NDArray[np.unsignedinteger]
    starts: NDArray[np.unsignedinteger]
    manifest: dict[str, Any]

    @property
    def separator(self) -> int:
        """What stands between conversations: one more than the largest token."""
        return int(self.manifest["vocab_size"])

    @property
    def depth(self) -> int:
        """Tokens to which the suffixes are sorted."""
        return int(self.manifest["depth"])

    @classmethod
    def open(cls, folder: Path) -> Datastore:
        """ValueError, in a sentence, for a folder that is none, of another version, or whose files do not fit it."""
        if folder.name == MANIFEST:
            folder = folder.parent
        manifest = _read_manifest(folder)
        size, vocabulary = manifest["tokens"], manifest["vocab_size"]
        return cls(
            _map(folder / "tokens.npy", size, unsigned(vocabulary)),
            _map(folder / "suffixes.npy", size, unsigned(size)),
            _map(folder / "starts.npy", vocabulary + 2, np.dtype("<u8")),
            manifest,
        )

    def check_tokenizer(self, tokenizer: PreTrainedTokenizerBase | None, vocab_size: int, path: str) -> None:
        """ValueError when it was built with another tokenizer than the target's.

        A target without one is asked for the size of its vocabulary only, which must hold the datastore's.
        """
        rule = "a datastore and the target must share the tokenizer"
        remedy = "build it again with scripts/build_datastore.py --tokenizer TARGET"
        if tokenizer is None:
            if vocab_size < self.separator:
                raise ValueError(
                    f"{rule}; {path} has {self.separator} tokens in its vocabulary, the target {vocab_size}; {remedy}"
                )
        elif (hashed := tokenizer_hash(tokenizer)) != (own := self.manifest.get("tokenizer_hash")):
            raise ValueError(f"{rule}; {path} has the tokenizer hash {own}, the target {hashed}; {remedy}")


# ----------------------------------------------------------------------------------------------------
# Opening


def unsigned(largest: int) -> np.dtype[Any]:
    """The smallest of three little-endian types that holds 0 … largest."""
    return np.dtype("<u2" if largest < 1 << 16 else "<u4" if largest < 1 << 32 else "<u8")


def _read_manifest(folder: Path) -> dict[str, Any]:
    path, remedy = folder / MANIFEST, "build it with scripts/build_datastore.py"
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"a datastore is a folder with {MANIFEST}; {path}: {error.strerror}; {remedy}") from None
    except ValueError as error:
        raise ValueError(f"{path} is not JSON ({error}); {remedy}") from None
    version = manifest.get("format_version") if isinstance(manifest, dict) else None
    if version != FORMAT_VERSION:
        raise ValueError(f"{path} must have format_version {FORMAT_VERSION}; got {version!r}; {remedy}")
    for name in ("tokens", "vocab_size", "depth"):
        if not isinstance(value := manifest.get(name), int) or value < 1:
            raise ValueError(f"{path}: {name} must be a positive whole number; got {value!r}; {remedy}")
    return dict(manifest)


def _map(path: Path, size: int, dtype: np.dtype[Any]) -> NDArray[Any]:
    """A file of `size` numbers, mapped; ValueError when it is missing, cut short, or holds others."""
    remedy = "copy the folder again, or build it with scripts/build_datastore.py"
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except OSError as error:
        raise ValueError(f"a datastore holds {path.name}; {path} cannot be read ({error.strerror}); {remedy}") from None
    except (ValueError, EOFError) as error:
        raise ValueError(f"{path} is damaged or cut short ({error}); {remedy}") from None
    if array.shape != (size,) or array.dtype != dtype:
        raise ValueError(
            f"{path} must hold {size:,} numbers of type {dtype} as {MANIFEST} says; it holds "
            f"{array.dtype} of shape {array.shape}; {remedy}"
        )
    return np.asarray(array)
