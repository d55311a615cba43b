"""The CTC-drafter head: one decoder block that drafts T frames in one parallel pass, aligned to labels by CTC.

Shapes: B batch, L length, A anchors a row, N windows, T frames, U labels, H hidden, V vocabulary (blank = class V).

Context states `c_i = W[e(x_{i+1}); h_i]` sit at position i+1; frame t of anchor n starts as `c_n + q_t`, sits at
position n+1+t, and attends to all c_i (i ≤ n) and to the other frames of its anchor. The output is normalised and read
by the target's own frozen LM head; one learned row more gives the blank. The base token `x_{n+1}` is known before
drafting and stands outside the alignment.

Paper: "Speculative Decoding with CTC-based Draft Model for LLM Inference Acceleration" (NeurIPS 2024), section 3.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from heads.base import DraftHead, HeadConfig, HeadLoss, TargetView
from heads.block import Attend, DecoderBlock
from heads.frame_attention import dense_attention, flex_frame_attention
from heads.losses import ctc_loss_fused
from heads.prefix_scores import teacher_forced_hits
from heads.windows import Windows, select_windows


@dataclass
class CTCConfig(HeadConfig):
    """Settings of a CTC head; sizes come from the target (`target_sizes`)."""

    kind: ClassVar[str] = "ctc"

    frames: int = field(default=8, metadata={"help": "T, CTC output slots an anchor"})
    labels: int = field(default=4, metadata={"help": "U, labels of a training window; frames >= 2*labels-1"})
    blocks: int = field(default=1, metadata={"help": "decoder blocks (1: the paper)"})
    context: str = field(
        default="hidden+token",
        metadata={"help": "what a context state reads: hidden+token, or hidden (eq 9)"},
    )
    labels_cut: str = field(
        default="agree", metadata={"help": "agree: a window ends where text and labels part; none: the paper"}
    )
    anchors: int = field(default=0, metadata={"help": "anchors sampled per row and step; 0 trains on every one"})
    open_windows: bool = field(
        default=False, metadata={"help": "score full windows too by what the collapse starts with"}
    )

    def __post_init__(self) -> None:
        if self.labels < 1:
            raise ValueError(f"--labels must be at least 1; got {self.labels}")
        if self.frames < 2 * self.labels - 1:
            raise ValueError(
                f"--frames must be at least 2*labels-1 = {2 * self.labels - 1} so that repeated labels fit with a "
                f"blank between them; got {self.frames}; raise --frames or lower --labels"
            )
        if self.blocks < 1:
            raise ValueError(f"--blocks must be at least 1; got {self.blocks}")
        if self.anchors < 0:
            raise ValueError(f"--anchors must be 0 (all) or more; got {self.anchors}")
        for name, valid in (("context", ("hidden+token", "hidden")), ("labels_cut", ("agree", "none"))):
            if getattr(self, name) not in valid:
                raise ValueError(f"--{name} must be one of {', '.join(valid)}; got {getattr(self, name)!r}")


class CTCHead(DraftHead):
    """T frames in, T distributions over V+1 classes out; see the module's head."""

    config: CTCConfig

    def __init__(self, config: CTCConfig) -> None:
        super().__init__(config)
        hidden = config.hidden_size
        if config.context == "hidden+token":
            self.context_proj = nn.Linear(2 * hidden, hidden, bias=False)
            with torch.no_grad():  # starts as [0 | I]: the context is the hidden state
                self.context_proj.weight.zero_()
                self.context_proj.weight[:, hidden:].fill_diagonal_(1.0)
        self.frame_queries = nn.Parameter(0.02 * torch.randn(config.frames, hidden))
        self.blocks = nn.ModuleList(DecoderBlock(config) for _ in range(config.blocks))
        self.norm = nn.RMSNorm(hidden, eps=config.rms_norm_eps)
        self.blank_weight = nn.Parameter(torch.zeros(hidden))
        self.blank_bias = nn.Parameter(torch.zeros(1))  # DeepSpeed broadcasts no 0-dimensional parameters

    @torch.no_grad()
    def calibrate(self, hidden: Tensor, target: TargetView) -> None:
        """Start the output norm at the scale the LM head expects, and the blank at probability about one half.

        hidden [..., H]: a sample of the target's hidden states. At first the frames' output is the hidden state scaled
        to one length for all, so the blank's bias is the mean log-normaliser of the target's logits there.
        """
        sample = hidden.reshape(-1, hidden.shape[-1])[:512].to(self.norm.weight.dtype)
        self.norm.weight.fill_(sample.float().pow(2).mean(-1).sqrt().mean())
        logits = target.logits(self.norm(sample).to(target.lm_head_weight.dtype))
        self.blank_bias.copy_(logits.float().logsumexp(-1).mean())

    def context_states(self, hidden: Tensor, next_ids: Tensor, target: TargetView) -> Tensor:
        """c `[B, L, H]` from hidden `[B, L, H]` and the token after each position `[B, L]`."""
        if self.config.context == "hidden":
            return hidden
        return self.context_proj(torch.cat([target.embed(next_ids).to(hidden.dtype), hidden], dim=-1))

    def draft_frames(self, anchor_states: Tensor, positions: Tensor, attend: list[Attend]) -> Tensor:
        """What the LM head reads for every frame.

        anchor_states [B, A, H] are c_n; positions [B, A] the position of the base token (n+1); `attend` holds one
        attention per block. Returns [B, A, T, H].
        """
        batch, count, hidden = anchor_states.shape
        frames = self.config.frames
        states = (anchor_states[:, :, None] + self.frame_queries).reshape(batch, count * frames, hidden)
        offsets = torch.arange(1, frames + 1, device=positions.device)
        at = (positions[:, :, None] + offsets).reshape(batch, count * frames)
        for block, block_attend in zip(self.blocks, attend):
            states = block(states, at, block_attend)
        return self.norm(states).view(batch, count, frames, hidden)

    def frame_log_probs(self, frames: Tensor, target: TargetView) -> Tensor:
        """[..., H] → [..., V+1] log-probabilities in float32, the blank last."""
        logits = target.logits(frames.to(target.lm_head_weight.dtype)).float()
        blank = (frames @ self.blank_weight).float() + self.blank_bias.float()
        return F.log_softmax(torch.cat([logits, blank[..., None]], dim=-1), dim=-1)

    def train_frames(
        self,
        hidden: Tensor,
        input_ids: Tensor,
        segment_ids: Tensor,
        position_ids: Tensor,
        anchors: Tensor,
        target: TargetView,
    ) -> Tensor:
        """Frames of the given anchors `[B, A]` (ascending) of a whole batch in one pass: [B, A, T, H]."""
        hidden = hidden.to(self.frame_queries.dtype)
        next_ids = F.pad(input_ids[:, 1:], (0, 1))
        context = self.context_states(hidden, next_ids, target)
        attention = flex_frame_attention if hidden.is_cuda else dense_attention
        attends = []
        for block in self.blocks:
            assert isinstance(block, DecoderBlock)
            keys, values = block.context_keys_values(context, position_ids + 1)
            attends.append(attention(keys, values, anchors, segment_ids, self.config.frames))
        states = context.gather(1, anchors[:, :, None].expand(-1, -1, context.shape[-1]))
        return self.draft_frames(states, position_ids.gather(1, anchors) + 1, attends)

    def windows(self, input_ids: Tensor, greedy_ids: Tensor, mask: Tensor, segment_ids: Tensor, seed: int) -> Windows:
        """The anchors this step trains on, with their labels."""
        config = self.config
        return select_windows(
            input_ids,
            greedy_ids,
            mask,
            segment_ids,
            config.labels,
            config.end_token_ids,
            config.labels_cut == "agree",
            config.anchors if self.training else 0,
            seed,
        )

    def forward(
        self,
        hidden: Tensor,
        input_ids: Tensor,
        greedy_ids: Tensor,
        mask: Tensor,
        target: TargetView,
        segment_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        seed: int = 0,
    ) -> HeadLoss:
        """See `DraftHead.forward`; in evaluation mode also the hits per label offset."""
        if segment_ids is None:
            segment_ids = torch.ones_like(input_ids)
        if position_ids is None:
            position_ids = torch.arange(input_ids.shape[1], device=input_ids.device).expand_as(input_ids)
        windows = self.windows(input_ids, greedy_ids, mask, segment_ids, seed)
        if windows.anchors.shape[1] == 0:  # nothing to train on here; still touch every parameter
            nothing = sum((p.sum() * 0.0 for p in self.parameters()), torch.zeros((), device=hidden.device))
            return HeadLoss(nothing, torch.zeros((), dtype=torch.long, device=hidden.device))
        frames = self.train_frames(hidden, input_ids, segment_ids, position_ids, windows.anchors, target)
        kept = frames[windows.valid]  # [N, T, H]
        labels, lengths = windows.labels[windows.valid], windows.lengths[windows.valid]
        closed = windows.closed[windows.valid]
        if self.config.open_windows:
            ended = torch.isin(
                labels.gather(1, lengths[:, None] - 1)[:, 0],
                torch.tensor(self.config.end_token_ids, device=labels.device),
            )
            closed = closed & ended
        total, infeasible = ctc_loss_fused(
            kept,
            self.blank_weight,
            self.blank_bias,
            target.lm_head_weight,
            labels,
            lengths,
            closed,
            lm_bias=target.lm_head_bias,
        )
        loss = HeadLoss(
            total=total,
            windows=torch.tensor(len(kept), device=hidden.device),
            parts={"ctc": total.detach(), "infeasible_count": infeasible.sum()},
        )
        if not self.training:
            loss.correct, loss.counted = teacher_forced_hits(
                kept, labels, lengths, lambda some: self.frame_log_probs(some, target)
            )
        return loss

    def count_windows(self, input_ids: Tensor, greedy_ids: Tensor, mask: Tensor, **batch: Any) -> Tensor:
        """See `DraftHead.count_windows`."""
        segment_ids = batch.get("segment_ids")
        if segment_ids is None:
            segment_ids = torch.ones_like(input_ids)
        return self.windows(input_ids, greedy_ids, mask, segment_ids, batch.get("seed", 0)).valid.sum()
