"""Files that appear complete or not at all, the checksums of their content, and folders that one run writes to."""

from __future__ import annotations

import fcntl
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

logger = logging.getLogger(__name__)

LOCK = ".lock"


def write_text(path: Path, text: str) -> None:
    """Replace a text file atomically: written beside, flushed to disk, renamed, and the folder's entry flushed."""
    partial = path.with_name(f".{path.name}.partial")
    with names_path(path):
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


@contextmanager
def names_path(path: Path) -> Iterator[None]:
    """Inside, an OSError names the path that was being written: the one of a full disk has none of its own."""
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno is not None:
            raise OSError(error.errno, error.strerror, str(path)) from None
        raise


def checksum(path: Path) -> str:
    """xxh3 of a file, 16 hex digits."""
    import xxhash  # comes with `datasets`; whoever only decodes needs neither

    digest = xxhash.xxh3_64()
    with path.open("rb") as file:
        while block := file.read(2**24):
            digest.update(block)
    return digest.hexdigest()


def lock_folder(folder: Path, flag: str) -> TextIO:
    """ValueError while another run writes to the folder, which is made; the lock ends when what is returned is closed,
    or with the process."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        raise ValueError(f"{flag} must be a folder; a file is in the way of {folder}; name another folder") from None
    lock = (folder / LOCK).open("w")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.close()
        raise ValueError(
            f"{flag} {folder} is being written by another run; wait for its end or pick another folder"
        ) from None
    except OSError as error:
        logger.warning("%s cannot be locked (%s): a second run in it would not be noticed", folder, error.strerror)
    return lock
