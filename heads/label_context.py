"""CTC emissions that depend on the label before them: the last *collapsed* label l adds a bias to the logits.

Shapes: N windows, T frames, U labels, K = U + 1 contexts (the base token, then each label), V vocabulary (the blank is
class V), H hidden, r the bias's rank.

A plain CTC head's frames are independent given the text, so a tree may join tokens that never stood side by side. Here

    p_t(c | l) = exp(z_t(c) + A(l)·B[c]) / Z_t(l),   Z_t(l) = Σ_c exp(z_t(c) + A(l)·B[c]),

a monotonic transducer whose predictor has no state. After the base token b the context is b; a blank keeps it; label u
is entered with p_t(y_u | y_{u−1}), stays with p_t(y_u | y_u), and is followed by blanks with p_t(blank | y_u).

`exp(z + bias)` is the product of `exp z [T, V]` and `exp bias [K, V]`, so every normaliser of a window is one small
matrix product, and no [N, T, K, V] tensor ever exists. With A = 0 all of this is the plain loss,
which `heads.ctc_loss` computes in half the time.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from draft_heads.heads.cross_entropy import logits_bytes, without_autocast
from draft_heads.heads.ctc_loss import IMPOSSIBLE, interleave_blank, lattice_log_prob


class _ContextCTC(torch.autograd.Function):
    """As `ctc_loss._FusedCTC`, chunk by chunk, with K normalisers a frame.

    With m_tk the occupancy of frame t's emissions under context k and w_tk = m_tk / Z_tk, the gradient of `−log P` with
    respect to z_t is `exp z_t · Σ_k w_tk·exp bias_k`, with respect to bias_k `exp bias_k · Σ_t w_tk·exp z_t`, each less
    the occupancies of the labels.
    """

    @staticmethod
    def forward(
        ctx: Any,
        frames_NTH: Tensor,
        blank_weight_H: Tensor,
        blank_bias: Tensor,
        contexts_NKr: Tensor,
        classes_Cr: Tensor,
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
        losses = frames_NTH.new_zeros(count, dtype=torch.promote_types(frames_NTH.dtype, torch.float32))
        infeasible = torch.zeros(count, dtype=torch.bool, device=frames_NTH.device)
        given = frames_NTH, blank_weight_H, blank_bias, contexts_NKr, classes_Cr
        grad_frames, grad_contexts = torch.zeros_like(frames_NTH), torch.zeros_like(contexts_NKr)
        # added up over the chunks
        shared = [torch.zeros_like(x, dtype=losses.dtype) for x in (blank_weight_H, blank_bias, classes_Cr)]
        grad_weight, grad_bias, grad_classes = shared
        for start in range(0, count, chunk):
            rows = slice(start, min(start + chunk, count))
            labels, contexts = labels_NU[rows], contexts_NKr[rows].to(losses.dtype)
            x = frames_NTH[rows].reshape(-1, hidden).to(lm_head_VH.dtype)
            blank = (x @ blank_weight_H.to(x.dtype)).to(losses.dtype) + blank_bias.to(losses.dtype)
            logits = torch.cat([F.linear(x, lm_head_VH, lm_bias_V).to(losses.dtype), blank[:, None]], dim=1)
            logits = logits.view(len(labels), frames, -1)  # [n, T, C]
            bias = contexts @ classes_Cr.to(losses.dtype).T  # [n, K, C]
            scores = _scores(logits, bias, labels)
            size = labels.shape[1]
            logits_peak, bias_peak = logits.amax(-1, keepdim=True), bias.amax(-1, keepdim=True)
            logits, bias = logits.sub_(logits_peak).exp_(), bias.sub_(bias_peak).exp_()
            sums = (logits @ bias.mT).clamp(min=1e-37)  # [n, T, K]
            normaliser = sums.log() + logits_peak + bias_peak.mT

            with torch.enable_grad():
                own = normaliser[:, :, :-1], normaliser[:, :, 1:], normaliser  # of what enters, what stays, of blanks
                leaves = [(score - under).requires_grad_(need_grad) for score, under in zip(scores, own)]
                enter, stay, blanks = leaves
                value = lattice_log_prob(
                    interleave_blank(stay, blanks),
                    labels,
                    lengths_N[rows],
                    closed_N[rows],
                    interleave_blank(enter, blanks),
                    decay,
                    accept,
                )
                possible = ~(value <= IMPOSSIBLE / 2)
                loss = torch.where(possible, -value, torch.zeros_like(value))
                taken = None
                if need_grad:  # −(occupancy); of one frame no label stays
                    taken = torch.autograd.grad(loss.sum(), leaves, materialize_grads=True)
            losses[rows] = loss.detach()
            infeasible[rows] = ~possible
            if taken is None:
                continue

            enter, stay, blanks = taken
            mass = -blanks  # [n, T, K]: of every emission under a context
            mass[:, :, :-1] -= enter
            mass[:, :, 1:] -= stay
            weight = mass / sums  # w_tk, but for the peaks, which cancel
            grad_logits, grad_bias_NKC = (weight @ bias) * logits, (weight.mT @ logits) * bias
            index = labels[:, None].expand(-1, frames, -1)
            grad_logits.scatter_add_(2, index, enter + stay)
            grad_logits[:, :, -1] += blanks.sum(-1)
            grad_bias_NKC[:, :size].scatter_add_(2, labels[:, :, None], enter.sum(1)[:, :, None])
            grad_bias_NKC[:, 1:].scatter_add_(2, labels[:, :, None], stay.sum(1)[:, :, None])
            grad_bias_NKC[:, :, -1] += blanks.sum(1)

            grad_x = grad_logits[:, :, :-1].reshape(len(x), -1).to(x.dtype) @ lm_head_VH
            grad_blank = grad_logits[:, :, -1].flatten()
            grad_x += (grad_blank[:, None] * blank_weight_H).to(x.dtype)
            grad_frames[rows] = grad_x.view(-1, frames, hidden)
            grad_weight += grad_blank @ x.to(grad_blank.dtype)
            grad_bias += grad_blank.sum()
            grad_contexts[rows] = (grad_bias_NKC @ classes_Cr.to(losses.dtype)).to(grad_contexts.dtype)
            grad_classes += grad_bias_NKC.flatten(0, 1).T @ contexts.flatten(0, 1)

        grads = grad_frames, grad_weight, grad_bias, grad_contexts, grad_classes
        ctx.save_for_backward(*(grad.to(x.dtype) for grad, x in zip(grads, given)))
        ctx.mark_non_differentiable(infeasible)
        return losses.sum(), infeasible

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return (*(saved * grads[0].to(saved.dtype) for saved in ctx.saved_tensors), *([None] * 9))


def _scores(logits: Tensor, bias: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """What the lattice emits, before it is normalised: labels entered and labels that stay `[n, T, U]`, blanks
    `[n, T, K]`; from logits [n, T, C] and biases [n, K, C]."""
    of_labels = logits.gather(2, labels[:, None].expand(-1, logits.shape[1], -1))
    entered, stays = (some.gather(2, labels[:, :, None])[:, None, :, 0] for some in (bias[:, :-1], bias[:, 1:]))
    return of_labels + entered, of_labels + stays, logits[:, :, -1:] + bias[:, None, :, -1]


def ctc_loss_with_context(
    frames: Tensor,
    blank_weight: Tensor,
    blank_bias: Tensor,
    contexts: Tensor,
    classes: Tensor,
    lm_head: Tensor,
    labels: Tensor,
    lengths: Tensor,
    closed: Tensor,
    lm_bias: Tensor | None = None,
    chunk_bytes: int | None = None,
    decay: float = 1.0,
    accept: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """As `ctc_loss.ctc_loss_fused`, with emissions that depend on the label before them.

    contexts [N, U + 1, r], A of the base token and of each label; classes [V + 1, r], B, the blank's last.
    """
    count, per_window, _ = frames.shape
    row_bytes = 8 * (per_window + labels.shape[1] + 1) * (lm_head.shape[0] + 1)  # logits, biases and their gradients
    chunk = max(1, min(count, (chunk_bytes or logits_bytes(frames)) // row_bytes))
    given = frames, blank_weight, blank_bias, contexts, classes
    need_grad = torch.is_grad_enabled() and any(x.requires_grad for x in given)
    with without_autocast(frames):
        return _ContextCTC.apply(*given, lm_head, lm_bias, labels, lengths, closed, decay, accept, chunk, need_grad)
