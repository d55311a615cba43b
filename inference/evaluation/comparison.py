"""Several reports side by side: what differs in their settings, and β, γ and losslessness of each drafter."""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Mapping, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

from draft_heads.data.fingerprint import ADDED, compared, flat
from draft_heads.inference.evaluation.metrics import shown_name
from draft_heads.inference.evaluation.report_text import (
    FINGERPRINT,
    Table,
    interval_cell,
    lossless_cell,
    number,
    overall,
    setting,
)

Report = dict[str, Any]
Reports = Mapping[str, Report]

NEEDED = ("benchmark", "category", "drafter", "questions", "beta", "gamma", "gamma_ci95", "lossless")
FIGURES = (
    *("questions", "skipped", "turns", "new_tokens", "target_steps", "beta", "beta_low", "beta_high"),
    *("gamma", "gamma_low", "gamma_high", "over_transformers", "tokens_per_second", "wall_seconds"),
    *("draft", "verify", "accept", "other"),  # shares of the time
    *("peak_memory_bytes", "joules_per_token"),
    *("identical_turns", "near_ties", "unexplained", "accuracy", "rouge2", "pass_at_1", "cut"),
)
CHECKSUMS = "question_checksums"
"""The setting that holds the checksum of each benchmark's questions."""
PROMPTS = "prompt_checksums"
"""The setting that holds the checksum of each benchmark's first prompts, as token ids."""
LOADED = "loaded_checksums"
"""The setting that holds the checksum of what each drafter loaded."""
LATEX = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
LATEX |= {sign: f"\\{sign}" for sign in "&%$#_{}"} | {"β": r"$\beta$", "γ": r"$\gamma$", "×": r"$\times$", "–": "--"}


# --- reading ----------------------------------------------------------------------------------------------------------


def read_reports(paths: Sequence[Path], any_target: bool = False) -> dict[str, Report]:
    """The reports by names that tell them apart; ValueError for one that cannot be read, for fewer than two, and for
    another target unless `any_target`."""
    if len(paths) < 2:
        raise ValueError(f"a comparison is of at least two reports; got {len(paths)}; name two run folders")
    files = [path / "report.json" if path.is_dir() else path for path in paths]
    if len({file.resolve() for file in files}) < len(files):
        raise ValueError(f"each report is given once; got {' '.join(map(str, paths))}; leave the second one out")
    reports = dict(zip(short_names(files), map(read_report, files)))
    if not any_target:
        check_targets(reports)
    return reports


def read_report(file: Path) -> Report:
    """The content of a report.json; ValueError for a file that is missing, cut or something else."""
    if not file.is_file():
        folder = file.name == "report.json" and file.parent.is_dir()
        found = f"{file.parent} holds none" if folder else f"{file} does not exist"
        found += "; name the --output of an evaluation"
        if folder and (file.parent / "parts").is_dir():
            found = f"{file.parent} holds an unfinished run; repeat its command, without --overwrite"
        raise ValueError(f"a report is a folder with report.json, or that file; {found}")
    remedy = "repeat the evaluation with --overwrite"
    try:
        report = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"a report is whole JSON; {file} is cut or damaged ({error}); {remedy}") from None
    rows = report.get("results") if isinstance(report, dict) else None
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise ValueError(f"a report has a list of results; {file} has none; name the report.json of an evaluation")
    for index, row in enumerate(rows):
        if missing := [key for key in NEEDED if key not in row]:
            raise ValueError(f"every row of results has {missing[0]}; row {index} of {file} lacks it; {remedy}")
    parts = {name: report.get(name) or {} for name in ("settings", "environment", "options")}
    return {**report, **parts, "target": report.get("target")}


def short_names(files: Sequence[Path]) -> list[str]:
    """The shortest ends of the folders' paths that tell them apart: runs/a/report, runs/b/report -> a/report, …"""
    parts = [file.absolute().parent.parts if file.name == "report.json" else file.absolute().parts for file in files]
    for length in range(1, max(map(len, parts)) + 1):
        names = ["/".join(part[-length:]) for part in parts]
        if len(set(names)) == len(names):
            return names
    return [str(file) for file in files]


def check_targets(reports: Reports) -> None:
    """ValueError naming two reports whose targets differ."""
    for (first, report), (name, other) in combinations(reports.items(), 2):
        if not same_target(report, other):
            here, there = target_name(report), target_name(other)
            apart = [row[0] for row in differences({first: report, name: other}).rows if here == there]
            unlike = ", ".join(key.removeprefix("target ") for key in apart if key.startswith("target "))
            raise ValueError(
                f"reports are compared on one target; {first} has {here} and {name} {there}"
                f"{f', of another {unlike}' if unlike else ''}; compare reports of one target, or add --any_target"
            )


def same_target(one: Report, other: Report) -> bool:
    """Whether two reports have one target, by fingerprint, or by number of parameters where one has none. A field
    that an older version did not write is not compared; replays without a target fit those with one."""
    ours, theirs = fingerprint(one), fingerprint(other)
    if ours and theirs:
        return not compared(ours, theirs)
    if not one["target"] or not other["target"]:
        return one["target"] is other["target"]
    return bool(one["target"].get("parameters") == other["target"].get("parameters"))


def fingerprint(report: Report) -> dict[str, Any]:
    """The fingerprint of a report's target, or of the one whose states a replay has read; empty without."""
    found: dict[str, Any] = (report["target"] or {}).get("fingerprint") or report["settings"].get(FINGERPRINT) or {}
    return found


def target_name(report: Report) -> str:
    """A target's path and size."""
    target = report["target"]
    replayed = report["settings"].get("target") or "none"
    return f"{target['path']} ({target['parameters']:,} parameters)" if target else f"{replayed} (replayed answers)"


# --- what differs -----------------------------------------------------------------------------------------------------


def differences(reports: Reports) -> Table:
    """Everything but the figures in which the reports differ: target, settings, versions, and questions and options of
    a benchmark or drafter among the reports that have it. "–" stands where a report does not say."""
    given = [facts(report) for report in reports.values()]
    rows = []
    for key in dict.fromkeys(key for one in given for key in one):
        values = [one.get(key, "–") for one in given]
        of, _, _ = key.partition(": ")
        needed = key if of in ("questions", "prompts") else f"{of}: loaded"  # by who has it
        added = key.startswith("target ") and key.removeprefix("target ").partition(".")[0] in ADDED
        own = [x for x, one in zip(values, given) if (key in one if added else needed in one or ": " not in key)]
        if len(set(own)) > 1:
            rows.append([key, *values])
    return Table("What differs", ("setting", *reports), rows, 1 + len(reports))


def facts(report: Report) -> dict[str, str]:
    """What a report's figures depend on, by name."""
    target, known = report["target"] or {}, dict[str, Any]()
    known |= {"target": target.get("path"), "parameters": target.get("parameters")}
    known |= {"dtype": target.get("dtype"), "device": target.get("device")}
    fields = flat(fingerprint(report))
    known |= {f"target {name}": "none" if x is None and "." in name else x for name, x in fields.items()}
    settings = report["settings"]
    elsewhere = ("drafters", "benchmarks", CHECKSUMS, PROMPTS, LOADED, FINGERPRINT)
    known |= {key: value for key, value in settings.items() if key not in elsewhere}
    known |= {key: value for key, value in report["environment"].items() if key != "time"}
    for row in overall(report["results"]):
        checksum = (settings.get(CHECKSUMS) or {}).get(row["benchmark"])
        known[f"questions: {row['benchmark']}"] = row["questions"], *([checksum] if checksum else [])
        known[f"prompts: {row['benchmark']}"] = (settings.get(PROMPTS) or {}).get(row["benchmark"])  # None: not noted
        known[f"{row['drafter']}: loaded"] = loaded(settings, row["drafter"])
    for drafter, options in report["options"].items():
        known |= {f"{drafter}: {name}": value for name, value in options.items()}
    for drafter, carried in (report.get("carried_over") or {}).items():  # of a run that was resumed, more
        known[f"{drafter}: copies that began with nothing"] = carried["runs"] * carried["drafters_per_run"]
        asked = dict.fromkeys(row["benchmark"] for row in report["results"])
        known[f"{drafter}: learned from, in this order"] = ", ".join(asked)
    return {key: whole(value) for key, value in known.items() if value is not None}


def whole(value: Any) -> str:
    """A setting's value as text, of which nothing is cut."""
    if isinstance(value, dict):
        return ", ".join(f"{name}={one}" for name, one in value.items()) or "none"
    return setting(value)


def loaded(settings: Mapping[str, Any], drafter: str) -> str:
    """The checksum of what a drafter loaded, or `nothing`; of an older report, which has none, its words."""
    if LOADED in settings:
        return str(settings[LOADED].get(drafter, "nothing"))
    given = settings.get("drafters") or []
    words = given.split() if isinstance(given, str) else given  # of a replay one text
    named = [word for word in words if re.match(rf"{re.escape(drafter)}\W", word)]
    return f"not noted ({named[0]})" if named else "nothing"


# --- figures ----------------------------------------------------------------------------------------------------------


def side_by_side(reports: Reports) -> Table:
    """β, γ with its interval and losslessness of every benchmark and drafter, a group of columns for each report. A
    drafter whose reports show it under several names, as exact and LOSSY, has all of them."""
    found: dict[tuple[str, str], dict[str, dict[str, Any]]] = {}
    for name, report in reports.items():
        for row in overall(report["results"]):
            found.setdefault((row["benchmark"], row["drafter"]), {})[name] = row
    benchmarks = list(dict.fromkeys(benchmark for benchmark, _ in found))
    rows = []
    for (benchmark, _), own in sorted(found.items(), key=lambda one: benchmarks.index(one[0][0])):
        cells = [cell for name in reports for cell in figures_of(own.get(name))]
        rows.append([benchmark, " / ".join(dict.fromkeys(map(shown_name, own.values()))), *cells])
    header = [f"{figure} {name}" for name in reports for figure in ("β", "γ", "lossless")]
    return Table("Side by side", ("benchmark", "drafter", *header), rows, 2)


def figures_of(row: dict[str, Any] | None) -> list[str]:
    """The three cells of one report; dashes where it lacks the drafter."""
    if row is None:
        return ["–"] * 3
    interval = f" ({interval_cell(row['gamma_ci95'])})" if row["gamma_ci95"] else ""
    gamma = "–" if row["gamma"] is None else f"{row['gamma']:.2f}×{interval}"
    return [number(row["beta"]), gamma, lossless_cell(row["lossless"])]


def latex(table: Table) -> str:
    """The header and rows of a LaTeX `tabular`, without its frame."""
    return "".join(" & ".join(map(latex_text, row)) + r" \\" + "\n" for row in [table.header, *table.rows])


def latex_text(cell: str) -> str:
    """A cell in which no character is a command: `50% a_b` -> `50\\% a\\_b`."""
    return "".join(LATEX.get(sign, sign) for sign in " ".join(cell.split()))


def csv_text(reports: Reports) -> str:
    """One line for each report, benchmark, category (empty: all) and drafter, with the numbers of report.json."""
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(["report", "benchmark", "category", "drafter", *FIGURES])
    for name, report in reports.items():
        for row in report["results"]:
            known = dict(row) | (row["lossless"] or {}) | (row.get("score") or {}) | (row.get("time_share") or {})
            for figure in ("beta", "gamma"):
                known[f"{figure}_low"], known[f"{figure}_high"] = row.get(f"{figure}_ci95") or (None, None)
            words = [re.sub(r"\s+", " ", str(word or "")) for word in (name, row["benchmark"], row["category"])]
            writer.writerow([*words, shown_name(row), *(known.get(figure) for figure in FIGURES)])
    return file.getvalue()
