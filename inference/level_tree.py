"""Trees grown level by level from heads that draft one offset after another (Medusa, Hydra, Chimera).

Shapes: W nodes expanded at a level, V vocabulary, M nodes of the tree.

The tree of M nodes with the highest accumulated log-probabilities: a child is never more probable than its parent, so
the best M of everything seen is prefix-closed, and a node outside of it can have no child inside.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from inference.tree import DraftTree

Expand = Callable[[int, Tensor, Tensor], Tensor]
"""(level, tokens [W], parents [W]) → [W, V] log-probabilities of what follows each node.

`level` counts from 1; `parents` are indices into the nodes expanded at the level before (level 0: the base token)."""


def grow_tree(first: Tensor, expand: Expand, max_nodes: int, levels: int) -> DraftTree:
    """The best `max_nodes` drafts behind the base token.

    first [V]: log-probabilities of what follows the base token; `expand` is called at most `levels − 1` times, each
    time with the nodes of one level that are among the best so far.
    """
    device = first.device
    tokens, parents, scores = [], [], []
    log_probs, reached = first[None], first.new_zeros(1)
    rows = torch.full((1,), -1, dtype=torch.long, device=device)  # index in the tree of every expanded node
    count = 0
    for level in range(1, levels + 1):
        total = (reached[:, None] + log_probs).flatten()
        best, index = total.topk(min(max_nodes, total.numel()))
        parent, token = index // first.numel(), index % first.numel()
        scores.append(best)
        tokens.append(token)
        parents.append(rows[parent])
        everything = torch.cat(scores)
        if level == levels:
            break
        kept = _best(everything, max_nodes)[count:]
        if not bool(kept.any()):
            break
        log_probs, reached = expand(level, token[kept], parent[kept]), best[kept]
        rows = count + kept.nonzero()[:, 0]
        count += len(token)
    tree = DraftTree.build(torch.cat(tokens), torch.cat(parents), torch.cat(scores))
    return tree.select(_best(tree.log_probs, max_nodes))


def _best(scores: Tensor, count: int) -> Tensor:
    """[N] bool, the `count` highest scores; of equals the earlier one, so that a parent goes before its child."""
    keep = torch.zeros_like(scores, dtype=torch.bool)
    return keep.index_fill(0, scores.argsort(descending=True, stable=True)[:count], True)
