"""The report of an evaluation in one folder: report.json, report.md, report.html and three pictures."""

from __future__ import annotations

import json
import platform
import re
import time
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from draft_heads.configs.waiting import threads_in_use, waiting_threads
from draft_heads.data.common.files import names_path, write_text
from draft_heads.data.common.program import source_digest
from draft_heads.inference.evaluation.evaluate import Evaluation
from draft_heads.inference.evaluation.html.page import page
from draft_heads.inference.evaluation.metrics import plain_loop, result_rows, shown_names, without_shared_seconds
from draft_heads.inference.evaluation.report_text import (
    Table,
    category_tables,
    findings_note,
    relative_paths,
    results_notes,
    results_table,
    settings_table,
    source_tables,
    target_sentence,
    time_table,
    usage_tables,
)
from draft_heads.inference.native.library import is_loaded

PICTURES = ("speedup.png", "accepted_length.png", "time_share.png")
REPLAY_PICTURES = ("accepted_length.png",)


def build_report(
    evaluation: Evaluation,
    target: dict[str, Any] | None,
    settings: dict[str, Any],
    seed: int,
    command: str | None = None,
    samples: Sequence[dict[str, Any]] = (),
) -> dict[str, Any]:
    """The content of report.json, with paths relative to the working directory where they are below it.

    target     describes the target; None: replayed answers
    settings   of the run
    seed       of the bootstrap
    command    the command line that made the report
    samples    answers token by token, of `sample_answers`
    """
    results = result_rows(evaluation, seed)
    if settings.get("batch_size", 1) > 1:
        results = [without_shared_seconds(row) for row in results]
    if target is not None:
        settings = {**settings, "plain_loop": plain_loop(evaluation), "processes": list(evaluation.processes)}
        if evaluation.threads and list(evaluation.threads) != [threads_in_use()]:  # groups of an interrupted run
            settings["threads_of_runs"] = list(evaluation.threads)
    return {
        "target": relative_paths(target),
        "settings": relative_paths(settings),
        "command": relative_paths(command),
        "results": results,
        "findings": evaluation.findings,
        "options": relative_paths(evaluation.options),
        "carried_over": evaluation.carried_over,
        "noise": evaluation.noise,
        "environment": environment((target or settings).get("device", "cpu").partition(",")[0]),
        "samples": list(samples),
    }


def _version(package: str) -> str | None:
    """Its installed version; None for a checkout of this project that runs without being installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def environment(device: str) -> dict[str, Any]:
    """What figures depend on besides the settings: versions, the sources of this package and whether its C++ is used,
    machine, threads and how they wait."""
    return {
        "python": platform.python_version(),
        **{name: _version(name) for name in ("draft-heads", "torch", "transformers")},
        "sources": source_digest(),
        "native_code": is_loaded(),
        "machine": platform.machine(),
        "processor": _processor(),
        "accelerator": torch.cuda.get_device_name(device) if device.startswith("cuda") else None,
        "threads": torch.get_num_threads(),
        "waiting_threads": waiting_threads(),
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def _processor(about: Path = Path("/proc/cpuinfo")) -> str:
    """The processor's name, as Linux or the system calls it."""
    found = re.search(r"^model name\s*: *(.+)$", about.read_text(), re.MULTILINE) if about.exists() else None
    return found[1] if found else platform.processor()


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
    """Write pictures, report.md, report.html and, last, report.json; returns the paths of the pictures."""
    from draft_heads.inference.evaluation import plots  # loading matplotlib takes half a second

    names = PICTURES if report["target"] else REPLAY_PICTURES
    for stale in {*PICTURES} - {*names}:  # of an evaluation that a replay replaces
        (folder / stale).unlink(missing_ok=True)
    for name in names:
        with names_path(folder / name):
            getattr(plots, Path(name).stem)(report).savefig(folder / name, dpi=150)
    write_text(folder / "report.md", markdown(report))
    write_text(folder / "report.html", page(report))
    write_text(folder / "report.json", report_json(report))
    return [folder / name for name in names]


def report_json(report: dict[str, Any]) -> str:
    """The text of report.json: indented, but for the samples, which have thousands of nodes: one in a line."""
    samples = ",\n    ".join(json.dumps(sample, ensure_ascii=False) for sample in report["samples"])
    text = json.dumps({key: value for key, value in report.items() if key != "samples"}, indent=2, ensure_ascii=False)
    return text.removesuffix("\n}") + f',\n  "samples": [{samples}]\n}}\n'


def write_json(path: Path, content: Any) -> None:
    """Replace `path` atomically."""
    write_text(path, json.dumps(content, indent=2, ensure_ascii=False) + "\n")


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]], text_columns: int) -> str:
    """A Markdown table whose first `text_columns` columns are left-aligned, the others right-aligned.

    A cell may hold anything, also what would end it (`|` and line breaks) or begin HTML.
    """
    rule = ["---" if index < text_columns else "--:" for index in range(len(header))]
    first, *others = (
        [re.sub(r"[\\|<]", r"\\\g<0>", " ".join(cell.split())) for cell in row] for row in [header, *rows]
    )
    return "\n".join(f"| {' | '.join(row)} |" for row in [first, rule, *others])


def markdown(report: dict[str, Any]) -> str:
    """report.md."""
    results = report["results"]
    accepted = "![accepted drafts per step](accepted_length.png)"
    parts = [
        "# Evaluation" if report["target"] else "# Replayed answers",
        target_sentence(report),
        *_markdown_parts([results_table(report)])[1:],
        *results_notes(report),
    ]
    if report["target"] is None:
        parts.append(accepted)
    else:
        parts += ["![speedup](speedup.png)", accepted, *_markdown_parts([time_table(report)])]
        parts += ["![time shares](time_share.png)", *_markdown_parts(usage_tables(report))]
    parts += _markdown_parts(source_tables(report))
    parts += findings_note(report["findings"], shown_names(results))
    parts += _markdown_parts([*category_tables(results), settings_table(report)])
    return "\n\n".join([*parts, ""])


def _markdown_parts(tables: Sequence[Table]) -> list[str]:
    """Each table's title and the table."""
    return [
        part
        for table in tables
        for part in (f"## {table.title}", markdown_table(table.header, table.rows, table.text_columns))
    ]
