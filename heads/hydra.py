"""Hydra heads: each offset's head also reads the tokens drafted before it.

Shapes: N windows, W tree nodes, K heads, H hidden, V vocabulary (the draft vocabulary's size where there is one).

Head k = 0 … K−1 drafts `x_{n+2+k}` from `[s_n; e(x_{n+1}); …; e(x_{n+1+k})]`: a projection to H added to s_n (it starts
at zero), L residual layers, a vocabulary matrix that starts as the target's LM head. s_n is the target's hidden state
h_n, or, with `prefix_attention` (Hydra++), the output of one decoder block over h_1 … h_n with a cache of its own.
In training the text supplies the tokens, in decoding the tree does: every node has its own path.

Paper: "Hydra: Sequentially-Dependent Draft Heads for Medusa Decoding" (2024), sections 3 and 4.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from draft_heads.configs.options import option
from draft_heads.heads.attention import causal_attention
from draft_heads.heads.base import Readout, Rows, TargetView
from draft_heads.heads.block import DecoderBlock
from draft_heads.heads.config import Budget
from draft_heads.heads.medusa import MedusaConfig, OffsetHead, OffsetHeads
from draft_heads.heads.windows import Windows


@dataclass
class HydraConfig(MedusaConfig):
    """Settings of Hydra heads; sizes come from the target (`target_sizes`)."""

    kind: ClassVar[str] = "hydra"
    title: ClassVar[str] = "Hydra heads"
    variants: ClassVar[dict[str, dict[str, Any]]] = {
        "plus": {"layers": 4, "prefix_attention": True, "labels_from": "distribution"},
    }
    budget: ClassVar[Budget] = Budget(training=3.7, whole_vocabulary=7.5)
    cut_at_disagreement: ClassVar[bool] = False
    reads_base_token: ClassVar[bool] = True

    prefix_attention: bool = option(False, "read the context through a decoder block of its own (Hydra++)")
    labels_from: str = option(
        "tokens",
        "tokens (the greedy ones) or distribution (the target's, without its own generation settings; Hydra++)",
        choices=("tokens", "distribution"),
    )
    dropout: float = option(
        0.0, "dropout on what a head reads (Hydra++: 0.2)", rule=("at least 0 and below 1", lambda p: 0 <= p < 1)
    )

    @property
    def learns_distribution(self) -> bool:  # type: ignore[override]
        return self.labels_from == "distribution"


class TokenHead(OffsetHead):
    """An offset's network that also reads the tokens before: a projection, starting at zero, is added to the state."""

    def __init__(self, config: HydraConfig, tokens: int) -> None:
        super().__init__(config)
        self.tokens = nn.Linear((1 + tokens) * config.hidden_size, config.hidden_size, bias=False)
        nn.init.zeros_(self.tokens.weight)


class HydraHead(OffsetHeads):
    """K heads of growing input; see the module's head."""

    config: HydraConfig

    def __init__(self, config: HydraConfig) -> None:
        super().__init__(config)
        if config.prefix_attention:
            self.prefix = DecoderBlock(config)

    def make_head(self, k: int) -> OffsetHead:
        """The network of offset k: it reads k+1 tokens."""
        return TokenHead(self.config, k + 1)

    def head_states(self, k: int, state: Tensor, token_states: Tensor) -> Tensor:
        """What head k's vocabulary matrix reads, [..., H].

        state [..., H] is s_n; token_states [..., k+1, H] the embeddings of the base token and the drafts after it.
        """
        head = cast("TokenHead", self.offset_heads[k])
        read = torch.cat([state[..., None, :], token_states], dim=-2).flatten(-2)
        read = F.dropout(read, self.config.dropout, self.training)
        return head.layers(state + head.tokens(read))

    def next_log_probs(self, k: int, state: Tensor, token_states: Tensor) -> Tensor:
        """Log-probabilities [..., V] in float32 of what follows k+1 known tokens; arguments as `head_states`."""
        return self.offset_heads[k].vocabulary(self.head_states(k, state, token_states)).float().log_softmax(-1)

    def row_states(self, rows: Rows) -> Tensor:
        """[B, L, H], s_n at every index of whole rows."""
        states = super().row_states(rows)
        if not self.config.prefix_attention:
            return states
        rotation = self.prefix.rotation(rows.position_ids)
        return self.prefix(states, rotation, causal_attention(rows.segment_ids))

    def readouts(self, rows: Rows, windows: Windows, wanted: Tensor, target: TargetView) -> Iterator[Readout]:
        """See `DraftHead.readouts`."""
        states = windows.gather(self.row_states(rows))  # [N, H]
        tokens = torch.cat([windows.gather(rows.input_ids[..., None], k + 1) for k in range(self.config.heads)], dim=-1)
        token_states = self.token_states(tokens, target)  # [N, K, H] of n+1 … n+K
        for k, head in enumerate(self.offset_heads):
            which = wanted[:, k]
            read, soft = self.head_states(k, states[which], token_states[which, : k + 1]), None
            if self.config.labels_from == "distribution":
                soft = windows.gather(rows.hidden, ahead=k + 1)[which]  # h_{n+1+k}, which predicts x_{n+2+k}
            yield Readout(read, head.vocabulary.weight, soft_hidden=soft)
