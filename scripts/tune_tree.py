"""Trees that fit a head and this machine: their temperature and their number of nodes, measured on held-out rows.

    python scripts/tune_tree.py --target TARGET --head runs/ctc/head --dataset runs/distilled --output tree.json
    python scripts/evaluate.py … --drafters ctc=runs/ctc/head,tuned=tree.json

First, trees are built along held-out rows with the head's probabilities at every temperature of the grid, and the
temperature with the highest simulated β is kept. Then the prompts of those rows are decoded with every number of nodes
in turn, and the number that gives the most tokens per second on this machine is kept. The decoded text does not change.
More --rows than the --held_out of training are refused; a line says if the head was trained on other data.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from draft_heads.configs.command_line import exit_status, parse_with_config

import torch

from draft_heads.data.collate import DraftCollator
from draft_heads.data.common.progress import track
from draft_heads.data.fingerprint import weights_hashes
from draft_heads.data.labels.shards import load_distilled
from draft_heads.heads.base import DraftHead
from draft_heads.heads.checkpoint import load_head, read_config
from draft_heads.heads.config import check_tree_temperature
from draft_heads.inference.drafters.base import VanillaDrafter
from draft_heads.inference.drafters.heads.fast_weights import prepare_for_drafting
from draft_heads.inference.drafters.registry import drafter_for
from draft_heads.inference.engine import DecodingEngine
from draft_heads.inference.evaluation.evaluate import time_engines
from draft_heads.inference.generation import GenerationSettings
from draft_heads.inference.target.target import Target
from draft_heads.scripts.accuracy import ROWS, check_held_out
from draft_heads.scripts.decoding_options import check_positive, load_target, target_parser, write_tuned
from draft_heads.train.held_out import replay_answers
from draft_heads.train.options import RunOptions
from draft_heads.train.training_data import load_data

NODES = (2, 4, 6, 8, 12, 16, 24, 32, 64)
COUNTS = {
    "rows": (ROWS, "held-out rows on which temperatures are compared"),
    "prompts": (16, "how many of these rows' prompts are decoded to compare numbers of nodes"),
    "new_tokens": (64, "longest answer to such a prompt, in tokens"),
    "max_nodes": (32, "nodes of the trees with which temperatures are compared"),
}
"""Flag → default, help."""
FEW_ANSWERS = 16
GRID = (0.6, 0.7, 0.8, 0.9, 1.0, 1.1, 1.2, 1.35, 1.5, 1.75, 2.0)


@torch.inference_mode()
def simulated_betas(
    head: DraftHead, target: Target, rows: Any, collator: DraftCollator, max_nodes: int, grid: list[float]
) -> tuple[dict[float, float], int, int]:
    """(temperature → β over all greedy answers of the rows, how many these are, their tokens); β is NaN of none."""
    drafter = drafter_for(head, target, max_nodes)
    totals = {temperature: torch.zeros(3) for temperature in grid}
    for row in track(rows, "walking held-out rows"):
        batch = {name: value.to(target.device) for name, value in collator([row]).items()}
        batch |= target.states_of(batch, head.config.target_layers)
        for temperature in grid:
            head.config.tree_temperature = temperature
            for run in replay_answers(drafter, batch):
                totals[temperature] += torch.tensor([*run, 1])
    tokens, _, answers = map(int, totals[grid[0]])
    return {one: float(found / steps) for one, (found, steps, _) in totals.items()}, answers, tokens


def decoding_speed(
    head: DraftHead, target: Target, prompts: list[list[int]], nodes: list[int], new_tokens: int
) -> dict[int, dict[str, float]]:
    """Nodes → β, γ against vanilla and milliseconds a step, the arms in turn prompt by prompt; 0 nodes: vanilla."""
    drafters = {0: VanillaDrafter(target.device), **{count: drafter_for(head, target, count) for count in nodes}}
    engines = {count: DecodingEngine(target, drafter) for count, drafter in drafters.items()}
    settings = GenerationSettings(new_tokens)
    totals = time_engines(engines, track(prompts, "decoding with every number of nodes"), settings)
    vanilla = totals[0][2] / totals[0][0]
    return {
        count: {"beta": tokens / steps, "gamma": vanilla * tokens / spent, "milliseconds_a_step": 1e3 * spent / steps}
        for count, (tokens, steps, spent) in totals.items()
        if count
    }


def best_temperature(betas: dict[float, float]) -> float:
    """The one of the highest β; of equal ones that nearest 1, which leaves the head's probabilities alone."""
    return max(betas, key=lambda temperature: (betas[temperature], -abs(temperature - 1)))


def check_new_file(output: Path) -> None:
    """ValueError unless --output is a file still to be made."""
    if output.exists():
        remedy = "name a file in it" if output.is_dir() else "name another, or remove it"
        raise ValueError(f"--output must be a new file; {output} is there already; {remedy}")


def run() -> None:
    parser = target_parser(__doc__)
    add = parser.add_argument
    add("--head", metavar="RUN/head", help="folder or hub id of the trained head")
    add("--dataset", nargs="+", help="output of scripts/distill.py for this target, as in training")
    add("--output", type=Path, help="the JSON to write, for a drafter's option tuned=FILE")
    for name, (default, text) in COUNTS.items():
        add(f"--{name}", type=int, default=default, help=f"{text} (default {default})")
    add("--temperatures", type=float, nargs="+", default=list(GRID), help="temperatures to try")
    add("--nodes", type=int, nargs="+", default=list(NODES), help="numbers of nodes to try")
    args = parse_with_config(parser, None, ("target", "head", "dataset", "output"))
    for temperature in args.temperatures:
        check_tree_temperature(temperature)
    check_positive(args, "rows", "max_nodes", "prompts", "new_tokens", "nodes")
    check_new_file(args.output)
    read_config(args.head)  # what cannot be read is told before the target is loaded
    check_held_out({"the head": args.head}, args.rows, [load_distilled(folder) for folder in args.dataset])
    target = load_target(args)
    head = load_head(args.head, target.fingerprint()).to(target.device, target.dtype)
    head = prepare_for_drafting(head)  # shared by all drafters
    rows = RunOptions(args.target, args.dataset, target_adapter=args.target_adapter, held_out=args.rows)
    _, held_out, _, collator = load_data(rows, target, head.config.target_layers, "--rows")
    betas, answers, tokens = simulated_betas(head, target, held_out, collator, args.max_nodes, args.temperatures)
    best = best_temperature(betas)
    print(f"simulated β: {answers:,} answers of {len(held_out)} rows are the target's own text, {tokens:,} tokens")
    if 0 < answers < FEW_ANSWERS:
        print(
            f"so few say little of a temperature: have {FEW_ANSWERS} or more: --labels generate, more held-out --rows"
        )
    for temperature, beta in betas.items():
        print(f"temperature {temperature:<5g} simulated β {beta:.3f}{'  <' if temperature == best else ''}")
    if betas[best] != betas[best]:
        raise ValueError(
            f"simulated β needs answers that are the target's own greedy text; the {args.rows} "
            "held-out rows hold none; distil with --labels generate"
        )
    head.config.tree_temperature = best
    asked = held_out.select(range(min(args.prompts, len(held_out))))
    prompts = [row["input_ids"][: row["assistant_mask"].index(True)] for row in asked]
    speeds = decoding_speed(head, target, prompts, args.nodes, args.new_tokens)
    fastest = max(speeds, key=lambda count: speeds[count]["gamma"])
    for count, speed in speeds.items():
        figures = f"β {speed['beta']:.2f}  γ {speed['gamma']:.2f}  {speed['milliseconds_a_step']:.2f} ms a step"
        print(f"{count:>3} nodes  {figures}{'  <' if count == fastest else ''}")
    if speeds[fastest]["gamma"] < 1:
        print("on this machine no number of nodes is faster than decoding without drafts")
    tuned = {"tree_temperature": best, "max_nodes": fastest, "simulated_beta": betas, "speed": speeds}
    tuned |= {"answers": answers, "answer_tokens": tokens}
    loaded_hash = weights_hashes(load_head(args.head))["weights_hash"]
    write_tuned(args.output, tuned, head.config.kind, args.head, loaded_hash, target)
    print(f"written: temperature {best:g} and {fastest} nodes in {args.output}")


if __name__ == "__main__":
    sys.exit(exit_status(run))
