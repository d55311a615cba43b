"""Drafting with Medusa heads: K distributions from one hidden state, combined into the best tree."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from heads.medusa import MedusaHead
from inference.ctc_search import build_tree
from inference.drafters.base import Drafter, VerifiedStep, check_max_nodes, tempered
from inference.rank_paths import RankPaths
from inference.target import Target
from inference.tree import DraftTree

TREES = ("best", "raw", "prefix")


def draft_tree(
    head: MedusaHead, last: Tensor, paths: RankPaths, max_nodes: int, tree: str = "best", heads: int = 0
) -> DraftTree:
    """A tree of K distributions that do not depend on what is drafted, from h_n `last [H]`.

    `best`: the most probable combinations as they are, of the levels that `paths` has. `raw` and `prefix` put them
    through the CTC collapse as if each offset were a frame that is never blank (the CTC-drafter paper's Table 2: linear
    heads with CTC verification).
    """
    offsets = paths.depth if tree == "best" else heads or None
    log_probs = tempered(head.draft_log_probs(last, offsets), head.config.tree_temperature)
    if tree == "best":
        return paths.best_tree(log_probs, head.draft_vocab)
    never_blank = torch.nn.functional.pad(log_probs, (0, 1), value=-torch.inf)
    return build_tree(never_blank, max_nodes, tree, vocabulary=head.draft_vocab)


def rank_paths(head: MedusaHead, max_nodes: int, heads: int = 0) -> RankPaths:
    """The list that trees of the first `heads` heads are chosen from; 0: of all."""
    levels = min(heads or head.config.heads, max_nodes)
    return RankPaths(levels, max_nodes, head.config.classes, head.each[0].vocabulary.weight.device)


class MedusaDrafter(Drafter):
    """Keeps the target's hidden state of the last committed token."""

    options: ClassVar[dict[str, Any]] = {"tree": "best", "heads": 0}

    def __init__(
        self, head: MedusaHead, target: Target, max_nodes: int = 32, tree: str = "best", heads: int = 0
    ) -> None:
        """heads: of the K heads, use the first so many; 0: all. Beside n-grams, which lengthen paths, few may do."""
        if tree not in TREES:
            raise ValueError(f"tree must be one of {', '.join(TREES)}; got {tree!r}")
        if not 0 <= heads <= head.config.heads:
            raise ValueError(f"heads is a number from 1 to the checkpoint's {head.config.heads}; got {heads}; 0: all")
        self.tree, self.heads = tree, heads
        self.head = head.eval()
        self.max_nodes = check_max_nodes(max_nodes)
        self.max_depth = min(heads or head.config.heads, self.max_nodes)
        self._paths = rank_paths(head, self.max_nodes, heads)
        self._last: Tensor | None = None  # h_n, [H]

    @property
    def on_device(self) -> bool:
        """The collapsed trees of the published code are built on the host."""
        return self.tree != "raw"

    def begin(self, prompt: Tensor, capacity: int) -> None:
        """Nothing is kept from prompt to prompt."""
        self._last = None

    def observe(self, step: VerifiedStep) -> None:
        """Take the last committed token's hidden state."""
        self._last = step.hidden[-1].to(self.head.dtype)

    def propose(self) -> DraftTree:
        """The best tree of at most `max_nodes` drafts."""
        assert self._last is not None, "observe the prefill before proposing"
        return draft_tree(self.head, self._last, self._paths, self.max_nodes, self.tree, self.heads)
