"""Files that appear complete or not at all, and the checksums of their content."""

from __future__ import annotations

import os
from pathlib import Path

import xxhash


def write_text(path: Path, text: str) -> None:
    """Replace a text file atomically: written beside, flushed to disk, renamed, and the folder's entry flushed."""
    partial = path.with_name(f".{path.name}.partial")
    with partial.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def checksum(path: Path) -> str:
    """xxh3 of a file, 16 hex digits."""
    digest = xxhash.xxh3_64()
    with path.open("rb") as file:
        while block := file.read(2**24):
            digest.update(block)
    return digest.hexdigest()
