"""Draft trees as flat tensors: what a drafter proposes and the target verifies in one forward.

Shapes: B texts, M nodes of each tree. Ancestors and depths follow from `parents`, without copying a value to the host.

Worked example, used throughout the tests. The base token `b` has children `x` and `y`; `x` has child `z`::

    index    0   1   2          row in the target forward   0(b)  1(x)  2(y)  3(z)
    tokens   x   y   z          depth                       0     1     1     2
    parents -1  -1   0          sees rows                   0     0,1   0,2   0,1,3
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True)
class DraftTree:
    """Candidate continuations of B texts' base tokens as trees in topological order (parents before children).

    tokens     [B, M] int64, the drafted token of each node
    parents    [B, M] int64, index of the parent node, -1 for children of the base token
    log_probs  [B, M] float, the drafter's log-probability of the path from the base token to the node
    source     [B, M] int64, which drafter proposed the node (index into `Drafter.sources`)
    candidate  [B, M] bool, False for rows that are computed and read back but never accepted

    Prefix-closed by construction; no two candidate siblings may share a token.
    """

    tokens: Tensor
    parents: Tensor
    log_probs: Tensor
    source: Tensor
    candidate: Tensor

    @classmethod
    def build(cls, tokens: Tensor, parents: Tensor, log_probs: Tensor | None = None) -> DraftTree:
        """Trees of candidates from one source; `log_probs` defaults to zeros."""
        if log_probs is None:
            log_probs = torch.zeros(tokens.shape, dtype=torch.float32, device=tokens.device)
        return cls(tokens, parents, log_probs, torch.zeros_like(tokens), torch.ones_like(tokens, dtype=torch.bool))

    @classmethod
    def of_lists(
        cls,
        tokens: Sequence[int],
        parents: Sequence[int],
        log_probs: Sequence[float],
        source: Sequence[int],
        device: torch.device,
    ) -> DraftTree:
        """One text's tree of candidates, built on the host."""
        if not tokens:
            return cls.empty(device)
        # from one buffer, in a third of the time that torch.tensor(list) takes, and one copy to a GPU
        values = array("q", tokens)
        for integers in (parents, source):
            values.extend(integers)
        values.frombytes(array("d", log_probs).tobytes())
        packed = torch.frombuffer(values, dtype=torch.long).view(4, 1, -1)
        if device.type != "cpu":
            packed = packed.pin_memory().to(device, non_blocking=True)
        token_ids, parent_ids, source_ids, scores = packed.unbind()
        candidate = torch.ones_like(token_ids, dtype=torch.bool)
        return cls(token_ids, parent_ids, scores.view(torch.float64).float(), source_ids, candidate)

    @classmethod
    def empty(cls, device: torch.device | str = "cpu", texts: int = 1) -> DraftTree:
        """No drafts: the step verifies the base tokens only, as the vanilla loop does."""
        none = torch.zeros(texts, 0, dtype=torch.long, device=device)
        return cls.build(none, none)

    def tensors(self) -> list[Tensor]:
        """Its five tensors."""
        return [self.tokens, self.parents, self.log_probs, self.source, self.candidate]

    def map(self, change: Callable[[Tensor], Tensor]) -> DraftTree:
        """The same tree with `change` applied to every tensor."""
        return DraftTree(*map(change, self.tensors()))

    @classmethod
    def stack(cls, trees: Sequence[DraftTree]) -> DraftTree:
        """The trees of all texts of `trees`, the smaller ones `padded` to the largest."""
        largest = max(map(len, trees))
        return cls(*map(torch.cat, zip(*(tree.padded(largest).tensors() for tree in trees))))

    def __len__(self) -> int:
        return self.tokens.shape[-1]

    def take(self, order: Tensor) -> DraftTree:
        """The nodes `order [B, K]` (indices, ascending), prefix-closed: the parent of a taken node is taken."""
        tokens, *rest = (x.gather(1, order) for x in (self.tokens, self.log_probs, self.source, self.candidate))
        return DraftTree(tokens, kept_parents(self.parents, order), *rest)

    def limit_depth(self, limit: Tensor | int, depth: Tensor) -> DraftTree:
        """The same nodes, of which those deeper than `limit` cannot be accepted; depth `[B, M]` of the nodes."""
        return replace(self, candidate=self.candidate & (depth <= limit))

    def padded(self, size: int) -> DraftTree:
        """Padded to `size` nodes with children of the base token that are never accepted."""
        missing = size - len(self)
        if missing <= 0:
            return self
        padding = self.tokens.new_zeros(len(self.tokens), missing)
        never = torch.full_like(padding, -torch.inf, dtype=self.log_probs.dtype)
        added = padding, padding - 1, never, padding, padding.bool()
        return DraftTree(*(torch.cat(both, dim=1) for both in zip(self.tensors(), added)))


def padded_nodes(nodes: int) -> int:
    """The size to which trees of at most `nodes` nodes are padded: 8, 16, 32, 64, then multiples of 64; 0 stays 0."""
    if nodes > 64:
        return -(-nodes // 64) * 64
    return nodes and max(8, 1 << (nodes - 1).bit_length())


def kept_parents(parents: Tensor, order: Tensor) -> Tensor:
    """[B, K] parents of the nodes `order [B, K]` (see `DraftTree.take`), as indices into `order`."""
    return torch.searchsorted(order, parents.gather(1, order), right=True) - 1


class TokenTrie:
    """A trie of token paths as lists of tokens and parents, with at most `most` nodes."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self._children: dict[tuple[int, int], int] = {}

    def add(self, path: Iterable[int], parent: int = -1) -> list[int]:
        """Insert a path below a node (−1: the base token); returns its nodes, fewer than tokens if the trie is full."""
        nodes = []
        for token in path:
            node = self._children.get((parent, token))
            if node is None:
                if len(self.tokens) == self.most:
                    break
                node = self._children[parent, token] = len(self.tokens)
                self.tokens.append(token)
                self.parents.append(parent)
            nodes.append(node)
            parent = node
        return nodes


def ancestor_rows(parents: Tensor, levels: int) -> Tensor:
    """[..., M+1, M+1] bool over forward rows (row 0 = base token): `out[i, j]` iff row i sees row j.

    In the worked example row 3 (z) sees rows 0, 1 and 3. `levels` bounds the tree's depth: each round doubles the
    distance covered, so ceil(log2(levels + 1)) small products suffice.
    """
    root = parents.new_zeros(*parents.shape[:-1], 1)
    parent_row = torch.cat([root, parents + 1], dim=-1)  # base token: its own parent
    index = torch.arange(parent_row.shape[-1], device=parents.device)
    sees = (index == index[:, None]) | (index == parent_row[..., None])
    for _ in range(max(levels, 1).bit_length()):
        sees = (sees.float() @ sees.float()) > 0
    return sees


def depths(sees: Tensor) -> Tensor:
    """[..., M+1] int64 depth of every forward row from `ancestor_rows`; the base token has depth 0."""
    return sees.sum(-1) - 1
