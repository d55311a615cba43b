"""Weights in eight bits, for products with a single vector, which on a CPU take as long as reading the weights takes.

Only drafts are made with them; what is written is the target's own. Compiled, a product is one loop that reads int8 and
multiplies in float32; uncompiled, a copy in float32 would be made first, which takes longer than it saves.

Shapes: K heads, H hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from heads.medusa import OffsetHead


class Int8Rows:
    """Matrices [..., N, H] with a scale for each row: the largest weight of a row is 127 of its steps."""

    def __init__(self, weight: Tensor) -> None:
        weight = weight.detach().float()
        most = weight.abs().amax(-1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny)
        self.scale = (most / 127)[..., 0]
        self.steps = (weight / most * 127).round().to(torch.int8)

    def __call__(self, vectors: Tensor) -> Tensor:
        """[..., N] from vectors [..., H]."""
        return (self.steps.float() * vectors[..., None, :]).sum(-1) * self.scale


class Int8Offsets:
    """K Medusa heads that read one hidden state."""

    def __init__(self, heads: Sequence[OffsetHead]) -> None:
        layers = zip(*(head.layers for head in heads))
        self.layers = [(Int8Rows(_stack(same, "weight")), _stack(same, "bias").float()) for same in layers]
        self.vocabulary = Int8Rows(torch.stack([head.vocabulary.weight for head in heads]))

    def log_probs(self, hidden: Tensor) -> Tensor:
        """[H] h_n → [K, V] log-probabilities, as `MedusaHead.draft_log_probs` but for the rounding of weights."""
        states = hidden.float().expand(len(self.vocabulary.scale), -1)
        for weight, bias in self.layers:
            states = states + nn.functional.silu(weight(states) + bias)
        return self.vocabulary(states).log_softmax(-1)


def _stack(layers: Sequence[nn.Module], name: str) -> Tensor:
    """One parameter of every layer's matrix."""
    return torch.stack([getattr(layer.linear, name).detach() for layer in layers])
