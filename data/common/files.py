"""Files that appear complete or not at all, the checksums of their content, and folders that one run writes to.

Every writer goes through `replacing`, or `names_path` where a library writes: a full disk then names the file.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import logging
import os
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

logger = logging.getLogger(__name__)

LOCK = ".lock"
_SEAL = "digest"

_FULL = {
    errno.ENOSPC: "has {free:,.0f} MiB left",
    errno.EDQUOT: "has no more of your quota",
    errno.EFBIG: "takes no larger file",
}
_FULL_SIGNS = ("No space left", "inline_container", "PytorchStreamWriter", *map(os.strerror, _FULL))
_FULL_SIGNS += ("requested and",)  # numpy: "1026 requested and 109 written"


@contextmanager
def names_path(path: Path, remedy: Callable[[], str] = lambda: "free some, or name another disk") -> Iterator[None]:
    """In this context the error of a full disk becomes a ValueError that names the path and the remedy.

    Libraries wrap the system's error: torch in a RuntimeError, safetensors in its own, with or without its number;
    numpy drops it.
    """
    try:
        yield
    except Exception as error:
        number = getattr(error, "errno", None)
        if number not in _FULL:
            message = str(error)
            if isinstance(error, ValueError) or not any(sign in message for sign in _FULL_SIGNS):
                raise
            number = next((known for known in _FULL if os.strerror(known) in message), errno.ENOSPC)
        named = getattr(error, "filename2", None) or getattr(error, "filename", None)  # the first: of a copy
        if isinstance(named, str) and not Path(named).is_relative_to(path.parent):
            path = Path(named)  # a library's own, as in TMPDIR
        there = next((parent for parent in (path, *path.absolute().parents) if parent.exists()), Path("/"))
        what = _FULL[number].format(free=shutil.disk_usage(there).free / 2**20)
        raise ValueError(f"{path} could not be written: its disk {what}; {remedy()}") from error


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yields the path of a temporary file to write; it then replaces `path`, flushed to disk, with the umask's rights.

    ValueError names the path and the remedy if the disk is full; nothing of the new file is left after an error.
    """
    partial = path.with_name(f".{path.name}.partial")
    with names_path(path):
        try:
            partial.unlink(missing_ok=True)  # what a kill left may have other rights
            partial.touch()
            rights = partial.stat().st_mode  # libraries make files that nobody else may read
            yield partial
            with partial.open("rb+") as file:
                os.fsync(file.fileno())
            partial.chmod(rights)
            partial.replace(path)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def sealed(record: Mapping[str, Any]) -> str:
    """The record as JSON in one line with a digest of itself, which `unsealed` compares."""
    return json.dumps({**record, _SEAL: _digest(record)}, ensure_ascii=False)


def unsealed(text: str | bytes, keys: Collection[str] = ()) -> dict[str, Any]:
    """The record of a `sealed` text; ValueError for other content than was written, and for one without these keys.

    Texts of older versions have no digest: those are taken as they are.
    """
    record = _object(text, keys)
    if record.pop(_SEAL, None) not in (None, _digest(record)):
        raise ValueError("it has other content than was written")
    return record


def _digest(record: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(record).encode()).hexdigest()[:16]


def _object(text: str | bytes, keys: Collection[str] = ()) -> dict[str, Any]:
    """The object in a JSON text; ValueError for any other text, and without one of the keys."""
    found = json.loads(text)
    if not isinstance(found, dict):
        raise ValueError(f"it holds a {type(found).__name__}, not an object")
    _check_keys(found, keys)
    return found


def _check_keys(found: Collection[str], keys: Collection[str]) -> None:
    if missing := [key for key in keys if key not in found]:
        raise ValueError(f"it has no {', '.join(missing)}")


@contextmanager
def _names_damage(path: Path, remedy: str) -> Iterator[None]:
    """In this context a ValueError names the file and the remedy."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{path} is damaged ({error}); {remedy}") from None


def read_object(path: Path, remedy: str, keys: Collection[str] = ()) -> dict[str, Any]:
    """The object in a JSON file, with these keys; ValueError, which ends with the remedy, for any other."""
    with _names_damage(path, remedy):
        return _object(path.read_bytes(), keys)


def read_manifest(path: Path, version: int, remedy: str, keys: Collection[str] = ()) -> dict[str, Any]:
    """`read_object` of a `format_version`; ValueError, which ends with the remedy, for another one."""
    manifest = read_object(path, remedy)
    if (found := manifest.get("format_version")) != version:
        raise ValueError(f"{path} must have format_version {version}; got {found!r}; {remedy}")
    with _names_damage(path, remedy):
        _check_keys(manifest, keys)
    return manifest


def write_text(path: Path, text: str) -> None:
    """Replace a text file atomically: written beside, flushed to disk, renamed, and the folder's entry flushed."""
    with replacing(path) as partial:
        partial.write_text(text, encoding="utf-8")


def write_tensors(path: Path, tensors: Mapping[str, Any]) -> None:
    """Replace a safetensors file atomically, as `write_text`; from any device and memory layout."""
    from safetensors.torch import save_file  # imports torch, which reading text does not need

    whole = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    with replacing(path) as partial:
        save_file(whole, partial, metadata={"format": "pt"})


def let_others_read(folder: Path) -> None:
    """Give the weights in a folder the rights that new files have here: safetensors makes files that nobody else may
    read, as another user's container."""
    probe = folder / ".rights.partial"
    probe.touch()
    rights = probe.stat().st_mode
    probe.unlink()
    for path in folder.glob("*.safetensors"):
        path.chmod(rights)


def sha256(path: Path) -> str:
    """SHA-256 of a file, 64 hex digits: where a head is loaded, as inside vLLM, there may be no `xxhash`."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def checksum(path: Path) -> str:
    """xxh3 of a file, 16 hex digits: of large ones, many times as fast."""
    import xxhash  # comes with `datasets`; decoding needs neither

    digest = xxhash.xxh3_64()
    with path.open("rb") as file:
        while block := file.read(2**24):
            digest.update(block)
    return digest.hexdigest()


def lock_folder(folder: Path, option: str) -> TextIO:
    """Make a folder and lock it until the returned file is closed or the process ends; ValueError, which names the
    option that gave the folder, while another run holds the lock."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        raise ValueError(f"{option} must be a folder; a file is in the way of {folder}; name another folder") from None
    lock = (folder / LOCK).open("w")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.close()
        raise ValueError(
            f"{option} {folder} is being written by another run; wait for its end or pick another folder"
        ) from None
    except OSError as error:
        logger.warning("%s cannot be locked (%s): a second run in it would not be noticed", folder, error.strerror)
    return lock
