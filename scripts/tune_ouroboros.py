"""Tune Ouroboros for two models and this machine: the paper's heuristic search (its Algorithm 1), by measured time.

    python scripts/tune_ouroboros.py --target TARGET --draft_model DIR --benchmarks gsm8k=FILE --output ouroboros.json
    python scripts/evaluate.py … --drafters ouroboros=DIR,tuned=ouroboros.json

It searches γ (tokens of the draft), then W (the draft model's window), then P (tokens of a phrase), each with the best
earlier values and the middle of the later grids; K, the phrases that lengthen a draft, is 3. All values decode the same
prompts, taking turns, and the fastest is kept. The decoded text does not change. The grids are the paper's: 7 to 14 for
γ where the two models mostly agree, --gammas 2 3 4 5 6 where they do not. Tune on other questions than you report on.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.progress import track

from draft_heads.data.benchmarks import load_benchmark
from draft_heads.data.config_file import exit_status, parse_with_config
from draft_heads.data.files import write_text
from draft_heads.data.rendering import render_prompt
from draft_heads.inference.drafters.base import Drafter
from draft_heads.inference.drafters.models.draft_model import load_draft_model
from draft_heads.inference.drafters.models.ouroboros import OuroborosDrafter
from draft_heads.inference.drafters.vanilla import VanillaDrafter
from draft_heads.inference.engine import DecodingEngine
from draft_heads.inference.evaluation.evaluate import time_engines
from draft_heads.inference.evaluation.report import environment
from draft_heads.inference.generation import GenerationSettings
from draft_heads.inference.target.target import Target
from draft_heads.scripts.decoding_options import load_target, parse_benchmarks, target_parser

GRIDS = {"gamma": range(7, 15), "w": range(15, 21), "p": range(5, 8)}
FLAGS = {"gamma": "gammas", "w": "windows", "p": "phrases"}
K = 3


def measure(
    target: Target, drafters: Mapping[int, Drafter], prompts: Sequence[list[int]], settings: GenerationSettings
) -> dict[int, dict[str, float]]:
    """Key of a drafter → β and seconds; all decode every prompt, taking turns in changing order."""
    engines = {key: DecodingEngine(target, drafter) for key, drafter in drafters.items()}
    totals = time_engines(engines, track(prompts, "decoding with every value"), settings)
    return {key: {"beta": tokens / steps, "seconds": spent} for key, (tokens, steps, spent) in totals.items()}


def search(
    target: Target,
    model: Target,
    prompts: Sequence[list[int]],
    grids: Mapping[str, Sequence[int]],
    settings: GenerationSettings,
) -> tuple[dict[str, int], dict[str, dict[int, dict[str, float]]]]:
    """The best γ, W and P, and the measurements of every value; key 0: without drafts."""
    best = {name: grid[len(grid) // 2] for name, grid in grids.items()} | {"k": K}
    measured = {}
    for name, grid in grids.items():
        drafters = {value: OuroborosDrafter(model, **{**best, name: value}) for value in grid}
        measured[name] = measure(target, {0: VanillaDrafter(target.device), **drafters}, prompts, settings)
        best[name] = min(grid, key=lambda value: measured[name][value]["seconds"])
        for value, cost in measured[name].items():
            what = f"{name} {value}" if value else "no drafts"
            marked = "  <" if value == best[name] else ""
            print(f"{what:<10} β {cost['beta']:.2f}  {cost['seconds']:.2f} s{marked}")
    return best, measured


def fitting_prompts(questions: Sequence[str], target: Target) -> list[list[int]]:
    """The questions as prompts; those that do not fit the target's context are left out, which is printed."""
    prompts = [render_prompt(target.tokenizer, [{"role": "user", "content": text}]) for text in questions]
    kept = [prompt for prompt in prompts if len(prompt) < target.max_positions]
    if len(kept) < len(prompts):
        print(f"{len(prompts) - len(kept)} of {len(prompts)} questions do not fit the context and are left out")
    if not kept:
        raise ValueError(
            f"--benchmarks must hold a question that fits the target's context; got {len(prompts)}; name others"
        )
    return kept


def parser() -> argparse.ArgumentParser:
    """The flags."""
    made = target_parser(__doc__)
    add = made.add_argument
    add("--draft_model", help="folder or hub id of the draft model")
    add("--benchmarks", nargs="+", metavar="NAME=FILE", help="question files, of which first turns are decoded")
    add("--output", type=Path, help="the JSON to write, for the drafter's option tuned=FILE")
    add("--prompts", type=int, default=16, help="questions of each file, from its end (default 16)")
    add("--new_tokens", type=int, default=64, help="longest answer (default 64)")
    for name, flag in FLAGS.items():
        add(f"--{flag}", type=int, nargs="+", default=list(GRIDS[name]), help=f"values of {name} to try")
    return made


def run(args: argparse.Namespace) -> None:
    for flag, bound in {"prompts": 1, "new_tokens": 1, "gammas": 1, "windows": 1, "phrases": 2}.items():
        given: Any = getattr(args, flag)
        smallest = given if isinstance(given, int) else min(given)
        if smallest < bound:
            raise ValueError(f"--{flag} must be at least {bound}; got {smallest}")
    files = parse_benchmarks(args.benchmarks)
    questions = [row for name, path in files.items() for row in load_benchmark(name, path)[-args.prompts :]]
    target = load_target(args)
    model = load_draft_model("ouroboros", args.draft_model, target)
    prompts = fitting_prompts([row.turns[0] for row in questions], target)
    grids = {name: getattr(args, flag) for name, flag in FLAGS.items()}
    best, measured = search(target, model, prompts, grids, GenerationSettings(args.new_tokens, target.end_token_ids))
    if all(cost["seconds"] > measured["p"][0]["seconds"] for value, cost in measured["p"].items() if value):
        print("no setting is faster than decoding without drafts on this machine")
    args.output.parent.mkdir(parents=True, exist_ok=True)
    tuned = {**best, "measured": measured, "environment": environment(str(target.device))}
    write_text(args.output, json.dumps(tuned, indent=1) + "\n")
    print(f"written: {', '.join(f'{name} {value}' for name, value in best.items())} in {args.output}")


def main(arguments: Sequence[str] | None = None) -> int:
    required = ("target", "draft_model", "benchmarks", "output")
    return exit_status(lambda: run(parse_with_config(parser(), arguments, required)))


if __name__ == "__main__":
    sys.exit(main())
