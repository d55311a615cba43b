"""Train heads for equal times, decode with each, and print the table that compares them. Run again, it goes on.

    python scripts/bench/heads.py --target TARGET --dataset runs/distilled --minutes 10 --output runs/heads \\
        --benchmarks gsm8k=gsm8k.jsonl mt_bench=mt_bench.jsonl [--heads NAME=KIND[,option=value…] …] [--seeds 0 1]

A time is turned into a number of optimizer steps: every head's seconds of processor a step are measured first, in runs
of one thread, so work of others on the machine changes neither the table nor who wins. `--steps N` gives every head N.
A list of values is written with spaces: `'ctc=ctc,target_layers=1 2 3'`.

Each head is decoded with alone, with n-grams in its tree, and as the chain of 3 that servers draft. The last line of
output is one JSON object, which OUTPUT/heads.json holds too; OUTPUT/heads.md has the table.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from draft_heads.configs.command_line import exit_status

from draft_heads.data.common.files import write_text
from draft_heads.heads.checkpoint import HEADS, head_variants, load_head
from draft_heads.inference.evaluation.report import environment, markdown_table
from draft_heads.inference.evaluation.report_text import overall
from draft_heads.scripts.decoding_options import check_positive, script_parser
from draft_heads.train.command import trainer_script

ROOT = Path(__file__).resolve().parent.parent.parent
CALIBRATION = (20, 80)  # steps of a short and a long run; the difference leaves loading out
VARIANTS = ("", "_ngram", "_chain")


def usual_arms() -> list[str]:
    """Every kind of head with its defaults, and with its paper's settings where those are others."""
    return [
        ",".join([f"{name}={kind}", *(f"{option}={value}" for option, value in options.items())])
        for name, (kind, options) in head_variants().items()
        if not options or name == f"{kind}_paper"
    ]


class Arm:
    """A head to train: NAME=KIND[,option=value…]."""

    def __init__(self, text: str) -> None:
        self.name, _, rest = text.partition("=")
        self.kind, *options = rest.split(",")
        if self.kind not in HEADS or not all("=" in option for option in options):
            raise ValueError(
                f"--heads takes NAME=KIND[,option=value…], KIND one of {', '.join(sorted(HEADS))}; got {text!r}"
            )
        words = (option.partition("=") for option in options)  # target_layers=1 2 3 → --target_layers 1 2 3
        self.options = [word for name, _, values in words for word in (f"--{name}", *values.split())]


RUNNING: set[subprocess.Popen[bytes]] = set()


def cpu_seconds(command: list[str], log: Path) -> float:
    """Run a command, its output in `log`, and return the processor seconds it took; ValueError if it fails."""
    with log.open("w") as out:
        words = [sys.executable, str(ROOT / command[0]), *command[1:]]
        process = subprocess.Popen(words, stdout=out, stderr=subprocess.STDOUT)
        RUNNING.add(process)
        _, status, usage = os.wait4(process.pid, 0)
        RUNNING.discard(process)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise ValueError(f"{' '.join(command[:1])} failed; its output is in {log}")
    return usage.ru_utime + usage.ru_stime


@contextmanager
def threads_for_commands(count: int) -> Iterator[ThreadPoolExecutor]:
    """A pool in which commands wait and run; whatever ends the work inside ends them too."""
    with ThreadPoolExecutor(count) as pool:
        try:
            yield pool
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            for process in RUNNING:
                process.terminate()
            raise


class Comparison:
    """All runs of one call, below --output."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.arms = [Arm(text) for text in args.heads]
        if len({arm.name for arm in self.arms}) < len(self.arms):
            raise ValueError(f"--heads must have different names; got {' '.join(arm.name for arm in self.arms)}")
        self.output = args.output.resolve()
        self.output.mkdir(parents=True, exist_ok=True)
        self.runs = {  # name → its arm and folder
            arm.name + (f"-{seed}" if len(args.seeds) > 1 else ""): (arm, self.output / f"{arm.name}-{seed}")
            for arm in self.arms
            for seed in args.seeds
        }

    def train(self, arm: Arm, folder: Path, steps: int, seed: int, *more: str) -> float:
        """Train one head, or resume it; returns its processor seconds."""
        args = self.args
        command = [
            *(*trainer_script(arm.kind), "--target", args.target, "--dataset", *args.dataset),
            *("--output_dir", str(folder)),
            *("--max_steps", str(steps), "--seed", str(seed), "--threads", str(args.threads)),
            *("--eval_strategy", "no", "--disable_tqdm", "true", *arm.options, *more),
        ]
        return cpu_seconds(command, folder.with_suffix(".log"))

    def step_seconds(self) -> dict[str, float]:
        """Processor seconds of a step of every head, kept in OUTPUT/step_seconds.json."""
        file = self.output / "step_seconds.json"
        found: dict[str, float] = json.loads(file.read_text()) if file.is_file() else {}
        short = ("--overwrite", "true", "--simulate_rows", "0", "--held_out", "8")
        for arm in self.arms:
            if arm.name in found:
                continue
            folder = self.output / "calibration"
            folder.mkdir(exist_ok=True)
            few, many = (self.train(arm, folder / f"{arm.name}-{steps}", steps, 0, *short) for steps in CALIBRATION)
            found[arm.name] = (many - few) / (CALIBRATION[1] - CALIBRATION[0])
            write_text(file, json.dumps(found, indent=1) + "\n")
            print(f"{arm.name}: {found[arm.name]:.3f} processor seconds a step", flush=True)
        return found

    def train_all(self, pool: ThreadPoolExecutor) -> None:
        """Train what has no head yet."""
        args = self.args
        seconds = {} if args.steps else self.step_seconds()
        waiting = []
        for arm, folder in self.runs.values():
            steps = args.steps or max(1, round(args.minutes * 60 / seconds[arm.name]))
            if not (folder / "head" / "config.json").is_file():
                seed = int(folder.name.rpartition("-")[2])
                waiting.append((folder, steps, pool.submit(self.train, arm, folder, steps, seed)))
        for folder, steps, result in waiting:
            print(f"{folder.name}: {steps:,} steps, {result.result() / 60:.1f} processor minutes", flush=True)

    def measured(self, script: str, result: str, command: list[str]) -> Any:
        """What a script writes to the file OUTPUT/`result`, run unless it is there."""
        args, file = self.args, self.output / result
        if not file.is_file():
            common = ["--target", args.target, "--threads", str(args.threads), "--output", str(file.parent)]
            cpu_seconds([script, *common, *command], self.output / f"{file.stem}.log")
        return json.loads(file.read_text())

    def decode(self) -> dict[str, dict[str, Any]]:
        """{drafter: {benchmark: row of the report}}, decoded in one process."""
        args, drafters = self.args, list[str]()
        for name, (arm, folder) in self.runs.items():
            head = folder / "head"
            drafters += [f"{name}={head}", f"{name}_ngram={arm.kind}:{head}+ngram"]
            drafters += [f"{name}_chain={head},tree=chain,max_nodes=3"]
        command = ["--drafters", *drafters, "--benchmarks", *args.benchmarks, "--stop_at_loops"]
        command += ["--max_new_tokens", str(args.max_new_tokens)]
        command += ["--limit", str(args.limit)] if args.limit else []
        found: dict[str, dict[str, Any]] = {}
        for row in overall(self.measured("scripts/evaluate.py", "report/report.json", command)["results"]):
            found.setdefault(row["drafter"], {})[row["benchmark"]] = row
        return found

    def accuracies(self) -> dict[str, list[float]]:
        """Name of a run → top-1 accuracy by offset on the held-out rows."""
        heads = [f"{name}={run / 'head'}" for name, (_, run) in self.runs.items()]
        command = ["--heads", *heads, "--dataset", *self.args.dataset]
        found = self.measured("scripts/accuracy.py", "accuracy/accuracy.json", command)
        return {name: [part["top"][0] for part in parts if part["top"]] for name, parts in found.items()}

    def rows(self) -> list[dict[str, Any]]:
        """What was measured of every head, means over its seeds."""
        decoded, accuracy, found = self.decode(), self.accuracies(), []
        for arm in self.arms:
            folders = {name: folder for name, (its, folder) in self.runs.items() if its is arm}
            names, heads = list(folders), [load_head(folder / "head") for folder in folders.values()]
            known = [head.provenance for head in heads]
            row: dict[str, Any] = {"head": arm.name, "steps": known[0]["steps"]}
            simulated = [one["metrics"].get("eval_simulated_beta") for one in known]
            row["simulated_beta"] = None if None in simulated else mean(simulated)
            for variant in VARIANTS:
                for benchmark in decoded["vanilla"]:
                    betas = [decoded[name + variant][benchmark]["beta"] for name in names]
                    row[f"beta{variant}_{benchmark}"] = mean(betas)
                    row[f"spread{variant}_{benchmark}"] = round(max(betas) - min(betas), 3)
            rows = [decoded[name + variant][b] for name in names for variant in VARIANTS for b in decoded["vanilla"]]
            row["unexplained"] = sum(one["lossless"]["unexplained"] for one in rows)
            row["draft_share"] = mean(
                [decoded[name][b]["time_share"]["draft"] for name in names for b in decoded[name]]
            )
            row["accuracy"] = [mean(list(at)) for at in zip(*(accuracy[name] for name in names))]
            row["parameters"] = sum(p.numel() for p in heads[0].parameters())
            row["bytes_read"] = heads[0].weights_read() * heads[0].dtype.itemsize
            found.append(row)
        return found


def mean(values: list[float]) -> float:
    return round(statistics.fmean(values), 3)


def table(rows: list[dict[str, Any]], benchmarks: list[str]) -> str:
    """Markdown: a row a head."""

    def betas(row: dict[str, Any], variant: str) -> str:
        return " / ".join(f"{row[f'beta{variant}_{name}']:.2f}" for name in benchmarks)

    cells = [
        [
            *(row["head"], f"{row['steps']:,}"),
            "–" if row["simulated_beta"] is None else f"{row['simulated_beta']:.2f}",
            *(betas(row, variant) for variant in VARIANTS),
            " ".join(f"{value:.2f}" for value in row["accuracy"]),
            *(f"{row['draft_share']:.2f}", f"{row['parameters'] / 1e6:.1f}M", f"{row['bytes_read'] / 2**20:.0f} MiB"),
        ]
        for row in rows
    ]
    header = ["head", "steps", "simulated β", f"β {' / '.join(benchmarks)}", "with n-grams", "chain of 3"]
    return markdown_table([*header, "accuracy by offset", "drafting", "parameters", "read a draft"], cells, 10) + "\n"


def run() -> None:
    parser = script_parser(__doc__, config=False)
    add = parser.add_argument
    add("--target", required=True, help="folder or hub id of the target")
    add("--dataset", required=True, nargs="+", help="what scripts/distill.py wrote; with the layers that heads read")
    add("--benchmarks", required=True, nargs="+", metavar="NAME=FILE", help="as for scripts/evaluate.py")
    add("--output", required=True, type=Path, help="folder for runs, reports and the table")
    add("--heads", nargs="+", default=usual_arms(), metavar="NAME=KIND[,option=value…]", help="default: all kinds")
    add("--minutes", type=float, default=10.0, help="processor minutes of training a head (default 10)")
    add("--steps", type=int, help="steps of every head, instead of --minutes")
    add("--seeds", type=int, nargs="+", default=[0], help="a run of every head for each (default 0)")
    add("--jobs", type=int, default=1, help="heads that train at once (default 1)")
    add("--threads", type=int, default=1, help="threads of each (default 1)")
    add("--max_new_tokens", type=int, default=96, help="longest answer (default 96)")
    add("--limit", type=int, help="only the first N questions of each benchmark")
    args = parser.parse_args()
    check_positive(args, "steps", "jobs", "threads", "max_new_tokens", "limit")
    if args.minutes <= 0:
        raise ValueError(f"--minutes must be above 0; got {args.minutes:g}")
    comparison = Comparison(args)
    with threads_for_commands(args.jobs) as pool:
        comparison.train_all(pool)
        rows = comparison.rows()
    made = table(rows, [text.partition("=")[0] for text in args.benchmarks])
    result = {"benchmark": "heads", "minutes": None if args.steps else args.minutes, "rows": rows}
    result["environment"] = environment("cpu")
    write_text(comparison.output / "heads.json", json.dumps(result, indent=1) + "\n")
    write_text(comparison.output / "heads.md", made)
    print(made)
    print(json.dumps(result))


if __name__ == "__main__":
    sys.exit(exit_status(run))
