"""The whole job on the embedded target: distil → train heads → decode → report. Offline, five to ten minutes.

    python scripts/quickstart.py --output runs/quickstart

Leaves OUTPUT/distilled, one run per head (OUTPUT/ctc, its head in OUTPUT/ctc/head) and OUTPUT/report. Every step is the
command a user would type, and is printed before it runs. Heads train for a fixed number of steps, so a busy machine
changes the time and not β. An earlier quickstart in OUTPUT is replaced.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from draft_heads.configs.command_line import exit_status

import torch
from rich.console import Console
from rich.rule import Rule

from draft_heads.data.common.console import plain_console
from draft_heads.data.synthetic.corpus import conversations, questions, word_problems
from draft_heads.heads.checkpoint import HEADS, head_classes
from draft_heads.inference.evaluation.report_text import relative_paths
from draft_heads.scripts.decoding_options import script_parser
from draft_heads.scripts.training_arms import ends_too
from draft_heads.train.command import trainer_script

ROOT = Path(__file__).resolve().parent.parent
TARGET = ROOT / "data" / "tiny_target"
LEAST = 80  # conversations to distil
FULL = 1500
"""Steps after which every head has learned to draft."""
ROWS = 8
"""Rows of an optimizer step, of all processes together."""
MANY = 2000
"""Conversations from which it learns so much."""
WEAK = 2.0
"""Tokens per forward that each then accepts at least."""
INPUTS = ("conversations", "dialogues", "word_problems")
"""The files of the folder's `data`, made here."""


def run(console: Console, title: str, command: tuple[str, ...]) -> None:
    """Show and run a step's command; if it fails, end the quickstart after the command's own message."""
    command = tuple(relative_paths(command, ROOT))  # where it runs
    console.print(Rule(title))
    console.print(f"$ {shlex.join(command)}", soft_wrap=True)
    start = time.monotonic()
    module = {"python": [], "torchrun": ["-m", "torch.distributed.run"]}[command[0]]  # of this Python
    threads = {"OMP_NUM_THREADS": "1"} if module else {}  # torchrun's choice, without its words
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", **threads}
    words = [sys.executable, *module, *command[1:]]
    with subprocess.Popen(words, cwd=ROOT, env=environment) as process, ends_too([process]):
        status = process.wait()
    if status:  # below 0: ended by a signal
        sys.exit(f"quickstart: the step '{title}' failed (status {status}); its message is above")
    console.print(f"{title}: {time.monotonic() - start:.0f} s", style="dim")


def main() -> None:
    parser = script_parser(__doc__, config=False)
    parser.add_argument("--output", type=Path, default=Path("runs/quickstart"))
    parser.add_argument("--heads", nargs="+", choices=sorted(HEADS), default=["ctc", "medusa"], help="heads to train")
    parser.add_argument("--conversations", type=int, default=MANY, help="conversations to distil")
    parser.add_argument("--steps", type=int, default=FULL, help="optimizer steps of each head")
    parser.add_argument("--questions", type=int, default=16, help="two-turn questions to be measured on")
    parser.add_argument("--problems", type=int, default=32, help="word problems to be measured on")
    args = parser.parse_args()
    if args.conversations < LEAST:
        parser.error(f"--conversations must be at least {LEAST}, of which 64 are held out; got {args.conversations}")
    for name in ("steps", "questions", "problems"):
        if getattr(args, name) < 1:
            parser.error(f"--{name} must be 1 or more; got {getattr(args, name)}")
    args.heads = list(dict.fromkeys(args.heads))
    output = args.output.resolve()
    console = plain_console()
    if output.exists():  # it is deleted
        check_earlier(output)
        console.print(f"replacing the earlier quickstart in {args.output}")
        shutil.rmtree(output)
    start = time.monotonic()
    (output / "data").mkdir(parents=True)
    inputs = {  # disjoint from what the target was trained on
        "conversations": conversations(args.conversations, 100, "heldout"),
        "dialogues": questions(args.questions, 200, "heldout"),
        "word_problems": word_problems(args.problems, 300, "heldout"),
    }
    measured = {row["turns"][0] for row in inputs["dialogues"]}
    measured |= {row["question"] for row in inputs["word_problems"]}
    inputs["conversations"] = [
        row for row in inputs["conversations"] if not any(turn["value"] in measured for turn in row["conversations"])
    ]
    files = {name: output / "data" / f"{name}.jsonl" for name in INPUTS}
    for name, rows in inputs.items():
        files[name].write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    target, distilled, report = str(TARGET), str(output / "distilled"), str(output / "report")
    depth = json.loads((TARGET / "config.json").read_text(encoding="utf-8"))["num_hidden_layers"]
    layers = max((head_classes(kind)[1].usual_layers(depth) for kind in args.heads), key=len)
    # Texts decoded one at a time gain nothing from a second thread; processes share them, and the rows of a step.
    processes = 1 if torch.cuda.is_available() else min(2, torch.get_num_threads())
    python = ("torchrun", "--nproc_per_node", str(processes)) if processes > 1 else ("python",)

    distil = (
        *python, "scripts/distill.py", "--target", target, "--dataset", str(files["conversations"]),
        "--output", distilled, "--labels", "generate", "--max_new_tokens", "128", "--batch_size", "128",
        "--hidden_states", *(["--target_layers", *map(str, layers)] if layers else []),
    )  # fmt: skip
    steps = len(args.heads) + 2
    run(console, f"1/{steps} distil: the target answers, its tokens are the labels", distil)
    for number, kind in enumerate(args.heads, 2):
        train = (
            *python, *trainer_script(kind), "--target", target, "--dataset", distilled,
            "--output_dir", str(output / kind), "--max_steps", str(args.steps), "--threads", "1",
            "--per_device_train_batch_size", str(ROWS // processes), "--eval_steps", str(max(1, args.steps // 2)),
        )  # fmt: skip
        run(console, f"{number}/{steps} train {head_classes(kind)[1].title}: {args.steps:,} steps", train)
    drafters = [f"{kind}={output}/{kind}/head" for kind in args.heads]
    drafters.insert(1, f"{args.heads[0]}_ngram={args.heads[0]}:{output}/{args.heads[0]}/head+ngram")
    decode = (
        *python, "scripts/evaluate.py", "--target", target,
        "--drafters", "transformers", "ngram", *drafters,  # the other plain loop, what needs no training, and heads
        "--benchmarks", *(f"{name}={files[name]}" for name in INPUTS[1:]), "--output", report, "--threads", "1",
    )  # fmt: skip
    run(console, f"{steps}/{steps} decode, and compare with the plain loop", decode)
    check_report(
        output / "report" / "report.json", args.heads if args.steps >= FULL and args.conversations >= MANY else ()
    )
    console.print(Rule("done"))
    trained, shown = (relative_paths(path, ROOT) for path in (f"{output}/*/head", f"{report}/report.html"))
    console.print(
        f"{(time.monotonic() - start) / 60:.1f} minutes. The trained heads are in {trained}. On your own model (NAME "
        "is a folder or a hub id):\n",
        soft_wrap=True,
    )
    for command in next_commands():
        console.print(f"  {command}", soft_wrap=True)
    console.print(f"\nThe report, to open in a browser: {shown}", soft_wrap=True)


def check_earlier(output: Path) -> None:
    """ValueError if a folder holds anything but what a quickstart, perhaps a stopped one, wrote."""
    own = {"data", "distilled", "report", *HEADS}
    found = {path.name for path in output.iterdir()} if output.is_dir() else {output.name}
    data = {path.name for path in (output / "data").glob("*")}
    if found and not (found <= own and data <= {f"{name}.jsonl" for name in INPUTS} and "data" in found):
        raise ValueError(
            f"--output must be a new folder or one of an earlier quickstart; {output} is none; pick another"
        )


def check_report(file: Path, heads: Sequence[str]) -> None:
    """End with a sentence if answers are not the target's, or if fully trained heads draft next to nothing."""
    rows = json.loads(file.read_text(encoding="utf-8"))["results"]
    if wrong := sorted({row["drafter"] for row in rows if row["lossless"]["unexplained"]}):
        sys.exit(f"quickstart: answers of {', '.join(wrong)} are not the target's own; {file.parent} says which")
    trained = [row for row in rows if row["drafter"] in heads and row["category"] is None]
    if weak := sorted({row["drafter"] for row in trained if row["beta"] < WEAK}):
        sys.exit(f"quickstart: β of {', '.join(weak)} is below {WEAK}; see the training's lines above")


def next_commands() -> list[str]:
    """What to type next; where `python` is not this one, as below `make`, it begins with activating the environment."""
    same = Path(shutil.which("python") or "").parent == Path(sys.executable).parent
    return [*([] if same else [f". {shlex.quote(str(Path(sys.executable).parent / 'activate'))}"]), *NEXT]


NEXT = (
    "python scripts/distill.py --target NAME --dataset sharegpt.json --labels generate --output runs/distilled",
    "deepspeed train/ctc.py --target NAME --dataset runs/distilled --output_dir runs/ctc",
    "python scripts/evaluate.py --target NAME --drafters ctc=runs/ctc/head hybrid=ctc:runs/ctc/head+ngram "
    "--benchmarks mt_bench=question.jsonl --output runs/report",
    "python scripts/chat.py --target NAME --drafters ctc=runs/ctc/head",
)
"""What to type next, in the environment."""


if __name__ == "__main__":
    sys.exit(exit_status(main))
