"""Trees grown level by level from heads that draft one offset after another (Hydra, Chimera).

Shapes: W nodes expanded at a level, V vocabulary, M nodes of the tree.

The tree of M nodes with the highest accumulated log-probabilities: a child is never more probable than its parent, so
the best M of everything seen is prefix-closed, and a node outside of it can have no child inside.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from draft_heads.configs.options import option
from draft_heads.heads.block import folded_attention
from draft_heads.inference.drafters.heads.base import BlockCache, HeadOptions
from draft_heads.inference.target.compiled import host_sync_allowed
from draft_heads.inference.tree import DraftTree, kept_parents

Expand = Callable[[int, Tensor, Tensor], Tensor]
"""(level, tokens [W], parents [W]) → [W, V] log-probabilities of what follows each node.

`level` counts from 1; `parents` are indices into the nodes expanded at the level before (level 0: the base token)."""


@dataclass(frozen=True)
class LevelTreeOptions(HeadOptions):
    tree: str = option("best", "the most probable nodes, or the most probable path alone", choices=("best", "chain"))


def grow_tree(
    first: Tensor, expand: Expand, max_nodes: int, levels: int, vocabulary: Tensor | None = None, chain: bool = False
) -> DraftTree:
    """The best `max_nodes` drafts after the base token.

    first [V]: log-probabilities of what follows the base token; `expand` is called at most `levels − 1` times, each
    time with the best nodes of one level; where host reads are allowed, only those still among the best of all.
    A node of depth d brings d − 1 ancestors along, so of that depth no more than `max_nodes − d + 1` can be in.
    vocabulary [V]: the token of each column of the log-probabilities; None: the column is the token.
    chain: the most probable token after each other instead, as most servers draft.
    """
    tokens, parents, scores = [], [], []
    above, count = -1, 0  # index in the tree of the first expanded node of the level above, and of this level
    width = 1 if chain else max_nodes
    best, token = first.topk(min(width, len(first)))
    parent = torch.zeros_like(token)
    for level in range(1, min(levels, max_nodes) + 1):
        if vocabulary is not None:
            token = vocabulary[token]
        scores.append(best)
        tokens.append(token)
        parents.append(parent + above)
        if level in (levels, max_nodes):
            break
        if chain:
            pass
        elif host_sync_allowed(first.device):
            kept = (best_indices(torch.cat(scores), max_nodes) >= count).sum()  # the level is sorted: its first ones
            if not kept:
                break
            best, token, parent = best[:kept], token[:kept], parent[:kept]
        elif len(token) == max_nodes - level + 1:  # one fewer of the next depth: the last here can have no child
            best, token, parent = best[:-1], token[:-1], parent[:-1]
        above, count = count, count + len(tokens[-1])
        width = 1 if chain else max_nodes - level
        best, parent, token = best_children(best, expand(level, token, parent), width)
    every = torch.cat(scores)
    order = best_indices(every, max_nodes)
    return DraftTree.build(torch.cat(tokens)[order], kept_parents(torch.cat(parents), order), every[order])


def best_children(reached: Tensor, log_probs: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """The `count` best of all children: their accumulated log-probabilities, best first, their parents and tokens.

    reached [W] is what the parents have accumulated, log_probs [W, V] what follows each. No parent has more than
    `count` children among the best, which are found first: a search over W·count instead of W·V.
    """
    own, token = log_probs.topk(min(count, log_probs.shape[1]))
    total = (reached[:, None] + own).flatten()
    best, index = total.topk(min(count, len(total)))
    return best, index // own.shape[1], token.flatten()[index]


def best_indices(scores: Tensor, count: int) -> Tensor:
    """Ascending indices of the `count` highest scores; of equals the earlier, so a parent goes before its child.

    float32 score and index are packed into one integer, so `topk` has no ties; a stable sort takes ten times as long.
    """
    count = min(count, len(scores))
    bits = scores.float().view(torch.int32).long()
    ranks = torch.where(bits < 0, -(bits + 2**31), bits)  # integers in the order of the numbers, both zeros alike
    highest = (ranks << 32) - torch.arange(len(scores), device=scores.device)
    return highest.topk(count, sorted=False).indices.topk(count, largest=False).values


class LevelAttention:
    """Attention of a draft tree grown level by level over a cached context that every node sees.

    The first `length` slots of the cache ([] int64, on the device) are the context; the drafted nodes' own keys and
    values are written after it, so it must have room for `most` of them. Call `enter` with each level's parents, then
    use the object as `Attend`. Masks are what is added to scores, 0 or −inf, made for all levels at once.
    """

    def __init__(self, cache: BlockCache, length: Tensor, heads: int, most: int) -> None:
        """heads: N, of the queries."""
        self._cache = cache
        shared, slots = cache.keys.shape[1:3]
        index = torch.arange(slots, device=length.device)
        self._slots = index[:most] + length
        sees = (index < length) | (index == self._slots[:, None])
        self._own = cache.keys.new_full(sees.shape, -torch.inf).masked_fill_(sees, 0)  # the context and itself
        self._repeat = heads // shared
        self._mask: Tensor  # [N/G, W, C] of the level
        self._drafted, self._level = 0, slice(0)

    def enter(self, parents: Tensor) -> None:
        """A new level: node w hangs under `parents[w]`, an index into the level before; any value at the root."""
        self._level = slice(self._drafted, self._drafted + len(parents))
        own = self._own[self._level].expand(self._repeat, -1, -1)
        self._mask = torch.maximum(self._mask.index_select(1, parents), own) if self._drafted else own
        self._drafted += len(parents)

    def __call__(self, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        self._cache.write(self._slots[self._level], keys, values)
        return folded_attention(queries, self._cache.keys, self._cache.values, self._mask)
