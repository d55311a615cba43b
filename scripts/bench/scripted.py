"""Decoding with scripted acceptance: the speed of steps that each accept a given number of tokens.

A step computes everything as usual (the drafter's and the target's forward, the compaction, the readback); only the
number of accepted tokens is fixed in advance, so the text is meaningless. It measures η = γ / β of random-weight
models, for which no trained head exists, at the accepted lengths that published heads reach.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from draft_heads.inference.drafters.base import Drafter
from draft_heads.inference.engine import DecodingEngine
from draft_heads.inference.target.target import Target
from draft_heads.inference.tree import DraftTree


def schedule(mean: float, steps: int = 20) -> list[int]:
    """Tokens of each of `steps` steps, whole numbers next to `mean` and spread evenly: 2.5 → 2, 3, 2, 3, …"""
    return [int((step + 1) * mean + 1e-9) - int(step * mean + 1e-9) for step in range(steps)]


class ScriptedAcceptance:
    """An acceptance rule (`inference.verify.Accept`): the first rows of a step, as many as scheduled.

    It ignores what the target chooses, so the text is meaningless.
    """

    def __init__(self, drafter: Drafter, tokens_per_step: float, device: torch.device) -> None:
        """ValueError when a step of this drafter cannot give so many tokens."""
        counts = schedule(tokens_per_step)
        limit = 1 + min(drafter.max_depth, drafter.max_nodes)
        if min(counts) < 1 or max(counts) > limit:
            raise ValueError(
                f"--scripted must lie between 1 and the {limit} tokens that a step of this drafter can give; got "
                f"{tokens_per_step:g}; lower it"
            )
        self._counts = torch.tensor(counts, device=device)
        self._turn = torch.zeros(1, dtype=torch.long, device=device)

    def __call__(
        self, tree: DraftTree, choices: Tensor, logits: Tensor, sees: Tensor, depth: Tensor, max_depth: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The first `count` rows, padded with the last of them; `count [1]`; the next base token `[1]`."""
        count = self._counts.index_select(0, self._turn % len(self._counts))
        self._turn += 1
        rows = torch.arange(max_depth + 1, device=choices.device)
        return torch.minimum(rows, count[:, None] - 1), count, choices[:, 0]


def scripted_engine(target: Target, drafter: Drafter, tokens_per_step: float, **options: Any) -> DecodingEngine:
    """An engine whose steps keep `tokens_per_step` tokens on average."""
    return DecodingEngine(
        target, drafter, accept=ScriptedAcceptance(drafter, tokens_per_step, target.device), **options
    )
