"""What results in a folder were made from: noted beside them, and results of something else are not taken over."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from draft_heads.data.common.files import checksum, write_text

NOTE = "made_from.json"


def content_of(source: str | Path) -> str:
    """Checksum of a file; what is none, say a hub id, is named as it is."""
    return checksum(Path(source)) if Path(source).is_file() else str(source)


def must_be_made(folder: Path, finished: str, made_from: Mapping[str, Any], overwrite: bool) -> bool:
    """Whether the file `finished` is still to be made in `folder`, where what it is made from is noted.

    ValueError, which names the differences, if it was made or begun from something else.
    """
    note, wanted = folder / NOTE, json.loads(json.dumps(made_from))
    if not overwrite and (note.is_file() or (folder / finished).is_file()):
        before = json.loads(note.read_text(encoding="utf-8")) if note.is_file() else {}
        changed = [name for name in wanted | before if wanted.get(name) != before.get(name)]
        if changed:
            differences = "; ".join(f"{name} was {before.get(name)!r}, now {wanted.get(name)!r}" for name in changed)
            remedy = "repeat what it was made from, take another --output or add --overwrite"
            raise ValueError(f"{folder} was made from something else ({differences}); {remedy}")
    folder.mkdir(parents=True, exist_ok=True)
    write_text(note, json.dumps(wanted, indent=1, ensure_ascii=False) + "\n")
    return overwrite or not (folder / finished).is_file()
