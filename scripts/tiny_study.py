"""The tiny form of studies: the embedded target, short texts and few steps, minutes on a CPU."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

from draft_heads.data.common.files import write_text
from draft_heads.data.synthetic.corpus import conversations, questions
from draft_heads.data.text.known_benchmarks import known_benchmarks
from draft_heads.heads.checkpoint import HEADS, head_classes
from draft_heads.inference.evaluation.studies import Study
from draft_heads.scripts import distill
from draft_heads.scripts.training_arms import ROOT

TARGET = ROOT / "data" / "tiny_target"
STEPS, CONVERSATIONS = 20, 96
NEW_TOKENS, QUESTIONS = 24, 2
HELD_OUT = 16
TRAINING = ("--held_out", str(HELD_OUT), "--simulate_rows", "4")


def tiny_benchmarks(studies: Sequence[Study], folder: Path) -> dict[str, str]:
    """Benchmark → its file in `folder`, with a question of every category that a study names."""
    folder.mkdir(parents=True, exist_ok=True)
    files = dict[str, str]()
    for name in dict.fromkeys(name for study in studies for name in study.benchmarks):
        cells = [cell for study in studies for cell in study.cells.values() if cell.benchmark == name]
        categories = list(dict.fromkeys(cell.category for cell in cells if cell.category)) or [""]
        columns = known_benchmarks()[name].columns if name in known_benchmarks() else {}
        named = {column: category for category, column in columns.items()}
        rows = questions(max(QUESTIONS, len(categories)), 200, "heldout")
        for number, row in enumerate(rows):
            category = categories[number % len(categories)]
            row |= {"question_id": number, "category": named.get(category, category)}
        files[name] = str(folder / f"{name}.jsonl")
        write_text(Path(files[name]), "".join(json.dumps(row) + "\n" for row in rows))
    return files


def tiny_labels(texts: Path, output: Path, succeed: Callable[[int, str], None]) -> str:
    """The folder of the embedded target's labels for conversations written to `texts`, made or completed if need be."""
    texts.parent.mkdir(parents=True, exist_ok=True)
    write_text(texts, "".join(json.dumps(row) + "\n" for row in conversations(CONVERSATIONS, 100, "heldout")))
    depth = json.loads((TARGET / "config.json").read_text(encoding="utf-8"))["num_hidden_layers"]
    layers = max((head_classes(kind)[1].usual_layers(depth) for kind in HEADS), key=len)
    manifest = output / "manifest.json"
    if not manifest.is_file() or not json.loads(manifest.read_text(encoding="utf-8"))["complete"]:
        words = ["--target", str(TARGET), "--dataset", str(texts), "--output", str(output)]
        words += ["--labels", "generate", "--max_new_tokens", "48", "--hidden_states"]
        succeed(distill.main([*words, "--target_layers", *map(str, layers)]), "distilling")
    return str(output)
