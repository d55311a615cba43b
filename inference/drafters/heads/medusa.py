"""Drafting with Medusa heads: K distributions from one hidden state, combined into the best tree."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from draft_heads.heads.medusa import MedusaHead
from draft_heads.inference.drafters.base import check_max_nodes, tempered
from draft_heads.inference.drafters.heads.base import HeadDrafter
from draft_heads.inference.drafters.heads.ctc_search import build_tree
from draft_heads.inference.drafters.heads.rank_paths import RankPaths
from draft_heads.inference.step import VerifiedStep
from draft_heads.inference.target.linear import prepare_for_drafting
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
    return RankPaths(levels, max_nodes, head.config.classes, head.offset_heads[0].vocabulary.weight.device)


class MedusaDrafter(HeadDrafter):
    """Keeps the target's hidden state of the last committed token."""

    kind = "medusa"
    options: ClassVar[dict[str, Any]] = {"tree": "best", "heads": 0}

    def __init__(
        self, head: MedusaHead, target: Target, max_nodes: int = 32, tree: str = "best", heads: int = 0
    ) -> None:
        """tree: `best`, or `raw` and `prefix`, which put the distributions through the CTC collapse as if each offset
        were a frame that is never blank (the CTC-drafter paper's Table 2: linear heads with CTC verification);
        heads: of the K heads, use the first so many; 0: all. Beside n-grams, which lengthen paths, few may do."""
        if tree not in TREES:
            raise ValueError(f"tree must be one of {', '.join(TREES)}; got {tree!r}")
        if not 0 <= heads <= head.config.heads:
            raise ValueError(f"heads is a number from 1 to the checkpoint's {head.config.heads}; got {heads}; 0: all")
        self.tree = tree
        self.on_device = tree != "raw"  # the collapsed trees of the published code are built on the host
        self.proposes_levels = tree == "best"
        self.head = prepare_for_drafting(head)
        self.max_nodes = check_max_nodes(max_nodes)
        self.max_depth = min(heads or head.config.heads, self.max_nodes)
        self._paths = rank_paths(head, self.max_nodes, heads)
        self._used = (heads or head.config.heads) if tree != "best" else self.max_depth  # heads that are computed
        self._last: Tensor | None = None  # h_n, [H]

    def begin(self, prompt: Tensor, capacity: int) -> None:
        """Nothing is kept from prompt to prompt."""
        self._last = None

    def observe(self, step: VerifiedStep) -> None:
        """Take the last committed token's hidden state."""
        aux_hidden = None if step.aux_hidden is None else step.aux_hidden[-1]
        self._last = self.head.target_states(step.hidden[-1], aux_hidden)

    def propose(self) -> DraftTree:
        """The best tree of at most `max_nodes` drafts."""
        log_probs, vocabulary = self._log_probs(), self.head.draft_vocab
        if self.tree == "best":
            return self._paths.best_tree(log_probs, vocabulary)
        never_blank = torch.nn.functional.pad(log_probs, (0, 1), value=-torch.inf)
        return build_tree(never_blank, self.max_nodes, self.tree, vocabulary=vocabulary)

    def propose_levels(self) -> Tensor:
        """[2, K, R] float64: of each level the `max_nodes` likeliest tokens, best first, and their log-probabilities.

        What a tree is made from, for whoever makes one of several drafters.
        """
        tokens, log_probs = self._paths.likeliest(self._log_probs(), self.head.draft_vocab)
        return torch.stack([tokens.double(), log_probs.double()])

    def _log_probs(self) -> Tensor:
        """[K, V] of the heads that are used."""
        assert self._last is not None, "observe the prefill before proposing"
        head = self.head
        return tempered(head.draft_log_probs(self._last, self._used), head.config.tree_temperature)
