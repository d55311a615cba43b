"""Measure the cells of one study, and write its table: the other half of scripts/study.py."""

from __future__ import annotations

import hashlib
import json
import re
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from draft_heads.configs.waiting import threads_text
from draft_heads.data.common.files import read_object, write_text
from draft_heads.data.labels.shards import load_distilled
from draft_heads.data.text.benchmarks import load_benchmark
from draft_heads.heads.checkpoint import load_head
from draft_heads.inference.evaluation import carried_over
from draft_heads.inference.evaluation.decoded import DecodedFolder
from draft_heads.inference.evaluation.evaluate import TRANSFORMERS
from draft_heads.inference.evaluation.made_from import NOTE, content_of, is_made_again, must_be_made
from draft_heads.inference.evaluation.report_text import caveats
from draft_heads.inference.evaluation.studies import (
    PLAIN_RUN,
    Cell,
    Study,
    figure,
    mixed_questions,
    study_table,
)
from draft_heads.scripts import accuracy, evaluate
from draft_heads.scripts.decoding_options import drafter_specs, loaded_by, parse_options
from draft_heads.scripts.training_arms import Arm

INTERRUPTED = 130
ANEW = "add --overwrite to measure it again"
ACCURACY = "accuracy"  # the folder of the heads' accuracies
PASSED_ON = ("target_adapter", "chat_template", "dtype", "device", "attention", "threads")


@dataclass(frozen=True)
class Inputs:
    """What studies are measured with.

    heads         name → folder of a trained head
    benchmarks    name → its file, as for scripts/evaluate.py
    draft_model   folder of a draft model, None for none
    decoding      options of scripts/evaluate.py, over those of the study
    dataset       folders of labels, for the accuracy of heads
    rows          held-out rows of these, None for the default of scripts/accuracy.py; fewer where a head held out fewer
    overwrite     measure again what is there
    """

    target: str
    heads: Mapping[str, Path]
    benchmarks: Mapping[str, str]
    draft_model: str | None
    decoding: Mapping[str, Any]
    dataset: Sequence[str] = ()
    rows: int | None = None
    overwrite: bool = False


def flags(options: Mapping[str, Any]) -> list[str]:
    """{"max_new_tokens": 64, "stop_at_loops": True} → the words of a command line; None and False are left out."""
    words = list[str]()
    for name, value in options.items():
        if value is not None and value is not False:
            words += [f"--{name}"] if value is True else [f"--{name}", str(value)]
    return words


def succeed(status: int, what: str) -> None:
    """End with the status of a step that failed or was interrupted, whose message is above."""
    if status == INTERRUPTED:
        sys.exit(status)
    if status:
        print(f"study: {what} failed; its message is above", file=sys.stderr)
        sys.exit(status)


def lacking(study: Study, cell: Cell, inputs: Inputs) -> str | None:
    """What a cell needs and was not given; None if it can be measured."""
    if "{draft_model}" in cell.drafter and inputs.draft_model is None:
        return "a draft model (--draft_model DIR)"
    if cell.of_report and not mix_parts(study, cell.benchmark, inputs):
        return f"the benchmark {cell.benchmark} (--benchmarks {cell.benchmark}=FILE)"
    if cell.measure == "accuracy" and not inputs.dataset:
        return "held-out labels (--dataset DIR)"
    return None


def mix_parts(study: Study, benchmark: str, inputs: Inputs) -> list[str]:
    """The benchmarks that were given, of those that a mix is made of; of any other benchmark it alone."""
    return [part for part in study.parts_of(benchmark) if part in inputs.benchmarks]


def drafter_argument(cell: Cell, study: Study, heads: Mapping[str, Path], draft_model: str | None) -> str:
    """NAME=SPEC of a cell's drafter, as scripts/evaluate.py takes it."""
    if cell.drafter == TRANSFORMERS:
        return TRANSFORMERS
    words = cell.drafter.replace("{draft_model}", str(draft_model))
    if cell.head:
        kind = Arm(cell.head, study.heads[cell.head]).kind
        words = words.replace("{kind}", kind).replace("{head}", str(heads[cell.head]))
    return f"{cell.drafter_name}={words}"


def options_of(study: Study, run: str, benchmark: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """The options of scripts/evaluate.py with which a benchmark is decoded."""
    return {**study.settings, **study.benchmark_settings.get(benchmark, {}), **study.runs[run], **given}


def default_options(*words: str) -> dict[str, Any]:
    """The options of scripts/evaluate.py where only these words are given; ValueError for what it refuses."""
    needed = ["--target", "T", "--drafters", "vanilla", "--benchmarks", "gsm8k", "--output", "O"]
    return vars(parse_options(None, [*needed, *words], scored=True))


def check_decoding(study: Study) -> None:
    """ValueError for options and drafters that scripts/evaluate.py would refuse, before anything runs."""
    known = default_options()
    heads = {name: Path("runs/head") for name in study.heads}
    cells = [cell for cell in study.cells.values() if cell.of_report]
    try:
        for run, benchmark in dict.fromkeys((cell.run, cell.benchmark) for cell in cells):
            options = options_of(study, run, benchmark, {})
            if unknown := sorted(options.keys() - known):
                raise ValueError(f"{unknown[0]} is no option of scripts/evaluate.py; it has {', '.join(known)}")
            default_options(*flags(options))
        for cell in {(cell.drafter, cell.head): cell for cell in cells if cell.drafter != "vanilla"}.values():
            drafter_specs(evaluate.split_rows([drafter_argument(cell, study, heads, "runs/draft_model")])[1])
    except ValueError as error:
        raise ValueError(f"{study.name}: {error}") from None


def measured_in(study: Study, inputs: Inputs, output: Path) -> list[Path]:
    """The folders of the results that `measure` makes or takes over."""
    able = [cell for cell in study.cells.values() if lacking(study, cell, inputs) is None]
    named: dict[str, tuple[str, str]] = {}
    for cell in able:
        name, own = f"{cell.run}_{cell.benchmark}", (cell.run, cell.benchmark)
        if cell.of_report and named.setdefault(name, own) != own:
            raise ValueError(
                f"the report of a run and a benchmark has a folder of its own, RUN_BENCHMARK; {' and '.join(own)} have "
                f"that of {' and '.join(named[name])}, {name}; rename one"
            )
    folders = [output / name for name in named]
    folders += [output / ACCURACY for cell in able if cell.measure == "accuracy"]
    return list(dict.fromkeys(folders))


def measure(study: Study, inputs: Inputs, output: Path) -> dict[tuple[str, str], float | None]:
    """(row, column) → value of every cell that can be measured, and whose category the benchmark has."""
    measured_in(study, inputs, output)  # two results of one folder are refused before anything is decoded
    able = {place: cell for place, cell in study.cells.items() if lacking(study, cell, inputs) is None}
    reports = {
        run: decode(study, run, [cell for cell in able.values() if cell.of_report and cell.run == run], inputs, output)
        for run in study.runs
    }
    ranked = dict.fromkeys(cell.head for cell in able.values() if cell.measure == "accuracy")
    ranks = accuracies({name: inputs.heads[name] for name in ranked}, inputs, output / ACCURACY)
    dtype = next((row["dtype"] for rows in reports.values() for row in rows), None)
    described = dict.fromkeys(cell.head for cell in able.values() if cell.of_head)
    facts = {name: head_facts(inputs.heads[name], dtype) for name in described}
    found = dict[tuple[str, str], float | None]()
    for place, cell in able.items():
        if cell.of_report:
            rows = reports[cell.run]
            if any((row["benchmark"], row["category"]) == (cell.benchmark, cell.category) for row in rows):
                found[place] = figure(rows, cell)
        elif cell.measure == "accuracy":
            by_offset = ranks[cell.head]
            top = by_offset[cell.offset]["top"] if cell.offset < len(by_offset) else None
            found[place] = top and top[cell.top - 1]
        else:
            found[place] = facts[cell.head][cell.measure.removeprefix("head.")]
    return found


def head_facts(folder: Path, dtype: str | None) -> dict[str, float | None]:
    """What a trained head's files say of it; see `HEAD_FACTS`.

    dtype: in which it drafted, None where it did not
    """
    head = load_head(folder)
    known = head.provenance
    return {
        "steps": known.get("steps"),
        "simulated_beta": known.get("metrics", {}).get("eval_simulated_beta"),
        "parameters": sum(p.numel() for p in head.parameters()),
        "bytes_read": head.weights_read() * getattr(torch, dtype).itemsize if dtype else None,
    }


def decode(study: Study, run: str, cells: Sequence[Cell], inputs: Inputs, output: Path) -> list[dict[str, Any]]:
    """The rows of the reports of one run, made unless they are there; `dtype` of each is the target's.

    Each benchmark is decoded by itself: of a drafter that learns from question to question, the figure on one depends
    on none of the others, which may have the same questions. A limit is of the parts of a mix, not of it.
    """
    drafters = dict[str, dict[str, Cell]]()  # benchmark → name → a cell that has it
    for cell in cells:
        own = drafters.setdefault(cell.benchmark, {})
        if cell.drafter != "vanilla":
            own[cell.drafter_name] = cell
        if cell.measure == "over_transformers":
            own.setdefault(TRANSFORMERS, replace(cell, drafter=TRANSFORMERS, head=""))
    results = list[dict[str, Any]]()
    for name, own in drafters.items():
        folder, options = output / f"{run}_{name}", options_of(study, run, name, inputs.decoding)
        limit = options.pop("limit", None)
        asked = questions_of(study, name, inputs, limit)
        named = [drafter_argument(cell, study, inputs.heads, inputs.draft_model) for cell in own.values()]
        made_from = decoded_from(name, asked, own, named, {**options, "limit": limit}, inputs)
        begun = any((folder / file).is_file() for file in ("report.json", "parts/run.json"))
        again = is_made_again(folder) or ((folder / NOTE).is_file() and not begun)  # interrupted before it began
        if overwrite := inputs.overwrite or again:
            DecodedFolder(folder).discard()  # of an earlier, interrupted run
        if must_be_made(folder, "report.json", made_from, overwrite):
            file = question_file(study, name, inputs, folder, asked)
            print(f"{study.name}, {run}: {len(own)} drafters on {name}", flush=True)
            words = ["--target", inputs.target, "--drafters", *(named or ["vanilla"])]
            words += ["--benchmarks", f"{name}={file}", "--output", str(folder)]
            limit = None if name in study.mixes else limit
            words += flags({**options, "limit": limit, "overwrite": overwrite})
            succeed(evaluate.main(words), "decoding")
        report = read_object(folder / "report.json", ANEW, ("results", "target"))
        results += [{**row, "dtype": report["target"]["dtype"]} for row in report["results"]]
    return results


def loaded_from(options: Mapping[str, Any], inputs: Inputs) -> dict[str, Any]:
    """Options and the target; what is loaded by its content."""
    files = {name: content_of(options[name]) for name in ("target_adapter", "chat_template") if options.get(name)}
    return {**options, **files, "target": content_of(inputs.target)}


def decoded_from(
    benchmark: str,
    asked: Sequence[Any],
    drafters: Mapping[str, Cell],
    arguments: Sequence[str],
    options: Mapping[str, Any],
    inputs: Inputs,
) -> dict[str, Any]:
    """All that decides what a report says: questions, and files, by their content.

    arguments: the drafters as scripts/evaluate.py gets them
    """
    specs = {name: cell.drafter for name, cell in drafters.items()}
    words = {word for spec in specs.values() for word in re.split("[=:,+]", spec) if word and Path(word).exists()}
    files = {word: content_of(word) for word in sorted(words)}
    known = {str(inputs.draft_model), *(str(inputs.heads[cell.head]) for cell in drafters.values() if cell.head)}
    for argument in arguments:  # also hub ids, and paths with the marks in them at which a specification was split
        with suppress(ValueError):  # which scripts/evaluate.py says
            files |= {path: content for path, content in loaded_by(argument).items() if path not in known}
    return {
        **loaded_from(options, inputs),
        "drafters": specs,
        "heads": {cell.head: content_of(inputs.heads[cell.head]) for cell in drafters.values() if cell.head},
        "draft_model": content_of(inputs.draft_model or "") if "{draft_model}" in str(specs) else None,
        "files": files,
        "questions": {benchmark: hashlib.sha256(json.dumps(asked).encode()).hexdigest()[:16]},
    }


def questions_of(study: Study, benchmark: str, inputs: Inputs, limit: int | None) -> list[dict[str, Any]]:
    """What is asked of a benchmark, or of each part of a mix at most `limit` questions."""
    parts = {part: inputs.benchmarks[part] for part in mix_parts(study, benchmark, inputs)}
    if benchmark in study.mixes:
        return mixed_questions(study.mixes[benchmark], parts, limit)
    return [asdict(question) for question in load_benchmark(benchmark, parts[benchmark], limit)]


def question_file(study: Study, benchmark: str, inputs: Inputs, folder: Path, rows: Sequence[Any]) -> str:
    """A benchmark's file; that of a mix, which has these rows, is written to `folder`."""
    if benchmark not in study.mixes:
        return inputs.benchmarks[benchmark]
    write_text(folder / f"{benchmark}.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    return str(folder / f"{benchmark}.jsonl")


def accuracies(heads: Mapping[str, Path], inputs: Inputs, output: Path) -> dict[str, list[Any]]:
    """Name of a head → its accuracies by offset, measured unless they are there."""
    if not heads:
        return {}
    options = {name: value for name, value in inputs.decoding.items() if name in PASSED_ON and name != "attention"}
    held_out = [accuracy.provenance_of(folder).get("options", {}).get("held_out") for folder in heads.values()]
    there = sum(len(load_distilled(folder).dataset) for folder in inputs.dataset)  # one is left to train on
    options["rows"] = min(rows for rows in (inputs.rows or accuracy.ROWS, *held_out, there - 1) if rows)
    made_from = loaded_from(options, inputs)
    made_from["heads"] = {name: content_of(folder) for name, folder in heads.items()}
    made_from["dataset"] = [content_of(Path(folder) / "manifest.json") for folder in inputs.dataset]
    failed = (output / NOTE).is_file() and not (output / "accuracy.json").is_file()  # nothing was measured from it
    overwrite = inputs.overwrite or is_made_again(output) or failed
    if must_be_made(output, "accuracy.json", made_from, overwrite):
        words = ["--target", inputs.target, "--heads", *(f"{name}={folder}" for name, folder in heads.items())]
        words += ["--dataset", *inputs.dataset, "--output", str(output)]
        succeed(accuracy.main([*words, *flags({**options, "overwrite": overwrite})]), "measuring accuracy")
    return read_object(output / "accuracy.json", ANEW, tuple(heads))


def surroundings_of(report: Mapping[str, Any]) -> str:
    """Type and place of a report's target, and what else its times depend on."""
    target, machine = report.get("target") or {}, report.get("environment") or {}
    place = machine.get("accelerator") or machine.get("processor") or "an unknown processor"
    versions = [f"{name} {machine.get(name)}" for name in ("draft-heads", "python", "torch", "transformers")]
    versions += [f"sources {machine['sources']}"] if "sources" in machine else []
    versions += ["without C++"] if machine.get("native_code") is False and target.get("device") == "cpu" else []
    last = [threads_text(machine["threads"], machine["waiting_threads"])] if "threads" in machine else []
    threads = " or ".join(report.get("settings", {}).get("threads_of_runs", last)) or "unknown threads"
    return f"{target.get('dtype')} on {place}, {threads}, {', '.join(versions)}"


def write_study(
    study: Study, measured: Mapping[tuple[str, str], float | None], inputs: Inputs, output: Path, tiny: bool
) -> None:
    """Write study.md and study.json and print the former."""
    target = Path(inputs.target).name
    needs = dict[str, list[str]]()
    for (row, column), cell in study.cells.items():
        what = lacking(study, cell, inputs)
        asked = mix_parts(study, cell.benchmark, inputs) if cell.of_report else True
        if what and not asked and (output / f"{cell.run}_{cell.benchmark}" / "report.json").is_file():
            what += ", of which an earlier call has a report: name it again"
        if what is None and (row, column) not in measured:
            what = f"questions of {cell.benchmark} of the category {cell.category}"
        elif what is None and measured[row, column] is None:
            what = "a figure in what was measured (a score that was not taken, shares of time on a GPU or of "
            what += "`generate`, more drafts than a head has)"
        if what and row not in (rows := needs.setdefault(what, [])):
            rows.append(row)
    notes = [f"Not measured here, for want of {what}: {', '.join(rows)}." for what, rows in needs.items()]
    for name in study.mixes:
        notes.append(f"{name} has questions of {', '.join(mix_parts(study, name, inputs)) or 'nothing'}.")
    limits = {name: value for name, value in default_options().items() if name in ("max_new_tokens", "max_nodes")}
    decoded = {"all": {**limits, **study.settings, **inputs.decoding}}
    decoded |= {name: options_of(study, PLAIN_RUN, name, inputs.decoding) for name in study.benchmark_settings}
    for run, own in study.runs.items():
        decoded[run] = {name: inputs.decoding.get(name, value) for name, value in own.items()}
    words = [f"{name}: {' '.join(flags(options))}" for name, options in decoded.items() if flags(options)]
    if any(cell.of_report for cell in study.cells.values()):
        notes.append(f"Decoded by scripts/evaluate.py with {'; '.join(words)}; what is not named is its default.")
    decodings = (
        f"{cell.run}_{cell.benchmark}" for at, cell in study.cells.items() if cell.of_report and at in measured
    )
    surroundings = dict[str, list[str]]()  # in which reports were made, perhaps on several days
    for folder in dict.fromkeys(decodings):
        report = read_object(output / folder / "report.json", ANEW, ("carried_over", "settings", "results"))
        surroundings.setdefault(surroundings_of(report), []).append(folder)
        notes += [note for note in carried_over.notes(report["carried_over"]) if note not in notes]
        notes += [f"{folder}: {note}" for note in caveats(report)]
        if (plain := report["settings"]["plain_loop"]) != "vanilla":
            notes.append(f"γ of {folder} is over {plain}, the faster of its loops without drafts.")
    if len(surroundings) > 1:
        places = "; ".join(f"{place} ({', '.join(folders)})" for place, folders in surroundings.items())
        notes.append(f"Measured in several surroundings, whose times do not compare: {places}.")
    if ranked := sorted(
        {cell.head for at, cell in study.cells.items() if cell.measure == "accuracy" and at in measured}
    ):
        found = read_object(output / "accuracy" / "accuracy.json", ANEW)
        counts = ", ".join(f"{name} {found[name][0]['counted']:,}" for name in ranked if found.get(name))
        notes.append(f"Accuracies are those of held-out labels, at the first offset of {counts}.")
        heads = {name: inputs.heads[name] for name in ranked}
        if others := accuracy.of_other_data(heads, [load_distilled(folder) for folder in inputs.dataset]):
            notes.append(
                f"Trained on other data, so they may know rows that they are measured on: {', '.join(others)}."
            )
    if tiny:
        notes.insert(0, "This is the tiny form: its figures mean nothing.")
    parts: list[str] = [f"# {study.title}", study_table(study, measured, target), *notes, *study.notes]
    write_text(output / "study.md", "\n\n".join([*parts, ""]))
    values = {row: {column: measured.get((row, column)) for column in study.columns} for row in study.rows}
    published = {
        source: {row: dict(zip(study.columns, values)) for row, values in by_row.items()}
        for source, by_row in study.published.items()
    }
    content = {"study": study.name, "title": study.title, "target": inputs.target, "tiny": tiny}
    content["rows"] = [{"row": row, "values": found} for row, found in values.items()]
    content |= {"published": published, "not_measured": needs, "decoded_with": decoded, "notes": notes}
    write_text(output / "study.json", json.dumps(content, indent=1, ensure_ascii=False) + "\n")
    print("\n\n".join(parts), flush=True)
    print(f"\nwritten: {output / 'study.md'}", flush=True)
