"""Top-1 … top-5 accuracy of heads at every offset, on held-out labelled conversations.

    python scripts/accuracy.py --target TARGET --heads ctc=runs/ctc/head medusa=runs/medusa/head \\
        --dataset runs/distilled --output runs/accuracy

Offset 0 is the token after the base token. At each offset the true tokens before it are known: Chimera and Hydra read
them, CTC ranks the tokens that continue them by its prefix scores, Medusa ignores them. More --rows than the --held_out
of training are refused; a line says if a head was trained on other data. Writes accuracy.json and accuracy.md.

Windows of heads that do not read the tokens before a label (Medusa, CTC) end where text and labels differ, so of data
with --labels argmax theirs are fewer and easier than other heads': the rows `labels` say how many each was counted on.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from draft_heads.configs.command_line import exit_status, parse_with_config

import torch
from torch.utils.data import DataLoader

from draft_heads.data.collate import DraftCollator
from draft_heads.data.common.files import read_object, write_text
from draft_heads.data.common.progress import track
from draft_heads.data.labels.shards import DistilledDataset, load_distilled
from draft_heads.heads.accuracy import TOP
from draft_heads.heads.base import DraftHead
from draft_heads.heads.checkpoint import ANEW, load_head, locate, read_config
from draft_heads.heads.config import PROVENANCE
from draft_heads.inference.evaluation.report import check_output, markdown_table
from draft_heads.inference.target.target import Target
from draft_heads.scripts.decoding_options import check_positive, load_target, target_parser
from draft_heads.train.options import RunOptions
from draft_heads.train.training_data import end_tokens, load_data

ROWS = 64


@torch.inference_mode()
def accuracies(head: DraftHead, target: Target, rows: Any, collator: DraftCollator, batch_size: int = 8) -> list[Any]:
    """Per offset: {"counted", "top": [top-1 … top-5]}; `top` is None where no window has a label."""
    hits = torch.zeros(head.config.offsets, TOP)
    counted = torch.zeros(head.config.offsets)
    view = target.view()
    batches: Any = DataLoader(rows, batch_size=batch_size, collate_fn=collator)
    for batch in track(batches, f"batches of rows for {head.config.kind}"):
        batch = {name: value.to(target.device) for name, value in batch.items()}
        loss = head(**{**batch, **target.states_of(batch, head.config.target_layers)}, target=view)
        if loss.correct is not None and loss.counted is not None:
            hits += loss.correct.cpu()
            counted += loss.counted.cpu()
    return [{"counted": int(n), "top": (row / n).tolist() if n else None} for row, n in zip(hits, counted)]


def table(results: dict[str, list[Any]]) -> str:
    """Markdown: a row per head and rank, and one of how many labels were counted, a column per offset."""
    offsets = range(max(len(found) for found in results.values()))
    rows = []
    for name, found in results.items():
        tops = [found[k]["top"] if k < len(found) else None for k in offsets]
        for rank in range(TOP):
            rows.append([name, f"top-{rank + 1}", *(f"{top[rank]:.3f}" if top else "–" for top in tops)])
        rows.append([name, "labels", *(f"{found[k]['counted']:,}" if k < len(found) else "–" for k in offsets)])
    return markdown_table(["head", "rank", *(f"offset {k}" for k in offsets)], rows, len(offsets) + 2) + "\n"


def provenance_of(head: str | Path) -> dict[str, Any]:
    """What is known of a head's training; empty where nothing is."""
    path = locate(head) / PROVENANCE
    return read_object(path, ANEW) if path.is_file() else {}


def of_other_data(heads: Mapping[str, str | Path], data: Sequence[DistilledDataset]) -> list[str]:
    """The heads that were trained on other datasets, as far as that is known."""
    measured = [[part.manifest["data"]["fingerprint"], part.manifest["counts"]] for part in data]
    found = []
    for name, folder in heads.items():
        trained = [[part.get("fingerprint"), part.get("counts")] for part in provenance_of(folder).get("data", [])]
        one, other = (sorted(json.dumps(part, sort_keys=True) for part in parts) for parts in (trained, measured))
        found += [name] if trained and one != other else []
    return found


def check_held_out(heads: Mapping[str, str | Path], rows: int, data: Sequence[DistilledDataset]) -> None:
    """ValueError for more rows than a head's training held out of the same data; a line for a head of other data."""
    others = of_other_data(heads, data)
    for name, folder in heads.items():
        held_out = provenance_of(folder).get("options", {}).get("held_out", rows)
        if name in others:
            print(
                f"{name} was trained on other data than --dataset: it may know rows that it is measured on", flush=True
            )
        elif rows > held_out:
            raise ValueError(
                f"--rows must be no more than the --held_out of training, or rows that were trained on are measured; "
                f"got {rows}, and {name} held out {held_out}; pass --rows {held_out}"
            )


def run(arguments: Sequence[str] | None) -> None:
    parser = target_parser(__doc__, attention=False)
    add = parser.add_argument
    add("--heads", nargs="+", metavar="NAME=RUN/head", help="heads to compare, and their names in the table")
    add("--dataset", nargs="+", help="output of scripts/distill.py for this target, as in training")
    add("--rows", type=int, default=ROWS, help=f"held-out rows to measure on (default {ROWS})")
    add("--output", type=Path, help="folder for accuracy.json and accuracy.md")
    add("--overwrite", action="store_true", help="replace what was measured before in --output")
    args = parse_with_config(parser, arguments, ("target", "heads", "dataset", "output"))
    named = dict(pair.split("=", 1) for pair in args.heads if "=" in pair)
    if len(named) != len(args.heads):
        raise ValueError(f"--heads takes NAME=RUN/head with different names; got {' '.join(args.heads)}")
    check_positive(args, "rows")
    for path in named.values():  # what cannot be read is told before the target is loaded
        read_config(path)
    check_held_out(named, args.rows, [load_distilled(folder) for folder in args.dataset])
    if args.output.is_file():
        raise ValueError(f"--output must be a folder; {args.output} is a file; name another")
    check_output(args.output, args.overwrite, "accuracy.json")
    args.output.mkdir(parents=True, exist_ok=True)
    target = load_target(args)
    heads = {name: load_head(path, target.fingerprint()).to(target.device).eval() for name, path in named.items()}
    rows = RunOptions(args.target, args.dataset, target_adapter=args.target_adapter, held_out=args.rows)
    data = {name: load_data(rows, target, head.config.target_layers, "--rows") for name, head in heads.items()}
    results = {}
    for name, (_, held_out, parts, collator) in data.items():
        heads[name].config.end_token_ids = end_tokens(parts)  # of all heads alike: an imported one knows none
        results[name] = accuracies(heads[name], target, held_out, collator)
    check_output(args.output, args.overwrite, "accuracy.json")  # again: another run may have ended meanwhile
    write_text(args.output / "accuracy.md", table(results))
    write_text(args.output / "accuracy.json", json.dumps(results, indent=1) + "\n")  # last: it says that all is there
    print(table(results))
    print(f"written: {args.output / 'accuracy.md'}")


def main(arguments: Sequence[str] | None = None) -> int:
    return exit_status(lambda: run(arguments))


if __name__ == "__main__":
    sys.exit(main())
