"""The Chimera head: a k-gram encoder, one block over the target's states and the k-grams, residual heads.

Shapes: B batch, L length, A anchors a row, K heads, N windows, W tree nodes, H hidden, V vocabulary (the draft
vocabulary's size where there is one).

`g_i` encodes token i and the few before it; the block reads `[h_1 … h_n ; g_1 … g_m]`, a state's position being its
token's index in both halves. Head k = 0 … K−1 drafts `x_{n+2+k}` from the target's last hidden state h_n and the
block's output `f_{n+1+k}`, which is regressed to h_{n+1+k}.

Training runs every anchor and every head in one pass. Head k's query at index i = n+1+k sees `h_j` for j ≤ n = i−1−k
and `g_j` for j ≤ i, is concatenated with h_n, has label y_{i+1} and regresses h_i. Worked example, n = 4, k = 1: the
query is g_6; it sees h_1 … h_4 and g_1 … g_6; it predicts the token at 7; f is regressed to h_6.

Paper: "Chimera: A Lossless Decoding Method for Accelerating Large Language Models Inference by Fusing all Tokens"
(2024), section 3.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from draft_heads.configs.options import option
from draft_heads.heads.attention import anchor_attention, causal_attention, fusion_mask
from draft_heads.heads.base import DraftHead, Readout, Rows, TargetView, root_mean_square
from draft_heads.heads.block import Attend, DecoderBlock, Norm, Rotation, scaled_rotation
from draft_heads.heads.config import LOSS_WEIGHT, Budget
from draft_heads.heads.cross_entropy import total
from draft_heads.heads.medusa import OffsetConfig
from draft_heads.heads.windows import Windows, at


@dataclass
class ChimeraConfig(OffsetConfig):
    """Settings of a Chimera head; sizes come from the target (`target_sizes`)."""

    kind: ClassVar[str] = "chimera"
    title: ClassVar[str] = "a Chimera head"
    variants: ClassVar[dict[str, dict[str, Any]]] = {
        "bare": {"order": 1, "residual": False},
        "layer": {"encoder": "target_layer0_finetuned"},
        "shared": {"projection": "shared"},
    }
    budget: ClassVar[Budget] = Budget(training=3.5, whole_vocabulary=9.5, drafting=0.26)
    cut_at_disagreement: ClassVar[bool] = False

    encoder: str = option(
        "kgram",
        "what encodes tokens; target_layer0: the target's own first layer (Table 7)",
        choices=("kgram", "target_layer0_frozen", "target_layer0_finetuned"),
    )
    order: int = option(
        3, "tokens of a k-gram, 1 to 5 (3: the paper's trigram)", rule=("from 1 to 5", lambda order: 1 <= order <= 5)
    )
    projection: str = option(
        "full",
        "full (the paper: a 2H x V matrix per head) or shared (the LM head after a 2H x H matrix)",
        choices=("full", "shared"),
    )
    residual: bool = option(True, "heads read h_n beside the block's output (Fig. 6)")
    ce_weight: float = option(
        1.0, "weight of the cross entropy, every head alike", rule=("above 0", lambda weight: 0 < weight < math.inf)
    )
    mse_weight: float = option(1.0, "weight of the squared error to the target's states", rule=LOSS_WEIGHT)

    def offset_weight(self, k: int) -> float:
        return self.ce_weight


class KGramEncoder(nn.Module):
    """g = W2·SiLU(W1·[e(x_{i−k+1}); …; e(x_i)]) with zeros for tokens before the first (the paper's eq 2)."""

    def __init__(self, order: int, hidden: int) -> None:
        super().__init__()
        self.order = order
        self.inner = nn.Linear(order * hidden, hidden, bias=False)
        self.outer = nn.Linear(hidden, hidden, bias=False)

    def forward(self, token_states: Tensor) -> Tensor:
        """[..., k, H] embeddings, oldest first → [..., H]."""
        return self.outer(F.silu(self.inner(token_states.flatten(-2))))


class ChimeraHead(DraftHead):
    """K residual heads after a block that fuses all tokens; see the module's head."""

    config: ChimeraConfig

    def __init__(self, config: ChimeraConfig) -> None:
        super().__init__(config)
        hidden, reads = config.hidden_size, (2 if config.residual else 1) * config.hidden_size
        self.encoder: nn.Module
        if config.encoder == "kgram":
            self.encoder = KGramEncoder(config.order, hidden)
        else:
            self.encoder = DecoderBlock(config)
            self.encoder.requires_grad_(config.encoder == "target_layer0_finetuned")
        self.block = DecoderBlock(config)
        self.norm = Norm(hidden, eps=config.rms_norm_eps)
        outputs = config.classes if config.projection == "full" else hidden
        self.heads = nn.ModuleList(nn.Linear(reads, outputs, bias=False) for _ in range(config.heads))
        for head in self.offset_heads:
            nn.init.zeros_(head.weight)

    @property
    def offset_heads(self) -> list[nn.Linear]:
        """The residual heads, in the order of their offsets."""
        return cast("list[nn.Linear]", list(self.heads))

    @property
    def tables(self) -> tuple[str, ...]:  # type: ignore[override]
        """The vocabulary matrices of `projection: full`."""
        return tuple(f"heads.{k}.weight" for k in range(self.config.heads)) if self.config.projection == "full" else ()

    def weights_read(self) -> int:
        """Encoder and block once a level, each head once; with `shared` also the LM head once a level."""
        config = self.config
        once = sum(p.numel() for p in self.heads.parameters()) + self.layer_weights
        level = super().weights_read() - once
        if config.projection == "shared":
            level += config.classes * config.hidden_size
        return once + config.heads * level

    @torch.no_grad()
    def start_from(self, hidden: Tensor, target: TargetView, aux_hidden: Tensor | None = None) -> None:
        """The output norm starts at the scale of h, each head as the target's LM head on the block's output.

        `full` starts as [0 | W_lm] and `shared` as LM(f): f is regressed to the target's hidden state.
        """
        super().start_from(hidden, target, aux_hidden)
        size = self.config.hidden_size
        self.norm.weight.fill_(root_mean_square(hidden))
        if self.config.projection == "full":
            for head in self.offset_heads:
                head.weight.zero_()
                head.weight[:, -size:] = self.draft_view(target).lm_head_weight * target.rule.factor
        if isinstance(self.encoder, DecoderBlock):
            different = ["all of it"]
            if target.layers is not None:
                rotations = [f"rotary positions of type {kind}" for kind in scaled_rotation(target.layers[0])]
                different = self.encoder.differs_from(target.layers[0]) + rotations
            if different or target.layers is None:
                raise ValueError(
                    f"--encoder {self.config.encoder} copies a Llama-like first layer (norms, q/k/v/o, gate/up/down, "
                    f"no biases); this target's differs in {', '.join(different)}; use --encoder kgram"
                )
            self.encoder.copy_from(target.layers[0])

    # --- parts ------------------------------------------------------------------------------------------------------

    def recent_states(self, input_ids: Tensor, segment_ids: Tensor, target: TargetView) -> Tensor:
        """[B, L, k, H], the embeddings of every index's k-gram, zero where the conversation has not begun."""
        states = self.token_states(input_ids, target)
        length = input_ids.shape[1]
        grams = []
        for back in range(self.config.order - 1, -1, -1):
            there = (torch.arange(length, device=input_ids.device) - back).clamp(min=0)
            inside = (segment_ids[:, there] == segment_ids) & (torch.arange(length, device=there.device) >= back)
            grams.append(states[:, there] * inside[..., None])
        return torch.stack(grams, dim=2)

    def encode_rows(self, rows: Rows, target: TargetView) -> Tensor:
        """[B, L, H], g of every index of whole rows."""
        if isinstance(self.encoder, DecoderBlock):
            states = target.embed(rows.input_ids).to(self.dtype)
            rotation = self.encoder.rotation(rows.position_ids)
            return self.encoder(states, rotation, causal_attention(rows.segment_ids))
        return self.encoder(self.recent_states(rows.input_ids, rows.segment_ids, target))

    def fuse(self, encoded: Tensor, rotation: Rotation, attend: Attend) -> Tensor:
        """f [B, Q, H] of queries g [B, Q, H] at positions with this `rotation`."""
        return self.norm(self.block(encoded, rotation, attend))

    def read_out(self, k: int, last: Tensor, fused: Tensor, target: TargetView) -> tuple[Tensor, Tensor, Tensor | None]:
        """What the logits of head k are the product of, from h_n and f [..., H]: states, vocabulary matrix, bias."""
        if self.config.projection == "full":
            return self._residual(last, fused), self.offset_heads[k].weight, None
        states = self._states(k, last, fused).to(target.lm_head_weight.dtype)
        return target.rule.scaled(states), target.lm_head_weight, target.scaled_bias

    def head_logits(self, k: int, last: Tensor, fused: Tensor, target: TargetView) -> Tensor:
        """[..., V] of head k from h_n [..., H] and f [..., H], by products that are fast for few rows where those of
        the head and of the view are."""
        if self.config.projection == "full":
            logits: Tensor = self.offset_heads[k](self._residual(last, fused))
            return logits
        return target.head_logits(self._states(k, last, fused).to(target.lm_head_weight.dtype))

    def _residual(self, last: Tensor, fused: Tensor) -> Tensor:
        """[..., H or 2·H], what an offset's head reads of h_n and f."""
        return torch.cat([last, fused], dim=-1) if self.config.residual else fused

    def _states(self, k: int, last: Tensor, fused: Tensor) -> Tensor:
        """[..., H] of head k, whose product with the target's LM head are its logits (projection `shared`)."""
        states: Tensor = fused + self.offset_heads[k](self._residual(last, fused))
        return states

    # --- training ---------------------------------------------------------------------------------------------------

    def train_outputs(self, rows: Rows, anchors: Tensor, target: TargetView) -> Tensor:
        """f of every head of the given anchors `[B, A]` (ascending), one pass: [B, A, K, H]."""
        heads, length = self.config.heads, rows.input_ids.shape[1]
        encoded = self.encode_rows(rows, target)
        rotation = self.block.rotation(rows.position_ids)
        past = self.block.context_keys_values(self.row_states(rows), rotation)
        grams = self.block.context_keys_values(encoded, rotation)
        offsets = torch.arange(1, heads + 1, device=anchors.device)
        index = (anchors[:, :, None] + offsets).clamp(max=length - 1).flatten(1)  # i = n+1+k
        attend = anchor_attention(fusion_mask(anchors, rows.segment_ids, heads), anchors, heads, past, grams)
        fused = self.fuse(at(encoded, index), self.block.rotation(rows.position_ids.gather(1, index)), attend)
        return fused.unflatten(1, (anchors.shape[1], heads))

    def readouts(self, rows: Rows, windows: Windows, wanted: Tensor, target: TargetView) -> Iterator[Readout]:
        """See `DraftHead.readouts`; f is also regressed to h."""
        fused = self.train_outputs(rows, windows.anchors, target)[windows.valid]  # [N, K, H]
        last = windows.gather(self.row_states(rows))
        for k in range(self.config.heads):
            which = wanted[:, k]
            f, h = fused[which, k], last[which]
            states, vocabulary, bias = self.read_out(k, h, f, target)
            hidden = windows.gather(rows.hidden, ahead=k + 1)[which]  # h_{n+1+k}
            error = total(F.mse_loss(f, hidden, reduction="none").mean(-1))
            yield Readout(states, vocabulary, bias, terms={"mse": (error, self.config.mse_weight)})
