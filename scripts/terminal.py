"""The table that an evaluation ends with."""

from __future__ import annotations

from itertools import chain
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from draft_heads.inference.evaluation.carried_over import notes
from draft_heads.inference.evaluation.report import write_report
from draft_heads.inference.evaluation.report_text import (
    cells,
    columns_of,
    cut_note,
    few_turns_note,
    overall,
    relative_paths,
    scores_note,
    skipped_note,
    slow_note,
)


def show_report(console: Console, folder: Path, report: dict[str, Any]) -> None:
    """Write the report to `folder`, print its table and the files' paths."""
    pictures = write_report(folder, report)
    console.print(summary_table(report))
    sentences = skipped_note, scores_note, cut_note, few_turns_note, slow_note
    noted = [sentence(report) for sentence in sentences]
    for note in [*chain.from_iterable(noted), *notes(report["carried_over"])]:
        console.print(note)
    for path in [*pictures, *(folder / f"report.{form}" for form in ("json", "md", "html"))]:
        console.print(f"  {relative_paths(str(path))}", soft_wrap=True)


def summary_table(report: dict[str, Any]) -> Table:
    """The closing table: whole benchmarks only, drafters with unexplained differences in red.

    It fits 80 columns, so speed over transformers is left to report.md; the row of that baseline has its γ.
    """
    columns, settings = columns_of(report), report["settings"]
    title = (
        f"{report['target']['path']}, at most {settings['max_new_tokens']} new tokens per turn"
        if report["target"]
        else f"{settings['answers']}, replayed"
    )
    plain = settings.get("plain_loop")
    caption = f"γ: times faster than {plain}; β: new tokens per forward of the target" if plain else None
    table = Table(
        title=Text(title, "table.title"),
        caption=caption,
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        collapse_padding=True,
    )
    columns = [name for name in columns if name != "benchmark"]  # it heads its rows
    for name in columns:
        wraps = name in ("drafter", "lossless")
        justify = "left" if name == "drafter" else "right"
        table.add_column(name, justify=justify, no_wrap=not wraps, min_width=len(name), overflow="fold")
    previous = None
    for row in overall(report["results"]):
        if previous != row["benchmark"]:
            table.add_section()
            table.add_row(Text(row["benchmark"], "bold"))
        previous = row["benchmark"]
        bad = row["lossless"] is not None and row["lossless"]["unexplained"]
        table.add_row(*map(Text, cells(row, columns)), style="red" if bad else None)
    return table
