"""What does decoding several texts at once give? The last line of output is one JSON object.

    python scripts/bench/batch.py --target TARGET --drafters ctc=RUN/head … [--sizes 1 2 4 8 16] [--max_nodes 32]

The same questions of the project's own are answered at every batch size, without drafts and with each drafter, the arms
in turn. Every answer must be the one that decoding alone gives. Of each size: γ against the plain loop of that size,
speed over the plain loop of one text, drafting's share of the time, and a draft's time over that of one text. Medians
of the rounds.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable
from typing import Any

from draft_heads.configs.command_line import exit_status, parse_with_config

from draft_heads.data.common.console import plain_console
from draft_heads.inference.batch import BatchEngine
from draft_heads.inference.drafters.registry import DrafterSpec, build_drafter
from draft_heads.inference.evaluation.report import markdown_table
from draft_heads.inference.generation import GenerationSettings
from draft_heads.inference.target.target import Target
from draft_heads.scripts.bench.decode import in_turn, prompts
from draft_heads.scripts.decoding_options import check_positive, drafter_specs, load_target, target_parser

Arm = tuple[str, int]
"""The name of a drafter and a batch size."""


class CountedBatches:
    """A batch engine whose runs note what they gave: tokens, target steps, seconds of drafting, drafts."""

    def __init__(self, target: Target, spec: DrafterSpec, nodes: int, size: int) -> None:
        drafter = build_drafter(spec, target, nodes, size)
        self._engine, self._propose, self.size = BatchEngine(target, drafter), drafter.propose, size
        drafter.propose = self._counted  # type: ignore[method-assign]
        self.answers: list[list[int]] = []
        self.beta, self._drafts = 0.0, 0
        self.draft_seconds: list[float] = []  # of a draft, the mean of each round

    def _counted(self) -> Any:
        self._drafts += 1
        return self._propose()

    def run(self, texts: list[list[int]], settings: GenerationSettings) -> None:
        self._drafts = 0
        answers = self._engine.generate(texts, settings)
        self.answers = [answer.tokens for answer in answers]
        self.beta = sum(map(len, self.answers)) / sum(answer.target_steps for answer in answers)
        self.draft_seconds.append(sum(answer.seconds["draft"] for answer in answers) / self._drafts)
        self.share = sum(a.seconds["draft"] for a in answers) / sum(a.seconds["total"] for a in answers)


def measure(
    target: Target,
    specs: list[DrafterSpec],
    sizes: list[int],
    nodes: int,
    texts: list[list[int]],
    tokens: int,
    rounds: int,
) -> list[dict[str, Any]]:
    """A row for every size and drafter; AssertionError if an answer depends on either."""
    settings = GenerationSettings(tokens)
    engines = {(spec.name, size): CountedBatches(target, spec, nodes, size) for size in sizes for spec in specs}
    keys = {f"{name} {size}": (name, size) for name, size in engines}
    runs: dict[str, Callable[[], None]] = {
        key: lambda one=engines[arm]: one.run(texts, settings)  # type: ignore[misc]
        for key, arm in keys.items()
    }
    taken: dict[Arm, list[float]] = {keys[key]: times for key, times in in_turn(runs, rounds, target.device).items()}
    alone = engines["vanilla", sizes[0]].answers
    rows = []
    for (name, size), engine in engines.items():
        if engine.answers != alone:
            raise AssertionError(f"{name} at {size} texts at once gave other answers than vanilla at {sizes[0]}")
        times, plain, first = taken[name, size], taken["vanilla", size], taken["vanilla", sizes[0]]
        own, one = engine.draft_seconds[1:], engines[name, sizes[0]].draft_seconds[1:]  # without the warm-up
        rows.append(
            {
                "drafter": name,
                "batch_size": size,
                "beta": engine.beta,
                "gamma": statistics.median(a / b for a, b in zip(plain, times)),
                "over_plain_alone": statistics.median(a / b for a, b in zip(first, times)),
                "draft_share": engine.share,
                "draft_over_first_size": statistics.median(a / b for a, b in zip(own, one)) if all(one) else 1.0,
            }
        )
    return rows


def main() -> None:
    parser = target_parser(__doc__)
    add = parser.add_argument
    add("--drafters", nargs="+", default=["ngram"], help="as in scripts/evaluate.py")
    add("--sizes", nargs="+", type=int, default=[1, 2, 4, 8, 16], help="texts at a time (default 1 2 4 8 16)")
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
    print(json.dumps({"target": args.target, "rows": rows}))


if __name__ == "__main__":
    sys.exit(exit_status(main))
