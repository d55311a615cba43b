"""Datastores for REST: the tokens of a corpus and their suffix array, in a memory-mapped folder.

    datastore.json  format_version, tokens, conversations, vocab_size, tokenizer_hash, depth, dataset, checksums (xxh3),
                    bad_rows [{place, reason, detail, kept_turns}]: what was trimmed, or dropped (no kept turns)
    tokens.npy      [N] the conversations one after another, a separator (the value vocab_size) after each
    suffixes.npy    [N] the positions in `tokens`, sorted by the `depth` tokens that begin there
    starts.npy      [vocab_size + 2] index in `suffixes` of the first suffix that begins with each token

Numbers are little-endian and unsigned. No looked-up phrase contains a separator, so no match spans two conversations.
`data/datastore_build.py` makes the folder.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from draft_heads.data.common.files import checksum, read_manifest
from draft_heads.data.fingerprint import tokenizer_hash

logger = logging.getLogger(__name__)

FORMAT_VERSION = 1
MANIFEST = "datastore.json"
ARRAYS = ("tokens", "suffixes", "starts")
DEPTH = 32  # tokens: the longest phrase looked up plus the continuation that is read after it


@dataclass(frozen=True)
class Datastore:
    """An opened folder, with the fields of the module's docstring; the arrays are memory-mapped."""

    tokens: NDArray[np.unsignedinteger]
    suffixes: NDArray[np.unsignedinteger]
    starts: NDArray[np.unsignedinteger]
    manifest: dict[str, Any]

    @property
    def separator(self) -> int:
        """The value between conversations: the largest token id plus one."""
        return int(self.manifest["vocab_size"])

    @property
    def depth(self) -> int:
        """How many tokens of each suffix are compared in sorting."""
        return int(self.manifest["depth"])

    @classmethod
    def open(cls, folder: Path) -> Datastore:
        """ValueError for a folder that is not a datastore, of another version, or with files that do not fit.

        Reads the files once, to compare their checksums.
        """
        if folder.name == MANIFEST:
            folder = folder.parent
        manifest = _read_manifest(folder)
        size, vocabulary = manifest["tokens"], manifest["vocab_size"]
        store = cls(
            _memory_map(folder / "tokens.npy", size, unsigned(vocabulary)),
            _memory_map(folder / "suffixes.npy", size, unsigned(size)),
            _memory_map(folder / "starts.npy", vocabulary + 2, np.dtype("<u8")),
            manifest,
        )
        _check_contents(folder, manifest)
        return store

    def check_tokenizer(self, tokenizer: PreTrainedTokenizerBase | None, vocab_size: int, path: str) -> None:
        """ValueError when it was built with another tokenizer than the target's.

        Without a tokenizer only the sizes are compared: the target's vocabulary must be at least the datastore's.
        """
        rule = "a datastore and the target must share the tokenizer"
        remedy = "build it again with scripts/build_datastore.py and the target's tokenizer"
        if tokenizer is None:
            if vocab_size < self.separator:
                raise ValueError(
                    f"{rule}; {path} has {self.separator} tokens in its vocabulary, the target {vocab_size}; {remedy}"
                )
        elif (hashed := tokenizer_hash(tokenizer)) != (own := self.manifest.get("tokenizer_hash")):
            raise ValueError(f"{rule}; {path} has the tokenizer hash {own}, the target {hashed}; {remedy}")


def unsigned(largest: int) -> np.dtype[Any]:
    """The smallest of three little-endian types that holds 0 … largest."""
    return np.dtype("<u2" if largest < 1 << 16 else "<u4" if largest < 1 << 32 else "<u8")


def _read_manifest(folder: Path) -> dict[str, Any]:
    path, remedy = folder / MANIFEST, "build it with scripts/build_datastore.py"
    try:
        manifest = read_manifest(path, FORMAT_VERSION, remedy)
    except OSError as error:
        raise ValueError(f"a datastore is a folder with {MANIFEST}; {path}: {error.strerror}; {remedy}") from None
    for name in ("tokens", "vocab_size", "depth"):
        if not isinstance(value := manifest.get(name), int) or value < 1:
            raise ValueError(f"{path}: {name} must be a positive whole number; got {value!r}; {remedy}")
    return manifest


_REMEDY = "copy the folder again, or build it with scripts/build_datastore.py"


def _check_contents(folder: Path, manifest: dict[str, Any]) -> None:
    """ValueError for a file that is not as it was written; one line where the folder is older than checksums."""
    known = manifest.get("checksums")
    if not isinstance(known, dict):
        logger.warning("%s was built without checksums: damage in its files would not be noticed", folder)
        return
    for name in ARRAYS:
        path = folder / f"{name}.npy"
        if (found := checksum(path)) != known.get(name):
            raise ValueError(
                f"{path} is damaged: its checksum is {found}, {MANIFEST} says {known.get(name)}; {_REMEDY}"
            )


def _memory_map(path: Path, size: int, dtype: np.dtype[Any]) -> NDArray[Any]:
    """A memory-mapped file of `size` numbers; ValueError when it is missing, truncated, or of another size or type."""
    try:
        array = np.lib.format.open_memmap(path, mode="r")
    except OSError as error:
        raise ValueError(
            f"a datastore holds {path.name}; {path} cannot be read ({error.strerror}); {_REMEDY}"
        ) from None
    except Exception as error:  # a header is read as Python, whose errors are many
        raise ValueError(f"{path} is damaged or cut short ({error}); {_REMEDY}") from None
    if array.shape != (size,) or array.dtype != dtype:
        raise ValueError(
            f"{path} must hold {size:,} numbers of type {dtype} as {MANIFEST} says; it holds "
            f"{array.dtype} of shape {array.shape}; {_REMEDY}"
        )
    return np.asarray(array)
