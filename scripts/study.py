"""A paper's table, ours beside the published numbers.

    python scripts/study.py ctc_drafter_table1 --target DIR --dataset runs/distilled --output runs/studies
    python scripts/study.py configs/studies/anpd_grid.yaml --target DIR --benchmarks humaneval=HumanEval.jsonl \\
        --output runs/studies
    python scripts/study.py --all --tiny --output runs/tiny_studies

A study is a file of configs/studies, or one of your own like them. It trains the heads that it needs, or takes those
of --heads, decodes and writes OUTPUT/NAME/study.md and study.json, beside the report of every run. Rows that need
what was not given (a draft model, a benchmark) say so and stay empty. Several studies in one OUTPUT share their heads;
run again, it goes on.

--tiny runs them small, on the target that comes with the project, in minutes: it shows that all works, and the figures
mean nothing.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draft_heads.configs.command_line import exit_status, parse_with_config

from draft_heads.data.common.files import write_text
from draft_heads.data.synthetic.corpus import conversations, questions
from draft_heads.data.text.benchmarks import load_benchmark
from draft_heads.data.text.known_benchmarks import known_benchmarks
from draft_heads.heads.checkpoint import HEADS, head_classes, load_head, read_config
from draft_heads.inference.evaluation.studies import Cell, Study, figure, known_studies, read_study, study_table
from draft_heads.scripts import accuracy, distill, evaluate
from draft_heads.scripts.decoding_options import check_positive, parse_benchmarks, target_parser
from draft_heads.scripts.training_arms import ROOT, Arm, ArmTrainer

TINY_TARGET = ROOT / "data" / "tiny_target"
TINY_STEPS, TINY_CONVERSATIONS = 20, 96
TINY_TOKENS, TINY_QUESTIONS = 24, 2
TINY_OPTIONS = ("--held_out", "16", "--simulate_rows", "4")
PASSED_ON = ("target_adapter", "chat_template", "dtype", "device", "attention", "threads")


@dataclass(frozen=True)
class Inputs:
    """What studies are measured with.

    heads         name → folder of a trained head
    benchmarks    name → its file, as for scripts/evaluate.py
    draft_model   folder of a draft model, None for none
    decoding      options of scripts/evaluate.py, over those of the study
    """

    target: str
    heads: Mapping[str, Path]
    benchmarks: Mapping[str, str]
    draft_model: str | None
    decoding: Mapping[str, Any]


def flags(options: Mapping[str, Any]) -> list[str]:
    """{"max_new_tokens": 64, "stop_at_loops": True} → the words of a command line; None and False are left out."""
    words = list[str]()
    for name, value in options.items():
        if value is not None and value is not False:
            words += [f"--{name}"] if value is True else [f"--{name}", str(value)]
    return words


def succeed(status: int, what: str) -> None:
    """End with the status of a step that failed, whose message is above."""
    if status:
        print(f"study: {what} failed; its message is above", file=sys.stderr)
        sys.exit(status)


# ----------------------------------------------------------------------------------------------------
# One study


def lacking(study: Study, cell: Cell, inputs: Inputs) -> str | None:
    """What a cell needs and was not given; None if it can be measured."""
    if "{draft_model}" in cell.drafter and inputs.draft_model is None:
        return "a draft model (--draft_model DIR)"
    if cell.of_report and not mix_parts(study, cell.benchmark, inputs):
        return f"the benchmark {cell.benchmark} (--benchmarks {cell.benchmark}=FILE)"
    return None


def mix_parts(study: Study, benchmark: str, inputs: Inputs) -> list[str]:
    """The benchmarks that were given, of those that a mix is made of; of any other benchmark it alone."""
    parts = study.mixes.get(benchmark, {}).get("of", [benchmark])
    return [part for part in parts if part in inputs.benchmarks]


def mixed_questions(mix: Mapping[str, Any], parts: Mapping[str, str]) -> list[dict[str, Any]]:
    """FastChat rows of a mix: `each` questions of each part, in turns of `consecutive`, or shuffled where that is 0."""
    each, run_length = mix.get("each", 20), mix.get("consecutive", 0)
    loaded = {name: load_benchmark(name, source, each) for name, source in parts.items()}
    rows = {
        name: [
            {"question_id": f"{name} {one.question_id}", "category": name, "turns": one.turns}
            | ({} if one.system is None else {"system": one.system})
            for one in found
        ]
        for name, found in loaded.items()
    }
    if not run_length:
        every = [row for found in rows.values() for row in found]
        random.Random(0).shuffle(every)
        return every
    starts = range(0, max(map(len, rows.values())), run_length)
    return [row for start in starts for found in rows.values() for row in found[start : start + run_length]]


def drafter_argument(cell: Cell, study: Study, inputs: Inputs) -> str:
    """NAME=SPEC of a cell's drafter, as scripts/evaluate.py takes it."""
    places = {"draft_model": inputs.draft_model}
    if cell.head:
        places |= {"head": str(inputs.heads[cell.head]), "kind": Arm(cell.head, study.heads[cell.head]).kind}
    return f"{cell.drafter_name}={cell.drafter.format(**places)}"


def measure(study: Study, inputs: Inputs, output: Path, dataset: Sequence[str]) -> dict[tuple[str, str], float | None]:
    """(row, column) → value of every cell that can be measured."""
    able = {place: cell for place, cell in study.cells.items() if lacking(study, cell, inputs) is None}
    reports = {
        run: decode(study, run, [cell for cell in able.values() if cell.of_report and cell.run == run], inputs, output)
        for run in study.runs
    }
    ranked = dict.fromkeys(cell.head for cell in able.values() if cell.measure == "accuracy")
    ranks = accuracies({name: inputs.heads[name] for name in ranked}, inputs, output / "accuracy", dataset)
    found = dict[tuple[str, str], float | None]()
    for place, cell in able.items():
        if cell.of_report:
            found[place] = figure(reports[cell.run], cell)
        elif cell.measure == "accuracy":
            by_offset = ranks[cell.head]
            top = by_offset[cell.offset]["top"] if cell.offset < len(by_offset) else None
            found[place] = top and top[cell.top - 1]
        else:
            found[place] = head_fact(inputs.heads[cell.head], cell.measure.removeprefix("head."))
    return found


def head_fact(folder: Path, name: str) -> float | None:
    """What a trained head's files say of it."""
    head = load_head(folder)
    known = head.provenance
    facts = {
        "steps": known.get("steps"),
        "simulated_beta": known.get("metrics", {}).get("eval_simulated_beta"),
        "parameters": sum(p.numel() for p in head.parameters()),
        "bytes_read": head.weights_read() * head.dtype.itemsize,
    }
    return facts[name]


def decode(study: Study, run: str, cells: Sequence[Cell], inputs: Inputs, output: Path) -> list[dict[str, Any]]:
    """The rows of the reports of one run, made unless they are there.

    A benchmark is decoded with the drafters that its cells name, together with those that have the same drafters.
    """
    drafters = dict[str, dict[str, str]]()  # benchmark → name → NAME=SPEC
    for cell in cells:
        own = drafters.setdefault(cell.benchmark, {})
        if cell.drafter != "vanilla":
            own[cell.drafter_name] = drafter_argument(cell, study, inputs)
    results = list[dict[str, Any]]()
    for named in list(dict.fromkeys(tuple(own.values()) for own in drafters.values())):
        benchmarks = [name for name, own in drafters.items() if tuple(own.values()) == named]
        folder = output / "_".join([run, *benchmarks])
        report = folder / "report.json"
        if not report.is_file():
            folder.mkdir(parents=True, exist_ok=True)
            files = {name: question_file(study, name, inputs, folder) for name in benchmarks}
            print(f"{study.name}, {run}: {len(named)} drafters on {', '.join(files)}", flush=True)
            words = ["--target", inputs.target, "--drafters", *(named or ["vanilla"])]
            words += ["--benchmarks", *(f"{name}={file}" for name, file in files.items()), "--output", str(folder)]
            options = {**study.settings, **study.runs[run], **inputs.decoding}
            succeed(evaluate.main([*words, *flags(options)]), "decoding")
        found: list[dict[str, Any]] = json.loads(report.read_text(encoding="utf-8"))["results"]
        lacking = {word.partition("=")[0] for word in named} - {row["drafter"] for row in found}
        if lacking:
            remedy = "remove its folder, or take another --output"
            raise ValueError(f"{report} is of another form of this study and lacks {', '.join(lacking)}; {remedy}")
        results += found
    return results


def question_file(study: Study, benchmark: str, inputs: Inputs, folder: Path) -> str:
    """A benchmark's file; that of a mix is written to `folder`."""
    if benchmark not in study.mixes:
        return inputs.benchmarks[benchmark]
    parts = {part: inputs.benchmarks[part] for part in mix_parts(study, benchmark, inputs)}
    rows = mixed_questions(study.mixes[benchmark], parts)
    write_text(folder / f"{benchmark}.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    return str(folder / f"{benchmark}.jsonl")


def accuracies(heads: Mapping[str, Path], inputs: Inputs, output: Path, dataset: Sequence[str]) -> dict[str, list[Any]]:
    """Name of a head → its accuracies by offset, measured unless they are there."""
    file = output / "accuracy.json"
    if heads and not file.is_file():
        words = ["--target", inputs.target, "--heads", *(f"{name}={folder}" for name, folder in heads.items())]
        options = {name: inputs.decoding.get(name) for name in PASSED_ON}
        words += ["--dataset", *dataset, "--output", str(output), *flags(options)]
        succeed(accuracy.main(words), "measuring accuracy")
    return json.loads(file.read_text(encoding="utf-8")) if heads else {}


def write_study(
    study: Study, measured: Mapping[tuple[str, str], float | None], inputs: Inputs, output: Path, tiny: bool
) -> None:
    """Write study.md and study.json and print the former."""
    target = Path(inputs.target).name
    needs = dict[str, list[str]]()
    for (row, _), cell in study.cells.items():
        if (what := lacking(study, cell, inputs)) and row not in (rows := needs.setdefault(what, [])):
            rows.append(row)
    notes = [f"Not measured here, for want of {what}: {', '.join(rows)}." for what, rows in needs.items()]
    for name in study.mixes:
        notes.append(f"{name} has questions of {', '.join(mix_parts(study, name, inputs)) or 'nothing'}.")
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
    content |= {"published": published, "not_measured": needs}
    write_text(output / "study.json", json.dumps(content, indent=1, ensure_ascii=False) + "\n")
    print("\n\n".join(parts), flush=True)
    print(f"\nwritten: {output / 'study.md'}", flush=True)


# ----------------------------------------------------------------------------------------------------
# The tiny form


def tiny_inputs(studies: Sequence[Study], train: bool, output: Path) -> tuple[dict[str, str], str]:
    """(benchmark → its file, folder of labels), made from texts that come with the project."""
    data = output / "data"
    data.mkdir(parents=True, exist_ok=True)
    texts = data / "conversations.jsonl"
    write_text(texts, "".join(json.dumps(row) + "\n" for row in conversations(TINY_CONVERSATIONS, 100, "heldout")))
    depth = json.loads((TINY_TARGET / "config.json").read_text(encoding="utf-8"))["num_hidden_layers"]
    layers = max((head_classes(kind)[1].usual_layers(depth) for kind in HEADS), key=len)
    if train and not (output / "distilled" / "manifest.json").is_file():
        words = ["--target", str(TINY_TARGET), "--dataset", str(texts), "--output", str(output / "distilled")]
        words += ["--labels", "generate", "--max_new_tokens", "48", "--hidden_states"]
        words += ["--target_layers", *map(str, layers)]
        succeed(distill.main(words), "distilling")
    files = dict[str, str]()
    for name in dict.fromkeys(name for study in studies for name in study.benchmarks):
        cells = [cell for study in studies for cell in study.cells.values() if cell.benchmark == name]
        categories = list(dict.fromkeys(cell.category for cell in cells if cell.category)) or [""]
        columns = known_benchmarks()[name].columns if name in known_benchmarks() else {}
        named = {column: category for category, column in columns.items()}
        rows = questions(max(TINY_QUESTIONS, len(categories)), 200, "heldout")
        for number, row in enumerate(rows):
            category = categories[number % len(categories)]
            row |= {"question_id": number, "category": named.get(category, category)}
        files[name] = str(data / f"{name}.jsonl")
        write_text(Path(files[name]), "".join(json.dumps(row) + "\n" for row in rows))
    return files, str(output / "distilled")


# ----------------------------------------------------------------------------------------------------
# The command line


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The options, checked."""
    parser = target_parser(__doc__)
    add = parser.add_argument
    add("studies", nargs="*", metavar="STUDY", help=f"files, or names: {', '.join(known_studies())}")
    add("--all", action="store_true", help="every study of configs/studies")
    add("--tiny", action="store_true", help="small, on the target that comes with the project")
    add("--output", type=Path, help="folder for the tables, the reports and the heads")
    add("--benchmarks", nargs="+", metavar="NAME[=FILE|ID]", help="default: all that a study names, from the hub")
    add("--draft_model", metavar="DIR", help="draft model of the rows that need one")
    add("--heads", nargs="+", default=[], metavar="NAME=RUN/head", help="trained heads, by their names in the studies")
    add("--dataset", nargs="+", help="output of scripts/distill.py for this target, to train the other heads on")
    add("--minutes", type=float, help="processor minutes of training a head (default: the recipe's length)")
    add("--steps", type=int, help="steps of every head, instead of --minutes")
    add("--jobs", type=int, default=1, help="heads that train at once (default 1)")
    add("--max_new_tokens", type=int, help="longest answer, in tokens (default: the study's)")
    add("--limit", type=int, help="only the first N questions of each benchmark")
    add("--max_nodes", type=int, help="most nodes of a draft tree (default: the study's, else 32)")
    args = parse_with_config(parser, arguments, ("output",))
    check_positive(args, "steps", "jobs", "max_new_tokens", "limit", "max_nodes")
    if args.minutes is not None and args.minutes <= 0:
        raise ValueError(f"--minutes must be above 0; got {args.minutes:g}")
    if bool(args.studies) == args.all:
        raise ValueError(f"give studies or --all; studies are files, or names: {', '.join(known_studies())}")
    if args.tiny == bool(args.target):
        raise ValueError(f"give --target, or --tiny, which has its own; got {'both' if args.tiny else 'neither'}")
    return args


def run(args: argparse.Namespace) -> None:
    studies = [read_study(name) for name in (known_studies() if args.all else args.studies)]
    arms = arms_of(studies)
    if unknown := [text for text in args.heads if "=" not in text or text.partition("=")[0] not in arms]:
        raise ValueError(f"--heads takes NAME=RUN/head, NAME one of {', '.join(arms) or 'none'}; got {unknown[0]!r}")
    given = {name: Path(folder) for name, _, folder in (text.partition("=") for text in args.heads)}
    for folder in given.values():  # what cannot be read is told before anything runs
        read_config(folder)
    to_train = [arms[name] for name in arms if name not in given]
    if args.tiny:
        files, labels = tiny_inputs(studies, bool(to_train), args.output)
        args.target = args.draft_model = str(TINY_TARGET)
        args.steps, args.max_new_tokens = args.steps or TINY_STEPS, args.max_new_tokens or TINY_TOKENS
        args.dataset = [labels]
    else:
        files = parse_benchmarks(args.benchmarks or list(dict.fromkeys(n for one in studies for n in one.benchmarks)))
    if to_train and not args.dataset:
        names = ", ".join(arm.name for arm in to_train)
        raise ValueError(f"the heads {names} must be trained; give --dataset, or them with --heads")
    schedule = {name: getattr(args, name) for name in ("minutes", "steps", "jobs", "threads")}
    short = TINY_OPTIONS if args.tiny else ()
    trainer = ArmTrainer(args.output / "heads", args.target, args.dataset or [], **schedule, options=short)
    heads = {**given, **(trainer.train(to_train) if to_train else {})}
    decoding = {name: getattr(args, name) for name in (*PASSED_ON, "max_new_tokens", "limit", "max_nodes")}
    decoding = {name: value for name, value in decoding.items() if value is not None}
    inputs = Inputs(args.target, heads, files, args.draft_model, decoding)
    for study in studies:
        output = args.output / study.name
        output.mkdir(parents=True, exist_ok=True)
        write_study(study, measure(study, inputs, output, args.dataset or []), inputs, output, args.tiny)


def arms_of(studies: Sequence[Study]) -> dict[str, Arm]:
    """Name → arm of all that the studies need; ValueError where two mean different heads by one name."""
    found = dict[str, Arm]()
    for study in studies:
        for name, text in study.heads.items():
            arm = found.setdefault(name, Arm(name, text))
            if arm.text != text:
                raise ValueError(f"{name} is {arm.text} in one study and {text} in {study.name}; run them apart")
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    return exit_status(lambda: run(parse(sys.argv[1:] if arguments is None else arguments)))


if __name__ == "__main__":
    sys.exit(main())
