"""Simulated β: the decoder's own trees and acceptance, walked along held-out text that the target wrote greedily.

No target step is needed: along greedy text the target's choices are the text itself. Worked example: the answer
`a b c d E` behind a prompt; the prefill gives a; drafts accepted behind a: b c → the step gives b c d; drafts accepted
behind d: E → the step gives E, the end. Three steps for five tokens: β = 1.67.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from draft_heads.heads.base import DraftHead, Rows, TargetView
from draft_heads.inference.tree import DraftTree, ancestor_rows, depths
from draft_heads.inference.verify import greedy_path

ProposeAt = Callable[[int], DraftTree]


def walk(row: Tensor, start: int, end: int, propose_at: ProposeAt) -> tuple[int, int]:
    """(new tokens, target steps) of decoding the answer `row[start:end]` of a conversation `[L]`.

    `propose_at(n)` drafts at anchor n: behind the base token n+1.
    """
    answer = row[start:end]
    steps, done = 1, 1  # the prefill gives the first token
    while done < end - start:
        tree = propose_at(start + done - 2)
        sees = ancestor_rows(tree.parents, len(tree))
        ahead = F.pad(answer[done:], (0, len(tree) + 1), value=-1)
        on_path, _ = greedy_path(tree, ahead[depths(sees)], sees)
        done += int(on_path.sum())  # the drafts accepted and the token the target adds
        steps += 1
    return end - start, steps


def simulate_row(
    head: DraftHead,
    batch: dict[str, Tensor],
    view: TargetView,
    propose_from: Callable[[Any, Rows, TargetView], ProposeAt],
) -> list[tuple[int, int]]:
    """(new tokens, target steps) of every greedy answer in a batch of one row, its states `[1, L, …]` in it."""
    text = batch["input_ids"][0]
    spans = list(answers(batch["mask"][0], text, batch["greedy_ids"][0]))
    if not spans:
        return []
    ids = batch["input_ids"], batch["segment_ids"], batch["position_ids"]
    rows = Rows(batch["hidden"].to(head.dtype), *ids, batch.get("aux_hidden"))
    propose_at = propose_from(head, rows, view)
    return [walk(text, start, end, propose_at) for start, end in spans]


def answers(mask: Tensor, input_ids: Tensor, greedy_ids: Tensor) -> Iterator[tuple[int, int]]:
    """(start, end) of every assistant turn of a row `[L]` that is the target's own greedy text throughout."""
    edges = F.pad(mask.long(), (1, 1)).diff()
    for start, end in zip((edges == 1).nonzero()[:, 0].tolist(), (edges == -1).nonzero()[:, 0].tolist()):
        if start > 0 and bool((input_ids[start:end] == greedy_ids[start:end]).all()):
            yield start, end
