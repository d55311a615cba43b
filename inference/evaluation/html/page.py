"""report.html: one file that shows a report in a browser, without a network, also with scripts off.

Everything that comes from data (names, texts, paths) passes `charts.text`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from draft_heads.inference.evaluation.html.answers import answers_view
from draft_heads.inference.evaluation.html.charts import (
    Bar,
    Line,
    bars,
    boxes,
    drafter_looks,
    legend,
    lines,
    name_html,
    rounded_top,
    stacked,
    text,
)
from draft_heads.inference.evaluation.metrics import OUTPUT_SPAN, shown_name, shown_names
from draft_heads.inference.evaluation.report_text import (
    HEADER,
    Table,
    category_tables,
    findings_note,
    interval_cell,
    number,
    overall,
    results_notes,
    results_table,
    settings_table,
    source_tables,
    target_sentence,
    time_table,
    usage_tables,
)

Row = dict[str, Any]
Report = dict[str, Any]
Points = Callable[[Row], list[tuple[float, float]]]

TIME_PARTS = {"draft": "c1", "verify": "c0", "accept": "c2", "other": "g1"}


def page(report: Report) -> str:
    """The whole file."""
    folder = Path(__file__).parent
    style, script = ((folder / name).read_text(encoding="utf-8") for name in ("page.css", "page.js"))
    title = "Evaluation" if report["target"] else "Replayed answers"
    sections = [
        *results_section(report),
        *speed_sections(report),
        *acceptance_section(report),
        *beta_section(report),
        *time_section(report),
        *verify_section(report),
        *(section(table.title, table_html(table, caption=False)) for table in usage_tables(report)),
        *source_section(report),
        *answers_section(report),
        section("Settings, versions and command", table_html(settings_table(report), "settings", caption=False)),
    ]
    return "\n".join(
        [
            "<!doctype html>",
            '<html lang="en">',
            '<head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">',
            f'<title>{title}</title><link rel="icon" href="data:,">',
            f"<style>\n{style}</style></head>",
            f"<body><header><h1>{title}</h1><p>{prose(target_sentence(report))}</p></header>",
            "<main>",
            *sections,
            "</main>",
            f"<script>\n{script}</script></body></html>",
            "",
        ]
    )


# --- building blocks --------------------------------------------------------------------------------------------------


def section(title: str, *parts: str) -> str:
    """A section under its heading."""
    return "\n".join([f"<section><h2>{text(title)}</h2>", *parts, "</section>"])


def prose(sentences: str) -> str:
    """Escaped sentences in which `code` is set as code."""
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", text(sentences))


def paragraphs(sentences: Iterable[str]) -> list[str]:
    return [f'<p class="note">{prose(one)}</p>' for one in sentences]


def table_html(table: Table, kind: str = "", caption: bool = True) -> str:
    """A table that scrolls in a box of its own where it is wider than the page; rows of one benchmark stand below its
    name.

    kind: a class of page.css; caption: whether the title is shown, or is only there for who cannot see the page
    """
    grouped = tuple(table.header[:2]) == HEADER[:2]
    header = table.header[1:] if grouped else table.header
    text_columns = table.text_columns - grouped
    looks = [' class="text"' if index < text_columns else "" for index in range(len(header))]
    head = "".join(f'<th scope="col"{look}>{text(cell)}</th>' for cell, look in zip(header, looks))
    body, group = [], None
    for row in table.rows:
        if grouped and row[0] != group:
            group = row[0]
            name = name_html(group)
            body.append(f'<tr><th scope="rowgroup" colspan="{len(header)}" class="text group">{name}</th></tr>')
        first, *others = row[1:] if grouped else row
        cells = "".join(f"<td{look}>{name_html(cell)}</td>" for cell, look in zip(others, looks[1:]))
        bad = ' class="bad"' if any("UNEXPLAINED" in cell for cell in row) else ""
        body.append(f'<tr{bad}><th scope="row" class="text">{name_html(first)}</th>{cells}</tr>')
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{text(table.title)}"><table class="{kind}">'
        f'<caption class="{"" if caption else "hidden"}">{text(table.title)}</caption>'
        f"<thead><tr>{head}</tr></thead><tbody>{''.join(body)}</tbody></table></div>"
    )


def figure(title: str, content: str, small: str = "") -> str:
    """A chart under its caption."""
    under = f"<small>{text(small)}</small>" if small else ""
    return f"<figure><figcaption>{name_html(title)}{under}</figcaption>{content}</figure>"


def panels(figures: Sequence[str]) -> str:
    """Figures side by side where there is room."""
    return f'<div class="panels">{"".join(figures)}</div>'


def details(summary: str, *parts: str) -> str:
    """Parts that are shown on demand."""
    return f"<details><summary>{text(summary)}</summary>{''.join(parts)}</details>"


# --- sections ---------------------------------------------------------------------------------------------------------


def results_section(report: Report) -> list[str]:
    """The table of whole benchmarks and what its figures mean."""
    table = table_html(results_table(report), caption=False)
    return [section("Results", table, *paragraphs(results_notes(report)))]


def speed_sections(report: Report) -> list[str]:
    """γ and β by benchmark, with their intervals, and by category."""
    rows, parts = overall(report["results"]), []
    for key, what in (("gamma", "γ, times faster than without drafts"), ("beta", "β, new tokens per target step")):
        if any(row[key] is not None for row in rows):
            benchmarks = dict.fromkeys(row["benchmark"] for row in rows)
            found = [bar_figure(report, rows, name, key, what) for name in benchmarks]
            parts.append(panels(found))
    for table in category_tables(report["results"]):
        benchmark = table.title.partition(": β")[0]
        parts.append(details(f"{benchmark}: by category", category_bars(report, benchmark), table_html(table)))
    return [section("Speed", *parts, *paragraphs(["Lines in the bars are 95 % intervals over questions."]))]


def bar_figure(report: Report, rows: Sequence[Row], benchmark: str, key: str, what: str, title: str = "") -> str:
    """One figure's bars: γ or β of the rows of a benchmark."""
    looks = drafter_looks(row["drafter"] for row in report["results"])
    own = [row for row in rows if row["benchmark"] == benchmark]
    ends = [end for row in rows for end in (row[key] or 0, *(row.get(f"{key}_ci95") or ()))]
    drawn = []
    for row in own:
        interval = row.get(f"{key}_ci95")
        unit = "×" if key == "gamma" else ""
        shown = number(row[key]) + unit + (f" ({interval_cell(interval)})" if interval else "")
        drawn.append(Bar(shown_name(row), looks[row["drafter"]][0], row[key], interval, shown))
    return figure(title or benchmark, bars(drawn, max([1.0, *ends]), one=True), what)


def category_bars(report: Report, benchmark: str) -> str:
    """γ and β of each category of a benchmark."""
    rows = [row for row in report["results"] if row["benchmark"] == benchmark and row["category"] is not None]
    found = []
    for category in dict.fromkeys(row["category"] for row in rows):
        own = [row for row in rows if row["category"] == category]
        for key, what in (("gamma", "γ"), ("beta", "β")):
            if any(row[key] is not None for row in own):
                found.append(bar_figure(report, own, benchmark, key, what, category))
    return panels(found)


def line_figures(report: Report, title: str, points: Points, axis: str, form: str, names: Sequence[str]) -> list[str]:
    """One figure for each benchmark, with a line for each drafter that has points.

    names: how the places 0, 1, 2, … are written; empty: as they are
    """
    rows, looks = overall(report["results"]), drafter_looks(row["drafter"] for row in report["results"])
    found = []
    for benchmark in dict.fromkeys(row["benchmark"] for row in rows):
        own = [(row, points(row)) for row in rows if row["benchmark"] == benchmark and row["drafter"] not in BASE]
        drawn = [Line(shown_name(row), *looks[row["drafter"]], places) for row, places in own if places]
        if not drawn:
            continue
        places = sorted({place for line in drawn for place, _ in line.points})
        written = {place: names[int(place)] if names else f"{place:g}" for place in places}
        top = 1.0 if form.endswith("%") else rounded_top(value for line in drawn for _, value in line.points)
        chart = lines(f"{title}, {benchmark}", drawn, axis, form, written, top)
        figures = [[line.name, *(format(dict(line.points).get(place, 0), form) if place in dict(line.points) else "–"
                                 for place in places)] for line in drawn]  # fmt: skip
        table = Table(f"{title}, {benchmark}", ("drafter", *written.values()), figures, 1)
        keys = legend([(line.name, line.colour, line.dashes) for line in drawn])
        found.append(figure(benchmark, keys + chart + details("figures", table_html(table)), title))
    return found


LEAST_STEPS = 5  # of a point whose median is drawn
VERIFY_NOTE = f"""Median seconds from the end of drafting until the host has the accepted tokens, over the same of
`vanilla`, for each number of nodes that at least {LEAST_STEPS} steps had. Left out: drafters whose steps begin
before the host has read the step before, as their drafting and verification cannot be timed apart."""
BASE = ("vanilla", "transformers")
"""Decode without drafts: their lines would be flat."""


def acceptance_section(report: Report) -> list[str]:
    """How often the draft at each position of a step was accepted."""

    def of(key: str) -> Points:
        return lambda row: [(k, share) for k, share in enumerate(row["acceptance_by_position"][key], 1)]

    found = line_figures(report, "share of target steps that accepted it", of("unconditional"), "draft", ".0%", ())
    found += line_figures(report, "of the steps that accepted those before it", of("conditional"), "draft", ".0%", ())
    return [section("Acceptance by position of a draft", panels(found))] if found else []


def beta_section(report: Report) -> list[str]:
    """β over the answers, by the length of the text before a step and by turn."""
    rows = overall(report["results"])
    spans = max((len(row["beta_by_output_position"]) for row in rows), default=0)
    names = [f"{OUTPUT_SPAN * span}" for span in range(spans)]
    found = line_figures(
        report, "β along the answers",
        lambda row: [(span, beta) for span, beta in enumerate(row["beta_by_output_position"]) if beta is not None],
        f"{OUTPUT_SPAN} tokens from", ".2f", names,
    ) if spans > 1 else []  # fmt: skip
    found += line_figures(
        report, "β by length of the text before a step",
        lambda row: [(part["from"], part["beta"]) for part in row["beta_by_context_length"]],
        "tokens, from", ".2f", (),
    )  # fmt: skip
    parts = [panels(found)] if found else []
    turns = max((len(row["beta_by_turn"]) for row in rows), default=0)
    if turns > 1:
        figures = [
            [row["benchmark"], shown_name(row), *map(number, row["beta_by_turn"]),
             *["–"] * (turns - len(row["beta_by_turn"]))]
            for row in rows if row["drafter"] not in BASE
        ]  # fmt: skip
        header = ("benchmark", "drafter", *(f"turn {turn + 1}" for turn in range(turns)))
        parts.append(table_html(Table("β by turn", header, figures, 2)))
    return [section("β over the answers", *parts)] if parts else []


def time_section(report: Report) -> list[str]:
    """Where the decoding time goes."""
    rows = [row for row in overall(report["results"]) if row["time_share"]]
    if not rows:
        return []
    found = []
    for benchmark in dict.fromkeys(row["benchmark"] for row in rows):
        own = [(shown_name(row), row["time_share"]) for row in rows if row["benchmark"] == benchmark]
        found.append(figure(benchmark, stacked(own, TIME_PARTS)))
    shown = details("figures", table_html(time_table(report), caption=False))
    return [section("Decoding time by part of a step", boxes(TIME_PARTS), panels(found), shown)]


def verify_section(report: Report) -> list[str]:
    """What verifying a tree costs by its nodes; none where no drafter's steps were timed one by one."""

    def points(row: Row) -> list[tuple[float, float]]:
        costs = row["verify_cost"] or ()
        return [(one["nodes"], one["over_plain_step"]) for one in costs if enough(one)]

    def enough(one: Row) -> bool:
        return bool(one["over_plain_step"]) and one["steps"] >= LEAST_STEPS

    rows = [
        [row["benchmark"], shown_name(row), str(one["nodes"]), f"{one['steps']:,}", number(1000 * one["seconds"]),
         number(one["over_plain_step"]) + "×"]
        for row in overall(report["results"]) for one in row["verify_cost"] or ()
    ]  # fmt: skip
    found = line_figures(report, "verification of a tree, over a step without drafts", points, "nodes", ".2f", ())
    if not found:
        return []
    header = ("benchmark", "drafter", "nodes", "steps", "milliseconds", "over a plain step")
    table = table_html(Table("Verification by nodes", header, rows, 2), caption=False)
    note = paragraphs([VERIFY_NOTE])
    return [section("Verification cost by nodes of a tree", panels(found), details("seconds and steps", table), *note)]


def source_section(report: Report) -> list[str]:
    """Accepted tokens by source, and parts of hybrids that were hardly needed."""
    tables = [table_html(table, caption=False) for table in source_tables(report)]
    sentences = paragraphs(findings_note(report["findings"], shown_names(report["results"])))
    return [section("Accepted tokens by source", *tables, *sentences)] if tables or sentences else []


def answers_section(report: Report) -> list[str]:
    """The sample answers, token by token."""
    samples = report.get("samples") or []
    names, looks = shown_names(report["results"]), drafter_looks(row["drafter"] for row in report["results"])
    colours = {drafter: int(look[1:]) for drafter, (look, _) in looks.items() if look[0] == "c"}
    return [section("Answers token by token", answers_view(samples, names, colours))] if samples else []
