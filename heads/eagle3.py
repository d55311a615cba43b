"""The EAGLE-3 head: one decoder block that reads its own output back, trained as it drafts.

Shapes: B batch, L length, A anchors a row, S passes, N windows, W tree nodes, H hidden, V vocabulary (the draft
vocabulary's size where there is one).

`g_i` is one projection of the target's low, middle and high layer at index i. The block reads `[e(x_{i+1}) ; g_i]` at
position i, each after a norm of its own; its residual stream is g_i. Its output s_i, through norm and LM head, drafts
`x_{i+2}`, and stands in for g_{i+1}, which is not known while drafting.

Training-time test: pass k = 0 … S−1 of anchor n reads the token at n+1+k and, for k > 0, the output of pass k−1; it
drafts the token at n+2+k. It sees the keys of g_0 … g_n and of its own passes 1 … k, which stand at n+1 … n+k. Worked
example, n = 4, k = 2: it reads x_7 and the output of pass 1 at position 6; it sees the keys of g_0 … g_4, of pass 1 at
position 5 and its own; its label is y_8, its distribution that of LM(h_7).

Paper: "EAGLE-3: Scaling up Inference Acceleration of Large Language Models via Training-Time Test" (2025), section 3.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from draft_heads.configs.options import option
from draft_heads.heads.accept_weight import accept_weights
from draft_heads.heads.accuracy import offset_hits
from draft_heads.heads.attention import before_anchor, chain_attention
from draft_heads.heads.base import DraftHead, HeadLoss, Readout, Rows, TargetView
from draft_heads.heads.block import DecoderBlock, Norm
from draft_heads.heads.config import DECAY, Budget, HeadConfig, spread_layers
from draft_heads.heads.cross_entropy import label_losses, soft_cross_entropy
from draft_heads.heads.draft_vocab import in_vocabulary
from draft_heads.heads.windows import Windows, at


@dataclass
class Eagle3Config(HeadConfig):
    """Settings of an EAGLE-3 head; sizes come from the target (`target_sizes`)."""

    kind: ClassVar[str] = "eagle3"
    title: ClassVar[str] = "an EAGLE-3 head"
    budget: ClassVar[Budget] = Budget(training=4.4, whole_vocabulary=7.7, drafting=0.36)  # S blocks one after another
    cut_at_disagreement: ClassVar[bool] = False
    learns_distribution: ClassVar[bool] = True

    passes: int = option(7, "S, passes of the training-time test and levels of a draft", least=1)
    decay: float = option(0.8, "the loss of pass k is weighted decay^k", rule=DECAY)

    @property
    def offsets(self) -> int:
        return self.passes

    @classmethod
    def usual_layers(cls, layers: int) -> list[int]:
        return spread_layers(layers)


class Eagle3Head(DraftHead):
    """One block, a norm and an LM head of its own; see the module's head."""

    config: Eagle3Config
    tables = ("lm_head.weight",)

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__(config)
        hidden = config.hidden_size
        if config.target_layers:
            with torch.no_grad():  # starts as [0 | 0 | I]: g is the high layer's output
                self.layer_projection.weight[:, -hidden:].fill_diagonal_(1.0)
        self.block = DecoderBlock(config, reads_tokens=True)
        self.norm = Norm(hidden, eps=config.rms_norm_eps)
        self.lm_head = nn.Linear(hidden, config.classes, bias=False)

    def weights_read(self) -> int:
        """The projection once, everything else once a pass."""
        return self.layer_weights + self.config.passes * (super().weights_read() - self.layer_weights)

    @torch.no_grad()
    def start_from(self, hidden: Tensor, target: TargetView, aux_hidden: Tensor | None = None) -> None:
        """The LM head starts as the target's, the norm before it with the gains that bring g, the block's first output,
        nearest to h (least squares by channel).

        A layer's output is no final state: at the scale of h, noise would have the say, and the loss would start at
        twice that of a uniform guess.
        """
        super().start_from(hidden, target, aux_hidden)
        states = self.target_states(hidden, aux_hidden).flatten(0, -2).float()
        normed = F.rms_norm(states, states.shape[-1:], eps=self.config.rms_norm_eps)
        fitted = (normed * hidden.flatten(0, -2).float()).sum(0) / normed.pow(2).sum(0).clamp(min=1e-12)
        self.norm.weight.copy_(fitted)
        self.lm_head.weight.copy_(self.draft_view(target).lm_head_weight * target.rule.factor)

    def target_states(self, hidden: Tensor, aux_hidden: Tensor | None) -> Tensor:
        """g [..., H]; h where there are no `target_layers`."""
        if aux_hidden is None:
            return hidden.to(self.dtype)
        projected: Tensor = self.layer_projection(aux_hidden.to(self.dtype))
        return projected

    def tokens(self, token_ids: Tensor, target: TargetView) -> Tensor:
        """[...] int64 → [..., H], the target's embeddings."""
        return target.embed(token_ids).to(self.dtype)

    def context(self, rows: Rows, target: TargetView) -> tuple[Tensor, Tensor]:
        """Keys and values of pass 0 at every index of whole rows, `[B, G, L, D]`."""
        following = self.tokens(F.pad(rows.input_ids[:, 1:], (0, 1)), target)
        return self.block.context_keys_values(self.row_states(rows), self.block.rotation(rows.position_ids), following)

    def next_log_probs(self, states: Tensor) -> Tensor:
        """s [..., H] → log-probabilities [..., V] in float32."""
        return self.lm_head(self.norm(states)).float().log_softmax(-1)

    def train_states(self, rows: Rows, anchors: Tensor, target: TargetView) -> Tensor:
        """s of every pass of the given anchors `[B, A]`: [B, A, S, H]."""
        attend = chain_attention(self.context(rows, target), before_anchor(anchors, rows.segment_ids))
        states, positions = at(self.row_states(rows), anchors), rows.position_ids.gather(1, anchors)
        passes = []
        for k in range(self.config.passes):
            index = (anchors + 1 + k).clamp(max=rows.input_ids.shape[1] - 1)
            tokens = self.tokens(rows.input_ids.gather(1, index), target)
            states = self.block(states, self.block.rotation(positions + k), attend, tokens)
            passes.append(states)
        return torch.stack(passes, dim=2)

    def readouts(self, rows: Rows, windows: Windows, wanted: Tensor, target: TargetView) -> Iterator[Readout]:
        """See `DraftHead.readouts`; the loss reads the LM head once for all passes instead."""
        states = self.train_states(rows, windows.anchors, target)[windows.valid]  # [N, S, H]
        for k, which in enumerate(wanted.unbind(1)):
            yield Readout(self.norm(states[which, k]), self.lm_head.weight)

    def window_loss(self, rows: Rows, windows: Windows, target: TargetView) -> HeadLoss:
        """Σ_k decay^k · cross entropy of pass k to the target's distribution, where there is a label at offset k; in
        training weighed by `accept_weight` too.
        """
        states = self.norm(self.train_states(rows, windows.anchors, target)[windows.valid])  # [N, S, H]
        labels, lengths = self.draft_classes(windows.labels[windows.valid]), windows.lengths[windows.valid]
        offset = torch.arange(self.config.passes, device=states.device)
        drafted = in_vocabulary(labels, lengths)  # [N, S]
        hidden = torch.stack([windows.gather(rows.hidden, ahead=k + 1) for k in range(len(offset))], dim=1)
        # h_{n+1+k} predicts x_{n+2+k}; the LM head is read once for all passes
        passes = offset.expand_as(drafted)[drafted]
        row_weights = self.config.decay ** passes.float()
        if self.accept_weight:
            of_labels = -label_losses(states[drafted], self.lm_head.weight, labels[drafted])
            log_probs = of_labels.new_full(drafted.shape, -torch.inf).masked_scatter(drafted, of_labels)
            log_reached = F.pad(log_probs.cumsum(1)[:, :-1], (1, 0))
            row_weights = row_weights * accept_weights(log_reached[drafted], self.accept_weight)
        total, losses = soft_cross_entropy(states[drafted], self.lm_head.weight, hidden[drafted], target, row_weights)
        loss = HeadLoss.zero(len(states), states.device)
        loss.total = loss.total + total
        parts = losses.new_zeros(len(offset)).index_add(0, passes, losses)
        loss.parts |= {f"soft_{k}": part for k, part in enumerate(parts.unbind())}
        if not self.training:
            hits = [
                offset_hits(self.lm_head, states[which, k], labels[which, k])
                for k, which in enumerate(drafted.unbind(1))
            ]
            loss.score(hits, lengths, drafted)
        return loss
