"""Acceptance: which path of a verified tree equals the target's own choices. Pure functions on tensors.

Shapes: M nodes, R = M+1 rows of the target forward (row 0 = base token); `...` stands for any batch dimensions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from draft_heads.configs.options import check_number
from draft_heads.inference.tree import DraftTree


def greedy_path(tree: DraftTree, choices: Tensor, sees: Tensor) -> tuple[Tensor, Tensor]:
    """The longest path of drafts that equal the target's greedy choice at their parent.

    choices [..., R] int64, `argmax` of the target at every row; sees [..., R, R] bool from `ancestor_rows`.
    Returns `on_path [..., R]` bool, the base token's row and the accepted nodes' rows, and `base [...]` int64, the
    target's choice after the last of them. Siblings differ, so at most one path is accepted.

    Worked example (`inference.tree`): choices (x, z, ?, w) accept x (row 1) and z (row 3): on_path (1, 1, 0, 1),
    the next base token is w.
    """
    agrees = (tree.tokens == choices.gather(-1, tree.parents + 1)) & tree.candidate
    last, _ = _deepest(agrees, sees)
    return _row(sees, last), choices.gather(-1, last)[..., 0]


def _deepest(agrees: Tensor, sees: Tensor) -> tuple[Tensor, Tensor]:
    """The row `[..., 1]` of the deepest node whose whole path agrees, and 1 + depth of every such row (else 0)."""
    agrees = torch.cat([agrees.new_ones(*agrees.shape[:-1], 1), agrees], dim=-1)  # the base token is the target's own
    accepted = ~(sees & ~agrees[..., None, :]).any(-1)
    depth = torch.where(accepted, sees.sum(-1), 0)
    return depth.argmax(-1, keepdim=True), depth


def _row(sees: Tensor, row: Tensor) -> Tensor:
    """[..., R], the row of `sees [..., R, R]` that `row [..., 1]` names."""
    return sees.gather(-2, row[..., None].expand(*row.shape, sees.shape[-1]))[..., 0, :]


def accepted_rows(on_path: Tensor, depth: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """The rows of an accepted path in order, as a tensor of fixed size, and their number.

    on_path and depth [..., R]; no path has more than `most` drafts. Returns rows `[..., most + 1]` int64, padded with
    the last one, and `count [...]` int64. In the worked example with most = 3: rows (0, 1, 3, 3), count 3.
    """
    index = torch.arange(on_path.shape[-1], device=on_path.device).expand_as(on_path)
    last = torch.where(on_path, depth, -1).argmax(-1, keepdim=True)
    slot = torch.where(on_path, depth, most + 1)  # rows off the path go to a last slot that is dropped
    rows = last.expand(*last.shape[:-1], most + 2).scatter(-1, slot, index)[..., :-1]
    return rows, on_path.sum(-1)


Accept = Callable[[DraftTree, Tensor, Tensor, Tensor, Tensor, int], tuple[Tensor, Tensor, Tensor]]
"""(tree, choices [..., R], logits [..., R, V], sees [..., R, R], depth [..., R], max_depth) → `accepted_rows` and the
next base token `[...]`."""


def accept_exact(
    tree: DraftTree, choices: Tensor, logits: Tensor, sees: Tensor, depth: Tensor, max_depth: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The path of the target's own choices; lossless."""
    on_path, base = greedy_path(tree, choices, sees)
    return *accepted_rows(on_path, depth, max_depth), base


@dataclass(frozen=True)
class TypicalAcceptance:
    """**Lossy.** Accepts drafts that are typical of the target, not only its own choices (Medusa, section 3.3.1).

    A draft c whose parent has the distribution p is accepted when `p(c) > min(epsilon, delta · exp(−H(p)))`; of the
    longest accepted paths the most probable one is kept, and the next base token is the target's greedy choice.
    """

    epsilon: float = 0.09
    delta: float = 0.3

    def __post_init__(self) -> None:
        check_number("epsilon", self.epsilon)
        check_number("delta", self.delta)
        if not 0 < self.epsilon < 1 or not 0 < self.delta <= 1:
            raise ValueError(
                f"typical acceptance needs 0 < epsilon < 1 and 0 < delta <= 1; got {self.epsilon:g} and "
                f"{self.delta:g}; leave them out"
            )

    def __call__(
        self, tree: DraftTree, choices: Tensor, logits: Tensor, sees: Tensor, depth: Tensor, max_depth: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        log_p = logits.float().log_softmax(-1)
        threshold = (self.delta * (log_p.exp() * log_p).nan_to_num().sum(-1).exp()).clamp(max=self.epsilon)  # e^(−H)
        parents = tree.parents + 1
        drafted = parents[..., None].expand(*parents.shape, log_p.shape[-1])
        draft_log_p = log_p.gather(-2, drafted).gather(-1, tree.tokens[..., None])[..., 0]
        agrees = (draft_log_p.exp() > threshold.gather(-1, parents)) & tree.candidate
        _, reached = _deepest(agrees, sees)
        own = torch.cat([torch.zeros_like(log_p[..., :1, 0]), draft_log_p], dim=-1)
        total = torch.where(sees, own[..., None, :], 0).sum(-1)  # no product: of an excluded token it is 0 · −inf
        last = total.masked_fill(reached < reached.amax(-1, keepdim=True), -torch.inf).argmax(-1, keepdim=True)
        base = logits.argmax(-1).gather(-1, last)[..., 0]
        return *accepted_rows(_row(sees, last), depth, max_depth), base
