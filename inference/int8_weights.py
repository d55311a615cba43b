"""Heads in eight bits, for drafts on a CPU, which take as long as reading the weights takes.

Only drafts are made with them; what is written is the target's own. A weight is rounded to 1/127 of the largest that
the same output has, the states it meets to 16 bits, or as many as sums of long rows leave room for.
"""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass, fields
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

from draft_heads.heads.base import DraftHead, TargetView
from draft_heads.heads.block import DecoderBlock
from draft_heads.inference.native import library
from draft_heads.inference.target.layout import for_drafting

Head = TypeVar("Head", bound=DraftHead)
Module = TypeVar("Module", bound=nn.Module)


class Int8Linear(nn.Module):
    """A product in float32 with a matrix in eight bits, in place of a Linear [N, K]."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        super().__init__()
        weight = weight.detach().float()
        scale = weight.abs().amax(-1).clamp(min=torch.finfo(torch.float32).tiny) / 127  # [N]
        self.scale = nn.Parameter(scale, requires_grad=False)
        self.weights = library.side_by_side((weight / scale[:, None]).round().to(torch.int8))
        self.bias = None if bias is None else bias.detach()

    def forward(self, x: Tensor) -> Tensor:
        """[..., K] → [..., N]"""
        product = library.few_rows(x.reshape(-1, x.shape[-1]), self.weights, self.scale).view(*x.shape[:-1], -1)
        return product if self.bias is None else product + self.bias


class Int8Block(DecoderBlock):
    """A block whose projections of the same states are one product."""

    def __init__(self, block: DecoderBlock) -> None:
        nn.Module.__init__(self)
        self.heads, self.kv_heads, self.head_dim = block.heads, block.kv_heads, block.head_dim
        self.rope_theta = block.rope_theta
        self.attention_norm, self.mlp_norm = block.attention_norm, block.mlp_norm
        queries, keys, values = (p.weight.detach() for p in (block.q_proj, block.k_proj, block.v_proj))
        self._sizes = [len(queries), len(keys), len(values)]
        self._merged = Int8Linear(torch.cat([queries, keys, values]))
        self._context = Int8Linear(torch.cat([keys, values]))
        self._gate = Int8Linear(torch.cat([block.gate_proj.weight.detach(), block.up_proj.weight.detach()]))
        self.o_proj = Int8Linear(block.o_proj.weight)  # type: ignore[assignment]
        self.down_proj = Int8Linear(block.down_proj.weight)  # type: ignore[assignment]

    def project(self, normed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """See `DecoderBlock.project`."""
        queries, keys, values = self._merged(normed).split(self._sizes, dim=-1)
        return queries, keys, values

    def project_context(self, normed: Tensor) -> tuple[Tensor, Tensor]:
        """See `DecoderBlock.project_context`."""
        keys, values = self._context(normed).chunk(2, dim=-1)
        return keys, values

    def project_gate(self, normed: Tensor) -> tuple[Tensor, Tensor]:
        """See `DecoderBlock.project_gate`."""
        gate, up = self._gate(normed).chunk(2, dim=-1)
        return gate, up


@dataclass(frozen=True)
class Int8View(TargetView):
    """A target's view whose LM head, as far as drafts read it, is in eight bits."""

    lm_head: Int8Linear | None = None

    @classmethod
    def of(cls, view: TargetView) -> Int8View:
        """The same, with a rounded copy beside."""
        shared = {field.name: getattr(view, field.name) for field in fields(TargetView)}
        return cls(**shared, lm_head=Int8Linear(view.lm_head_weight, view.lm_head_bias))

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., H] → [..., V], those of the LM head but for the rounding."""
        assert self.lm_head is not None
        product: Tensor = self.lm_head(hidden)
        return product


def in_eight_bits(module: Module) -> Module:
    """The same module with every block and Linear rounded; all else is shared, not copied."""
    made: dict[int, Any] = {id(tensor): tensor for tensor in (*module.parameters(), *module.buffers())}

    def rounded(part: nn.Module) -> None:
        if isinstance(part, DecoderBlock):
            made[id(part)] = Int8Block(part)
        elif type(part) is nn.Linear:
            made[id(part)] = Int8Linear(part.weight, part.bias)
        else:
            for child in part.children():
                rounded(child)

    rounded(module)
    return deepcopy(module, made)  # which copies nothing that is made already


class DraftingHead(Generic[Head]):
    """A head and what it reads of the target, as drafts use them: in compiled programs on a CPU in eight bits."""

    def __init__(self, head: Head, int8: int, view: TargetView | None = None) -> None:
        """int8: 1 rounds where that is faster, 0 never; view: for a head that reads the target's LM head."""
        if int8 not in (0, 1):
            raise ValueError(f"int8 is 0 or 1; got {int8}")
        self._exact = for_drafting(head), view
        weight = next(head.parameters())
        self._rounds = bool(int8) and weight.device.type == "cpu" and weight.dtype == torch.float32
        self._rounded: tuple[Head, TargetView | None] | None = None

    def prepare(self) -> None:
        """Programs will be made: round, once, if they are to be."""
        if self._rounds and self._rounded is None and library.load():
            head, view = self._exact
            self._rounded = in_eight_bits(head), view and Int8View.of(view)

    @property
    def _used(self) -> tuple[Head, TargetView | None]:
        if self._rounded is None or not torch.compiler.is_compiling():
            return self._exact
        return self._rounded

    @property
    def head(self) -> Head:
        """The head."""
        return self._used[0]

    @property
    def view(self) -> TargetView:
        """What it reads of the target."""
        view = self._used[1]
        assert view is not None, "only a head that was given a view reads it"
        return view
