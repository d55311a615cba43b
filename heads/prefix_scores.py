"""CTC prefix scores Ψ: the probability that the collapse of the frames *starts with* a prefix.

Shapes: B texts, M prefixes of each, T frames, C classes considered, N windows, U labels. All in probabilities, float32
or float64.

With γⁿ_t(p), γᵇ_t(p) the probability that frames 1..t collapse to p ending in p's last label / in blank,

    φ_t(p, c) = γᵇ_{t−1}(p) + [c ≠ last(p)]·γⁿ_{t−1}(p)          Ψ(p·c) = Σ_t φ_t(p, c)·p_t(c)
    γⁿ_t(p·c) = (γⁿ_{t−1}(p·c) + φ_t(p, c))·p_t(c)               γᵇ_t(p) = (γᵇ_{t−1}(p) + γⁿ_{t−1}(p))·p_t(blank)

Worked example: frames (a .6, blank .4), (a .5, b .5): Ψ("a") = .6 + .4·.5 = .8, Ψ("b") = .4·.5 = .2,
Ψ("ab") = .6·.5 = .3.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from draft_heads.heads.accuracy import TOP, top_hits
from draft_heads.heads.windows import rows_at


@dataclass(frozen=True)
class PrefixState:
    """Forward probabilities of prefixes *before* each frame, in one tensor: column t of a part is before frame t+1.

    sums  [B, M, 2T + 1]: γⁿ + γᵇ, then γᵇ, then Ψ of the child that repeats the last label, Σ_t γᵇ_{t−1}·p_t(last)
    last  [B, M] int64, the class of the prefix's last label; None for empty prefixes
    """

    sums: Tensor
    last: Tensor | None

    @property
    def either(self) -> Tensor:
        """[B, M, T] γⁿ + γᵇ"""
        return self.sums[..., : self.sums.shape[-1] // 2]

    @property
    def repeated(self) -> Tensor:
        """[B, M, 1], the last column."""
        return self.sums[..., -1:]


def empty_prefix(blank_runs: Tensor) -> PrefixState:
    """The empty prefix of each text, M = 1, from the `runs` of the blank in its frames, `[B, T, T]`."""
    before = blank_runs[:, :1]
    return PrefixState(torch.cat([before, before, torch.zeros_like(before[..., :1])], dim=-1), None)


def child_scores(state: PrefixState, probs: Tensor) -> Tensor:
    """Ψ(p·c) `[B, M, C]` of every prefix and class; probs `[B, T, C]`.

    One product for all classes, then the one that repeats the prefix's last label is replaced.
    """
    scores = state.either @ probs
    return scores if state.last is None else scores.scatter(-1, state.last[..., None], state.repeated)


def runs(probs: Tensor) -> Tensor:
    """[..., T, T] probability of one class at every frame from s to j−1: `out[s, j] = Π_{s≤r<j} p_r`, 0 for j < s.

    Worked example: p = (.5, .4, .2) gives (1, .5, .2), (0, 1, .4), (0, 0, 1).
    """
    frames = probs.shape[-1]
    from_start = torch.ones(frames, frames, dtype=torch.bool, device=probs.device).triu()
    products = torch.where(from_start, probs[..., None, :], 1.0).cumprod(-1)
    return torch.nn.functional.pad(products[..., :-1], (1, 0), value=1.0).triu()


def from_entry(entering: Tensor, stays: Tensor, blank_runs: Tensor) -> Tensor:
    """[..., T, 2T + 1], the `sums` of a prefix per unit of probability φ_s that may enter its last label c at frame s.

    entering [..., T], p_s(c) after the label before; stays [..., T], p_t(c) after c itself, the same numbers unless
    emissions depend on the label before them (`heads.label_context`); blank_runs: the `runs` of the blank after c, of
    each label, or `[B, T, T]` for all labels of a text. Before frame j c was emitted since s; or for some frames, then
    blank, once or more.
    """
    in_label = torch.nn.functional.pad(runs(stays)[..., 1:, :], (0, 0, 0, 1))
    later = blank_runs.triu(1)
    if later.dim() == in_label.dim():
        in_blank = in_label @ later
    else:
        in_blank = (in_label.flatten(-3, -2) @ later).view_as(in_label)
    repeated = in_blank @ stays[..., None]
    return torch.cat([in_label + in_blank, in_blank, repeated], dim=-1) * entering[..., None]


def extend(state: PrefixState, parent: Tensor, label: Tensor, entered: Tensor) -> PrefixState:
    """The state of prefixes p·c: parent [B, M'] indexes `state`, label [B, M'] is c, entered `[B, M', T, 2T + 1]`
    `from_entry`.

    The recursions over frames are written out as sums over the frame s at which c begins, of φ_s(p, c) times what that
    leads to.
    """
    frames = entered.shape[-2]
    entering, in_blank, _ = rows_at(state.sums, parent).tensor_split((frames, 2 * frames), dim=-1)  # φ
    if state.last is not None:
        entering = torch.where((label == state.last.gather(1, parent))[..., None], in_blank, entering)
    return PrefixState((entering[..., None, :] @ entered).squeeze(-2), label)


def teacher_forced_hits(
    frames: Tensor,
    before: Tensor,
    labels: Tensor,
    lengths: Tensor,
    emissions: Callable[[Tensor], Callable[[Tensor], Tensor]],
    chunk_bytes: int = 64 * 2**20,
) -> Tensor:
    """[U, 5], how often the true next label is among the 1, 2, … 5 best children of the *true* prefix.

    frames [N, T, H]; labels [N, U]; lengths [N]; before [N, U + 1], the tokens that are the label before: the base
    token, then each label's; `emissions` makes of frames [n, T, H] a function from such tokens [n] to the probabilities
    [n, T, V+1] after them, the blank last.
    """
    hits = torch.zeros(labels.shape[1], TOP, device=frames.device)
    _, per_window, classes = emissions(frames[:0])(before[:0, 0]).shape
    chunk = max(1, chunk_bytes // (4 * per_window * classes))
    for some, *their in zip(*(x.split(chunk) for x in (frames, before, labels, lengths))):
        known, wanted, ends = their
        scores = true_prefix_scores(known[:, :-1], wanted[:, :-1], emissions(some))
        hits += torch.stack([top_hits(s, wanted[:, u], ends > u) for u, s in enumerate(scores)])
    return hits


def true_prefix_scores(before: Tensor, labels: Tensor, emissions: Callable[[Tensor], Tensor]) -> Iterator[Tensor]:
    """Ψ [n, V] of every class after the true prefix of each length, of windows with their own frames.

    before [n, U], the tokens that are the label before; labels [n, U − 1], their classes but for the base token's.
    """
    only = torch.zeros_like(before[:, :1])  # one prefix a window
    probs = emissions(before[:, 0])
    state = empty_prefix(runs(probs[:, :, -1]))
    yield child_scores(state, probs[:, :, :-1])[:, 0]
    for label, token in zip(labels.unbind(1), before[:, 1:].unbind(1)):
        index = label[:, None, None].expand(-1, probs.shape[1], 1)
        entering, probs = probs.gather(2, index)[:, :, 0], emissions(token)
        following = from_entry(entering, probs.gather(2, index)[:, :, 0], runs(probs[:, :, -1]))
        state = extend(state, only, label[:, None], following[:, None])
        yield child_scores(state, probs[:, :, :-1])[:, 0]
