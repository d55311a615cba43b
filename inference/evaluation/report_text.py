"""What reports say, as tables of cells and as sentences: `report.md` and `report.html` show the same."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draft_heads.configs.waiting import threads_text
from draft_heads.data.generation_config import settings_text
from draft_heads.inference.evaluation.carried_over import notes
from draft_heads.inference.evaluation.evaluate import TRANSFORMERS
from draft_heads.inference.evaluation.metrics import SLOW, TIME_KEYS, shown_name
from draft_heads.inference.evaluation.scores import SCORES

HEADER = ("benchmark", "drafter", "β", "γ", "95 %", "tokens/s", "lossless", "score")
REPLAY_HEADER = ("benchmark", "drafter", "β", "new tokens", "target steps")
OVER_TRANSFORMERS = "over transformers"
FINGERPRINT = "target_fingerprint"  # the setting that holds the fingerprint of the target whose states a replay read
FEW_TURNS = 20

EXPLANATION = """β: new tokens per target step, the prefill included. γ: seconds per token of the plain loop, here
`{plain_loop}`, over the drafter's, same process and prompts; {interval}. Lossless: turns
identical to transformers' own `generate`, of all turns, each judged at its first difference; a near tie is a difference
within the numerical noise."""
INTERVAL = "95 % interval by bootstrap over questions"
NO_INTERVAL = "without an interval, as answers decoded together share their time"
EXPLANATION_REPLAY = """β: new tokens per target step, the prefill included, as in greedy decoding.
Recorded answers were replayed; nothing was decoded, timed or compared."""
EXPLANATION_TRANSFORMERS = """Drafter `transformers` is the target's own `generate`, without this project's engine;
over transformers: its seconds per token over the drafter's. The plain loop is the faster of it and `vanilla`."""


@dataclass(frozen=True)
class Table:
    """A table under a title; its first `text_columns` columns are left-aligned, the others hold numbers."""

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    text_columns: int


# --- figures ----------------------------------------------------------------------------------------------------------


def overall(results: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows of whole benchmarks."""
    return [row for row in results if row["category"] is None]


def by_benchmark(report: dict[str, Any], key: str) -> dict[str, list[int]]:
    """Benchmark → a count of each drafter that has it."""
    found: dict[str, list[int]] = {}
    for row in overall(report["results"]):
        if (count := row.get(key)) is not None:
            found.setdefault(row["benchmark"], []).append(count)
    return found


def span(counts: Sequence[int]) -> str:
    """`19–20`, or `20` where all are the same."""
    return "–".join(map(str, sorted({min(counts), max(counts)})))


def number(value: float | None, form: str = ".2f") -> str:
    return "–" if value is None else format(value, form)


def columns_of(report: dict[str, Any]) -> tuple[str, ...]:
    """The columns of the table of whole benchmarks that fits 80 columns of a terminal."""
    return HEADER if report["target"] else REPLAY_HEADER


def cells(row: dict[str, Any], columns: Sequence[str]) -> list[str]:
    """A row's figures in the order of `columns`."""
    figures = {
        "benchmark": row["benchmark"],
        "drafter": shown_name(row),
        "β": number(row["beta"]),
        "γ": f"{number(row['gamma'])}×",
        "95 %": interval_cell(row["gamma_ci95"]),
        OVER_TRANSFORMERS: f"{number(row['over_transformers'])}×",
        "tokens/s": number(row["tokens_per_second"], ".1f"),
        "lossless": lossless_cell(row["lossless"]),
        "score": number(score_of(row)[1], ".1%"),
        "new tokens": f"{row['new_tokens']:,}",
        "target steps": f"{row['target_steps']:,}",
    }
    return [figures[column] for column in columns]


def score_of(row: dict[str, Any]) -> tuple[str, float | None]:
    """(title, value) of the score that a row has; ("", None) of a row without one."""
    found = {name: row.get(name) for name in SCORES} | (row["score"] or {})
    return next(((SCORES[name], value) for name, value in found.items() if value is not None), ("", None))


def interval_cell(interval: Sequence[float] | None) -> str:
    """`1.57–2.30`."""
    return "–" if interval is None else f"{interval[0]:.2f}–{interval[1]:.2f}"


def lossless_cell(counts: dict[str, int] | None) -> str:
    """`160/160`, and near ties or unexplained differences where there are any."""
    if counts is None:
        return "–"
    parts = [f"{counts['identical_turns']}/{counts['turns']}"]
    if counts["near_ties"]:
        parts.append(f"{counts['near_ties']} near {'tie' if counts['near_ties'] == 1 else 'ties'}")
    if counts["unexplained"]:
        parts.append(f"{counts['unexplained']} UNEXPLAINED")
    return ", ".join(parts)


# --- tables -----------------------------------------------------------------------------------------------------------


def results_table(report: dict[str, Any]) -> Table:
    """Whole benchmarks; the speed over transformers' own `generate` comes after γ's interval where that was run."""
    columns = (*HEADER[:5], OVER_TRANSFORMERS, *HEADER[5:]) if has_transformers(report) else columns_of(report)
    return Table("Results", columns, [cells(row, columns) for row in overall(report["results"])], 2)


def time_table(report: dict[str, Any]) -> Table:
    """Shares of the decoding time by part of a step."""
    rows = []
    for row in overall(report["results"]):
        shares = ["–" if row["time_share"] is None else f"{row['time_share'][key]:.1%}" for key in TIME_KEYS]
        rows.append([row["benchmark"], shown_name(row), *shares, number(row["wall_seconds"], ".1f")])
    return Table("Decoding time by part of a step", (*HEADER[:2], *TIME_KEYS, "seconds"), rows, 2)


def usage_tables(report: dict[str, Any]) -> list[Table]:
    """Peak GPU memory and energy; none where neither was measured."""
    rows = []
    for row in overall(report["results"]):
        peak, joules = row["peak_memory_bytes"], row["joules_per_token"]
        if peak is not None or joules is not None:
            shown = number(None if peak is None else peak / 2**20, ",.0f"), number(joules)
            rows.append([row["benchmark"], shown_name(row), *shown])
    header = (*HEADER[:2], "MiB beside the weights", "J/token")
    return [Table("Peak GPU memory and energy", header, rows, 2)] if rows else []


def source_tables(report: dict[str, Any]) -> list[Table]:
    """Accepted tokens by source, for drafters with more than one source; none where there is no such drafter."""
    rows = []
    for row in overall(report["results"]):
        if len(counts := row.get("accepted_by_source") or {}) > 1:
            parts = ", ".join(f"{name} {count:,}" for name, count in counts.items())
            rows.append([row["benchmark"], shown_name(row), parts, f"{row['new_tokens']:,}"])
    header = (*HEADER[:2], "by source", "new tokens")
    return [Table("Accepted tokens by source", header, rows, 3)] if rows else []


def category_tables(results: Sequence[dict[str, Any]]) -> list[Table]:
    """β, and γ where it was measured, by category: one table for each benchmark that has more than one."""
    tables, timed = [], any(row["gamma"] is not None for row in results if row["category"] is not None)
    for benchmark in dict.fromkeys(row["benchmark"] for row in results):
        figures: dict[str, list[str]] = {}
        rows = [row for row in results if row["benchmark"] == benchmark and row["category"] is not None]
        for row in rows:
            figure = number(row["beta"]) + (f" ({number(row['gamma'])}×)" if timed else "")
            figures.setdefault(row["category"], [row["category"]]).append(figure)
        if len(figures) > 1:
            columns = ("category", *dict.fromkeys(map(shown_name, rows)))
            title = f"{benchmark}: β{' (γ)' if timed else ''} by category"
            tables.append(Table(title, columns, list(figures.values()), 1))
    return tables


def settings_table(report: dict[str, Any]) -> Table:
    """The target, the settings, the machine with its versions, and the command."""
    given: dict[str, Any] = {}
    if target := report["target"]:
        given = {"target": target["path"], "parameters": f"{target['parameters']:,}"}
        given |= {"precision": f"{target['dtype']} on {target['device']}"}
    given |= report["settings"] | report["environment"] | {"command": report.get("command"), FINGERPRINT: None}
    rows = [[name, setting(value)] for name, value in given.items() if value is not None]
    return Table("Settings, versions and command", ("setting", "value"), rows, 2)


def setting(value: Any) -> str:
    """A setting's value as text; of the checkpoint's own generation settings `repetition_penalty=1.3`, or none."""
    if isinstance(value, dict):
        return settings_text(value) or "none"
    return " ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)


# --- sentences --------------------------------------------------------------------------------------------------------


def has_transformers(report: dict[str, Any]) -> bool:
    """Whether the target's own `generate` was run as a baseline."""
    return any(row["drafter"] == TRANSFORMERS for row in report["results"])


def target_sentence(report: dict[str, Any]) -> str:
    """The target and the machine, in one sentence; of replayed answers their file."""
    target = report["target"]
    if target is None:
        return f"Answers `{report['settings']['answers']}`."
    machine = report["environment"]
    runs = report["settings"].get("threads_of_runs", [threads_text(machine["threads"], machine["waiting_threads"])])
    place = machine["accelerator"] or " or ".join(runs)
    precision = f"{target['dtype']} on {target['device']}"
    shared = " and ".join(map(str, report["settings"].get("processes", [1])))
    place += "" if shared == "1" else f", {shared} processes"
    return f"Target `{target['path']}`, {target['parameters']:,} parameters, {precision}, {place}."


def explanation(report: dict[str, Any]) -> str:
    """What β, γ and lossless mean in this report."""
    if report["target"] is None:
        return " ".join([EXPLANATION_REPLAY, *filter(None, [report["settings"].get("not_greedy")])])
    interval = NO_INTERVAL if report["settings"].get("batch_size", 1) > 1 else INTERVAL
    return EXPLANATION.format_map(report["settings"] | {"interval": interval})


def scores_note(report: dict[str, Any]) -> list[str]:
    """A sentence that names the score of each benchmark, if one is scored."""
    titles = {row["benchmark"]: title for row in overall(report["results"]) if (title := score_of(row)[0])}
    return [f"Score: {', '.join(f'{title} of {name}' for name, title in titles.items())}."] if titles else []


def cut_note(report: dict[str, Any]) -> list[str]:
    """A sentence on the benchmarks with answers that were cut, how many of each; a range where drafters differ."""
    cut, turns = (by_benchmark(report, key) for key in ("cut", "turns"))
    counts = [f"{name} {span(each)} of {span(turns[name])}" for name, each in cut.items() if max(each)]
    rule = "Answers cut at the longest length or the end of the context"
    scored = {row["benchmark"] for row in overall(report["results"]) if score_of(row)[0]}
    mentioned = [name for name, each in cut.items() if max(each)]
    of_them = [name for name in mentioned if name in scored]
    rule += ", and scored as far as they go" if of_them == mentioned else ""
    rest = (
        f"; those of {' and '.join(of_them)} are scored as far as they go" if of_them and of_them != mentioned else ""
    )
    return [f"{rule}: {', '.join(counts)}{rest}."] if counts else []


def results_notes(report: dict[str, Any]) -> list[str]:
    """The sentences under the table of results."""
    return [
        *skipped_note(report),
        explanation(report),
        *scores_note(report),
        *cut_note(report),
        *few_turns_note(report),
        *slow_note(report),
        *notes(report["carried_over"]),
        *([EXPLANATION_TRANSFORMERS] if has_transformers(report) else []),
    ]


def caveats(report: dict[str, Any]) -> list[str]:
    """What is to be known of the figures of a report where they stand in another table."""
    lossy = str(report["settings"].get("acceptance", "")).startswith("typical")
    unexplained = [
        f"{row['benchmark']} {shown_name(row)} {row['lossless']['unexplained']} of {row['lossless']['turns']}"
        for row in overall(report["results"])
        if (row["lossless"] or {}).get("unexplained")
    ]
    return [
        *(["Acceptance is typical, which is LOSSY: the answers are not the target's own."] if lossy else []),
        *([f"Answers that differ from generate's, UNEXPLAINED: {', '.join(unexplained)}."] if unexplained else []),
        *skipped_note(report),
        *cut_note(report),
        *few_turns_note(report),
        *slow_note(report),
    ]


WHY_SKIPPED = "a prompt did not fit the context or the chat template refuses it"


def skipped_note(report: dict[str, Any]) -> list[str]:
    """A sentence if a turn was skipped."""
    rows = [row for row in overall(report["results"]) if row["skipped"]]
    skipped = ", ".join(f"{row['benchmark']} {shown_name(row)} {row['skipped']}" for row in rows)
    return [f"Turns skipped because {WHY_SKIPPED}: {skipped}."] if skipped else []


def few_turns_note(report: dict[str, Any]) -> list[str]:
    """A sentence if a benchmark has too few turns for its intervals; replayed answers have that of β alone."""
    turns = by_benchmark(report, "turns")
    few = ", ".join(f"{name} {span(each)}" for name, each in turns.items() if min(each) < FEW_TURNS)
    figures = "β, γ and their intervals" if any(row["gamma"] for row in report["results"]) else "β and its interval"
    rule = f"With fewer than {FEW_TURNS} answered turns, {figures} say little"
    return [f"{rule}; answered here: {few}. Measure on more questions."] if few else []


def slow_note(report: dict[str, Any]) -> list[str]:
    """A sentence for each benchmark with questions that were decoded beside other work, it seems."""
    found: dict[str, tuple[list[str], list[str]]] = {}
    for row in overall(report["results"]):
        if slow := row.get("slow_steps"):
            places, figures = found.setdefault(row["benchmark"], ([], []))
            places += [f"{shown_name(row)} in {', '.join(slow['questions'])}"] if slow["questions"] else []
            figures.append(f"{shown_name(row)} {number(slow['gamma_without'])}")
    return [
        f"In these questions of {benchmark} steps took over {SLOW} times as long as most, as beside other work: "
        f"{'; '.join(places)}. γ without them: {', '.join(figures)}."
        for benchmark, (places, figures) in found.items()
    ]


def findings_note(findings: dict[str, dict[str, Any]], names: Mapping[str, str] | None = None) -> list[str]:
    """A sentence for every part of a hybrid that could have been left out: needed in fewer than 1 % of the steps."""
    names = names or {}
    return [
        f"{names.get(drafter, drafter)}: in {found['steps']:,} target steps, {part['needed']:,} tokens were accepted "
        f"thanks to {name} alone; without it drafting takes less time."
        for drafter, found in findings.items()
        for name, part in found.get("parts", {}).items()
        if part["needed"] < found["steps"] / 100
    ]


# --- paths ------------------------------------------------------------------------------------------------------------


def relative_paths(value: Any, folder: Path | None = None) -> Any:
    """A JSON value in which paths below `folder` (the working directory) are relative to it.

    In `/home/me`, `ctc=/home/me/runs/ctc/head` is `ctc=runs/ctc/head`; `/data/home/me/x` stays.
    """
    folder = folder or Path.cwd()
    if isinstance(value, dict):
        return {key: relative_paths(one, folder) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [relative_paths(one, folder) for one in value]
    if not isinstance(value, str) or folder == Path("/"):
        return value
    return re.sub(rf"(?<![\w.~/-]){re.escape(f'{folder}/')}(?=[^/\s])", "", value)
