"""Split a drafter's command-line form into its parts; a path that exists may have `,`, `+` and `:` in it."""

from __future__ import annotations

import json
import re
from contextlib import suppress
from pathlib import Path

from transformers.utils import cached_file

from draft_heads.data.common.pretrained import MAY_BE_MISSING
from draft_heads.heads.checkpoint import foreign_form, read_config

_BEFORE_PATH = re.compile(r"(?:\w+=)?(?:\w+:)?")  # of a field: `tuned=` or `via=`, `KIND:`


def split_parts(text: str) -> list[list[str]]:
    """`ctc:RUN/head,tree=raw+ngram` as [["ctc:RUN/head", "tree=raw"], ["ngram"]]: not split within an existing path.

    Of several readings the one with the longest existing path counts.
    """
    parts: list[list[str]] = [[]]
    while True:
        first, *later = [*(mark.start() for mark in re.finditer("[,+]", text)), len(text)]
        before = _BEFORE_PATH.match(text)
        starts = {0, before.end() if before else 0}
        end = next((end for end in later[::-1] if any(is_loadable(text[start:end]) for start in starts)), first)
        parts[-1].append(text[:end])
        if end == len(text):
            return parts
        if text[end] == "+":
            parts.append([])
        text = text[end + 1 :]


def split_pairs(pairs: list[str], whole: str) -> dict[str, str]:
    """["k=3", "n=4"] as {"k": "3", "n": "4"}; ValueError for another form, or a key given twice."""
    options: dict[str, str] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals or not key:
            raise ValueError(
                f"a drafter's options are key=value; got {pair!r} in {whole!r}; a path with , or + in it must exist"
            )
        if key in options:
            raise ValueError(f"a drafter's options have one value each; got {key} twice in {whole!r}; drop one")
        if not value and key != "via":  # of a variable that is not set; without via a draft model drafts alone
            raise ValueError(f"a drafter's options have a value each; got none for {key} in {whole!r}; give or drop it")
        options[key] = value
    return options


def is_loadable(path: str) -> bool:
    """Whether there is a head, a model, a datastore or a file at the path."""
    with suppress(OSError):  # a name that is too long, a folder that may not be read
        return any(Path(one).is_file() for one in (path, f"{path}/config.json", f"{path}/datastore.json"))
    return False


def kind_at(path: str) -> str:
    """The kind of the head at a folder or hub id, or `draft_model` for a causal language model."""
    with suppress(OSError, ValueError):  # a folder that is not there and no hub id either: `read_config` says so
        config = cached_file(path, "config.json", **MAY_BE_MISSING)
        found = None if config is None else json.loads(Path(config).read_text(encoding="utf-8"))
        if isinstance(found, dict) and "model_type" in found and not foreign_form(found):
            return "draft_model"
    return str(read_config(path)["kind"])
