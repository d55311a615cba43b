"""Acceptance: which path of a verified tree the target itself would have taken. Pure functions on tensors.

Shapes: M nodes, R = M+1 rows of the target forward (row 0 = base token).
"""

from __future__ import annotations

import torch
from torch import Tensor

from inference.tree import DraftTree


def greedy_path(tree: DraftTree, choices: Tensor, sees: Tensor) -> tuple[Tensor, Tensor]:
    """The longest path of drafts that equal the target's greedy choice at their parent.

    choices [R] int64, `argmax` of the target at every row; sees [R, R] bool from `ancestor_rows`.
    Returns `on_path [R]` bool, the base token's row and the accepted nodes' rows, and `base` [] int64, the target's
    choice after the last of them. Siblings differ, so at most one path is accepted.

    Worked example (`inference.tree`): choices (x, z, ?, w) accept x (row 1) and z (row 3): on_path (1, 1, 0, 1),
    the next base token is w.
    """
    agrees = (tree.tokens == choices[tree.parents + 1]) & tree.candidate
    agrees = torch.cat([agrees.new_ones(1), agrees])  # the base token is the target's own
    accepted = ~(sees & ~agrees[None, :]).any(-1)
    depth = torch.where(accepted, sees.sum(-1), 0)
    last = depth.argmax()
    return sees[last], choices[last]
