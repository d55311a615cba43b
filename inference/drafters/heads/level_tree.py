"""Trees grown level by level from heads that draft one offset after another (Hydra, Chimera, EAGLE-3).

Shapes: B texts, W nodes expanded at a level, V vocabulary, M nodes of a tree.

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
from draft_heads.heads.windows import rows_at
from draft_heads.inference.drafters.heads.base import BlockCache, HeadOptions
from draft_heads.inference.target.host_sync import host_sync_allowed
from draft_heads.inference.tree import DraftTree, kept_parents

Expand = Callable[[int, Tensor, Tensor], Tensor]
"""(level, tokens [B, W], parents [B, W]) → [B, W, V] log-probabilities of what follows each node.

`level` counts from 1; `parents` are indices into the nodes expanded at the level before (level 0: the base token)."""


@dataclass(frozen=True)
class LevelTreeOptions(HeadOptions):
    tree: str = option("best", "the most probable nodes, or the most probable path alone", choices=("best", "chain"))


def grow_tree(
    first: Tensor, expand: Expand, max_nodes: int, levels: int, vocabulary: Tensor | None = None, chain: bool = False
) -> DraftTree:
    """The best `max_nodes` drafts after each base token.

    first [B, V]: log-probabilities of what follows the base token; `expand` is called at most `levels − 1` times, each
    time with the best nodes of one level; where host reads are allowed, only those still among the best of all of
    some text.
    A node of depth d brings d − 1 ancestors along, so of that depth no more than `max_nodes − d + 1` can be in.
    vocabulary [V]: the token of each column of the log-probabilities; None: the column is the token.
    chain: the most probable token after each other instead, as most servers draft.
    """
    tokens, parents, scores = [], [], []
    above, count = -1, 0  # index in the tree of the first expanded node of the level above, and of this level
    width = 1 if chain else max_nodes
    best, token = first.topk(min(width, first.shape[1]))
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
            of_level = best_indices(torch.cat(scores, dim=1), max_nodes) >= count
            kept = int(of_level.sum(1).amax())  # the level is sorted: its first ones
            if not kept:
                break
            best, token, parent = best[:, :kept], token[:, :kept], parent[:, :kept]
        elif token.shape[1] == max_nodes - level + 1:  # one fewer of the next depth: the last here can have no child
            best, token, parent = best[:, :-1], token[:, :-1], parent[:, :-1]
        above, count = count, count + tokens[-1].shape[1]
        width = 1 if chain else max_nodes - level
        best, parent, token = best_children(best, expand(level, token, parent), width)
    drafts, above_them, every = (torch.cat(of_levels, dim=1) for of_levels in (tokens, parents, scores))
    order = best_indices(every, max_nodes)
    return DraftTree.build(drafts.gather(1, order), kept_parents(above_them, order), every.gather(1, order))


def best_children(reached: Tensor, log_probs: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """The `count` best of all children: their accumulated log-probabilities, best first, their parents and tokens.

    reached [B, W] is what the parents have accumulated, log_probs [B, W, V] what follows each. No parent has more than
    `count` children among the best, which are found first: a search over W·count instead of W·V.
    """
    own, token = log_probs.topk(min(count, log_probs.shape[-1]))
    total = (reached[..., None] + own).flatten(1)
    best, index = total.topk(min(count, total.shape[1]))
    return best, index // own.shape[-1], token.flatten(1).gather(1, index)


def best_indices(scores: Tensor, count: int) -> Tensor:
    """[B, count], ascending indices of the highest of `scores [B, N]`; of equals the earlier, so a parent goes before
    its child.

    float32 score and index are packed into one integer, so `topk` has no ties; a stable sort takes ten times as long.
    """
    count = min(count, scores.shape[1])
    bits = scores.float().view(torch.int32).long()
    ranks = torch.where(bits < 0, -(bits + 2**31), bits)  # integers in the order of the numbers, both zeros alike
    highest = (ranks << 32) - torch.arange(scores.shape[1], device=scores.device)
    return highest.topk(count, sorted=False).indices.topk(count, largest=False).values


class LevelAttention:
    """Attention of draft trees grown level by level over a cached context that every node sees.

    The first `length` rows of the cache ([B] int64, on the device) are the context; the drafted nodes' own keys and
    values are written after it, so it must have room for `most` of them. Call `enter` with each level's parents, then
    use the object as `Attend`. Masks are what is added to scores, 0 or −inf, made for all levels at once.
    """

    def __init__(self, cache: BlockCache, length: Tensor, heads: int, most: int) -> None:
        """heads: N, of the queries."""
        self._cache = cache
        index, shared = cache.index(), cache.keys.shape[1]
        self._places = index[:most] + length[:, None]
        sees = (index < length[:, None, None]) | (index == self._places[..., None])
        self._own = cache.keys.new_full(sees.shape, -torch.inf).masked_fill_(sees, 0)  # the context and itself
        self._repeat = heads // shared
        self._mask: Tensor  # [B, N/G, W, C'] of the level
        self._drafted, self._level = 0, slice(0)

    def enter(self, parents: Tensor) -> None:
        """A new level: node w hangs under `parents[:, w]`, an index into the level before; any value at the root."""
        self._level = slice(self._drafted, self._drafted + parents.shape[1])
        own = self._own[:, None, self._level].expand(-1, self._repeat, -1, -1)
        self._mask = torch.maximum(self._of_parents(parents), own) if self._drafted else own
        self._drafted += parents.shape[1]

    def _of_parents(self, parents: Tensor) -> Tensor:
        """[B, N/G, W, C'], the rows of the last level's mask at `parents [B, W]`."""
        if len(parents) == 1:
            return self._mask.index_select(2, parents[0])
        rows = parents.repeat_interleave(self._repeat, dim=0)
        return rows_at(self._mask.flatten(0, 1), rows).unflatten(0, self._mask.shape[:2])

    def __call__(self, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        self._cache.write(self._places[:, self._level], keys, values)
        return folded_attention(queries, self._cache.keys, self._cache.values, self._mask)
