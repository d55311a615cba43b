"""Top-1 … top-5 accuracy of drafts of the labels in a head's windows (N windows, V vocabulary)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

TOP = 5
"""Accuracies are counted for the 1, 2, … 5 best drafts."""


def top_hits(scores: Tensor, labels: Tensor, counted: Tensor) -> Tensor:
    """[5] float, how many labels `[N]` with `counted [N]` are among the 1, 2, … 5 highest of `scores [N, V]`.

    A label's rank is the number of classes that are not scored lower, of equals those before it: as argmax does, which
    takes a score that is no number for the highest, so a label that has one itself is no hit.
    """
    own = scores.gather(1, labels.clamp(min=0)[:, None])
    classes = torch.arange(scores.shape[1], device=scores.device)
    rank = (~(scores <= own) | ((scores == own) & (classes < labels[:, None]))).sum(-1)
    ranks = torch.arange(TOP, device=scores.device)
    return ((rank[:, None] <= ranks) & counted[:, None]).sum(0).float()


def offset_hits(
    logits_of: Callable[[Tensor], Tensor], states: Tensor, labels: Tensor, rows_at_once: int = 1024
) -> Tensor:
    """[5] float, top-1 … top-5 hits of `labels [N]` under the logits `[n, V]` of `states [N, …]`, made in chunks."""
    hits = torch.zeros(TOP, device=states.device)
    for some, their in zip(states.split(rows_at_once), labels.split(rows_at_once)):
        hits += top_hits(logits_of(some), their, torch.ones_like(their, dtype=torch.bool))
    return hits
