"""Cross entropies of states and a vocabulary matrix, whose logits never exist for all rows at once.

Shapes: N rows, H hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from draft_heads.heads.target_view import TargetView

Wanted = Tensor | Callable[[slice], Tensor]
"""What each row is to predict: labels [N] int64, or distributions [n, V] of a slice of rows."""


def total(losses: Tensor) -> Tensor:
    """[] their sum, of half precision in float32."""
    return losses.sum(dtype=torch.promote_types(losses.dtype, torch.float32))


def logits_bytes(states: Tensor) -> int:
    """Bytes of logits that may exist at once: on a GPU enough to keep it busy, on a CPU what its caches like."""
    return 2**30 if states.is_cuda else 32 * 2**20


def without_autocast(states: Tensor) -> AbstractContextManager[Any]:
    """In this context products and sums have the types that are given; the meta device has no autocast."""
    return nullcontext() if states.is_meta else torch.autocast(states.device.type, enabled=False)


def linear_cross_entropy(
    states: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None = None,
    chunk_bytes: int | None = None,
) -> Tensor:
    """[] sum over rows of −log softmax(states·weightᵀ + bias)[label]; the logits of all rows never exist at once.

    states [N, H], weight [V, H] (trained, or frozen), labels [N] int64. In chunks of rows, not by torch's function of
    that name: of bfloat16 it adds the weight's gradient up in bfloat16.
    """
    return _chunked_cross_entropy(states, weight, bias, labels, None, chunk_bytes)[0]


def weighted_cross_entropy(
    states: Tensor, weight: Tensor, labels: Tensor, row_weights: Tensor, bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """[] as `linear_cross_entropy`, the rows weighted by `row_weights [N]`; and the plain loss of each row [N],
    detached. In chunks of rows."""
    return _chunked_cross_entropy(states, weight, bias, labels, row_weights, None)


def label_losses(states: Tensor, weight: Tensor, labels: Tensor, bias: Tensor | None = None) -> Tensor:
    """[N] −log softmax(states·weightᵀ + bias)[label] of each row, without a gradient."""
    with torch.no_grad():
        return _chunked_cross_entropy(states, weight, bias, labels, None, None)[1]


def soft_cross_entropy(
    states: Tensor,
    weight: Tensor,
    hidden: Tensor,
    target: TargetView,
    row_weights: Tensor | None = None,
    bias: Tensor | None = None,
    chunk_bytes: int | None = None,
) -> tuple[Tensor, Tensor]:
    """[] sum over rows of −Σ_v p_v·log q_v, p = softmax(LM(hidden)) of the target, q from states and weight; and the
    loss of each row [N], detached.

    states [N, H], weight [V, H], hidden [N, H] of the target; row_weights [N] of the rows in the sum. In chunks, as
    `linear_cross_entropy`.
    """
    hidden = hidden.to(target.lm_head_weight.dtype)

    def wanted(rows: slice) -> Tensor:
        return target.logits(hidden[rows]).float().softmax(-1)

    return _chunked_cross_entropy(states, weight, bias, wanted, row_weights, chunk_bytes)


def _chunked_cross_entropy(
    states: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    wanted: Wanted,
    row_weights: Tensor | None,
    chunk_bytes: int | None,
) -> tuple[Tensor, Tensor]:
    """(sum, each row's loss); products in the type of autocast where it is on, else in that of the weight."""
    dtype, device = weight.dtype, states.device.type
    if device != "meta" and torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
    chunk = max(1, (chunk_bytes or logits_bytes(states)) // (4 * weight.shape[0]))
    with without_autocast(states):
        return _ChunkedCrossEntropy.apply(
            states, weight, bias, wanted, row_weights, chunk, dtype, torch.is_grad_enabled()
        )


class _ChunkedCrossEntropy(torch.autograd.Function):
    """Chunks of rows: logits → loss and gradient `softmax − wanted`, written over the logits and multiplied at once.

    The gradient of the weight is made here, in one buffer:
    what reads one weight several times should do it in one call.
    """

    @staticmethod
    def forward(
        ctx: Any,
        states_NH: Tensor,
        weight_VH: Tensor,
        bias_V: Tensor | None,
        wanted: Wanted,
        row_weights_N: Tensor | None,
        chunk: int,
        dtype: torch.dtype,
        need_grad: bool,
    ) -> tuple[Tensor, Tensor]:
        given = states_NH, weight_VH, bias_V
        summed = torch.promote_types(dtype, torch.float32)
        weight, bias = weight_VH.to(dtype), None if bias_V is None else bias_V.to(dtype)
        half = dtype == torch.float16  # its sums could pass 65,504 before the backward scales them
        several = summed if half or len(states_NH) > chunk else None  # chunks are not added up in half precision
        grad_states, grad_weight, grad_bias = (
            None if x is None or not (need_grad and x.requires_grad) else torch.zeros_like(x, dtype=kept)
            for x, kept in zip(given, (None, several, several))
        )
        grads = grad_states, grad_weight, grad_bias
        losses = states_NH.new_zeros(len(states_NH), dtype=summed)
        for start in range(0, len(states_NH), chunk):
            rows = slice(start, start + chunk)
            x = states_NH[rows].to(dtype)
            logits = F.linear(x, weight, bias).to(summed)  # [n, V], overwritten below
            if isinstance(wanted, Tensor):
                labels = wanted[rows, None]
                hit = logits.gather(1, labels)[:, 0]
            else:
                probs = wanted(rows).to(summed)
                hit = (probs[:, None] @ logits[:, :, None])[:, 0, 0]
            peak = logits.amax(-1)
            exped = logits.sub_(peak[:, None]).exp_()
            total = exped.sum(-1)
            losses[rows] = peak + total.log() - hit
            if all(grad is None for grad in grads):
                continue
            grad_logits = exped.div_(total[:, None])
            if isinstance(wanted, Tensor):
                grad_logits.scatter_add_(1, labels, grad_logits.new_full(labels.shape, -1.0))
            else:
                grad_logits.sub_(probs)
            if row_weights_N is not None:
                grad_logits.mul_(row_weights_N[rows, None])
            grad = grad_logits.to(dtype)
            if grad_states is not None:
                grad_states[rows] = (grad @ weight).to(grad_states.dtype)
            if grad_weight is not None and grad_weight.dtype == dtype:
                grad_weight.addmm_(grad.T, x)
            elif grad_weight is not None:
                grad_weight += grad.T.float() @ x.float() if half else grad.T @ x
            if grad_bias is not None:
                grad_bias += grad_logits.sum(0)
        ctx.types = [None if x is None else x.dtype for x in given]
        ctx.grads = [None if x is None else x if half else x.to(dtype) for x, dtype in zip(grads, ctx.types)]
        ctx.mark_non_differentiable(losses)
        return (losses if row_weights_N is None else losses * row_weights_N).sum(), losses

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        found, ctx.grads = ctx.grads, None  # handed on, not copied: the weight's is large
        assert found is not None, "the gradient of a loss is computed once"
        scaled = (None if x is None else x.mul_(grads[0].to(x.dtype)).to(dtype) for x, dtype in zip(found, ctx.types))
        return (*scaled, *([None] * 5))
