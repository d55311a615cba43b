"""What does decoding several texts at once give? The last line of output is one JSON object.

    python scripts/bench/batch.py --target TARGET --drafters ctc=RUN/head … [--sizes 1 2 4 8 16] [--max_nodes 32]

The same questions of the project's own are answered at every batch size, without drafts and with each drafter, the arms
in turn. `other_answers` counts those that are not the ones of decoding alone without drafts, or that change from round
to round: in float32 and float64 none, else the status is 1; in half precision near ties. Of each size: γ against the
plain loop of that size, speed over the plain loop of one text, and, on a CPU, drafting's share of the time, prompts
included, and the time of a draft (to read a step and propose after it) over that at one text. Medians of the rounds.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from functools import partial
from typing import Any

from draft_heads.configs.command_line import exit_status, parse_with_config

import torch

from draft_heads.data.common.console import plain_console
from draft_heads.inference.batch import BatchEngine
from draft_heads.inference.drafters.registry import DrafterSpec, build_drafter
from draft_heads.inference.evaluation.report import environment, markdown_table
from draft_heads.inference.generation import GenerationSettings
from draft_heads.inference.step import VerifiedStep
from draft_heads.inference.target.target import Target
from draft_heads.inference.tree import DraftTree
from draft_heads.scripts.bench.decode import check_forgets, in_turn, prompts
from draft_heads.scripts.decoding_options import check_positive, drafter_specs, load_target, target_parser


class CountedBatches:
    """A batch engine whose runs note their answers, and of each round a draft's seconds and drafting's share."""

    def __init__(self, target: Target, spec: DrafterSpec, nodes: int, size: int) -> None:
        drafter = build_drafter(spec, target, nodes, size)
        check_forgets({spec.name: drafter})
        self._engine, self.size = BatchEngine(target, drafter), size
        self._propose, self._observe = drafter.propose, drafter.observe
        drafter.propose = self._counted  # type: ignore[method-assign]
        drafter.observe = self._timed  # type: ignore[method-assign]
        self._on_cpu, self._drafting = target.device.type == "cpu", 0.0
        self.answers: list[list[int]] = []
        self.changed = set[int]()  # the answers that were others in the round before
        self.beta, self.drafts = 0.0, 0
        self.draft_seconds: list[float] = []
        self.shares: list[float] = []

    def _counted(self) -> DraftTree:
        start = time.perf_counter()
        tree = self._propose()
        self._drafting += time.perf_counter() - start
        self.drafts += 1
        return tree

    def _timed(self, step: VerifiedStep, slot: int | None = None) -> None:
        start = time.perf_counter()
        self._observe(step, slot)
        if slot is None:  # else a prompt: each text has one, however many are read at once
            self._drafting += time.perf_counter() - start

    def run(self, texts: list[list[int]], settings: GenerationSettings) -> None:
        """Answer all texts."""
        self.drafts, self._drafting = 0, 0.0
        answers = self._engine.generate(texts, settings)
        earlier, self.answers = self.answers, [answer.tokens for answer in answers]
        self.changed |= differing(earlier, self.answers)
        self.beta = sum(map(len, self.answers)) / sum(answer.target_steps for answer in answers)
        if self._on_cpu:  # else the device drafts beside the host
            drafting, total = (sum(answer.seconds[part] for answer in answers) for part in ("draft", "total"))
            self.draft_seconds.append(self._drafting / max(self.drafts, 1))  # none where prefills end every answer
            self.shares.append(drafting / total)


def differing(some: list[list[int]], others: list[list[int]]) -> set[int]:
    """The numbers of the answers that are not the same."""
    return {number for number, (one, other) in enumerate(zip(some, others)) if one != other}


def measure(
    target: Target,
    specs: list[DrafterSpec],
    sizes: list[int],
    nodes: int,
    texts: list[list[int]],
    tokens: int,
    rounds: int,
) -> list[dict[str, Any]]:
    """A row for every size and drafter, one text, which figures are over, among the sizes."""
    sizes = sorted({1, *sizes})
    settings = GenerationSettings(tokens)
    engines = {(spec.name, size): CountedBatches(target, spec, nodes, size) for size in sizes for spec in specs}
    runs = {f"{name} {size}": partial(engine.run, texts, settings) for (name, size), engine in engines.items()}
    taken = dict(zip(engines, in_turn(runs, rounds, target.device).values()))

    def median(over: list[float], under: list[float]) -> float:
        return statistics.median(a / b for a, b in zip(over, under))

    alone = "vanilla", sizes[0]
    rows = []
    for (name, size), engine in engines.items():
        others = differing(engines[alone].answers, engine.answers)
        times, first = taken[name, size], engines[name, sizes[0]]
        rows.append(
            {
                "drafter": name,
                "batch_size": size,
                "other_answers": len(others | engine.changed),
                "beta": engine.beta,
                "gamma": median(taken["vanilla", size], times),
                "over_plain_alone": median(taken[alone], times),
                "draft_share": statistics.median(engine.shares[1:]) if engine.shares else None,  # without the warm-up
                "draft_over_first_size": median(engine.draft_seconds[1:], first.draft_seconds[1:])
                if name != "vanilla" and first.draft_seconds and all(first.draft_seconds)
                else None,
            }
        )
    return rows


def main() -> bool:
    parser = target_parser(__doc__)
    add = parser.add_argument
    add("--drafters", nargs="+", default=["ngram"], help="as in scripts/evaluate.py")
    add("--sizes", nargs="+", type=int, default=[1, 2, 4, 8, 16], help="texts at a time, beside 1 (default 1 2 4 8 16)")
    add("--max_nodes", type=int, default=32, help="default 32")
    add("--questions", type=int, default=32, help="default 32")
    add("--max_new_tokens", type=int, default=64, help="default 64")
    add("--rounds", type=int, default=3, help="after one to warm up (default 3)")
    args = parse_with_config(parser, None, ["target"])
    check_positive(args, "sizes", "max_nodes", "questions", "max_new_tokens", "rounds")
    specs, target = drafter_specs(args.drafters), load_target(args)
    texts = prompts(target, args.questions, 64)
    rows = measure(target, specs, args.sizes, args.max_nodes, texts, args.max_new_tokens, args.rounds)
    names = list(rows[0])
    cells = [[f"{row[name]:.2f}" if isinstance(row[name], float) else str(row[name]) for name in names] for row in rows]
    plain_console().print(markdown_table(names, cells, 1), soft_wrap=True)
    settings = {name: getattr(args, name) for name in ("sizes", "max_nodes", "questions", "max_new_tokens", "rounds")}
    made_on = environment(str(target.device))
    print(json.dumps({"target": args.target, "settings": settings, "environment": made_on, "rows": rows}))
    exact = target.dtype in (torch.float32, torch.float64)
    if exact and (others := sum(row["other_answers"] for row in rows)):
        print(f"{others} answers are not those of decoding alone: `other_answers` says where", file=sys.stderr)
        return False
    return True


if __name__ == "__main__":
    sys.exit(exit_status(main))
