"""ANPD: adaptive n-grams over the text so far, the largest level that matches first (https://arxiv.org/abs/2404.08698)."""

from __future__ import annotations

import math
from heapq import heappop, heappush
from typing import Any, ClassVar

import torch

from draft_heads.inference.drafters.base import Builder
from draft_heads.inference.drafters.text.base import TextDrafter, check_positive, refuse_path
from draft_heads.inference.drafters.text.ngram_table import NgramTable
from draft_heads.inference.tree import DraftTree


class NgramDrafter(TextDrafter):
    """Step by step the most frequent continuation; stops where no level matches.

    As a tree (`branches` above 1), the likeliest continuations by all levels together (`NgramTable.shares`).
    """

    sources = ("ngram",)
    kind = "ngram"
    extends_paths = True
    options: ClassVar[dict[str, Any]] = {"n": 5, "k": 7, "branches": 1, "keep": 0}

    def __init__(
        self,
        device: torch.device | str = "cpu",
        max_nodes: int = 32,
        n: int = 5,
        k: int = 7,
        branches: int = 1,
        keep: int = 0,
    ) -> None:
        """n: tokens of the longest n-gram; k: most steps; branches: 1, a chain, or the most continuations of a node
        in a tree of up to `max_nodes`; keep: 1 keeps the counts from prompt to prompt."""
        check_positive(k=k, branches=branches, max_nodes=max_nodes)
        if keep not in (0, 1):
            raise ValueError(f"drafter option keep must be 0 or 1; got {keep}; leave it out for the default")
        super().__init__(device, min(k, max_nodes) if branches == 1 else max_nodes, min(k, max_nodes))
        self.branches, self.keep = branches, bool(keep)
        self.table = NgramTable(n)

    @classmethod
    def from_options(cls, path: str, build: Builder, **options: int) -> NgramDrafter:
        """See `Drafter.from_options`."""
        refuse_path("ngram", path)
        return cls(build.target.device, **options)

    def start(self) -> None:
        """Forget the last text, unless its counts are kept."""
        self.table.start(self.keep)

    def read(self, tokens: list[int]) -> None:
        """Count them at every level."""
        self.table.extend(tokens)

    def propose(self) -> DraftTree:
        """See the class."""
        if self.branches > 1:
            return self._branching()
        return self.chain(self.table.chain(self.max_depth))

    def _branching(self) -> DraftTree:
        """The nodes of the highest shares, multiplied along the path."""
        table = self.table
        tokens: list[int] = []
        parents: list[int] = []
        scores: list[float] = []
        waiting: list[tuple[float, int, int, int, int]] = []  # −share, order, token, parent, depth
        contexts = [table.code]  # behind the text, and behind every node

        def follow(parent: int, reached: float, depth: int) -> None:
            shares = sorted(table.shares(contexts[parent + 1]).items(), key=lambda item: -item[1])
            for token, share in shares[: self.branches]:
                order = len(tokens) + len(waiting)
                heappush(waiting, (-reached * share, order, token, parent, depth + 1))

        follow(-1, 1.0, 0)
        while waiting and len(tokens) < self.max_nodes:
            reached, _, token, parent, depth = heappop(waiting)
            tokens.append(token)
            parents.append(parent)
            scores.append(math.log(-reached))
            contexts.append(table.after(contexts[parent + 1], token))
            if depth < self.max_depth:
                follow(len(tokens) - 1, -reached, depth)
        return self.tree(tokens, parents, scores)
