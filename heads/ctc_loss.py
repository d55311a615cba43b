"""CTC losses: the readable reference, the lattice they share, and the fused version that training uses.

Shapes: N windows, T frames, U labels, V vocabulary (the blank is class V), H hidden, S = 2U+1 lattice states
`blank y1 blank y2 … yU blank`.

Two losses on a window of labels Y:

* closed  `−log Σ_{A: collapse(A) = Y} Π_t p_t(A_t)`  the collapse *is* Y                (Graves et al. 2006)
* open    `−log Ψ(Y)`, Ψ(Y) = the probability that the collapse *starts with* Y; used where a cut left fewer labels
          although the text goes on. In the lattice the last label's state keeps its mass through all later frames.

Either is a sum over the window: label u costs `−log Ψ(y_1…y_u) / Ψ(y_1…y_{u−1})`, the end of a closed one
`−log P(collapse = Y) / Ψ(Y)`. With a decay d < 1 label u weighs d^{u−1} and the end d^{U}, as offsets in other heads;
with `accept` α > 0 label u also weighs Ψ_{u−1}^α and the end Ψ_U^α (`heads.accept_weight`).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from draft_heads.heads.accept_weight import accept_weights
from draft_heads.heads.cross_entropy import logits_bytes, without_autocast

IMPOSSIBLE = -1e30  # finite: −inf would turn the gradient of logaddexp into NaN


def lattice_log_prob(
    emissions: Tensor,
    labels: Tensor,
    lengths: Tensor,
    closed: Tensor,
    entering: Tensor | None = None,
    decay: float = 1.0,
    accept: float = 0.0,
) -> Tensor:
    """[N] log-probability of each window under its lattice; about -1e30 where no alignment fits the frames.

    With a decay below 1, or `accept` above 0, it is the weighted sum of the module's head instead.

    emissions  [N, T, S] log p of every lattice state's class at every frame
    labels     [N, U] int64; lengths [N] int64; closed [N] bool
    entering   [N, T, S] the same where the frame before was in another state; None: the same numbers
    Differentiable: minus its gradient with respect to `emissions` is minus the occupancy of each state.
    """
    count, frames, states = emissions.shape
    state = torch.arange(states, device=emissions.device)
    may_skip = torch.zeros(count, states, dtype=torch.bool, device=emissions.device)
    may_skip[:, 3::2] = labels[:, 1:] != labels[:, :-1]  # over the blank, unless the label repeats
    last = 2 * lengths - 1  # state of the last label; −1 in an empty window
    absorbing = (state == last[:, None]) & ~closed[:, None]

    entering = emissions if entering is None else entering
    alpha = torch.full_like(emissions[:, 0], IMPOSSIBLE)
    alpha = torch.where(state < 2, entering[:, 0], alpha)
    entered = [alpha[:, 1::2]]  # by frame, the mass that enters each label
    for t in range(1, frames):
        step = F.pad(alpha[:, :-1], (1, 0), value=IMPOSSIBLE)
        skip = torch.where(may_skip, F.pad(alpha[:, :-2], (2, 0), value=IMPOSSIBLE), IMPOSSIBLE)
        enter = torch.logaddexp(step, skip) + entering[:, t]
        stay = torch.where(absorbing, alpha, alpha + emissions[:, t])
        alpha = torch.logaddexp(enter, stay)
        entered.append(enter[:, 1::2])

    in_label = alpha.gather(1, last.clamp(min=0)[:, None])[:, 0]
    in_blank = alpha.gather(1, (2 * lengths)[:, None])[:, 0]
    ends = torch.where(closed, torch.where(lengths > 0, torch.logaddexp(in_label, in_blank), in_blank), in_label)
    ends = torch.where((lengths == 0) & ~closed, torch.zeros_like(ends), ends)
    if decay == 1 and not accept:
        return ends
    prefixes = F.pad(torch.stack(entered).logsumexp(0), (1, 0))  # [N, U + 1]: log Ψ of the first 0 … U labels
    offset = torch.arange(labels.shape[1] + 1, dtype=ends.dtype, device=ends.device)
    weights = (decay**offset).expand_as(prefixes)  # of the step after so many labels
    if accept:
        weights = weights * accept_weights(prefixes, accept)
    steps = torch.where(offset[:-1] < lengths[:, None], prefixes.diff(dim=1) * weights[:, :-1], 0.0)
    after, ending = (x.gather(1, lengths[:, None])[:, 0] for x in (prefixes, weights))
    return torch.where(ends <= IMPOSSIBLE / 2, ends, steps.sum(1) + (ends - after) * ending)


def interleave_blank(label_scores: Tensor, blank_scores: Tensor) -> Tensor:
    """[N, T, U] label scores and [N, T, U+1] blank scores, or [N, T, 1] for all, → [N, T, 2U+1] in lattice order."""
    blanks = blank_scores.expand(-1, -1, label_scores.shape[2] + 1)
    out = blanks.repeat_interleave(2, dim=2)[:, :, :-1].clone()
    out[:, :, 1::2] = label_scores
    return out


def ctc_loss_reference(log_probs: Tensor, labels: Tensor, lengths: Tensor, closed: Tensor) -> tuple[Tensor, Tensor]:
    """Readable version on full log-probabilities `[N, T, V+1]`: (sum of losses [], infeasible [N] bool).

    Closed windows go through `F.ctc_loss` (whose backward assumes a log-softmax as input), open ones through the
    lattice. Infeasible windows add nothing.
    """
    count, frames, classes = log_probs.shape
    emissions = interleave_blank(log_probs.gather(2, labels[:, None, :].expand(-1, frames, -1)), log_probs[:, :, -1:])
    value = lattice_log_prob(emissions, labels, lengths, closed)
    infeasible = value < IMPOSSIBLE / 2
    closed_losses = F.ctc_loss(
        log_probs.transpose(0, 1),
        labels,
        torch.full((count,), frames, dtype=torch.long),
        lengths,
        blank=classes - 1,
        reduction="none",
        zero_infinity=True,
    )
    use_lattice = ~closed & ~infeasible
    losses = torch.where(closed & ~infeasible, closed_losses, torch.zeros_like(closed_losses))
    return losses.sum() - value[use_lattice].sum(), infeasible


class _FusedCTC(torch.autograd.Function):
    """Chunks of windows: logits → one normaliser and the few log-probabilities the lattice needs → gradient.

    The gradient of `−log P` with respect to the logits of frame t is `m_t·softmax_t − occupancy_t`, with m_t the
    total occupancy of the frame (1 in closed windows; less where an open window is already decided). It is written
    over the chunk's logits and multiplied into dX at once, so no [N, T, V] tensor ever exists and the frozen LM head
    gets no gradient.
    """

    @staticmethod
    def forward(
        ctx: Any,
        frames_NTH: Tensor,
        blank_weight_H: Tensor,
        blank_bias: Tensor,
        lm_head_VH: Tensor,
        lm_bias_V: Tensor | None,
        labels_NU: Tensor,
        lengths_N: Tensor,
        closed_N: Tensor,
        decay: float,
        accept: float,
        chunk: int,
        need_grad: bool,
    ) -> tuple[Tensor, Tensor]:
        count, frames, hidden = frames_NTH.shape
        size = labels_NU.shape[1]
        losses = frames_NTH.new_zeros(count, dtype=torch.promote_types(frames_NTH.dtype, torch.float32))
        infeasible = torch.zeros(count, dtype=torch.bool, device=frames_NTH.device)
        grad_frames = torch.zeros_like(frames_NTH) if need_grad else None
        grad_weight = torch.zeros_like(blank_weight_H, dtype=losses.dtype)
        grad_bias = torch.zeros_like(blank_bias, dtype=losses.dtype)
        for start in range(0, count, chunk):
            rows = slice(start, min(start + chunk, count))
            x = frames_NTH[rows].reshape(-1, hidden).to(lm_head_VH.dtype)  # [n·T, H]
            labels = labels_NU[rows]
            index = labels[:, None, :].expand(-1, frames, -1).reshape(-1, size)  # [n·T, U]
            logits = F.linear(x, lm_head_VH, lm_bias_V).to(losses.dtype)  # [n·T, V], overwritten below
            blank = (x @ blank_weight_H.to(x.dtype)).to(losses.dtype) + blank_bias.to(losses.dtype)  # [n·T]
            label_logits = logits.gather(1, index)
            peak = torch.maximum(logits.amax(-1), blank)
            exped = logits.sub_(peak[:, None]).exp_()
            normaliser = peak + (exped.sum(-1) + (blank - peak).exp()).log()

            with torch.enable_grad():
                emissions = interleave_blank(
                    (label_logits - normaliser[:, None]).view(-1, frames, size),
                    (blank - normaliser).view(-1, frames, 1),
                ).requires_grad_(need_grad)
                value = lattice_log_prob(emissions, labels, lengths_N[rows], closed_N[rows], None, decay, accept)
                possible = ~(value <= IMPOSSIBLE / 2)  # a value that is no number is not hidden
                loss = torch.where(possible, -value, torch.zeros_like(value))
                occupancy = torch.autograd.grad(loss.sum(), emissions)[0] if need_grad else None
            losses[rows] = loss.detach()
            infeasible[rows] = ~possible
            if occupancy is None or grad_frames is None:
                continue

            occupancy = occupancy.reshape(-1, 2 * size + 1)  # −(state occupancy), [n·T, S]
            mass = -occupancy.sum(-1)  # m_t
            grad_logits = exped.mul_((mass * (peak - normaliser).exp())[:, None])
            grad_logits.scatter_add_(1, index, occupancy[:, 1::2])
            grad_blank = mass * (blank - normaliser).exp() + occupancy[:, 0::2].sum(-1)
            grad_x = grad_logits.to(x.dtype) @ lm_head_VH
            grad_x += (grad_blank[:, None] * blank_weight_H).to(x.dtype)
            grad_frames[rows] = grad_x.view(-1, frames, hidden)
            grad_weight += grad_blank @ x.to(losses.dtype)
            grad_bias += grad_blank.sum()

        if grad_frames is not None:
            ctx.save_for_backward(grad_frames, grad_weight.to(blank_weight_H.dtype), grad_bias.to(blank_bias.dtype))
        ctx.mark_non_differentiable(infeasible)
        return losses.sum(), infeasible

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        frames, weight, bias = ctx.saved_tensors
        scale = grads[0]
        return (frames * scale.to(frames.dtype), weight * scale, bias * scale, *([None] * 9))


def ctc_loss_fused(
    frames: Tensor,
    blank_weight: Tensor,
    blank_bias: Tensor,
    lm_head: Tensor,
    labels: Tensor,
    lengths: Tensor,
    closed: Tensor,
    lm_bias: Tensor | None = None,
    chunk_bytes: int | None = None,
    decay: float = 1.0,
    accept: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Sum of the CTC losses [] and which windows are infeasible [N] bool (zero loss, zero gradient).

    frames        [N, T, H], what the LM head reads
    blank_weight  [H], blank_bias [1]: the learned extra row that gives the blank logit
    lm_head       [V, H] frozen; lm_bias [V] or None
    labels        [N, U] int64; lengths [N] int64 (0…U); closed [N] bool (see the module's head)
    chunk_bytes   bound on the one logits buffer, counted as float32; None: `logits_bytes`
    decay         weight of a label over that of the label before it (see the module's head)
    accept        α of `heads.accept_weight`
    """
    count, per_window, _ = frames.shape
    chunk = max(1, min(count, (chunk_bytes or logits_bytes(frames)) // (4 * per_window * lm_head.shape[0])))
    need_grad = torch.is_grad_enabled() and (frames.requires_grad or blank_weight.requires_grad)
    given = frames, blank_weight, blank_bias, lm_head, lm_bias, labels, lengths, closed
    with without_autocast(frames):
        return _FusedCTC.apply(*given, decay, accept, chunk, need_grad)
