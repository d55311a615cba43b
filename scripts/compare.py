"""Several reports side by side: what differs in their settings first, then β, γ and losslessness of every drafter.

    python scripts/compare.py runs/report_a runs/report_b [--latex | --csv] [--output runs/comparison]

Reports are folders of scripts/evaluate.py or scripts/replay.py, or their report.json. They are of one target unless
--any_target is given. Prints Markdown, the rows of a LaTeX table, or CSV with all figures; with --output it writes all
three there: comparison.md, comparison.tex and comparison.csv.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from draft_heads.configs.command_line import exit_status

from draft_heads.data.common.files import write_text
from draft_heads.inference.evaluation.comparison import csv_text, differences, latex, read_reports, side_by_side
from draft_heads.inference.evaluation.report import markdown_table
from draft_heads.inference.evaluation.report_text import Table
from draft_heads.scripts.decoding_options import script_parser


def run(options: argparse.Namespace) -> None:
    if options.output and options.output.is_file():
        raise ValueError(f"--output must be a folder; {options.output} is a file; name another")
    reports = read_reports(options.reports, options.any_target)
    apart, table = differences(reports), side_by_side(reports)
    texts = {
        "md": "\n\n".join([*difference_note(apart), markdown_of(table), ""]),
        "tex": "".join(f"% {' | '.join(row)}\n" for row in ([apart.header, *apart.rows] if apart.rows else []))
        + latex(table),
        "csv": csv_text(reports),
    }
    form = "tex" if options.latex else "csv" if options.csv else "md"
    if form == "csv":  # which has no comments
        print("\n\n".join(difference_note(apart)), file=sys.stderr)
    print(texts[form], end="")
    if options.output:
        options.output.mkdir(parents=True, exist_ok=True)
        for ending, content in texts.items():
            write_text(options.output / f"comparison.{ending}", content)


def markdown_of(table: Table) -> str:
    return markdown_table(table.header, table.rows, table.text_columns)


def difference_note(apart: Table) -> list[str]:
    """A sentence, and the table of settings that differ if there are any."""
    if not apart.rows:
        return ["The reports have the same target, settings and versions."]
    return ["The reports differ in what follows; figures differ for these reasons too:", markdown_of(apart)]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = script_parser(__doc__, config=False)
    add = parser.add_argument
    add("reports", nargs="+", type=Path, metavar="REPORT", help="folders with report.json, or such files")
    add("--any_target", action="store_true", help="compare reports of different targets")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--latex", action="store_true", help="print rows of a LaTeX table, the differences as comments")
    form.add_argument("--csv", action="store_true", help="print CSV with all figures, also of categories")
    add("--output", type=Path, metavar="FOLDER", help="write Markdown, LaTeX and CSV there, too")
    return exit_status(lambda: run(parser.parse_args(arguments)))


if __name__ == "__main__":
    sys.exit(main())
