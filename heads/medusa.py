"""Medusa-1 heads: one small network per offset on the target's last hidden state.

Shapes: N windows, K heads, H hidden, V vocabulary (the draft vocabulary's size where there is one).

Head k = 0 … K−1 drafts `x_{n+2+k}` from h_n alone: L layers `x + SiLU(Wx + b)`, W starting at zero and not shared
between layers, then a vocabulary matrix of its own that starts as the target's LM head.

Paper: "Medusa: Simple LLM Inference Acceleration Framework with Multiple Decoding Heads" (2024), section 2.1.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn

from draft_heads.configs.options import option
from draft_heads.heads.base import DraftHead, Readout, Rows, TargetView
from draft_heads.heads.block import ResidualLayer
from draft_heads.heads.config import DECAY, Budget, HeadConfig
from draft_heads.heads.windows import Windows


@dataclass
class OffsetConfig(HeadConfig):
    """What heads share that draft K offsets, one small network each."""

    heads: int = option(4, "K, tokens drafted after the base token", least=1)

    @property
    def offsets(self) -> int:
        return self.heads


@dataclass
class MedusaConfig(OffsetConfig):
    """Settings of Medusa heads; sizes come from the target (`target_sizes`)."""

    kind: ClassVar[str] = "medusa"
    title: ClassVar[str] = "Medusa heads"
    variants: ClassVar[dict[str, dict[str, Any]]] = {"deep": {"layers": 2}}
    budget: ClassVar[Budget] = Budget(training=1.4, whole_vocabulary=4.6)
    reads_base_token: ClassVar[bool] = False

    layers: int = option(1, "residual layers of a head", least=0)
    decay: float = option(0.8, "the loss of head k is weighted decay^k", rule=DECAY)

    def offset_weight(self, k: int) -> float:
        return self.decay**k


class OffsetHead(nn.Module):
    """Residual layers, then a vocabulary matrix."""

    def __init__(self, config: MedusaConfig) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(ResidualLayer(config.hidden_size) for _ in range(config.layers)))
        self.vocabulary = nn.Linear(config.hidden_size, config.classes, bias=False)


class OffsetHeads(DraftHead):
    """One network per offset, each with a vocabulary matrix of its own: what Medusa and Hydra share."""

    config: MedusaConfig
    tables = ("vocabulary.weight",)

    def __init__(self, config: MedusaConfig) -> None:
        super().__init__(config)
        self.heads = nn.ModuleList(self.make_head(k) for k in range(config.heads))

    def make_head(self, k: int) -> OffsetHead:
        """The network of offset k."""
        return OffsetHead(self.config)

    @property
    def offset_heads(self) -> list[OffsetHead]:
        """The networks, in the order of their offsets."""
        return cast("list[OffsetHead]", list(self.heads))

    @torch.no_grad()
    def start_from(self, hidden: Tensor, target: TargetView, aux_hidden: Tensor | None = None) -> None:
        """Every vocabulary matrix starts as the target's LM head."""
        super().start_from(hidden, target, aux_hidden)
        for head in self.offset_heads:
            head.vocabulary.weight.copy_(self.draft_view(target).lm_head_weight * target.rule.factor)


class MedusaHead(OffsetHeads):
    """K heads that read one hidden state; see the module's head."""

    def draft_log_probs(self, hidden: Tensor, offsets: int | None = None) -> Tensor:
        """[..., H] h_n → [..., K, V] log-probabilities in float32, of the first `offsets` only where that is given."""
        logits = [head.vocabulary(head.layers(hidden)) for head in self.offset_heads[:offsets]]
        return torch.stack(logits, dim=-2).float().log_softmax(-1)

    def readouts(self, rows: Rows, windows: Windows, wanted: Tensor, target: TargetView) -> Iterator[Readout]:
        """See `DraftHead.readouts`."""
        states = windows.gather(self.row_states(rows))  # [N, H]
        for k, head in enumerate(self.offset_heads):
            yield Readout(head.layers(states[wanted[:, k]]), head.vocabulary.weight)
