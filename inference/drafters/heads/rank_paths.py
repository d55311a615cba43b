"""The best tree of distributions that do not depend on what is drafted (Medusa): a choice from a fixed list.

Shapes: K levels, V vocabulary, R most ranks of a level, C paths of the list, M nodes of the tree.

A path takes at each level the token of some rank, 1 being the most probable. At least as probable are all paths of its
length with no higher rank at any level (Π ranks of them, itself included) and its ancestors. So no best tree of M nodes
needs a path with `Π ranks + length − 1 > M`, whatever the probabilities are.
"""

from __future__ import annotations

import torch
from torch import Tensor

from draft_heads.inference.drafters.heads.level_tree import best_indices
from draft_heads.inference.tree import DraftTree


class RankPaths:
    """The list for trees of M nodes, shorter paths first.

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
        """[K, R] of each level of `log_probs [K, V]` the likeliest tokens, best first, and their log-probabilities."""
        top, columns = log_probs.topk(self.most)
        return columns if vocabulary is None else vocabulary[columns], top

    def best_tree(self, log_probs: Tensor, vocabulary: Tensor | None = None) -> DraftTree:
        """The best `max_nodes` drafts of `log_probs [K, V]`; vocabulary [V]: the token of each column, None: itself."""
        tokens, top = self.likeliest(log_probs, vocabulary)
        padded = torch.nn.functional.pad(top, (0, 1))  # 0 beyond a path's end
        scores = padded.gather(1, self.ranks.T).sum(0)
        tree = DraftTree.build(tokens[self.levels, self.last], self.parents, scores)
        return tree.take(best_indices(scores, self.max_nodes))
