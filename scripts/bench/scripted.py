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


class ScriptedEngine(DecodingEngine):
    """Keeps `tokens_a_step` tokens of every step on average, whatever the target chooses."""

    def __init__(self, target: Target, drafter: Drafter, tokens_a_step: float, **options: Any) -> None:
        """ValueError when a step of this drafter cannot give so many tokens."""
        counts = schedule(tokens_a_step)
        limit = 1 + min(drafter.max_depth, drafter.max_nodes)
        if min(counts) < 1 or max(counts) > limit:
            raise ValueError(
                f"--scripted must lie between 1 and the {limit} tokens that a step of this drafter can give; got "
                f"{tokens_a_step:g}; lower it"
            )
        self._counts = torch.tensor(counts, device=target.device)
        self._turn = torch.zeros(1, dtype=torch.long, device=target.device)
        super().__init__(target, drafter, **options)
        self._accept = self._scripted_rows

    def _scripted_rows(
        self, tree: DraftTree, choices: Tensor, logits: Tensor, sees: Tensor, depth: Tensor, max_depth: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The first rows, as many as scheduled; see `inference.verify.Accept`."""
        count = self._counts.index_select(0, self._turn % len(self._counts))
        self._turn += 1
        rows = torch.arange(max_depth + 1, device=choices.device)
        return torch.minimum(rows, count[:, None] - 1), count, choices[:, 0]
