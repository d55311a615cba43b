"""What an evaluation shows while it runs and when it is done."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich import box
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table

from draft_heads.inference.evaluation.report import cells, columns_of, overall


@contextmanager
def progress_bar(console: Console, first: str = "warming up") -> Iterator[Callable[[str, int, int], None]]:
    """A bar that `evaluate` moves: stage, done, of; `first` is the stage before that."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as bars:
        task = bars.add_task(first, total=None)

        def move(stage: str, done: int, of: int) -> None:
            if done == 0:
                bars.reset(task)
            bars.update(task, description=stage, completed=done, total=of)

        yield move


def summary_table(report: dict[str, Any]) -> Table:
    """The closing table: whole benchmarks only, drafters with unexplained differences in red.

    It fits 80 columns, so speed over transformers is left to report.md; the row of that baseline has its γ.
    """
    columns, settings = columns_of(report), report["settings"]
    table = Table(
        title=f"{report['target']['path']}, at most {settings['max_new_tokens']} new tokens a turn"
        if report["target"]
        else f"{settings['answers']}, replayed",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        collapse_padding=True,
    )
    for index, name in enumerate(columns):
        table.add_column(name, justify="left" if index < 2 else "right", no_wrap=name != "lossless")
    previous = None
    for row in overall(report["results"]):
        if previous not in (None, row["benchmark"]):
            table.add_section()
        previous = row["benchmark"]
        bad = row["lossless"] is not None and row["lossless"]["unexplained"]
        table.add_row(*cells(row, columns), style="red" if bad else None)
    return table
