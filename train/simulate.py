"""Simulated β: the decoder's own trees and acceptance, walked along held-out text that the target wrote greedily.

No target step is needed: along greedy text the target's choices are the text itself. Worked example: the answer
`a b c d E` behind a prompt; the prefill gives a; drafts accepted behind a: b c → the step gives b c d; drafts accepted
behind d: E → the step gives E, the end. Three steps for five tokens: β = 1.67.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from inference.tree import DraftTree, ancestor_rows, depths
from inference.verify import greedy_path

ProposeAt = Callable[[int], DraftTree]


def walk(answer: Tensor, propose_at: ProposeAt) -> tuple[int, int]:
    """(new tokens, target steps) of decoding `answer [n]`; `propose_at(i)` drafts what follows answer token i."""
    count = answer.numel()
    steps, done = 1, 1
    while done < count:
        tree = propose_at(done - 1)
        sees = ancestor_rows(tree.parents, len(tree))
        ahead = F.pad(answer[done:], (0, len(tree) + 1), value=-1)
        on_path, _ = greedy_path(tree, ahead[depths(sees)], sees)
        done += int(on_path.sum())  # the drafts accepted and the token the target adds
        steps += 1
    return count, steps


def answers(mask: Tensor, input_ids: Tensor, greedy_ids: Tensor) -> Iterator[tuple[int, int]]:
    """(start, end) of every assistant turn of a row `[L]` that is the target's own greedy text throughout."""
    edges = F.pad(mask.long(), (1, 1)).diff()
    for start, end in zip((edges == 1).nonzero()[:, 0].tolist(), (edges == -1).nonzero()[:, 0].tolist()):
        if start > 0 and bool((input_ids[start:end] == greedy_ids[start:end]).all()):
            yield start, end


def simulated_beta(runs: Iterable[tuple[int, int]]) -> float:
    """β of (tokens, steps) pairs; NaN when there were none."""
    totals = torch.tensor(list(runs), dtype=torch.float64).reshape(-1, 2).sum(0)
    return float(totals[0] / totals[1])
