"""What results in a folder were made from: noted beside them, and results of something else are not taken over."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from transformers.utils import cached_file

from draft_heads.data.common.files import checksum, read_object, write_text
from draft_heads.data.common.pretrained import MAY_BE_MISSING

NOTE = "made_from.json"
_AGAIN = '{"again": true}\n'
_OF_MODELS = (".json", ".safetensors", ".bin", ".npy", ".jinja", ".model", ".txt", ".py")
_LARGE = 2**30  # bytes


def content_of(source: str | Path, whole: bool = False) -> Any:
    """Checksum of a file (unless `whole` is set, of one of 1 GiB or more its size and time of change), or name →
    checksum of the files of a model, head or datastore in a folder. Of a hub id the revision that is loaded now; of
    FILE,name=value the file's and the rest; what is none of these is named as it is.
    """
    path = Path(source)
    if path.is_dir():
        return {file.name: content_of(file, whole) for file in sorted(path.iterdir()) if file.suffix in _OF_MODELS}
    file, comma, settings = str(source).partition(",")
    if comma and not path.is_file() and Path(file).is_file():
        return [content_of(file, whole), settings]
    if not path.is_file():
        return _with_revision(str(source))
    about = path.stat()
    return checksum(path) if whole or about.st_size < _LARGE else [about.st_size, about.st_mtime_ns]


def _with_revision(source: str) -> str:
    """`OWNER/NAME@COMMIT` for a hub id that has the config of a model or adapter; anything else as it is."""
    for name in ("config.json", "adapter_config.json") if source.count("/") == 1 else ():
        with suppress(OSError, ValueError):  # no hub id, or none that may be read
            if (config := cached_file(source, name, **MAY_BE_MISSING)) is not None:
                return f"{source}@{Path(config).parent.name}"
    return source


def differences(before: Any, now: Any, name: str = "") -> list[str]:
    """["limit was 3, now None", "heads.ctc was 'a', now 'b'"]: what differs in two mappings and those inside them."""
    if not (isinstance(before, dict) and isinstance(now, dict)):
        return [] if before == now else [f"{name} was {before!r}, now {now!r}"]
    inside = {key: f"{name}.{key}" if name else key for key in before | now}
    return [text for key, path in inside.items() for text in differences(before.get(key), now.get(key), path)]


def make_again(folders: Iterable[Path]) -> None:
    """Note in the folders that have results that these are to be replaced: also by a later command, which goes on where
    this one is interrupted."""
    for folder in folders:
        if (folder / NOTE).is_file():
            write_text(folder / NOTE, _AGAIN)


def is_made_again(folder: Path) -> bool:
    """Whether `make_again` was called for it, and nothing has been made since."""
    note = folder / NOTE
    return note.is_file() and note.read_text(encoding="utf-8", errors="replace") == _AGAIN


def must_be_made(
    folder: Path, finished: str, made_from: Mapping[str, Any], overwrite: bool, remedy: str = "add --overwrite"
) -> bool:
    """Whether the file `finished` is still to be made in `folder`, where what it is made from is noted.

    ValueError, which names the differences and ends with the remedy, if it was made or begun from something else.
    """
    note, wanted = folder / NOTE, json.loads(json.dumps(made_from))
    if overwrite:
        (folder / finished).unlink(missing_ok=True)  # the new note is not true of it
    elif note.is_file() or (folder / finished).is_file():
        before = read_object(note, remedy) if note.is_file() else {}
        if changed := "; ".join(differences(before, wanted)):
            what = "repeat what it was made from, take another --output"
            raise ValueError(f"{folder} was made from something else ({changed}); {what} or {remedy}")
    folder.mkdir(parents=True, exist_ok=True)
    write_text(note, json.dumps(wanted, indent=1, ensure_ascii=False) + "\n")
    return not (folder / finished).is_file()
