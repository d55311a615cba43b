"""A study is a paper's table in a file of `configs/studies`: what is measured for each cell, and what the paper prints.

    title: "CTC-drafter, Table 1: …"
    settings: {max_new_tokens: 128}         options of scripts/evaluate.py, for every run (optional)
    benchmark_settings: {gsm8k: {max_new_tokens: 256}}  options of one benchmark, over `settings` (optional)
    runs: {typical: {acceptance: typical}}  further runs by name, with their options (optional; `plain` has none)
    heads: {medusa: "medusa"}               NAME: KIND[,option=value…] of the heads that it needs (optional)
    mixes: {mixed: {of: [gsm8k, mbpp]}}     benchmarks of shuffled questions of others (optional)
    cell: {measure: beta}                   the fields that all cells have (optional)
    rows: {Medusa: {head: medusa}}          row → its fields
    columns: {GSM8K β: {benchmark: gsm8k}}  column → its fields
    published: {Vicuna-7B: {Medusa: [2.78]}}  what was measured on → row → the paper's numbers, one a column, or null
    notes: ["…"]                            sentences below the table (optional)

A cell is measured as its fields say: those of `cell`, over them those of its row, over them those of its column.

    measure     the path of a figure in a row of report.json (`gamma`, `time_share.draft`; see `FIGURES`), `accuracy` of
                a head, `head.steps`, `head.parameters`, `head.simulated_beta`, or `head.bytes_read` as it was decoded
    drafter     as for scripts/evaluate.py; {head} is the head's folder, {kind} its kind, {draft_model} that of
                --draft_model, and any other {field} that of the cell. Default with a head: "{kind}:{head}"
    head        the head's name, of `heads`
    benchmark, category, run    which row of which report (default: the whole benchmark, `plain`)
    offset, top                 of `accuracy`: the offset, from 0, and the rank within which the token must be
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import NoneType
from typing import Any

import yaml

from draft_heads.configs.yaml_files import read_yaml
from draft_heads.data.text.benchmarks import Question, load_benchmark
from draft_heads.heads.accuracy import TOP
from draft_heads.inference.evaluation.evaluate import TRANSFORMERS, VANILLA
from draft_heads.inference.evaluation.report import markdown_table

FOLDER = Path(__file__).resolve().parents[2] / "configs" / "studies"
PLAIN_RUN = "plain"
HEAD_FACTS = ("steps", "parameters", "bytes_read", "simulated_beta")
_PLACE = re.compile(r"\{(\w+)\}")
_AXES = ("rows", "columns")
FIGURES = (
    *("beta", "gamma", "over_transformers", "tokens_per_second", "wall_seconds"),
    *("questions", "turns", "skipped", "new_tokens", "target_steps", "score.accuracy", "rouge2", "pass_at_1"),
    *(f"time_share.{part}" for part in ("draft", "verify", "accept", "other")),
    *(f"lossless.{count}" for count in ("identical_turns", "turns", "near_ties", "unexplained")),
    *(f"acceptance_by_position.{of}.N" for of in ("unconditional", "conditional")),
)
"""What a `measure` of a report can be; N counts from 0."""
OWN_OPTIONS = ("target", "drafters", "benchmarks", "output", "overwrite", "config", "list_drafters")
"""Options of scripts/evaluate.py that a study sets by itself."""
_COUNTS = (
    "questions",
    "turns",
    "skipped",
    "new_tokens",
    "target_steps",
    "lossless",
    "steps",
    "parameters",
    "bytes_read",
)
_SHARES = ("time_share", "acceptance_by_position", "accuracy", "rouge2", "pass_at_1")
_FORMS = {  # a word of a measure → digits, format and unit of its values
    **dict.fromkeys(("gamma", "over_transformers"), (2, "f", "×")),
    **dict.fromkeys(_COUNTS, (0, "f", "")),
    **dict.fromkeys(_SHARES, (1, "%", "")),
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
        return self.measure != "accuracy" and not self.of_head

    @property
    def of_head(self) -> bool:
        """Whether a head's files say it."""
        return self.measure.startswith("head.")

    @property
    def drafter_name(self) -> str:
        """The drafter's name in the report: its words, and the head's name for its folder."""
        words = self.drafter.replace("{kind}:", "").replace("{head}", self.head).replace("{draft_model}", "")
        return re.sub(r"\W+", "_", words).strip("_")

    def text(self, value: float | None, unrounded: bool = False) -> str:
        """A value as the table shows it; unrounded: with all digits that it has, as published ones."""
        if value is None:
            return "–"
        known = (_FORMS[word] for word in self.measure.split(".") if word in _FORMS)
        digits, form, unit = next(known, (2, "f", ""))
        if unrounded:
            digits = max(digits, len(str(value).partition(".")[2]) - (2 if form == "%" else 0))
        return f"{value:,.{digits}{form}}{unit}"


@dataclass(frozen=True)
class Study:
    """The content of a study's file; `cells` are by row and column."""

    name: str
    title: str
    rows: tuple[str, ...]
    columns: tuple[str, ...]
    cells: Mapping[tuple[str, str], Cell]
    settings: Mapping[str, Any] = field(default_factory=dict)
    benchmark_settings: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    runs: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    heads: Mapping[str, str] = field(default_factory=dict)
    mixes: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    published: Mapping[str, Mapping[str, Sequence[float | None]]] = field(default_factory=dict)
    notes: Sequence[str] = ()

    @property
    def benchmarks(self) -> list[str]:
        """The benchmarks that its cells need, parts of mixes instead of these."""
        named = dict.fromkeys(cell.benchmark for cell in self.cells.values() if cell.of_report)
        return list(dict.fromkeys(part for name in named for part in self.parts_of(name)))

    def parts_of(self, benchmark: str) -> list[str]:
        """The benchmarks that a mix is made of; of any other benchmark it alone."""
        return self.mixes[benchmark]["of"] if benchmark in self.mixes else [benchmark]

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
        content = read_yaml(path)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not YAML: {error}") from None
    valid = [*(one.name for one in fields(Study) if one.name not in ("name", "cells")), "cell"]
    if not isinstance(content, dict) or (unknown := [str(key) for key in content if key not in valid]):
        found = ", ".join(unknown) if isinstance(content, dict) else type(content).__name__
        raise ValueError(f"{path}: a study has the keys {', '.join(valid)}; received {found}")
    for key in ("title", "rows", "columns"):
        if not content.get(key):
            raise ValueError(f"{path}: {key} is required; add it")
    _check_types(path, content)
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


def _check_types(path: Path, content: Mapping[str, Any]) -> None:
    """ValueError for a key of the file whose value is not what the module says."""
    for key in content.keys() - {"title", "notes"}:
        if not isinstance(content[key], dict):
            raise ValueError(f"{path}: {key} maps names to values, received {content[key]!r}")
    for key in ("rows", "columns", "runs", "benchmark_settings", "mixes", "published"):
        for name, value in content.get(key, {}).items():
            if not isinstance(name, str) or not isinstance(value, dict | (NoneType if key in _AXES else dict)):
                raise ValueError(f"{path}: {key} maps names to mappings, received {name!r}: {value!r}")
    if not isinstance(content["title"], str) or not _is_list(content.get("notes", []), str):
        raise ValueError(f"{path}: title is a text and notes a list of texts; put what has a colon in quotes")
    for name, value in content.get("heads", {}).items():
        if not isinstance(value, str) or not re.fullmatch(r"\w[\w.-]*", str(name)):
            raise ValueError(
                f"{path}: heads has a name, which a folder gets, and KIND[,option=value…] of each; received "
                f"{name!r}: {value!r}"
            )
    for name, mix in content.get("mixes", {}).items():
        counts = mix.get("each", 20), mix.get("consecutive", 0) + 1 if isinstance(mix.get("consecutive", 0), int) else 0
        right = mix.keys() <= {"of", "each", "consecutive"} and all(isinstance(n, int) and n > 0 for n in counts)
        if not (right and mix.get("of") and _is_list(mix["of"], str)):
            raise ValueError(
                f"{path}: a mix is {{of: [benchmarks], each: 20, consecutive: 0}}; received {name}: {mix!r}"
            )


def _is_list(value: Any, of: Any) -> bool:
    return isinstance(value, list) and all(isinstance(one, of) and not isinstance(one, bool) for one in value)


def _cell(path: Path, place: str, given: dict[str, Any], heads: Mapping[str, str]) -> Cell:
    """The cell with these fields; those that `Cell` lacks are put into its drafter."""
    names = {one.name for one in fields(Cell)}
    given = {name: value for name, value in given.items() if value is not None}
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
    for one in fields(Cell):
        if not isinstance(value := getattr(cell, one.name), int if one.name in ("offset", "top") else str | NoneType):
            raise ValueError(f"{path}: {one.name} of the cell ({place}) is no {value!r}; see {__name__}")
    if cell.offset < 0 or not 1 <= cell.top <= TOP:
        raise ValueError(f"{path}: offset is from 0 and top from 1 to {TOP}; got {cell.offset}, {cell.top} ({place})")
    if cell.of_report and re.sub(r"\.\d+$", ".N", cell.measure) not in FIGURES:
        raise ValueError(
            f"{path}: measure is accuracy, head.… or a figure of a report, {', '.join(FIGURES)}; got {cell.measure!r} "
            f"({place})"
        )
    needs_head = not cell.of_report or "{head}" in spec
    if needs_head and cell.head not in heads:
        raise ValueError(f"{path}: the cell ({place}) needs a head of {', '.join(heads) or 'heads'}, got {cell.head!r}")
    if cell.of_head and cell.measure.removeprefix("head.") not in HEAD_FACTS:
        raise ValueError(f"{path}: of a head one of {', '.join(HEAD_FACTS)} is known; got {cell.measure!r} ({place})")
    if cell.of_report and not (cell.benchmark and spec):
        raise ValueError(f"{path}: the cell ({place}) needs {'drafter' if cell.benchmark else 'benchmark'}; add it")
    return cell


def _check(path: Path, study: Study) -> None:
    """ValueError for runs that are not named, options that are the study's own, drafters that would have one name in a
    report, and published numbers that fit no row or column."""
    for options in (study.settings, *study.benchmark_settings.values(), *study.runs.values()):
        if own := sorted(options.keys() & set(OWN_OPTIONS)):
            raise ValueError(f"{path}: settings are of decoding, and {own[0]} is given otherwise; take it out")
    benchmarks = {cell.benchmark for cell in study.cells.values()}
    if unused := sorted(study.benchmark_settings.keys() - benchmarks):
        raise ValueError(f"{path}: benchmark_settings has {unused[0]}, which no cell names; take it out")
    names = dict[tuple[str, ...], str]()
    for cell in (one for one in study.cells.values() if one.of_report):
        name, drafter = cell.drafter_name, cell.drafter.replace("{head}", cell.head)
        first = drafter if name not in (VANILLA, TRANSFORMERS) else name  # which reports have beside those of the study
        if (other := names.setdefault((cell.run, cell.benchmark, name), first)) != drafter:
            raise ValueError(f"{path}: {other!r} and {drafter!r} have one name in a report, {name}; change one")
    for (run,) in study.needed("run"):
        if run not in study.runs:
            raise ValueError(f"{path}: runs has no {run!r}; name it there")
    for source, by_row in study.published.items():
        for row, values in by_row.items():
            if row not in study.rows:
                raise ValueError(f"{path}: published numbers of {source} are of rows; {row!r} is none")
            if not _is_list(values, int | float | NoneType):
                raise ValueError(f"{path}: {source}, {row} is a list of numbers or null, one a column; got {values!r}")
            if len(values) != len(study.columns):
                raise ValueError(
                    f"{path}: {source}, {row} has {len(values)} numbers for {len(study.columns)} columns; use null"
                )


# ----------------------------------------------------------------------------------------------------
# What is asked, and the table


def mixed_questions(mix: Mapping[str, Any], parts: Mapping[str, str], limit: int | None = None) -> list[dict[str, Any]]:
    """FastChat rows of a mix: `each` questions of each part, at most `limit`, in turns of `consecutive`, or shuffled
    where that is 0. All orders of one `each` have the same questions."""
    each, run_length = mix.get("each", 20), mix.get("consecutive", 0)
    each = min(each, limit or each)
    loaded = {name: load_benchmark(name, source, each) for name, source in parts.items()}
    rows = {name: [_fastchat_row(name, one) for one in found] for name, found in loaded.items()}
    if not run_length:
        every = [row for found in rows.values() for row in found]
        random.Random(0).shuffle(every)
        return every
    starts = range(0, max(map(len, rows.values())), run_length)
    return [row for start in starts for found in rows.values() for row in found[start : start + run_length]]


def _fastchat_row(benchmark: str, question: Question) -> dict[str, Any]:
    """A row that is read as the same question of the category `benchmark`; it is not scored."""
    row = {"question_id": f"{benchmark} {question.question_id}", "category": benchmark, "turns": question.turns}
    further = {"system": question.system, "reference": question.reference, "chat_template_kwargs": question.extra}
    return row | {key: value for key, value in further.items() if value}


def figure(results: Sequence[Mapping[str, Any]], cell: Cell) -> float | None:
    """The figure of a cell in the rows of its report; None where the report has none."""
    for row in results:
        if (row["benchmark"], row["category"], row["drafter"]) == (cell.benchmark, cell.category, cell.drafter_name):
            value: Any = row
            for word in cell.measure.split("."):
                if isinstance(value, list):
                    value = value[int(word)] if int(word) < len(value) else _nothing_accepted(row, cell.measure)
                elif value is not None:
                    value = value.get(word)
            return value
    return None


def _nothing_accepted(row: Mapping[str, Any], measure: str) -> float | None:
    """0 for a position of drafts after the last at which one was accepted; None where nothing was drafted, no step was
    counted, or none reached the position."""
    *_, of, position = measure.split(".")
    histogram = row.get("accept_length_histogram") or []
    drafted = bool(histogram) and int(position) < (row.get("max_depth") or 0)
    return 0.0 if drafted and (of == "unconditional" or int(position) == len(histogram) - 1) else None


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
                lines.append(
                    [row, f"published: {source}", *(cell.text(value, True) for cell, value in zip(cells, by_row[row]))]
                )
    return markdown_table(["", "measured on", *study.columns], lines, 2)
