"""Lookahead decoding (Fu et al., https://arxiv.org/abs/2402.02057): the target drafts for itself, by Jacobi iteration.

The forward includes a window of N−1 rows and W columns of guessed tokens: row 0 is a chain below the base token, cell
(r, w) a child of cell (r−1, w). The target's choices at the last row complete W N-grams for the pool and become the
last row, as row 0 is dropped. N-grams that begin with the base token are verified in the same forward.

Worked example (N = 3, W = 2; rows of the target forward after base b, which is row 0)::

    cell    (0,0) (0,1) (1,0) (1,1)        parent row  0(b)  1     1     2
    row      1     2     3     4           depth       1     2     2     3
    sees rows  0,1   0,1,2   0,1,3   0,1,2,4
"""

from __future__ import annotations

import random
from typing import Any, ClassVar

import torch
from torch import Tensor

from draft_heads.configs.options import check_whole
from draft_heads.inference.drafters.text.base import TextDrafter, check_positive, committed, target_choices
from draft_heads.inference.drafters.text.phrase_pool import PhrasePool
from draft_heads.inference.step import VerifiedStep
from draft_heads.inference.tree import DraftTree, TokenTrie


class LookaheadDrafter(TextDrafter):
    """Verifies the pool's newest phrases after the base token while the window generates new ones."""

    sources = ("lookahead",)
    text_only = False
    reads_choices = True
    kind = "lookahead"
    options: ClassVar[dict[str, Any]] = {"n": 5, "w": 15, "g": 0, "max_nodes": 0}

    def __init__(
        self,
        device: torch.device | str = "cpu",
        max_nodes: int = 0,
        n: int = 5,
        w: int = 15,
        g: int = 0,
        pool: PhrasePool | None = None,
    ) -> None:
        """n: tokens of an N-gram; w: columns of the window; g: N-grams verified a step, 0: as many as columns;
        max_nodes: shrinks window and N-grams in proportion, 0: no limit; pool: a shared pool, which its owner clears;
        None: its own pool, cleared for each prompt."""
        check_whole("drafter option n", n, least=2, remedy="5 is usual")
        check_positive(w=w)
        for name, value in (("g", g), ("max_nodes", max_nodes)):
            check_whole(f"drafter option {name}", value, remedy="leave it out for the default")
        if g < 0 or max_nodes < 0:
            raise ValueError(f"drafter options g and max_nodes must not be negative; got {g} and {max_nodes}")
        self.width, self.phrases = fit_window(n, w, g or w, max_nodes)
        super().__init__(device, (n - 1) * (self.width + self.phrases), self.width + n - 2)
        self.n = n
        self.pool = PhrasePool(n, g or w) if pool is None else pool
        self._owns_pool = pool is None
        self._rows: list[list[int]] = []  # of the window, each of `width` tokens
        self._base = 0
        self._proposed: DraftTree | None = None
        cells = range((n - 1) * self.width)
        self._cell_parents = [cell - (1 if cell < self.width else self.width) for cell in cells]

    def begin(self, prompt: Tensor, capacity: int) -> None:
        """Forget the last text's phrases; fill the window's first row with random prompt tokens."""
        if self._owns_pool:
            self.pool.clear()
        self._rows = [random.Random(0).choices(prompt.tolist(), k=self.width)]
        self._proposed = None

    def rewind(self, text: VerifiedStep, capacity: int) -> None:
        self._proposed = None  # phrases and window are as useful for another text
        self.observe(text)

    def observe(self, step: VerifiedStep) -> None:
        """Fill the window row by row; once it is full, every step gives N-grams."""
        choices = target_choices(step, self._proposed)
        if choices is not None:
            last = 1 + (len(self._rows) - 1) * self.width
            row = choices[last : last + self.width]
            if len(self._rows) == self.n - 1:
                for phrase in zip(*self._rows, row):
                    self.pool.add(phrase)
                del self._rows[0]
            self._rows.append(row)
        self._base = committed(step)[-1]

    def propose(self) -> DraftTree:
        """The window's cells, row by row, and after them the phrases merged into a tree."""
        trie = TokenTrie(self.phrases * (self.n - 1))
        for phrase in self.pool.newest(self._base, self.phrases):
            trie.add(phrase[1:])
        cells = len(self._rows) * self.width
        tokens = [token for row in self._rows for token in row] + trie.tokens
        below = [parent + cells if parent >= 0 else -1 for parent in trie.parents]
        tree = self.tree(tokens, self._cell_parents[:cells] + below, [0.0] * len(tokens))
        tree.candidate[:cells] = False
        self._proposed = tree
        return tree


def fit_window(n: int, w: int, g: int, max_nodes: int) -> tuple[int, int]:
    """(columns, phrases), each of n − 1 nodes, within a node budget (0: no limit); ValueError for too small a budget.

    n = 5, w = g = 15 need 120 nodes; 32 nodes allow 4 columns and 4 phrases.
    """
    fit = max_nodes // (n - 1)
    if not max_nodes or w + g <= fit:
        return w, g
    if fit < 2:
        raise ValueError(
            f"lookahead with n={n} needs at least {2 * (n - 1)} nodes (a column of the window, a phrase); got "
            f"max_nodes={max_nodes}; leave it out for no limit"
        )
    columns = min(max(1, fit * w // (w + g)), fit - 1)
    return columns, fit - columns
