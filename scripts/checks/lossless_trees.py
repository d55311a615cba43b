"""Losslessness with random draft trees: every attention path and every way to run a step, on random-weight targets.

    python -m draft_heads.scripts.checks.lossless_trees [--tokens 100000] [--targets llama mistral …]

Trees have random shapes and sizes; some of their paths continue the answer, so that steps accept nothing, a few drafts
or a whole path, through any rows. Ends with one JSON line; status 1 if a difference is unexplained.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import sys

import torch
from rich.progress import track
from torch import Tensor

from draft_heads.inference.drafters.base import Drafter
from draft_heads.inference.engine import DecodingEngine
from draft_heads.inference.evaluation.lossless import LosslessCounts, Oracle, Turn, judge_all
from draft_heads.inference.generation import GenerationSettings
from draft_heads.inference.sampling import Sampling
from draft_heads.inference.step import VerifiedStep
from draft_heads.inference.target.cuda_graphs import CapturedSteps, Rerun
from draft_heads.inference.target.tree_attention import TREE_ATTENTION
from draft_heads.inference.tree import DraftTree
from draft_heads.scripts.checks.lossless_matrix import DTYPES, NEW_TOKENS, RANDOM_TARGETS, load_target, make_prompts

RUNS = {"plain": {}, "ahead": {"ahead": True}, "captured": {"ahead": True}}
SAMPLINGS = (None, Sampling(temperature=0.9, top_p=0.95, seed=5))


class RandomTrees(Drafter):
    """Drafts random trees around a known answer; siblings differ, parents come before children."""

    max_nodes, max_depth = 24, 6

    def __init__(self, vocabulary: int, seed: int) -> None:
        self.vocabulary, self.random = vocabulary, random.Random(seed)
        self.answer: list[int] = []

    @property
    def on_device(self) -> bool:
        """`observe` reads the step's count on the host."""
        return False

    def begin(self, prompt: Tensor, capacity: int) -> None:
        """Start before the answer."""
        self.position = -len(prompt)

    def observe(self, step: VerifiedStep) -> None:
        """Advance by the committed tokens."""
        self.position += int(step.count)

    def propose(self) -> DraftTree:
        """Up to 24 nodes; each continues the answer with probability one half where its parent does."""
        size, draw = self.random.randint(1, self.max_nodes), self.random
        tokens: list[int] = []
        parents: list[int] = []
        depth: list[int] = []
        right: list[bool] = []  # whether the path to the node continues the answer
        taken: set[tuple[int, int]] = set()
        for _ in range(size):
            parent = draw.randint(-1, len(tokens) - 1)
            level = 1 if parent < 0 else depth[parent] + 1
            at = self.position + level
            follows = (parent < 0 or right[parent]) and at < len(self.answer) and draw.random() < 0.5
            token = self.answer[at] if follows else draw.randrange(self.vocabulary)
            if level > self.max_depth or (parent, token) in taken:
                continue
            taken.add((parent, token))
            tokens.append(token)
            parents.append(parent)
            depth.append(level)
            right.append(follows)
        return DraftTree.build(torch.tensor(tokens, dtype=torch.long), torch.tensor(parents, dtype=torch.long))


def check(name: str, dtype: str, path: str, run: str, sampling: Sampling | None, turns: int) -> LosslessCounts:
    """Compare `turns` answers of one cell with transformers' own."""
    target = load_target(name, DTYPES[dtype])
    target.attend(path)
    settings = GenerationSettings(NEW_TOKENS, sampling=sampling)
    oracle = Oracle(target, settings)
    drafter = RandomTrees(target.config.vocab_size, seed=turns)
    captured = CapturedSteps(Rerun) if run == "captured" else None
    engine = DecodingEngine(target, drafter, **RUNS[run], captured=captured)
    answered = []
    for index, prompt in enumerate(make_prompts(target, turns)):
        drafter.answer = oracle.answer(prompt)
        answer = engine.generate(prompt, settings)
        answered.append(Turn(tuple(prompt), tuple(answer.tokens), f"{name} {dtype} {path} {run}, prompt {index}"))
    return judge_all(oracle, answered)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=100_000, help="new tokens in all, at least (default 100000)")
    parser.add_argument("--targets", nargs="+", choices=list(RANDOM_TARGETS), default=list(RANDOM_TARGETS))
    options = parser.parse_args()
    torch.set_num_threads(1)
    cells = list(itertools.product(options.targets, ("float64", "float32"), TREE_ATTENTION, RUNS, SAMPLINGS))
    turns = max(1, -(-options.tokens // (len(cells) * NEW_TOKENS)))
    total = LosslessCounts.of([], 0)
    for cell in track(cells, "random trees"):
        total += check(*cell, turns)
    print(json.dumps({"cells": len(cells), "tokens": total.tokens, **total.as_dict()}))
    return int(total.unexplained > 0)


if __name__ == "__main__":
    sys.exit(main())
