"""The draft vocabulary: the tokens a head drafts from, where it leaves the target's rare ones out.

Shapes: V the target's vocabulary, D the draft vocabulary, U label offsets.

A head scores D *classes*, class c standing for the token `vocabulary[c]`; the ids ascend, so tokens are mapped to
classes by binary search. Verification reads the whole vocabulary: a token left out is merely never drafted.
Worked example, used throughout: vocabulary (2, 5, 7) has the classes 0, 1, 2.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

OUTSIDE = -1
"""The class of a token that the draft vocabulary lacks."""


def frequent_tokens(counts: Tensor, size: int, always: Sequence[int] = ()) -> Tensor:
    """[D] ascending ids of the `size` tokens of the highest `counts [V]`, of equals the smaller id; `always` are in.

    Worked example: counts (0, 3, 9, 3, 1), size 3 and always (4,) give (1, 2, 4). ValueError for more of `always`.
    """
    if size < len(always):
        raise ValueError(
            f"draft_vocab_size must be at least {len(always)}, as many end tokens the target has; got {size}; raise it"
        )
    ranked = counts.clone()
    ranked[list(always)] = counts.max() + 1
    return ranked.sort(descending=True, stable=True).indices[:size].sort().values


def check_draft_vocab(ids: Tensor, size: int, vocab_size: int, always: Sequence[int] = ()) -> None:
    """ValueError unless `ids` are `size` ascending int64 tokens below `vocab_size`, those of `always` among them."""
    problem = ""
    if ids.dtype != torch.int64 or ids.shape != (size,):
        problem = f"{ids.dtype} of shape {tuple(ids.shape)}"
    elif not bool((ids.diff() > 0).all()) or not 0 <= int(ids[0]) <= int(ids[-1]) < vocab_size:
        problem = f"ids from {int(ids.min())} to {int(ids.max())}, in no strictly ascending order or out of range"
    elif missing := sorted(set(always) - set(ids.tolist())):
        problem = f"no end token {', '.join(map(str, missing))}"
    if problem:
        raise ValueError(
            f"a draft vocabulary must be {size} ascending int64 token ids below {vocab_size}, the end tokens among "
            f"them; got {problem}; train the head again, or copy its folder again"
        )


def classes_of(tokens: Tensor, vocabulary: Tensor) -> Tensor:
    """[...] int64 tokens → their classes, `OUTSIDE` for tokens left out: (5, 6, 7) → (1, −1, 2)."""
    found = torch.searchsorted(vocabulary, tokens).clamp(max=len(vocabulary) - 1)
    return torch.where(vocabulary[found] == tokens, found, OUTSIDE)


def in_vocabulary(classes: Tensor, lengths: Tensor) -> Tensor:
    """[N, U] bool, which labels of windows `[N, U]` of `lengths [N]` the head can draft: those not `OUTSIDE`.

    Worked example: classes 1 −1 2 0 of length 3 give yes, no, yes, no.
    """
    return (torch.arange(classes.shape[1], device=classes.device) < lengths[:, None]) & (classes != OUTSIDE)


def cut_before_outside(classes: Tensor, lengths: Tensor, closed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Windows `[N, U]` of classes that end before the first `OUTSIDE`: classes (0 beyond), lengths and closed [N].

    Such a window is open, as other cuts are: its loss is that of a collapse which *starts with* the labels. A window
    whose first label is outside has no loss.
    Worked example: labels 5 2 6 7 of length 4 are the classes 1 0 −1 2, become 1 0 0 0 of length 2, open.
    """
    inside = ((classes != OUTSIDE).long().cumprod(-1)).sum(-1).minimum(lengths)
    kept = torch.arange(classes.shape[1], device=classes.device) < inside[:, None]
    return torch.where(kept, classes, 0), inside, closed & (inside == lengths)
