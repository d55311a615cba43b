"""Choose the temperature a head's draft trees are built with: the one of the highest simulated β on held-out rows.

    python scripts/tune_tree.py --target TARGET --head runs/ctc/head --dataset runs/distilled

A tree is as good as the probabilities it is built from. Every temperature of the grid builds the trees along the same
rows; the best is written to the head's config.json as `tree_temperature`, which its drafter reads. The drafts change,
what is decoded does not. Rows are chosen as training chooses its held-out rows: keep `--rows` up to its `--held_out`.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from pathlib import Path
from typing import Any

import torch
from rich.progress import track

from data.collate import DraftCollator
from heads.base import DraftHead, Rows, TargetView
from heads.checkpoint import CONFIG, load_head, write_text
from inference.config_file import parse_with_config
from inference.target import Target
from train.options import RunOptions
from train.run import load_data
from train.simulate import ProposeAt, simulate_row

GRID = (0.6, 0.7, 0.8, 0.9, 1.0, 1.1, 1.2, 1.35, 1.5, 1.75, 2.0)


@torch.inference_mode()
def simulated_betas(
    head: DraftHead, target: Target, rows: Any, collator: DraftCollator, max_nodes: int, grid: list[float]
) -> dict[float, float]:
    """Temperature → β over all greedy answers of the rows; NaN where they hold none."""
    draft = importlib.import_module(f"train.{head.config.kind}").propose_from
    view = target.view()
    totals = {temperature: torch.zeros(2) for temperature in grid}

    def propose_from(head: DraftHead, row: Rows, view: TargetView) -> ProposeAt:
        made: ProposeAt = draft(head, row, view, max_nodes)
        return made

    for row in track(rows, "walking held-out rows"):
        batch = {name: value.to(target.device) for name, value in collator([row]).items()}
        hidden = batch.pop("hidden", None)
        if hidden is None:
            hidden = target.forward_rows(batch["input_ids"], batch["segment_ids"], batch["position_ids"])
        for temperature in grid:
            head.config.tree_temperature = temperature
            for run in simulate_row(head, batch, hidden, view, propose_from):
                totals[temperature] += torch.tensor(run)
    return {temperature: float(tokens / steps) for temperature, (tokens, steps) in totals.items()}


def parser() -> argparse.ArgumentParser:
    """The flags."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--config", type=Path, help="YAML file with defaults for any of these flags, without the dashes")
    made.add_argument("--target", help="the target the head was trained for: a folder or a hub id")
    made.add_argument("--head", help="RUN/head; its config.json is rewritten")
    made.add_argument("--dataset", nargs="+", help="what scripts/distill.py wrote with this target; as in training")
    made.add_argument("--rows", type=int, default=64, help="held-out rows to walk along (default 64)")
    made.add_argument("--max_nodes", type=int, default=32, help="nodes of a tree (default 32)")
    made.add_argument("--temperatures", type=float, nargs="+", default=list(GRID), help="the grid")
    made.add_argument("--threads", type=int, default=0, help="torch threads; 0 leaves them alone")
    return made


def main() -> None:
    try:
        args = parse_with_config(parser(), None, ("target", "head", "dataset"))
        if args.threads:
            torch.set_num_threads(args.threads)
        if min(args.temperatures) <= 0:
            raise ValueError(f"--temperatures must be above 0; got {min(args.temperatures)}; 1 leaves drafts alone")
        if args.max_nodes < 1:
            raise ValueError(f"--max_nodes must be at least 1; got {args.max_nodes}")
        target = Target.from_pretrained(args.target)
        _, held_out, _, collator = load_data(RunOptions(args.target, args.dataset, held_out=args.rows), target)
        head = load_head(args.head, target.fingerprint()).to(target.device).eval()
    except (ValueError, OSError) as error:
        sys.exit(f"scripts/tune_tree.py: {error}")
    betas = simulated_betas(head, target, held_out, collator, args.max_nodes, args.temperatures)
    for temperature, beta in betas.items():
        print(f"temperature {temperature:<5g} simulated β {beta:.3f}")
    best = max(betas, key=lambda temperature: betas[temperature])
    if betas[best] != betas[best]:
        sys.exit(
            f"scripts/tune_tree.py: simulated β needs answers that are the target's own greedy text; the {args.rows} "
            "held-out rows hold none; distil with --labels generate"
        )
    head.config.tree_temperature = best
    write_text(Path(args.head) / CONFIG, head.config.to_json_string())
    print(f"written: tree_temperature {best:g} in {Path(args.head) / CONFIG}")


if __name__ == "__main__":
    main()
