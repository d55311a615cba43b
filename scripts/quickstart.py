"""The whole job on the embedded target: distil → train a CTC head → decode → report. Runs offline on two CPU cores.

    python scripts/quickstart.py --output runs/quickstart

Leaves OUTPUT/distilled, OUTPUT/ctc (head in OUTPUT/ctc/head) and OUTPUT/report. Every step is the command a user would
type, and is printed before it runs. An earlier quickstart in OUTPUT is replaced.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.rule import Rule

from data.synthetic import conversations, questions, word_problems

ROOT = Path(__file__).resolve().parent.parent
TARGET = ROOT / "data" / "tiny_target"


def write_inputs(folder: Path, args: argparse.Namespace) -> dict[str, Path]:
    """Conversations to learn from and questions to be measured on, disjoint from what the target was trained on."""
    folder.mkdir(parents=True)
    paths = {name: folder / f"{name}.jsonl" for name in ("conversations", "mt_bench", "gsm8k")}
    write_jsonl(paths["conversations"], conversations(args.conversations, 100, "heldout"))
    write_jsonl(paths["mt_bench"], questions(args.questions, 200, "heldout"))
    write_jsonl(paths["gsm8k"], word_problems(args.problems, 300, "heldout"))
    return paths


def write_jsonl(path: Path, rows: list[dict[str, Any]]) -> None:
    """One JSON object a line."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def run(console: Console, title: str, *command: str) -> None:
    """Run one step as its own command; a failing step ends the quickstart with that step's message."""
    console.print(Rule(title))
    console.print(f"$ python {shlex.join(command)}", highlight=False, soft_wrap=True)
    start = time.monotonic()
    # Threads that wait should sleep: where other programs share the cores, spinning ones slow everything down.
    environment = {"OMP_WAIT_POLICY": "PASSIVE", **os.environ}
    done = subprocess.run([sys.executable, *command], cwd=ROOT, env=environment, check=False)
    if done.returncode:
        sys.exit(f"quickstart: the step '{title}' failed (status {done.returncode}); its message is above")
    console.print(f"[dim]{title}: {time.monotonic() - start:.0f} s[/dim]")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("runs/quickstart"))
    parser.add_argument("--conversations", type=int, default=2000, help="conversations to distil")
    parser.add_argument("--questions", type=int, default=16, help="two-turn questions to be measured on")
    parser.add_argument("--problems", type=int, default=32, help="word problems to be measured on")
    parser.add_argument("--max_minutes", type=float, default=4.0, help="training time")
    args = parser.parse_args()
    output = args.output.resolve()
    console = Console()
    if output.exists():
        console.print(f"replacing the earlier quickstart in {args.output}")
        shutil.rmtree(output)
    start = time.monotonic()
    inputs = write_inputs(output / "data", args)
    target, distilled, training, report = (
        str(p) for p in (TARGET, output / "distilled", output / "ctc", output / "report")
    )

    run(
        console, "1/3 distil: the target answers, its tokens are the labels",
        "scripts/distill.py", "--target", target, "--dataset", str(inputs["conversations"]), "--output", distilled,
        "--labels", "generate", "--max_new_tokens", "160", "--batch_size", "128",
    )  # fmt: skip
    run(
        console, f"2/3 train a CTC head for {args.max_minutes:g} minutes",
        "train/ctc.py", "--target", target, "--dataset", distilled, "--output_dir", training,
        "--max_minutes", str(args.max_minutes), "--head_optimizer", "muon", "--learning_rate", "1e-2",
    )  # fmt: skip
    head = f"{training}/head"
    run(
        console, "3/3 decode and compare: no drafts, the paper's trees, the best trees",
        "scripts/evaluate.py", "--target", target,
        "--drafters", "vanilla", f"ctc_raw={head},tree=raw", f"ctc={head}",
        "--benchmarks", f"mt_bench={inputs['mt_bench']}", f"gsm8k={inputs['gsm8k']}", "--output", report,
    )  # fmt: skip
    console.print(f"quickstart done in {(time.monotonic() - start) / 60:.1f} minutes; head: {head}", soft_wrap=True)


if __name__ == "__main__":
    main()
