"""Losslessness over random trees: every way to attend, every way to run a step, on random-weight targets.

    python -m draft_heads.scripts.checks.lossless_trees [--tokens 100000] [--targets llama mistral …]

The trees are of random shape and size; some of their paths are the answer's own continuation, so that steps accept
nothing, a little or all there is, through any rows. Ends with one JSON line; status 1 if a difference is unexplained.
"""

from __future__ import annotations

import itertools
import json
import random
import sys

import torch
from rich.progress import track
from torch import Tensor

from draft_heads.inference.drafters.base import Drafter
from draft_heads.inference.engine import DecodingEngine
from draft_heads.inference.evaluation.lossless import LosslessCounts, Oracle, judge_all
from draft_heads.inference.generation import GenerationSettings
from draft_heads.inference.sampling import Sampling
from draft_heads.inference.step import VerifiedStep
from draft_heads.inference.target.cuda_graphs import CapturedSteps, Rerun
from draft_heads.inference.target.tree_attention import TREE_ATTENTION
from draft_heads.inference.tree import DraftTree
from draft_heads.scripts.checks.lossless_matrix import DTYPES, NEW_TOKENS, RANDOM_TARGETS, load_target, make_prompts
from draft_heads.scripts.decoding_options import script_parser

RUNS = {"plain": {}, "ahead": {"ahead": True}, "captured": {"ahead": True}}
SAMPLINGS = (None, Sampling(temperature=0.9, top_p=0.95, seed=5))


class RandomTrees(Drafter):
    """Drafts random trees around a known answer; siblings differ, parents go before children."""

    max_nodes, max_depth = 24, 6

    def __init__(self, vocabulary: int, seed: int) -> None:
        self.vocabulary, self.random = vocabulary, random.Random(seed)
        self.answer: list[int] = []

    on_device = False  # `observe` reads the count

    def begin(self, prompt: Tensor, capacity: int) -> None:
        """Start before the answer's first token."""
        self.position = -len(prompt)

    def observe(self, step: VerifiedStep) -> None:
        """Move behind the committed tokens."""
        self.position += int(step.count)

    def propose(self) -> DraftTree:
        """Up to 24 nodes; each continues the answer with probability one half where its parent does."""
        draw = self.random
        nodes: list[tuple[int, int, int, bool]] = []  # token, parent, depth, whether the path to it is the answer's
        for _ in range(draw.randint(1, self.max_nodes)):
            parent = draw.randint(-1, len(nodes) - 1)
            level, right = (1, True) if parent < 0 else (nodes[parent][2] + 1, nodes[parent][3])
            at = self.position + level
            follows = right and at < len(self.answer) and draw.random() < 0.5
            token = self.answer[at] if follows else draw.randrange(self.vocabulary)
            if level <= self.max_depth and (token, parent) not in [node[:2] for node in nodes]:
                nodes.append((token, parent, level, follows))
        return DraftTree.build(*torch.tensor([node[:2] for node in nodes], dtype=torch.long).reshape(-1, 2).T)


def check(name: str, dtype: str, path: str, run: str, sampling: Sampling | None, turns: int) -> LosslessCounts:
    """How `turns` answers of one cell compare with transformers' own."""
    target = load_target(name, DTYPES[dtype])
    target.attend(path)
    settings = GenerationSettings(NEW_TOKENS, sampling=sampling)
    oracle = Oracle(target, settings)
    drafter = RandomTrees(target.config.vocab_size, seed=turns)
    engine = DecodingEngine(target, drafter, **RUNS[run], captured=CapturedSteps(Rerun) if run == "captured" else None)
    answered = []
    for prompt in make_prompts(target, turns):
        drafter.answer = oracle.answer(prompt)
        answer = engine.generate(prompt, settings)
        answered.append((prompt, answer.tokens))
    return judge_all(oracle, answered)


def main() -> int:
    parser = script_parser(__doc__, config=False)
    parser.add_argument("--tokens", type=int, default=100_000, help="new tokens in all, at least (default 100000)")
    parser.add_argument("--targets", nargs="+", choices=list(RANDOM_TARGETS), default=list(RANDOM_TARGETS))
    options = parser.parse_args()
    torch.set_num_threads(1)
    cells = list(itertools.product(options.targets, ("float64", "float32"), TREE_ATTENTION, RUNS, SAMPLINGS))
    turns = max(1, -(-options.tokens // (len(cells) * NEW_TOKENS)))
    total = LosslessCounts()
    for cell in track(cells, "random trees"):
        total += check(*cell, turns)
    print(json.dumps({"cells": len(cells), "tokens": total.tokens, **total.as_dict()}))
    return int(total.unexplained > 0)


if __name__ == "__main__":
    sys.exit(main())
