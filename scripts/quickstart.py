"""The whole job on the embedded target: distil → train heads → tune trees → decode → report. Offline, on two CPU cores.

    python scripts/quickstart.py --output runs/quickstart

Leaves OUTPUT/distilled, one run per head (OUTPUT/ctc, its head in OUTPUT/ctc/head, its trees' measure for this machine
in OUTPUT/ctc/tree.json) and OUTPUT/report. Every step is the command a user would type, and is printed before it runs.
An earlier quickstart in OUTPUT is replaced.
"""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

from draft_heads.data.config_file import exit_status

from rich.console import Console
from rich.rule import Rule

from draft_heads.data.synthetic.corpus import conversations, questions, word_problems
from draft_heads.scripts.decoding_options import script_parser

ROOT = Path(__file__).resolve().parent.parent
TARGET = ROOT / "data" / "tiny_target"
MUON = ("--head_optimizer", "muon", "--learning_rate", "6e-3")
HEADS = {
    "medusa": ("Medusa heads", *MUON),
    "chimera": ("a Chimera head", *MUON),
    "ctc": ("a CTC head", *MUON, "--frames", "11", "--labels", "6"),
}
"""Kind → what it is called, and the options it is trained with here."""


def run(console: Console, title: str, *command: str) -> None:
    """Run one step as its own command; a failing step ends the quickstart with that step's message."""
    console.print(Rule(title))
    console.print(f"$ python {shlex.join(command)}", highlight=False, soft_wrap=True)
    start = time.monotonic()
    done = subprocess.run([sys.executable, *command], cwd=ROOT, check=False)
    if done.returncode:
        sys.exit(f"quickstart: the step '{title}' failed (status {done.returncode}); its message is above")
    console.print(f"[dim]{title}: {time.monotonic() - start:.0f} s[/dim]")


def main() -> None:
    parser = script_parser(__doc__, config=False)
    parser.add_argument("--output", type=Path, default=Path("runs/quickstart"))
    parser.add_argument("--conversations", type=int, default=2000, help="conversations to distil")
    parser.add_argument("--questions", type=int, default=16, help="two-turn questions to be measured on")
    parser.add_argument("--problems", type=int, default=32, help="word problems to be measured on")
    parser.add_argument("--heads", nargs="+", choices=list(HEADS), default=list(HEADS), help="heads to train")
    parser.add_argument("--max_minutes", type=float, default=2.25, help="training time of each head")
    args = parser.parse_args()
    output = args.output.resolve()
    console = Console()
    if output.exists():
        console.print(f"replacing the earlier quickstart in {args.output}")
        shutil.rmtree(output)
    start = time.monotonic()
    (output / "data").mkdir(parents=True)
    inputs = {  # disjoint from what the target was trained on
        "conversations": conversations(args.conversations, 100, "heldout"),
        "mt_bench": questions(args.questions, 200, "heldout"),
        "gsm8k": word_problems(args.problems, 300, "heldout"),
    }
    files = {name: output / "data" / f"{name}.jsonl" for name in inputs}
    for name, rows in inputs.items():
        files[name].write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    target, distilled, report = str(TARGET), str(output / "distilled"), str(output / "report")
    steps = 2 * len(args.heads) + 2

    run(
        console, f"1/{steps} distil: the target answers, its tokens are the labels",
        "scripts/distill.py", "--target", target, "--dataset", str(files["conversations"]), "--output", distilled,
        "--labels", "generate", "--max_new_tokens", "160", "--batch_size", "128", "--hidden_states",
    )  # fmt: skip
    drafters = ["vanilla", "transformers", "ngram"]  # two baselines, and what needs no training
    for index, kind in enumerate(args.heads):
        head, tree = str(output / kind / "head"), str(output / kind / "tree.json")
        run(
            console, f"{2 * index + 2}/{steps} train {HEADS[kind][0]} for {args.max_minutes:g} minutes",
            f"train/{kind}.py", "--target", target, "--dataset", distilled, "--output_dir", str(output / kind),
            "--max_minutes", str(args.max_minutes), *HEADS[kind][1:],
        )  # fmt: skip
        run(
            console, f"{2 * index + 3}/{steps} tune the trees of {HEADS[kind][0]} to this machine",
            "scripts/tune_tree.py", "--target", target, "--head", head, "--dataset", distilled, "--output", tree,
            "--rows", "24", "--prompts", "4", "--new_tokens", "48", "--temperatures", "0.85", "1", "1.2",
            "--nodes", "4", "8", "16", "32",
        )  # fmt: skip
        raw = [f"{kind}_raw={head},tree=raw"] if kind == "ctc" else []
        both = [f"{kind}_ngram={kind}:{head}+ngram"] if kind == args.heads[-1] else []
        drafters += [*raw, f"{kind}={head}", f"{kind}_tuned={head},tuned={tree}", *both]
    run(
        console, f"{steps}/{steps} decode and compare with no drafts at all",
        "scripts/evaluate.py", "--target", target, "--drafters", *drafters,
        "--benchmarks", f"mt_bench={files['mt_bench']}", f"gsm8k={files['gsm8k']}", "--output", report,
    )  # fmt: skip
    minutes = (time.monotonic() - start) / 60
    console.print(f"quickstart done in {minutes:.1f} minutes; heads: {output}/*/head", soft_wrap=True)


if __name__ == "__main__":
    sys.exit(exit_status(main))
