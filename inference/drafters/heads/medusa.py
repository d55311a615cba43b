"""Drafting with Medusa heads: K distributions from one hidden state, combined into the best tree.

Shapes: B texts, K levels, V vocabulary, R most ranks of a level, C paths of a list, M nodes of the tree.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from draft_heads.configs.options import option
from draft_heads.heads.base import TargetView
from draft_heads.heads.medusa import MedusaHead
from draft_heads.inference.drafters.base import tempered
from draft_heads.inference.drafters.heads.base import HeadDrafter, HeadOptions
from draft_heads.inference.drafters.heads.ctc_search import build_tree
from draft_heads.inference.drafters.heads.level_tree import best_indices
from draft_heads.inference.step import VerifiedStep
from draft_heads.inference.tree import DraftTree


class RankPaths:
    """The paths that a best tree of M nodes may have, shorter ones first; probabilities choose among them.

    A path takes at each level the token of some rank, 1 being the most probable. At least as probable are all paths of
    its length with no higher rank at any level (Π ranks of them, itself included) and its ancestors. So no best tree
    needs a path with `Π ranks + length − 1 > M`, whatever the probabilities are.

    ranks    [C, K] int64 from 0, R beyond a path's end
    levels   [C] int64, a path's last level from 0
    last     [C] int64, its rank there
    parents  [C] int64, the path without its last level; −1 for none
    """

    def __init__(self, levels: int, max_nodes: int, classes: int, device: torch.device | str = "cpu") -> None:
        """levels: K; classes: V, the highest rank."""
        self.depth, self.max_nodes = levels, max_nodes
        self.most = min(max_nodes, classes)  # R
        paths: list[tuple[int, ...]] = []
        parents: list[int] = []
        before: list[tuple[tuple[int, ...], int, int]] = [((), -1, 1)]  # path, its index in the list, its Π ranks
        start = 0
        for length in range(1, levels + 1):
            found = [
                ((*path, rank), place, product * rank)
                for path, place, product in before
                for rank in range(1, min((max_nodes - length + 1) // product, classes) + 1)
            ]
            paths += [path for path, _, _ in found]
            parents += [place for _, place, _ in found]
            before = [(path, start + index, product) for index, (path, _, product) in enumerate(found)]
            start += len(found)
        filled = [[rank - 1 for rank in path] + [self.most] * (levels - len(path)) for path in paths]
        self.ranks = torch.tensor(filled, device=device)
        self.levels = torch.tensor([len(path) - 1 for path in paths], device=device)
        self.last = torch.tensor([path[-1] - 1 for path in paths], device=device)
        self.parents = torch.tensor(parents, device=device)

    def likeliest(self, log_probs: Tensor, vocabulary: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Of each level of `log_probs [B, K, V]` the R likeliest tokens, best first, and their log-probabilities."""
        top, columns = log_probs.topk(self.most)
        return columns if vocabulary is None else vocabulary[columns], top

    def best_tree(self, log_probs: Tensor, vocabulary: Tensor | None = None) -> DraftTree:
        """The best `max_nodes` drafts of `log_probs [B, K, V]`; vocabulary [V]: each column's token, None: itself."""
        tokens, top = self.likeliest(log_probs, vocabulary)
        padded = torch.nn.functional.pad(top, (0, 1))  # 0 beyond a path's end
        scores = padded.gather(2, self.ranks.T.expand(len(padded), -1, -1)).sum(1)  # [B, C]
        tree = DraftTree.build(tokens[:, self.levels, self.last], self.parents.expand_as(scores), scores)
        return tree.take(best_indices(scores, self.max_nodes))


@dataclass(frozen=True)
class MedusaOptions(HeadOptions):
    """Trees `raw` and `prefix` put the distributions through the CTC collapse as if each offset were a frame that is
    never blank (the CTC-drafter paper's Table 2: linear heads with CTC verification). Beside n-grams, which lengthen
    paths, few heads may do."""

    tree: str = option("best", "how K distributions become a tree", choices=("best", "chain", "raw", "prefix"))
    heads: int = option(0, "use the first so many heads (0: all)", least=0)


class MedusaDrafter(HeadDrafter):
    """Keeps the target's hidden state of the last committed token."""

    kind = "medusa"
    title = "the best combinations of K independent distributions"
    options_type = MedusaOptions

    def __init__(self, head: MedusaHead, view: TargetView, max_nodes: int = 32, slots: int = 1, **options: Any) -> None:
        """options: see `MedusaOptions`."""
        chosen = MedusaOptions(max_nodes=max_nodes, **options)
        tree, heads = chosen.tree, chosen.heads
        if heads > head.config.heads:
            raise ValueError(f"heads is a number from 1 to the checkpoint's {head.config.heads}; got {heads}; 0: all")
        super().__init__(head, view, chosen, slots, heads or head.config.heads)
        self.tree = tree
        self.on_device = tree != "raw"  # the collapsed trees of the published code are built on the host
        self.proposes_levels = tree == "best"
        self._paths = RankPaths(self.max_depth, self.max_nodes, head.config.classes, view.device)
        self._used = (heads or head.config.heads) if tree != "best" else self.max_depth  # heads that are computed

    def read(self, step: VerifiedStep, texts: slice) -> tuple[Tensor, ...]:
        """h_n [B, H]."""
        aux_hidden = None if step.aux_hidden is None else step.aux_hidden[:, -1]
        return (self.head.target_states(step.hidden[:, -1], aux_hidden),)

    def propose(self) -> DraftTree:
        log_probs, vocabulary = self._log_probs(), self.head.draft_vocab
        if self.tree == "best":
            return self._paths.best_tree(log_probs, vocabulary)
        if self.tree == "chain":
            best, tokens = log_probs[:, : self.max_depth].max(-1)
            tokens = tokens if vocabulary is None else vocabulary[tokens]
            parents = torch.arange(-1, tokens.shape[1] - 1, device=tokens.device).expand_as(tokens)
            return DraftTree.build(tokens, parents, best.cumsum(1))
        never_blank = torch.nn.functional.pad(log_probs, (0, 1), value=-torch.inf)
        return build_tree(never_blank, self.max_nodes, self.tree, vocabulary=vocabulary)

    def propose_levels(self) -> Tensor:
        """[B, 2, K, R] float64: the R likeliest tokens of each level, best first, and their log-probabilities."""
        tokens, log_probs = self._paths.likeliest(self._log_probs(), self.head.draft_vocab)
        return torch.stack([tokens.double(), log_probs.double()], dim=1)

    def _log_probs(self) -> Tensor:
        """[B, K, V] of the heads that are used."""
        head, (last,) = self.head, self.state
        return tempered(head.draft_log_probs(last, self._used), head.config.tree_temperature)
