"""A head's weights as drafting reads them: a copy of the head whose products are few, or fast for few rows on a CPU.

The copy shares its weights with the head, except those that are merged; neither may be trained while it drafts.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from typing import TypeVar

import torch
from torch import Tensor, nn

from draft_heads.heads.base import DraftHead
from draft_heads.heads.block import DecoderBlock
from draft_heads.inference.target.linear import MergedLinear, copy_pays

Head = TypeVar("Head", bound=DraftHead)
Layer = TypeVar("Layer", bound=nn.Module)


def prepare_for_drafting(head: Head, dtype: torch.dtype | None = None) -> Head:
    """A copy of the head for its drafter, in evaluation mode and without gradients; a head that is one is returned.

    Its Linears become `SkinnyLinear` where that pays; elsewhere projections of a block that read the same states are
    merged. dtype: that of its weights, by default the head's; where it differs, no weight is shared.
    """
    if any(isinstance(module, SkinnyLinear | FastBlock) for module in head.modules()):
        return head
    prepared = share_weights(head, dtype or head.dtype)
    skinny = copy_pays(list(prepared.parameters()))
    for module in list(prepared.modules()):
        for name, child in list(module.named_children()):
            if skinny and type(child) is nn.Linear:
                setattr(module, name, SkinnyLinear(child))
            elif not skinny and type(child) is DecoderBlock:
                setattr(module, name, FastBlock(child))
    return prepared.eval()


def share_weights(module: Layer, dtype: torch.dtype) -> Layer:
    """A copy with parameters and buffers of its own over the same memory; those of another dtype are converted."""

    def shared(x: Tensor) -> Tensor:
        return x.detach().to(dtype if x.is_floating_point() else x.dtype)

    made = copy(module)
    made._parameters = {
        name: None if x is None else nn.Parameter(shared(x), requires_grad=False)
        for name, x in module._parameters.items()
    }
    made._buffers = {name: None if x is None else shared(x) for name, x in module._buffers.items()}
    made._modules = {
        name: None if child is None else share_weights(child, dtype) for name, child in module._modules.items()
    }
    return made


class FastBlock(DecoderBlock):
    """A block with one product for queries, keys and values, and one for SwiGLU's two factors."""

    def __init__(self, block: DecoderBlock) -> None:
        """block: its projections become views of the merged weights, and this block's own."""
        nn.Module.__init__(self)
        self.__dict__.update(block.__dict__)
        self._merge()

    def _merge(self) -> None:
        self._qkv = MergedLinear.of([self.q_proj, self.k_proj, self.v_proj], copy=False)
        self._gate_up = MergedLinear.of([self.gate_proj, self.up_proj], copy=False)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> FastBlock:
        """Moving or converting gives the projections weights of their own: merge those."""
        super()._apply(fn, recurse)
        self._merge()
        return self

    def _project(self, read: Tensor) -> tuple[Tensor, Tensor]:
        queries_keys, values = self._qkv(read).tensor_split([-self.kv_heads * self.head_dim], dim=-1)
        return queries_keys, values

    def _gate_and_up(self, normed: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = self._gate_up(normed).chunk(2, dim=-1)
        return gate, up


class SkinnyLinear(nn.Linear):
    """A Linear that is fast for few rows; shares the weight and bias of the one that it is made from."""

    def __init__(self, linear: nn.Linear) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight, self.bias = linear.weight, linear.bias
        self._merged: MergedLinear | None = MergedLinear.of([linear], copy=True)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> SkinnyLinear:
        """Moving or converting makes another weight, which the copy in column blocks would not follow."""
        self._merged = None
        super()._apply(fn, recurse)
        return self

    def forward(self, x: Tensor) -> Tensor:
        """[..., K] → [..., N]"""
        return super().forward(x) if self._merged is None else self._merged(x)
