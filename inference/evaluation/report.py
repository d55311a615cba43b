"""The report of an evaluation: report.json, report.md, three pictures and the answers, in one folder."""

from __future__ import annotations

import json
import platform
import re
import time
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from draft_heads.data.common.files import names_path, write_text
from draft_heads.data.generation_config import settings_text
from draft_heads.inference.evaluation.carried_over import notes
from draft_heads.inference.evaluation.evaluate import TRANSFORMERS, Evaluation
from draft_heads.inference.evaluation.metrics import TIME_KEYS, plain_loop, result_rows, shown_name, shown_names
from draft_heads.inference.evaluation.scores import SCORES, TITLES

PICTURES = ("speedup.png", "accepted_length.png", "time_share.png")
HEADER = ("benchmark", "drafter", "β", "γ", "95 %", "tokens/s", "lossless", "score")
REPLAY_PICTURES = ("accepted_length.png",)
REPLAY_HEADER = ("benchmark", "drafter", "β", "new tokens", "target steps")
OVER_TRANSFORMERS = "over transformers"
FEW_TURNS = 20

EXPLANATION = """β: new tokens per target step, the prefill included. γ: seconds per token of the plain loop, here
`{plain_loop}`, over the drafter's, same process and prompts; {interval}. Lossless: turns
identical to transformers' own `generate`, of all turns, each judged at its first difference; a near tie is a difference
within the numerical noise."""
INTERVAL = "95 % interval by bootstrap over questions"
NO_INTERVAL = "without an interval, as answers decoded together share their time"
EXPLANATION_REPLAY = """β: new tokens per target step, the prefill included, as in greedy decoding.
Recorded answers were replayed through text-only drafters; no target ran, nothing was timed or compared."""
EXPLANATION_TRANSFORMERS = """Drafter `transformers` is the target's own `generate`, without this project's engine;
over transformers: its seconds per token over the drafter's. The plain loop is the faster of it and `vanilla`."""


def build_report(
    evaluation: Evaluation, target: dict[str, Any] | None, settings: dict[str, Any], seed: int
) -> dict[str, Any]:
    """The content of report.json; `target` and `settings` describe the run; target None: replayed answers."""
    results = result_rows(evaluation, seed)
    if settings.get("batch_size", 1) > 1:  # answers decoded together share their seconds by tokens: none has its own
        for row in results:
            row |= {"gamma_ci95": None} | ({"gamma": None, "over_transformers": None} if row["category"] else {})
    return {
        "target": target,
        "settings": settings if target is None else {**settings, "plain_loop": plain_loop(evaluation)},
        "results": results,
        "findings": evaluation.findings,
        "options": evaluation.options,
        "carried_over": evaluation.carried_over,
        "noise": evaluation.noise,
        "environment": environment((target or {}).get("device", "cpu")),
    }


def environment(device: str) -> dict[str, Any]:
    """What figures depend on besides the settings: versions, machine, threads."""
    return {
        "python": platform.python_version(),
        **{name: version(name) for name in ("torch", "transformers")},
        "machine": platform.machine(),
        "accelerator": torch.cuda.get_device_name(device) if device.startswith("cuda") else None,
        "threads": torch.get_num_threads(),
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def check_output(folder: Path, overwrite: bool, finished: str = "report.json") -> None:
    """ValueError when `folder` holds a finished run and `overwrite` is not set."""
    if (folder / finished).exists() and not overwrite:
        remedy = "choose another folder or add --overwrite"
        raise ValueError(f"--output {folder} holds a finished run ({finished}); {remedy}")


def clear_output(folder: Path, finished: str = "report.json") -> None:
    """Create `folder`, or mark the earlier run in it as unfinished."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / finished).unlink(missing_ok=True)


def write_report(folder: Path, report: dict[str, Any]) -> list[Path]:
    """Write pictures, report.md and, last and atomically, report.json; returns the paths of the pictures."""
    from draft_heads.inference.evaluation import plots  # loading matplotlib takes half a second

    names = PICTURES if report["target"] else REPLAY_PICTURES
    for name in names:
        with names_path(folder / name):
            getattr(plots, Path(name).stem)(report).savefig(folder / name, dpi=150)
    write_text(folder / "report.md", markdown(report))
    write_json(folder / "report.json", report)
    return [folder / name for name in names]


def write_json(path: Path, content: Any) -> None:
    """Replace `path` atomically."""
    write_text(path, json.dumps(content, indent=2, ensure_ascii=False) + "\n")


def overall(results: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows of whole benchmarks."""
    return [row for row in results if row["category"] is None]


def number(value: float | None, form: str = ".2f") -> str:
    return "–" if value is None else format(value, form)


def columns_of(report: dict[str, Any]) -> tuple[str, ...]:
    """The columns of the table of whole benchmarks that fits 80 columns of a terminal."""
    return HEADER if report["target"] else REPLAY_HEADER


def cells(row: dict[str, Any], columns: Sequence[str]) -> list[str]:
    """A row's figures in the order of `columns`."""
    interval = row["gamma_ci95"]
    figures = {
        "benchmark": row["benchmark"],
        "drafter": shown_name(row),
        "β": number(row["beta"]),
        "γ": f"{number(row['gamma'])}×",
        "95 %": "–" if interval is None else f"{interval[0]:.2f}–{interval[1]:.2f}",
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
    return next(((TITLES[name], value) for name, value in found.items() if value is not None), ("", None))


def scores_note(report: dict[str, Any]) -> list[str]:
    """A sentence that names the score of each benchmark, if one is scored."""
    titles = {row["benchmark"]: title for row in overall(report["results"]) if (title := score_of(row)[0])}
    return [f"Score: {', '.join(f'{title} of {name}' for name, title in titles.items())}."] if titles else []


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


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]], text_columns: int) -> str:
    """A Markdown table whose first `text_columns` columns are left-aligned, the others right-aligned.

    A cell may hold anything, also what would end it: `|` and line breaks.
    """
    rule = ["---" if index < text_columns else "--:" for index in range(len(header))]
    first, *others = ([re.sub(r"[\\|]", r"\\\g<0>", " ".join(cell.split())) for cell in row] for row in [header, *rows])
    return "\n".join(f"| {' | '.join(row)} |" for row in [first, rule, *others])


def markdown(report: dict[str, Any]) -> str:
    """report.md."""
    whole, both = overall(report["results"]), any(row["drafter"] == TRANSFORMERS for row in report["results"])
    # the speed over transformers' own `generate` comes after γ's interval
    columns = (*HEADER[:5], OVER_TRANSFORMERS, *HEADER[5:]) if both else columns_of(report)
    table = markdown_table(columns, [cells(row, columns) for row in whole], 2)
    accepted = "![accepted drafts per step](accepted_length.png)"
    if report["target"] is None:
        given = ", ".join(f"{key} {value}" for key, value in report["settings"].items() if value is not None)
        parts = ["# Replayed answers", f"{given}.", table, EXPLANATION_REPLAY, *notes(report["carried_over"]), accepted]
    else:
        times = []
        for row in whole:
            shares = ["–" if row["time_share"] is None else f"{row['time_share'][key]:.1%}" for key in TIME_KEYS]
            times.append([row["benchmark"], shown_name(row), *shares, number(row["wall_seconds"], ".1f")])
        interval = INTERVAL if any(row["gamma_ci95"] for row in whole) else NO_INTERVAL
        parts = [
            *("# Evaluation", setting_sentence(report), table),
            *skipped_note(report),
            EXPLANATION.format_map(report["settings"] | {"interval": interval}),
            *scores_note(report),
            *few_turns_note(report),
            *notes(report["carried_over"]),
            *([EXPLANATION_TRANSFORMERS] if both else []),
            *("![speedup](speedup.png)", accepted),
            "## Decoding time by part of a step",
            markdown_table((*HEADER[:2], *TIME_KEYS, "seconds"), times, 2),
            "![time shares](time_share.png)",
            *source_table(whole),
            *findings_note(report["findings"], shown_names(report["results"])),
        ]
    return "\n\n".join([*parts, *category_tables(report["results"]), ""])


def skipped_note(report: dict[str, Any]) -> list[str]:
    """A sentence if a turn was skipped."""
    rows = [row for row in overall(report["results"]) if row["skipped"]]
    skipped = ", ".join(f"{row['benchmark']} {shown_name(row)} {row['skipped']}" for row in rows)
    return [f"Turns skipped because a prompt did not fit the context: {skipped}."] if skipped else []


def few_turns_note(report: dict[str, Any]) -> list[str]:
    """A sentence if a benchmark has too few turns for its intervals; none for replayed answers, which have none."""
    turns = {row["benchmark"]: row["turns"] for row in overall(report["results"])} if report["target"] else {}
    few = ", ".join(f"{name} {count}" for name, count in turns.items() if count < FEW_TURNS)
    rule = f"With fewer than {FEW_TURNS} answered turns, β, γ and their intervals say little"
    return [f"{rule}; answered here: {few}. Measure on more questions."] if few else []


def setting_sentence(report: dict[str, Any]) -> str:
    """The target, the settings and the machine, in one sentence."""
    target, machine = report["target"], report["environment"]
    parts = [
        f"Target `{target['path']}`, {target['parameters']:,} parameters",
        f"{target['dtype']} on {target['device']}",
        ", ".join(f"{key} {setting(value)}" for key, value in report["settings"].items()),
        f"torch {machine['torch']}, transformers {machine['transformers']}, {machine['threads']} threads",
        *([machine["accelerator"]] if machine["accelerator"] else []),
    ]
    return "; ".join(parts) + "."


def setting(value: Any) -> str:
    """A setting's value as text; of the checkpoint's own generation settings `repetition_penalty=1.3`, or none."""
    return (settings_text(value) or "none") if isinstance(value, dict) else str(value)


def source_table(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Accepted tokens by source, for drafters with more than one source."""
    lines = []
    for row in rows:
        if len(counts := row.get("accepted_by_source") or {}) > 1:
            parts = ", ".join(f"{name} {count:,}" for name, count in counts.items())
            lines.append([row["benchmark"], shown_name(row), parts, f"{row['new_tokens']:,}"])
    table = markdown_table((*HEADER[:2], "by source", "new tokens"), lines, 3)
    return ["## Accepted tokens by source", table] if lines else []


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


def category_tables(results: Sequence[dict[str, Any]]) -> list[str]:
    """β, and γ where it was measured, by category: one table for each benchmark that has more than one."""
    parts, timed = [], any(row["gamma"] is not None for row in results if row["category"] is not None)
    for benchmark in dict.fromkeys(row["benchmark"] for row in results):
        figures: dict[str, list[str]] = {}
        rows = [row for row in results if row["benchmark"] == benchmark and row["category"] is not None]
        for row in rows:
            figure = number(row["beta"]) + (f" ({number(row['gamma'])}×)" if timed else "")
            figures.setdefault(row["category"], [row["category"]]).append(figure)
        if len(figures) > 1:
            columns = ("category", *dict.fromkeys(map(shown_name, rows)))
            title = f"## {benchmark}: β{' (γ)' if timed else ''} by category"
            parts += [title, markdown_table(columns, list(figures.values()), 1)]
    return parts
