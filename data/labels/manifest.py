"""The manifest of a distillation: what is in it, and what two commands must have in common to be one."""

from __future__ import annotations

from operator import itemgetter
from pathlib import Path
from typing import Any

from draft_heads.data.common.console import brief
from draft_heads.data.common.files import read_manifest
from draft_heads.data.fingerprint import compared

FORMAT_VERSION = 1
MANIFEST = "manifest.json"
HEADER = ("target", "labels", "settings", "data", "end_token_ids")
REMEDY = "make the folder again with overwrite, or another one"


def read_distilled_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a distillation, begun or finished; ValueError for a damaged one."""
    keys = (*HEADER, "shards", "counts", "complete")
    return read_manifest(folder / MANIFEST, FORMAT_VERSION, REMEDY, keys)


def is_manifest(file: Path) -> bool:
    """Whether a file is a manifest of this project, be it a damaged one: its beginning, or nothing."""
    text = file.read_text(encoding="utf-8", errors="replace") if file.is_file() else "none"
    return not text or '"format_version"' in text


def differences(manifest: dict[str, Any], header: dict[str, Any]) -> list[str]:
    """What another command has made, a line each. Of conversations the fingerprint says it, of bad rows their places;
    the fingerprint of a target does not see all weights, so its folder is compared too, however it is written."""
    known: dict[str, Any]
    asked: dict[str, Any]
    known, asked = ({key: source.get(key) for key in HEADER} for source in (manifest, header))
    made_for, own = (of["target"]["fingerprint"] for of in (known, asked))
    shared = {name: value for name, value in own.items() if name in made_for}  # of what an older version wrote
    different = [(f"target.fingerprint.{name}", there, here) for name, there, here in compared(made_for, shared)]
    for of in (known, asked):
        path = of["target"]["path"]
        of["target"] = {"path": str(Path(path).resolve()) if Path(path).is_dir() else path}
        of["data"] = {name: value for name, value in (of["data"] or {}).items() if name != "source"}
        bad = of["data"].get("bad_rows", [])  # whose reasons another version may word otherwise
        of["data"]["bad_rows"] = [(row["place"], row.get("kept_turns", 0)) for row in bad]
    old, new = _flatten(known), _flatten(asked)
    different += [(key, old.get(key), new.get(key)) for key in old.keys() | new.keys() if old.get(key) != new.get(key)]
    ordered = sorted(different, key=itemgetter(0))
    return [f"{key} is {brief(there)} there, {brief(here)} here" for key, there, here in ordered]


def _flatten(value: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(value, dict):
        return {prefix: value}
    flat: dict[str, Any] = {}
    for key, inner in value.items():
        flat |= _flatten(inner, f"{prefix}.{key}" if prefix else key)
    return flat
