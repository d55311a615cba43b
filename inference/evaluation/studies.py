"""A study is a paper's table in a file of `configs/studies`: what is measured for each cell, and what the paper prints.

    title: "CTC-drafter, Table 1: …"
    settings: {max_new_tokens: 128}         options of scripts/evaluate.py, for every run (optional)
    runs: {typical: {acceptance: typical}}  further runs by name, with their options (optional; `plain` has none)
    heads: {medusa: "medusa"}               NAME: KIND[,option=value…] of the heads that it needs (optional)
    mixes: {mixed: {of: [gsm8k, mbpp]}}     benchmarks of shuffled questions of others (optional)
    cell: {measure: beta}                   the fields that all cells have (optional)
    rows: {Medusa: {head: medusa}}          row → its fields
    columns: {GSM8K β: {benchmark: gsm8k}}  column → its fields
    published: {Vicuna-7B: {Medusa: [2.78]}}  what was measured on → row → the paper's numbers, one a column, or null
    notes: ["…"]                            sentences below the table (optional)

A cell is measured as its fields say: those of `cell`, over them those of its row, over them those of its column.

    measure     the path of a figure in a row of report.json (`gamma`, `time_share.draft`), `accuracy` of a head, or
                `head.steps`, `head.parameters`, `head.bytes_read`, `head.simulated_beta`
    drafter     as for scripts/evaluate.py; {head} is the head's folder, {kind} its kind, {draft_model} that of
                --draft_model, and any other {field} that of the cell. Default with a head: "{kind}:{head}"
    head        the head's name, of `heads`
    benchmark, category, run    which row of which report (default: the whole benchmark, `plain`)
    offset, top                 of `accuracy`: the offset, from 0, and the rank within which the token must be
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import yaml

from draft_heads.inference.evaluation.report import markdown_table

FOLDER = Path(__file__).resolve().parents[2] / "configs" / "studies"
PLAIN_RUN = "plain"
HEAD_FACTS = ("steps", "parameters", "bytes_read", "simulated_beta")
_PLACE = re.compile(r"\{(\w+)\}")
_FORMS = {  # the last word of a measure → how its values are written
    "gamma": "{:.2f}×",
    "over_transformers": "{:.2f}×",
    "tokens_per_second": "{:.1f}",
    "steps": "{:,.0f}",
    "parameters": "{:,.0f}",
    "bytes_read": "{:,.0f}",
    "draft": "{:.1%}",
    "verify": "{:.1%}",
    "accept": "{:.1%}",
    "other": "{:.1%}",
}


@dataclass(frozen=True)
class Cell:
    """What one cell measures; see the module."""

    measure: str
    drafter: str = ""  # without {places}, but for {draft_model} and the head's
    head: str = ""
    benchmark: str = ""
    category: str | None = None
    run: str = PLAIN_RUN
    offset: int = 0
    top: int = 1

    @property
    def of_report(self) -> bool:
        """Whether it is a figure of a report, and not one of the head alone."""
        return self.measure != "accuracy" and not self.measure.startswith("head.")

    @property
    def drafter_name(self) -> str:
        """The drafter's name in the report: its words, and the head's name for its folder."""
        words = self.drafter.replace("{kind}:", "").replace("{head}", self.head).replace("{draft_model}", "")
        return re.sub(r"\W+", "_", words).strip("_")

    def text(self, value: float | None) -> str:
        """A value as the table shows it."""
        return "–" if value is None else _FORMS.get(self.measure.rpartition(".")[2], "{:.2f}").format(value)


@dataclass(frozen=True)
class Study:
    """The content of a study's file; `cells` are by row and column."""

    name: str
    title: str
    rows: tuple[str, ...]
    columns: tuple[str, ...]
    cells: Mapping[tuple[str, str], Cell]
    settings: Mapping[str, Any] = field(default_factory=dict)
    runs: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    heads: Mapping[str, str] = field(default_factory=dict)
    mixes: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    published: Mapping[str, Mapping[str, Sequence[float | None]]] = field(default_factory=dict)
    notes: Sequence[str] = ()

    @property
    def benchmarks(self) -> list[str]:
        """The benchmarks that its cells need, parts of mixes instead of these."""
        named = dict.fromkeys(cell.benchmark for cell in self.cells.values() if cell.of_report)
        return list(dict.fromkeys(part for name in named for part in self.mixes.get(name, {}).get("of", [name])))

    def needed(self, *attributes: str) -> Iterator[tuple[Any, ...]]:
        """Each combination of these attributes of cells, once, in order."""
        yield from dict.fromkeys(tuple(getattr(cell, name) for name in attributes) for cell in self.cells.values())


def known_studies() -> list[str]:
    """The names of the files of `configs/studies`."""
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


def read_study(name_or_file: str) -> Study:
    """The study of a known name or in a file; ValueError says what is wrong with it."""
    known = name_or_file in known_studies()
    path = FOLDER / f"{name_or_file}.yaml" if known else Path(name_or_file)
    if not path.is_file():
        raise ValueError(f"a study is a YAML file or one of {', '.join(known_studies())}; got {name_or_file!r}")
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not YAML: {error}") from None
    valid = [*(one.name for one in fields(Study) if one.name not in ("name", "cells")), "cell"]
    if not isinstance(content, dict) or (unknown := [str(key) for key in content if key not in valid]):
        found = ", ".join(unknown) if isinstance(content, dict) else type(content).__name__
        raise ValueError(f"{path}: a study has the keys {', '.join(valid)}; received {found}")
    for key in ("title", "rows", "columns"):
        if not content.get(key):
            raise ValueError(f"{path}: {key} is required; add it")
    for key in set(content) - {"title", "notes"}:
        if not isinstance(content[key], dict):
            raise ValueError(f"{path}: {key} maps names to values, received {content[key]!r}")
    shared = content.pop("cell", {})
    heads = content.get("heads", {})
    cells = {
        (row, column): _cell(path, f"{row}, {column}", {**shared, **(of_row or {}), **(of_column or {})}, heads)
        for row, of_row in content["rows"].items()
        for column, of_column in content["columns"].items()
    }
    given = {name for axis in (content["rows"], content["columns"]) for one in axis.values() for name in one or {}}
    read = {*(one.name for one in fields(Cell)), *_PLACE.findall(str([shared, content["rows"], content["columns"]]))}
    if unread := sorted((given | shared.keys()) - read):
        raise ValueError(f"{path}: {unread[0]} is no field of a cell and in no drafter as {{{unread[0]}}}")
    content |= {"runs": {PLAIN_RUN: {}, **content.get("runs", {})}}
    content |= {name: tuple(content[name]) for name in ("rows", "columns")}
    study = Study(path.stem, cells=cells, **content)
    _check(path, study)
    return study


def _cell(path: Path, place: str, given: dict[str, Any], heads: Mapping[str, str]) -> Cell:
    """The cell with these fields; those that `Cell` lacks are put into its drafter."""
    names = {one.name for one in fields(Cell)}
    if given.get("head"):
        given = {"drafter": "{kind}:{head}", **given}
    spec = str(given.get("drafter", ""))
    kept = {"head", "kind", "draft_model"}
    asked = set(_PLACE.findall(spec)) - kept
    if missing := sorted(asked - given.keys()):
        raise ValueError(f"{path}: the drafter {spec!r} of the cell ({place}) needs {missing[0]}; add it to the row")
    if "measure" not in given:
        raise ValueError(f"{path}: the cell ({place}) needs measure; add it to its row, its column or to `cell`")
    spec = _PLACE.sub(lambda found: found[0] if found[1] in kept else str(given[found[1]]), spec)
    cell = Cell(**{**{name: value for name, value in given.items() if name in names}, "drafter": spec})
    needs_head = not cell.of_report or "{head}" in spec
    if needs_head and cell.head not in heads:
        raise ValueError(f"{path}: the cell ({place}) needs a head of {', '.join(heads) or 'heads'}, got {cell.head!r}")
    if cell.measure.startswith("head.") and cell.measure.removeprefix("head.") not in HEAD_FACTS:
        raise ValueError(f"{path}: of a head one of {', '.join(HEAD_FACTS)} is known; got {cell.measure!r} ({place})")
    if cell.of_report and not (cell.benchmark and spec):
        raise ValueError(f"{path}: the cell ({place}) needs {'drafter' if cell.benchmark else 'benchmark'}; add it")
    return cell


def _check(path: Path, study: Study) -> None:
    """ValueError for runs that are not named, and published numbers that fit no row or column."""
    for (run,) in study.needed("run"):
        if run not in study.runs:
            raise ValueError(f"{path}: runs has no {run!r}; name it there")
    for source, by_row in study.published.items():
        for row, values in by_row.items():
            if row not in study.rows:
                raise ValueError(f"{path}: published numbers of {source} are of rows; {row!r} is none")
            if len(values) != len(study.columns):
                raise ValueError(
                    f"{path}: {source}, {row} has {len(values)} numbers for {len(study.columns)} columns; use null"
                )


# ----------------------------------------------------------------------------------------------------
# The table


def figure(results: Sequence[Mapping[str, Any]], cell: Cell) -> float | None:
    """The figure of a cell in the rows of its report; None where the report has none."""
    for row in results:
        if (row["benchmark"], row["category"], row["drafter"]) == (cell.benchmark, cell.category, cell.drafter_name):
            value: Any = row
            for word in cell.measure.split("."):
                if isinstance(value, list):
                    value = value[int(word)] if int(word) < len(value) else None
                else:
                    value = None if value is None else value[word]
            return value
    return None


def study_table(study: Study, measured: Mapping[tuple[str, str], float | None], target: str) -> str:
    """Markdown: for each row what was measured here, below it what the paper prints, each under its source.

    measured    (row, column) → value; a cell that is not in it was not measured
    target      what was measured on
    """
    lines = list[list[str]]()
    for row in study.rows:
        own = [study.cells[row, column].text(measured.get((row, column))) for column in study.columns]
        lines.append([row, f"here: {target}", *own])
        for source, by_row in study.published.items():
            if row in by_row:
                cells = [study.cells[row, column] for column in study.columns]
                lines.append([row, f"published: {source}", *(map(Cell.text, cells, by_row[row]))])
    return markdown_table(["", "measured on", *study.columns], lines, 2)
