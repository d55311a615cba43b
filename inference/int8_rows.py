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
    """K matrices [N, H] with a scale for each row: the largest weight of a row is 127 of its steps."""

    def __init__(self, weights: Sequence[Tensor]) -> None:
        rounded = [self._rounded(weight.detach().float()) for weight in weights]  # one wide copy at a time
        self.steps, self.scale = (torch.stack(same) for same in zip(*rounded))

    @staticmethod
    def _rounded(weight: Tensor) -> tuple[Tensor, Tensor]:
        most = weight.abs().amax(-1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny)
        return (weight / most * 127).round().to(torch.int8), (most / 127)[:, 0]

    def __call__(self, vectors: Tensor) -> Tensor:
        """[K, N] from vectors [K, H]."""
        return (self.steps.float() * vectors[..., None, :]).sum(-1) * self.scale


class Int8Offsets:
    """K Medusa heads that read one hidden state."""

    def __init__(self, heads: Sequence[OffsetHead]) -> None:
        layers = zip(*(head.layers for head in heads))
        self.layers = [
            (
                Int8Rows([layer.linear.weight for layer in same]),
                torch.stack([layer.linear.bias.detach() for layer in same]),
            )
            for same in layers
        ]
        self.vocabulary = Int8Rows([head.vocabulary.weight for head in heads])

    def log_probs(self, hidden: Tensor) -> Tensor:
        """[H] h_n → [K, V] log-probabilities, as `MedusaHead.draft_log_probs` but for the rounding of weights."""
        states = hidden.float().expand(len(self.vocabulary.scale), -1)
        for weight, bias in self.layers:
            states = states + nn.functional.silu(weight(states) + bias)
        return self.vocabulary(states).log_softmax(-1)
