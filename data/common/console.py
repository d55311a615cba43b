"""The console of every command line: what is printed through rich is shown as it is."""

from __future__ import annotations

from rich.console import Console


def plain_console(stderr: bool = False) -> Console:
    """A console that reads no markup: ids, names and paths come from users, who may write `[bold]`, `[/x]` or `:x:`."""
    return Console(stderr=stderr, markup=False, emoji=False, highlight=False)
