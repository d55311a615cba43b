"""Which anchors are trained on and which labels each of them drafts (docs/training.md, labels).

Shapes: B batch, L length, U labels, A anchors a row.

An anchor n is the last committed position: the base token `x[n+1]` is known, the head drafts `y[n+2], y[n+3], …`
where `y[i] = argmax LM(h[i-1])`. Worked example (0-based, everything the assistant's, U = 3)::

    index       0  1  2  3  4  5
    text   x    P  a  b  c  d  E        P prompt, E end of turn
    greedy y    -  a  b  c  q  E

    anchor 0: base a, labels b c q      q is the label at 4; the text has d there, so nothing may follow q
    anchor 1: base b, labels c q        cut after q (`agree`): y[5] = E follows d, not q
    anchor 2: base c, labels q          the same cut
    anchor 3: base d, labels E          the turn ended: a closed window of one label; none for a head that reads no
                                        base token (`reads_base` False): after c the target says q, not d
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

IGNORED = -100


@dataclass(frozen=True)
class Windows:
    """Anchors and their labels."""

    anchors: Tensor  # [B, A] int64, index of the last committed token, ascending; 0 for a chosen one that is not valid
    valid: Tensor  # [B, A] bool
    labels: Tensor  # [B, A, U] int64, 0 beyond `lengths`
    lengths: Tensor  # [B, A] int64, labels in the window; at least 1 where valid
    closed: Tensor  # [B, A] bool, nothing may follow the labels (the turn ended, or the window is full)

    def gather(self, rows: Tensor, ahead: int = 0) -> Tensor:
        """[N, H], what `rows [B, L, H]` holds `ahead` indices behind the anchor of each valid window."""
        return at(rows, (self.anchors + ahead).clamp(max=rows.shape[1] - 1))[self.valid]


def at(rows: Tensor, index: Tensor) -> Tensor:
    """[B, A, H], the states `rows [B, L, H]` at `index [B, A]`."""
    return rows.gather(1, index[:, :, None].expand(-1, -1, rows.shape[-1]))


def rows_at(rows: Tensor, index: Tensor) -> Tensor:
    """[B, A, …], the rows of `rows [B, L, …]` at `index [B, A]`, copied whole: faster than `at`, not for training."""
    if len(index) == 1:
        return rows.index_select(1, index[0])
    first = torch.arange(len(rows), device=index.device)[:, None] * rows.shape[1]
    return rows.flatten(0, 1).index_select(0, (index + first).flatten()).unflatten(0, index.shape)


def label_windows(
    input_ids: Tensor,
    greedy_ids: Tensor,
    mask: Tensor,
    segment_ids: Tensor,
    size: int,
    end_token_ids: list[int],
    agree: bool = True,
    reads_base: bool = True,
    tokens_after: int = 0,
) -> Windows:
    """The windows of `size` labels at *every* position, A = L.

    tokens_after: how many tokens of the same conversation must follow the anchor (chained frames read that text).

    A window stops before the first position that is not the assistant's, belongs to another conversation or has no
    greedy label; after an end-of-turn label; and, with `agree`, after the first label the text does not share, and
    before the first one where the text does not share the base token either, which a head reads unless `reads_base`.
    """
    batch, length = input_ids.shape

    def ahead(values: Tensor, by: int, fill: int | bool) -> Tensor:
        out = torch.full_like(values, fill)
        if by < length:
            out[:, : length - by] = values[:, by:]
        return out

    ends = torch.tensor(end_token_ids, dtype=torch.long, device=input_ids.device)
    labels = input_ids.new_zeros(batch, length, size)
    lengths = input_ids.new_zeros(batch, length)
    closed = torch.zeros_like(mask)
    alive = (segment_ids > 0) & ahead(mask, 1, False) & (ahead(segment_ids, 1, 0) == segment_ids)
    alive = alive & (ahead(segment_ids, tokens_after, 0) == segment_ids)
    if agree and not reads_base:
        alive = alive & (ahead(input_ids, 1, 0) == ahead(greedy_ids, 1, IGNORED))
    for offset in range(size):
        label = ahead(greedy_ids, offset + 2, IGNORED)
        alive = alive & ~closed & ahead(mask, offset + 2, False) & (label != IGNORED)
        alive = alive & (ahead(segment_ids, offset + 2, 0) == segment_ids)
        labels[:, :, offset] = torch.where(alive, label, 0)
        lengths = lengths + alive
        closed = closed | (alive & torch.isin(label, ends))
        if agree:
            text = ahead(input_ids, offset + 2, 0)
            alive = alive & (text == label)
    index = torch.arange(length, device=input_ids.device).expand_as(input_ids)
    return Windows(index, lengths > 0, labels, lengths, closed | (lengths == size))


def position_in_segment(segment_ids: Tensor) -> Tensor:
    """[B, L] int64, how many places before each one belong to its run of equal ids: 1 1 1 2 2 0 → 0 1 2 0 1 0."""
    index = torch.arange(segment_ids.shape[1], device=segment_ids.device).expand_as(segment_ids)
    begins = F.pad(segment_ids[:, 1:] != segment_ids[:, :-1], (1, 0), value=True)
    return index - torch.where(begins, index, 0).cummax(-1).values


def anchor_scores(input_ids: Tensor, segment_ids: Tensor, seed: int) -> Tensor:
    """[B, L] int64 pseudo-random scores that depend on the conversation's own tokens and `seed` only.

    The same conversation gets the same anchors however rows are packed, padded, and spread over processes and batches,
    and other anchors with another seed; nothing is drawn from a random generator whose state would have to be saved.
    """
    position = position_in_segment(segment_ids)
    terms = (input_ids + 1) * (2 * position + 1)
    sums = torch.zeros_like(F.pad(terms, (0, 1))).scatter_add_(1, segment_ids, terms)
    value = sums.gather(1, segment_ids) * 0x9E3779B1 + position * 0x85EBCA77 + (seed + 1) * 0xC2B2AE3D
    for shift, factor in ((15, 0x2C1B3C6D), (12, 0x297A2D39), (16, 0x165667B1)):
        value = ((value ^ (value >> shift)) * factor) & 0x7FFFFFFF
    return value


def rank_in_segment(score: Tensor, segment_ids: Tensor) -> Tensor:
    """[B, L] int64, how many positions of the same segment have a higher score; scores are 0 or more, and below 2^32.

    Worked example: segments 1 1 1 2 2 with scores 5 9 7 3 4 have the ranks 2 0 1 1 0.
    """
    order = (segment_ids * 2**32 - score).argsort(dim=-1, stable=True)
    return torch.zeros_like(order).scatter_(1, order, position_in_segment(segment_ids.gather(1, order)))


def choose_windows(every: Windows, input_ids: Tensor, segment_ids: Tensor, anchors_each: int, seed: int) -> Windows:
    """Of the windows at every position those of at most `anchors_each` anchors of each conversation (0: all valid)."""
    score = torch.where(every.valid, anchor_scores(input_ids, segment_ids, seed) + 1, 0)
    sampled = every.valid
    if anchors_each:
        sampled = sampled & (rank_in_segment(score, segment_ids) < anchors_each)
    take = max(1, int(sampled.sum(-1).max()))  # with one that is not valid a batch without any has the same graph
    chosen = (score * sampled).topk(take, dim=-1).indices
    anchors = chosen.sort(-1).values
    picked = sampled.gather(1, anchors)
    order = torch.argsort((~picked).long(), dim=-1, stable=True)  # valid first, still ascending
    anchors, picked = anchors.gather(1, order), picked.gather(1, order)
    return Windows(
        anchors=torch.where(picked, anchors, 0),
        valid=picked,
        labels=at(every.labels, anchors),
        lengths=every.lengths.gather(1, anchors),
        closed=every.closed.gather(1, anchors),
    )
