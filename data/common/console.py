"""The console of every command line: what is printed through rich is shown as it is; long values in sentences."""

from __future__ import annotations

from typing import Any

from rich.console import Console

_LONGEST = 200


def plain_console(stderr: bool = False) -> Console:
    """A console that reads no markup: ids, names and paths come from users, who may write `[bold]`, `[/x]` or `:x:`."""
    return Console(stderr=stderr, markup=False, emoji=False, highlight=False)


def brief(value: Any) -> str:
    """A value as Python writes it, of a long one the beginning and its length."""
    text = repr(value)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}… ({len(text)} characters)"
