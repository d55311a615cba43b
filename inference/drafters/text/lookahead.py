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
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from draft_heads.configs.options import option
from draft_heads.inference.drafters.options import DrafterOptions
from draft_heads.inference.drafters.text.base import TextDrafter, committed_tokens, target_choices
from draft_heads.inference.drafters.text.phrase_pool import PhrasePool
from draft_heads.inference.step import VerifiedStep
from draft_heads.inference.tree import DraftTree, TokenTrie


@dataclass(frozen=True)
class LookaheadOptions(DrafterOptions):
    n: int = option(5, "tokens of an n-gram", least=2)
    w: int = option(15, "columns of the window", least=1)
    g: int = option(0, "n-grams verified per step (0: as many as columns)", least=0)
    max_nodes: int = option(
        0, "shrinks window and n-grams in proportion (0: no limit; default in a hybrid: --max_nodes)", least=0
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self.fit_window()

    def fit_window(self) -> tuple[int, int]:
        """(columns, phrases), each of n − 1 nodes, within the node budget; ValueError for too small a budget.

        n = 5, w = g = 15 need 120 nodes; 32 nodes allow 4 columns and 4 phrases.
        """
        columns, phrases = self.w, self.g or self.w
        fit = self.max_nodes // (self.n - 1)
        if not self.max_nodes or columns + phrases <= fit:
            return columns, phrases
        if fit < 2:
            raise ValueError(
                f"lookahead with n={self.n} needs at least {2 * (self.n - 1)} nodes (a column of the window, a "
                f"phrase); got max_nodes={self.max_nodes}; raise it, in a hybrid --max_nodes, or lower n"
            )
        columns = min(max(1, fit * columns // (columns + phrases)), fit - 1)
        return columns, fit - columns


class LookaheadDrafter(TextDrafter):
    """Verifies the pool's newest phrases after the base token while the window generates new ones."""

    sources = ("lookahead",)
    text_only = False
    reads_choices = True
    kind = "lookahead"
    title = "n-grams from a window in the target's own forward"
    options_type = LookaheadOptions
    options: LookaheadOptions

    def __init__(self, device: torch.device | str = "cpu", pool: PhrasePool | None = None, **options: Any) -> None:
        """pool: a shared pool, which its owner clears; None: its own pool, cleared for each prompt; options: see
        `LookaheadOptions`."""
        self.options = chosen = LookaheadOptions(**options)
        self.n = n = chosen.n
        self.width, self.phrases = chosen.fit_window()
        super().__init__(device, (n - 1) * (self.width + self.phrases), self.width + n - 2)
        self.window_nodes = (n - 1) * self.width
        self.pool = PhrasePool(n, chosen.g or chosen.w) if pool is None else pool
        self._owns_pool = pool is None
        self._rows: list[list[int]] = []  # of the window, each of `width` tokens
        self._base = 0
        self._proposed: DraftTree | None = None
        cells = range((n - 1) * self.width)
        self._cell_parents = [cell - (1 if cell < self.width else self.width) for cell in cells]

    @property
    def deepest_draft(self) -> int:
        return self.n - 1  # a phrase without its first token, which is the base token

    def begin(self, slot: int, prompt: Tensor, capacity: int) -> None:
        """Forget the last text's phrases; fill the window's first row with random prompt tokens."""
        if self._owns_pool:
            self.pool.clear()
        self._rows = [random.Random(0).choices(prompt.tolist(), k=self.width)]
        self._proposed = None

    def rewind(self, text: VerifiedStep, capacity: int) -> None:
        self._proposed = None  # phrases and window are as useful for another text
        self.observe(text)

    def observe(self, step: VerifiedStep, slot: int | None = None) -> None:
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
        self._base = committed_tokens(step)[-1]

    def propose(self) -> DraftTree:
        """The window's cells, row by row, and after them the phrases merged into a tree."""
        trie = TokenTrie(self.phrases * (self.n - 1))
        for phrase in self.pool.newest(self._base, self.phrases):
            trie.add(phrase[1:])
        cells = len(self._rows) * self.width
        tokens = [token for row in self._rows for token in row] + trie.tokens
        below = [parent + cells if parent >= 0 else -1 for parent in trie.parents]
        tree = self.tree(tokens, self._cell_parents[:cells] + below, [0.0] * len(tokens))
        tree.candidate[:, :cells] = False
        self._proposed = tree
        return tree
