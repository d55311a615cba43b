"""CTC prefix scores Ψ: the probability that the collapse of the frames *starts with* a prefix.

Shapes: M prefixes, T frames, C classes considered, N windows, U labels. All in probabilities, float32 or float64.

With γⁿ_t(p), γᵇ_t(p) the probability that frames 1..t collapse to p ending in p's last label / in blank,

    φ_t(p, c) = γᵇ_{t−1}(p) + [c ≠ last(p)]·γⁿ_{t−1}(p)          Ψ(p·c) = Σ_t φ_t(p, c)·p_t(c)
    γⁿ_t(p·c) = (γⁿ_{t−1}(p·c) + φ_t(p, c))·p_t(c)               γᵇ_t(p) = (γᵇ_{t−1}(p) + γⁿ_{t−1}(p))·p_t(blank)

Worked example: frames (a .6, blank .4), (a .5, b .5): Ψ("a") = .6 + .4·.5 = .8, Ψ("b") = .4·.5 = .2,
Ψ("ab") = .6·.5 = .3.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from draft_heads.heads.accuracy import TOP, top_hits


@dataclass(frozen=True)
class PrefixState:
    """Forward probabilities of M prefixes *before* each frame: column t holds γ_{t} for t = 0..T−1."""

    in_label: Tensor  # [M, T] γⁿ
    in_blank: Tensor  # [M, T] γᵇ
    last: Tensor  # [M] int64, the prefix's last label (−1: the empty prefix)
    repeated: Tensor  # [M] Σ_t γⁿ_{t−1}·p_t(last): what a frame that repeats the last label adds to no child


def empty_prefix(blank_runs: Tensor) -> PrefixState:
    """The empty prefix, from the `runs` of the blank (`[T, T]`, or `[M, T, T]` for M sets of frames)."""
    before = blank_runs[..., 0, :].reshape(-1, blank_runs.shape[-1])
    last = torch.full((len(before),), -1, dtype=torch.long, device=before.device)
    return PrefixState(torch.zeros_like(before), before, last, torch.zeros_like(before[:, 0]))


def child_scores(state: PrefixState, probs: Tensor, labels: Tensor) -> Tensor:
    """Ψ(p·c) `[M, C]` of every prefix and every label.

    probs `[T, C]`, or `[M, T, C]` where each prefix has its own frames; labels `[C]` int64, the label of each column.
    One product for all labels, then the correction where c repeats the prefix's last label.
    """
    before = state.in_label + state.in_blank
    if torch.compiler.is_compiling():
        scores = (before[..., None] * probs).sum(-2)  # one loop with what is around it, which a product is not
    else:
        scores = (before[:, None] @ probs).squeeze(1)
    return torch.where(labels == state.last[:, None], scores - state.repeated[:, None], scores).clamp_(min=0)


def runs(probs: Tensor) -> Tensor:
    """[..., T, T] probability of one class at every frame from s to j−1: `out[s, j] = Π_{s≤r<j} p_r`, 0 for j < s.

    Worked example: p = (.5, .4, .2) gives (1, .5, .2), (0, 1, .4), (0, 0, 1).
    """
    frames = probs.shape[-1]
    from_start = torch.ones(frames, frames, dtype=torch.bool, device=probs.device).triu()
    products = torch.where(from_start, probs[..., None, :], 1.0).cumprod(-1)
    return torch.nn.functional.pad(products[..., :-1], (1, 0), value=1.0).triu()


@dataclass(frozen=True)
class LabelRuns:
    """How a label that begins at frame s goes on up to frame j: probabilities at (s, j) of L labels."""

    in_label: Tensor  # [..., T, T], that every frame between s and j emits the label
    in_blank: Tensor  # [..., T, T], that they emit it for some frames, then blank up to frame j−1, once or more

    @classmethod
    def of(cls, label_runs: Tensor, blank_runs: Tensor) -> LabelRuns:
        """From the `runs` of every label `[..., T, T]` and of the blank, `[T, T]` or of each label's own frames."""
        in_label = torch.nn.functional.pad(label_runs[..., 1:, :], (0, 0, 0, 1))
        return cls(in_label, in_label @ blank_runs.triu(1))

    def __getitem__(self, chosen: Tensor) -> LabelRuns:
        return LabelRuns(self.in_label[chosen], self.in_blank[chosen])


def extend(state: PrefixState, parent: Tensor, label: Tensor, label_probs: Tensor, following: LabelRuns) -> PrefixState:
    """The state of prefixes p·c: parent [M'] indexes `state`, label [M'] is c, label_probs [M', T] is p_t(c).

    following: of these labels, `[M', T, T]`. The recursions over frames are written out as sums over the frame s at
    which c begins: γⁿ_j = Σ_{s<j} gain_s·in_label_sj, γᵇ_j = Σ_{s<j} gain_s·in_blank_sj, gain_s = φ_s(p, c)·p_s(c).
    """
    same = (label == state.last[parent])[:, None]
    gain = (state.in_blank[parent] + torch.where(same, 0.0, state.in_label[parent])) * label_probs
    in_label = (gain[..., None] * following.in_label).sum(-2)
    in_blank = (gain[..., None] * following.in_blank).sum(-2)
    return PrefixState(in_label, in_blank, label, (in_label * label_probs).sum(-1))


def teacher_forced_hits(
    frames: Tensor,
    labels: Tensor,
    lengths: Tensor,
    log_probs: Callable[[Tensor], Tensor],
    chunk_bytes: int = 64 * 2**20,
) -> Tensor:
    """[U, 5], how often the true next label is among the 1, 2, … 5 best children of the *true* prefix.

    frames [N, T, H]; labels [N, U]; lengths [N]; `log_probs` maps [n, T, H] to [n, T, V+1], the blank last.
    """
    hits = torch.zeros(labels.shape[1], TOP, device=frames.device)
    _, per_window, classes = log_probs(frames[:0]).shape
    chunk = max(1, chunk_bytes // (4 * per_window * classes))
    for some, their_labels, their_lengths in zip(frames.split(chunk), labels.split(chunk), lengths.split(chunk)):
        hits += _hits(log_probs(some).exp(), their_labels, their_lengths)
    return hits


def _hits(probs: Tensor, labels: Tensor, lengths: Tensor) -> Tensor:
    """[U, 5] hits of windows with their own frames: probs [n, T, V+1], blank last; labels [n, U]; lengths [n]."""
    count, frames, _ = probs.shape
    blank = probs[:, :, -1]
    vocabulary = torch.arange(probs.shape[2] - 1, device=probs.device)
    everyone = torch.arange(count, device=probs.device)
    blank_runs = runs(blank)
    state = empty_prefix(blank_runs)
    hits = []
    for offset in range(labels.shape[1]):
        label = labels[:, offset]
        hits.append(top_hits(child_scores(state, probs[:, :, :-1], vocabulary), label, lengths > offset))
        own = probs.gather(2, label[:, None, None].expand(-1, frames, 1))[:, :, 0]
        state = extend(state, everyone, label, own, LabelRuns.of(runs(own), blank_runs))
    return torch.stack(hits)
