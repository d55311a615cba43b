"""Linear layers as decoding uses them: those that read the same states merged, and fast for a tree's few rows on a CPU.

On a CPU in float32, column blocks for `skinny_matmul` are held beside the weights; a row's result does not depend on
how many rows are multiplied with it. Elsewhere, or without a C++ compiler, the product is `F.linear`.

Shapes: R rows, K inputs, N outputs of all layers together.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from draft_heads.heads.base import TargetView
from draft_heads.inference.native import library
from draft_heads.inference.target.library_names import forward_hooks

MAX_SKINNY_ROWS = 128  # above, `F.linear` is faster than `skinny_matmul`
MAX_COPIED_BYTES = 4 * 2**30  # weights of larger modules are not held a second time


class MergedLinear:
    """x [..., K] → x Wᵀ + b [..., N]; W is the weights of several Linears, one below the other."""

    def __init__(self, weights: Sequence[Tensor], bias: Tensor | None = None, blocks: Tensor | None = None) -> None:
        """weights: one [N, K], or several [Nᵢ, K] whose `column_blocks` are `blocks`; None: `F.linear` always."""
        assert blocks is not None or len(weights) == 1
        self.weights, self.bias, self.blocks = weights, bias, blocks
        self.outputs = sum(map(len, weights))

    @classmethod
    def of(cls, linears: Sequence[nn.Linear], copy: bool) -> MergedLinear:
        """copy: hold column blocks beside the Linears; otherwise they become views of the merged weight."""
        weights = [linear.weight.detach() for linear in linears]
        weight = torch.cat(weights) if len(weights) > 1 else weights[0]
        biases = [linear.bias for linear in linears]
        bias = None
        if any(one is not None for one in biases):
            parts = zip(biases, weights)
            bias = torch.cat([w.new_zeros(len(w)) if one is None else one.detach() for one, w in parts])
        if copy:
            return cls(weights, bias, library.column_blocks(weight))
        sizes = [len(one) for one in weights]
        for linear, rows in zip(linears, weight.split(sizes)):
            linear.weight.data = rows
        for own, part in zip(biases, () if bias is None else bias.split(sizes)):
            if own is not None:
                own.data = part
        return cls([weight], bias)

    def __call__(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        if self.blocks is not None and len(rows) <= MAX_SKINNY_ROWS:
            product = library.skinny_matmul(rows, self.blocks, self.outputs).view(*x.shape[:-1], self.outputs)
        elif len(self.weights) == 1:
            return F.linear(x, self.weights[0], self.bias)
        else:
            product = torch.cat([F.linear(x, weight) for weight in self.weights], dim=-1)
        return product if self.bias is None else product + self.bias


def half_precision_product(linear: nn.Module, x: Tensor) -> Tensor | None:
    """[..., K] → [..., N] of an unquantised Linear in half precision on a GPU, in float32; None for any other, and
    where something sees or replaces the module's forward."""
    if not x.is_cuda or type(linear) is not nn.Linear or linear.weight.dtype not in (torch.bfloat16, torch.float16):
        return None
    laid = forward_hooks(linear)
    if hasattr(
        linear, "_hf_hook"
    ):  # accelerate has put a forward in place of another, to move states of spread targets
        within = getattr(linear, "_old_forward", None)
        laid = [one for one in laid if one is not linear.__dict__.get("forward")]
        laid += [within] * (getattr(within, "__func__", within) is not type(linear).forward)
    if laid:
        return None
    rows = x.reshape(-1, x.shape[-1]).to(linear.weight.device)  # of a spread target: its last layer is elsewhere
    product = torch.mm(rows, linear.weight.T, out_dtype=torch.float32)
    return (product if linear.bias is None else product + linear.bias).view(*x.shape[:-1], -1)


def copy_pays(weights: Collection[Tensor]) -> bool:
    """Whether weights should be held in column blocks too: float32 on a CPU, not too large, a compiler found."""
    return (
        all(weight.device.type == "cpu" and weight.dtype == torch.float32 for weight in weights)
        and sum(weight.numel() * weight.element_size() for weight in weights) <= MAX_COPIED_BYTES
        and library.load_library()
    )


@dataclass(frozen=True)
class DraftingView(TargetView):
    """A target's view whose LM head is fast for few rows."""

    lm_head: MergedLinear = field(kw_only=True)

    @classmethod
    def of(cls, view: TargetView, lm_head: MergedLinear | None = None) -> DraftingView:
        """lm_head: of the target's decoder, where it has all of the view's rows; None: made from them."""
        weight, bias = view.lm_head_weight.detach(), view.lm_head_bias
        blocks = library.column_blocks(weight) if lm_head is None and copy_pays([weight]) else None
        lm_head = lm_head or MergedLinear([weight], bias, blocks)
        return cls(view.embedding, view.lm_head_weight, bias, view.layers, view.rule, view.renew, lm_head=lm_head)

    def product(self, hidden: Tensor) -> Tensor:
        """[..., H] → [..., V]"""
        return self.lm_head(hidden)
