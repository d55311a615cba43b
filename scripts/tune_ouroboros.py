"""Ouroboros for a pair of models and this machine: the paper's heuristic search (its Algorithm 1), by the clock.

    python scripts/tune_ouroboros.py --target TARGET --draft_model DIR --benchmarks gsm8k=FILE --output ouroboros.json
    python scripts/evaluate.py … --drafters ouroboros=DIR,tuned=ouroboros.json

First γ (tokens of the draft), then W (the draft model's window), then P (tokens of a phrase), each with the best found
before it and the middle of the grids after it; K, the phrases that lengthen, is 3. Every value decodes the same
prompts, in turn, and the one that takes the least time a token is kept. The grids are the
paper's: 7 to 14 for γ where the two models say much the same, --gammas 2 3 4 5 6 where they do not. Tune on other
questions than those that results are reported on.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from draft_heads.configs.command_line import exit_status, parse_with_config

from draft_heads.configs.options import check_whole
from draft_heads.data.common.progress import track
from draft_heads.data.text.benchmarks import Question, load_benchmark
from draft_heads.inference.drafters.base import VanillaDrafter
from draft_heads.inference.drafters.models.draft_model import load_draft_model
from draft_heads.inference.drafters.models.ouroboros import OuroborosDrafter
from draft_heads.inference.engine import DecodingEngine
from draft_heads.inference.evaluation.evaluate import time_engines
from draft_heads.inference.generation import GenerationSettings
from draft_heads.inference.target.target import Target
from draft_heads.scripts.decoding_options import (
    check_positive,
    load_target,
    parse_benchmarks,
    target_parser,
    write_tuned,
)
from draft_heads.scripts.tune_tree import check_new_file

GRIDS = {"gamma": range(7, 15), "w": range(15, 21), "p": range(5, 8)}
FLAGS = {"gamma": "gammas", "w": "windows", "p": "phrases"}
K = 3


def search(
    target: Target,
    model: Target,
    prompts: Sequence[list[int]],
    grids: Mapping[str, Sequence[int]],
    settings: GenerationSettings,
) -> tuple[dict[str, int], dict[str, dict[int, dict[str, float]]]]:
    """The best γ, W and P in that order, and what every value tried was measured as; key 0: without drafts."""
    best = {name: grid[len(grid) // 2] for name, grid in grids.items()} | {"k": K}
    measured: dict[str, dict[int, dict[str, float]]] = {}
    for name, grid in grids.items():
        drafters = {value: OuroborosDrafter(model, **{**best, name: value}) for value in grid}
        every = {0: VanillaDrafter(target.device), **drafters}
        engines = {value: DecodingEngine(target, drafter) for value, drafter in every.items()}
        totals = time_engines(engines, track(prompts, "decoding with every value"), settings)
        measured[name] = {
            key: {"beta": tokens / steps, "seconds_per_token": seconds / tokens}
            for key, (tokens, steps, seconds) in totals.items()
        }
        best[name] = min(grid, key=lambda value: measured[name][value]["seconds_per_token"])
        for value, cost in measured[name].items():
            what = f"{name} {value}" if value else "no drafts"
            marked = "  <" if value == best[name] else ""
            print(f"{what:<10} β {cost['beta']:.2f}  {1000 * cost['seconds_per_token']:.2f} ms a token{marked}")
    return best, measured


def fitting_prompts(questions: Sequence[Question], target: Target) -> list[list[int]]:
    """The first turns of questions as prompts; those that leave no room in the context are left out, counted aloud."""
    prompts = [target.renderer.prompt(one.first_messages, one.extra) for one in questions]
    kept = [prompt for prompt in prompts if len(prompt) < target.max_positions]
    if len(kept) < len(prompts):
        print(f"{len(prompts) - len(kept)} of {len(prompts)} questions do not fit the context and are left out")
    if not kept:
        raise ValueError(
            f"--benchmarks must hold a question that fits the target's context; got {len(prompts)}; name others"
        )
    return kept


def run(args: argparse.Namespace) -> None:
    check_positive(args, "prompts", "new_tokens", *FLAGS.values())
    check_whole("--phrases", min(args.phrases), least=2)
    check_new_file(args.output)
    files = parse_benchmarks(args.benchmarks)
    questions = [row for name, path in files.items() for row in load_benchmark(name, path)[-args.prompts :]]
    target = load_target(args)
    model = load_draft_model("ouroboros", args.draft_model, target)
    prompts = fitting_prompts(questions, target)
    grids = {name: getattr(args, flag) for name, flag in FLAGS.items()}
    best, measured = search(target, model, prompts, grids, GenerationSettings(args.new_tokens))
    a_token = {value: cost["seconds_per_token"] for value, cost in measured["p"].items()}
    if all(seconds > a_token[0] for value, seconds in a_token.items() if value):
        print("no setting is faster than decoding without drafts on this machine")
    loaded_hash = model.fingerprint()["weights_hash"]
    write_tuned(args.output, {**best, "measured": measured}, "ouroboros", args.draft_model, loaded_hash, target)
    print(f"written: {', '.join(f'{name} {value}' for name, value in best.items())} in {args.output}")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = target_parser(__doc__)
    add = parser.add_argument
    add("--draft_model", help="folder or hub id of the draft model")
    add("--benchmarks", nargs="+", metavar="NAME[=FILE|ID]", help="benchmarks; each question's first turn is asked")
    add("--output", type=Path, help="the JSON to write, for the drafter's option tuned=FILE")
    add("--prompts", type=int, default=16, help="questions of each file, from its end (default 16)")
    add("--new_tokens", type=int, default=64, help="longest answer (default 64)")
    for name, flag in FLAGS.items():
        add(f"--{flag}", type=int, nargs="+", default=list(GRIDS[name]), help=f"values of {name} to try")
    required = ("target", "draft_model", "benchmarks", "output")
    return exit_status(lambda: run(parse_with_config(parser, arguments, required)))


if __name__ == "__main__":
    sys.exit(main())
