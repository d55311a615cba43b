"""Which program made a result: the commit, the sources, and the versions of the libraries it runs with."""

from __future__ import annotations

import hashlib
import platform
import subprocess
from collections.abc import Mapping
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOMS = ("configs", "data", "heads", "inference", "train")
_ROOT = Path(__file__).resolve().parents[2]


def this_program() -> dict[str, Any]:
    """The commit, the sources and the versions of this program as they are now."""
    return {
        "git_commit": git_commit(),
        "sources": source_digest(),
        "python": platform.python_version(),
        "packages": {name: version(name) for name in ("torch", "transformers", "deepspeed", "datasets")},
    }


@cache
def source_digest() -> str:
    """12 hex digits of all code and chat templates of the rooms that make results, as they were when first asked for:
    an installed package has no commit, and its version does not change with every change. Folders that a user put
    beside them, as a copy of a target, are no packages and do not count."""
    digest = hashlib.sha256()
    files = [path for room in ROOMS for path in (_ROOT / room).rglob("*") if path.suffix in (".py", ".cpp")]
    own = [path for path in files if (path.parent / "__init__.py").is_file()]
    for path in sorted([*own, *(_ROOT / "configs" / "chat_templates").glob("*.jinja")]):
        digest.update(f"{path.relative_to(_ROOT)}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()[:12]


def changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """What a program has other than one before, as `torch was 2.11, now 2.12`; "" for nothing."""
    before, now = ({**one, **one.get("packages", {})} for one in (before, now))
    named = [name for name in now if name not in ("from_step", "packages") and now[name] != before.get(name)]
    return "; ".join(f"{name} was {before.get(name, 'not recorded')}, now {now[name]}" for name in named)


def git_commit() -> str:
    """This program's, with `-dirty` where code or recipes of its rooms are in no commit as they are; rows and results
    that a user has put there do not count. Not that of a repository whose environment it is installed in."""
    here, said = Path(__file__).resolve(), list[str]()
    own = str(here.relative_to(_ROOT))
    try:
        files = ["configs", *(f"{room}/*{suffix}" for room in ROOMS for suffix in (".py", ".cpp"))]
        asked = ["ls-files", "--error-unmatch", own], ["rev-parse", "HEAD"], ["status", "-s", "-uall", "--", *files]
        for words in asked:
            done = subprocess.run(["git", *words], cwd=_ROOT, capture_output=True, text=True, check=True, timeout=10)
            said.append(done.stdout.strip())
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    _, commit, changed = said
    return f"{commit}-dirty" if changed else commit
