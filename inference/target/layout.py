"""How weights lie in memory where it matters: on a CPU, products with the few rows of a tree."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from draft_heads.inference.native import library

Module = TypeVar("Module", bound=nn.Module)


def by_columns(weight: Tensor) -> Tensor:
    """A copy of the weight laid out column by column: on CPU a product with 4 to 64 rows is a quarter faster."""
    return weight.detach().t().contiguous().t()


FEW = 64
"""Rows up to which it is faster to read a matrix once for every twelve of them than to multiply as for many."""


class Product:
    """x [..., K] → x Wᵀ + b [..., N], W and b those of Linears that read the same states, one below the other.

    Where a copy is held, on a CPU, few rows are multiplied with that: in float32 by `library.float_rows`, by which a
    row's result does not depend on how many rows there are; where that cannot be, with a copy laid out `by_columns`.
    """

    def __init__(self, linears: Sequence[nn.Linear], copied: bool) -> None:
        """copied: hold one; otherwise the Linears become views of the merged weight, so that nothing is held twice."""
        weights = [linear.weight.detach() for linear in linears]
        weight = torch.cat(weights) if len(weights) > 1 else weights[0]
        self.outputs = len(weight)
        self.bias = None if linears[0].bias is None else torch.cat([linear.bias.detach() for linear in linears])
        self._blocks: Tensor | None = None
        if copied and weight.dtype == torch.float32 and library.load():
            self._blocks, self._weights = library.in_blocks(weight), weights
        elif copied:
            self._weights = [by_columns(weight)]
        else:
            self._weights = [weight]
            sizes = [len(one) for one in weights]
            for linear, rows in zip(linears, weight.split(sizes)):
                linear.weight.data = rows
            for linear, some in zip(linears, () if self.bias is None else self.bias.split(sizes)):
                linear.bias.data = some

    @property
    def inputs(self) -> int:
        """K."""
        return self._weights[0].shape[1]

    def __call__(self, x: Tensor) -> Tensor:
        """The product. A program is made for any number of rows, and takes all of them for few."""
        rows = x.reshape(-1, x.shape[-1])
        if self._blocks is not None and (torch.compiler.is_compiling() or len(rows) <= FEW):
            product = library.float_rows(rows, self._blocks, self.outputs).view(*x.shape[:-1], self.outputs)
        elif len(self._weights) == 1:
            return F.linear(x, self._weights[0], self.bias)
        else:
            product = torch.cat([F.linear(x, weight) for weight in self._weights], dim=-1)
        return product if self.bias is None else product + self.bias


def for_drafting(head: Module) -> Module:
    """The head in evaluation mode; on CPU its projections, which meet the rows of a tree, are laid out `by_columns`."""
    for module in head.modules():
        if isinstance(module, nn.Linear) and module.weight.device.type == "cpu":
            module.weight.data = by_columns(module.weight)
    return head.eval()
