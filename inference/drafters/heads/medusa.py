"""Drafting with Medusa heads: K distributions from one hidden state, combined into the best tree."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from draft_heads.heads.medusa import MedusaHead
from draft_heads.inference.drafters.base import Drafter, VerifiedStep, check_max_nodes, tempered
from draft_heads.inference.drafters.heads.ctc_search import build_tree
from draft_heads.inference.drafters.heads.rank_paths import RankPaths
from draft_heads.inference.int8_weights import DraftingHead
from draft_heads.inference.target.target import Target
from draft_heads.inference.tree import DraftTree

TREES = ("best", "raw", "prefix")


def draft_tree(head: MedusaHead, last: Tensor, paths: RankPaths) -> DraftTree:
    """The most probable combinations of K distributions that do not depend on what is drafted, from h_n `last [H]`."""
    log_probs = tempered(head.draft_log_probs(last, paths.depth), head.config.tree_temperature)
    return paths.best_tree(log_probs, head.draft_vocab)


def rank_paths(head: MedusaHead, max_nodes: int, heads: int = 0) -> RankPaths:
    """The list that trees of the first `heads` heads are chosen from; 0: of all."""
    levels = min(heads or head.config.heads, max_nodes)
    return RankPaths(levels, max_nodes, head.config.classes, head.each[0].vocabulary.weight.device)


class MedusaDrafter(Drafter):
    """Keeps the target's hidden state of the last committed token."""

    options: ClassVar[dict[str, Any]] = {"tree": "best", "heads": 0, "int8": 1}

    def __init__(
        self, head: MedusaHead, target: Target, max_nodes: int = 32, tree: str = "best", heads: int = 0, int8: int = 1
    ) -> None:
        """tree: `best`, or `raw` and `prefix`, which put the distributions through the CTC collapse as if each offset
        were a frame that is never blank (the CTC-drafter paper's Table 2: linear heads with CTC verification);
        heads: of the K heads, use the first so many; 0: all. Beside n-grams, which lengthen paths, few may do;
        int8: 1 drafts with weights of eight bits where that is faster, in compiled programs on a CPU."""
        if tree not in TREES:
            raise ValueError(f"tree must be one of {', '.join(TREES)}; got {tree!r}")
        if not 0 <= heads <= head.config.heads:
            raise ValueError(f"heads is a number from 1 to the checkpoint's {head.config.heads}; got {heads}; 0: all")
        self.tree = tree
        self.proposes_levels = tree == "best"
        self.drafting = DraftingHead(head, int8)
        self.max_nodes = check_max_nodes(max_nodes)
        self.max_depth = min(heads or head.config.heads, self.max_nodes)
        self._paths = rank_paths(head, self.max_nodes, heads)
        self._used = (heads or head.config.heads) if tree != "best" else self.max_depth  # heads that are computed
        self._last: Tensor | None = None  # h_n, [H]

    @property
    def on_device(self) -> bool:
        """The collapsed trees of the published code are built on the host."""
        return self.tree != "raw"

    def prepare(self) -> None:
        """See `Drafter.prepare`: the weights in eight bits."""
        self.drafting.prepare()

    def begin(self, prompt: Tensor, capacity: int) -> None:
        """Nothing is kept from prompt to prompt."""
        self._last = None

    def observe(self, step: VerifiedStep) -> None:
        """Take the last committed token's hidden state."""
        self._last = step.hidden[-1].to(self.drafting.head.dtype)

    def propose(self) -> DraftTree:
        """The best tree of at most `max_nodes` drafts."""
        log_probs, vocabulary = self._log_probs(), self.drafting.head.draft_vocab
        if self.tree == "best":
            return self._paths.best_tree(log_probs, vocabulary)
        never_blank = torch.nn.functional.pad(log_probs, (0, 1), value=-torch.inf)
        return build_tree(never_blank, self.max_nodes, self.tree, vocabulary=vocabulary)

    def propose_levels(self) -> Tensor:
        """[2, K, R] float64: of each level the `max_nodes` likeliest tokens, best first, and their log-probabilities.

        What a tree is made from, for whoever makes one of several drafters.
        """
        tokens, log_probs = self._paths.likeliest(self._log_probs(), self.drafting.head.draft_vocab)
        return torch.stack([tokens.double(), log_probs.double()])

    def _log_probs(self) -> Tensor:
        """[K, V] of the heads that are used."""
        assert self._last is not None, "observe the prefill before proposing"
        head = self.drafting.head
        return tempered(head.draft_log_probs(self._last, self._used), head.config.tree_temperature)
