"""The CTC-drafter head: one decoder block that drafts T frames in one parallel pass, aligned to labels by CTC.

Shapes: B batch, L length, A anchors a row, N windows, T frames, U labels, H hidden, V vocabulary (the draft
vocabulary's size where there is one; blank = class V).

Context states `c_i = W[e(x_{i+1}); h_i]`, e at the scale of h, sit at position i+1; frame t of anchor n starts as
`c_n + q_t`, sits at position n+1+t, and attends to all c_i (i ≤ n) and to the other frames of its anchor. The output is
normalised and read by the target's own frozen LM head; one learned row more gives the blank. The base token `x_{n+1}`
is known before drafting and stands outside the alignment.

`frames_from: chain` is the layer of the authors' published code, kept to be measured: the block runs causally over the
context states, its output f_i regresses h_{i+1}, frame t of anchor n is f_{n+t} under teacher forcing in training; in
decoding one frame after another, each fed the most probable label of the one before.

Paper: "Speculative Decoding with CTC-based Draft Model for LLM Inference Acceleration" (NeurIPS 2024), section 3.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from draft_heads.configs.options import option
from draft_heads.heads.attention import anchor_attention, before_anchor, causal_attention, chain_attention, frame_mask
from draft_heads.heads.base import DraftHead, HeadLoss, Rows, TargetView, root_mean_square
from draft_heads.heads.block import Attend, DecoderBlock, Norm, grouped_attention
from draft_heads.heads.config import DECAY, LOSS_WEIGHT, Budget, HeadConfig
from draft_heads.heads.cross_entropy import soft_cross_entropy, total
from draft_heads.heads.ctc_loss import ctc_loss_fused
from draft_heads.heads.draft_vocab import cut_before_outside, in_vocabulary
from draft_heads.heads.label_context import ctc_loss_with_context
from draft_heads.heads.prefix_scores import teacher_forced_hits, true_prefix_scores
from draft_heads.heads.windows import Windows, at


@dataclass
class CTCConfig(HeadConfig):
    """Settings of a CTC head; sizes come from the target (`target_sizes`)."""

    kind: ClassVar[str] = "ctc"
    title: ClassVar[str] = "a CTC head"
    variants: ClassVar[dict[str, dict[str, Any]]] = {
        "paper": {"context": "hidden", "labels_cut": "none", "decay": 1.0},
        "chain": {"frames_from": "chain", "soft_weight": 0.1},
        "decay": {"decay": 0.8},
        "context": {"label_context": 8},
    }
    budget: ClassVar[Budget] = Budget(training=1.6, whole_vocabulary=3.7)

    frames: int = option(8, "T, CTC output slots an anchor")
    labels: int = option(4, "U, labels of a training window; frames >= 2*labels-1", least=1)
    context: str = option(
        "hidden+token", "what a context state reads; hidden: the paper's eq 9", choices=("hidden+token", "hidden")
    )
    labels_cut: str = option(
        "agree", "agree: a window ends where text and labels part; none: the paper", choices=("agree", "none")
    )
    label_context: int = option(
        0,
        "rank of the bias that the label before adds to the logits; 0: frames are independent (paper)",
        least=0,
    )
    decay: float = option(1.0, "weight of a label over that of the label before it; 1: the paper's loss", rule=DECAY)
    frames_from: str = option(
        "queries",
        "queries: all frames in one pass; chain: one after another (the published code)",
        choices=("queries", "chain"),
    )
    ctc_weight: float = option(1.0, "weight of the CTC loss", rule=LOSS_WEIGHT)
    regression_weight: float = option(
        0.0, "chain: weight of SmoothL1 between first frame and next hidden state", rule=LOSS_WEIGHT
    )
    soft_weight: float = option(
        0.0, "chain: weight of cross entropy to the target's next distribution", rule=LOSS_WEIGHT
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.frames < 2 * self.labels - 1:
            raise ValueError(
                f"--frames must be at least 2*labels-1 = {2 * self.labels - 1} so that repeated labels fit with a "
                f"blank between them; got {self.frames}; raise --frames or lower --labels"
            )
        if not (self.ctc_weight or self.regression_weight or self.soft_weight):
            raise ValueError(
                "--ctc_weight, --regression_weight and --soft_weight must not all be 0, or nothing is learned; got "
                "three zeros; raise one"
            )
        if self.chained:
            if self.context != "hidden+token":
                raise ValueError(
                    "--frames_from chain needs --context hidden+token: a frame is fed as the next state; got "
                    f"--context {self.context}"
                )
            if self.label_context:
                raise ValueError(
                    "--label_context is for frames made in one pass, a chain's read the label before already; got "
                    f"--frames_from chain with --label_context {self.label_context}; leave one out"
                )
        elif self.regression_weight or self.soft_weight:
            raise ValueError(
                "--regression_weight and --soft_weight need --frames_from chain: parallel frames are aligned by the "
                f"CTC loss alone; got {self.regression_weight:g} and {self.soft_weight:g}"
            )

    @property
    def offsets(self) -> int:
        return self.labels

    @property
    def cut_at_disagreement(self) -> bool:  # type: ignore[override]
        return self.labels_cut == "agree"

    @property
    def reads_base_token(self) -> bool:  # type: ignore[override]
        return self.context != "hidden" or self.label_context > 0  # the first label's context is it

    @property
    def learns_distribution(self) -> bool:  # type: ignore[override]
        return self.soft_weight > 0

    @property
    def chained(self) -> bool:
        """Frames come one after another."""
        return self.frames_from == "chain"


class CTCHead(DraftHead):
    """T frames in, T distributions over V+1 classes out; see the module's head."""

    config: CTCConfig
    tables = ("frame_queries", "class_context")

    def __init__(self, config: CTCConfig) -> None:
        super().__init__(config)
        hidden = config.hidden_size
        if config.context == "hidden+token":
            self.context_proj = nn.Linear(2 * hidden, hidden, bias=False)
            with torch.no_grad():  # starts as [0 | I]: the context is the hidden state
                self.context_proj.weight.zero_()
                self.context_proj.weight[:, hidden:].fill_diagonal_(1.0)
        if not config.chained:
            self.frame_queries = nn.Parameter(torch.randn(config.frames, hidden))
        self.blocks = nn.ModuleList([DecoderBlock(config)])  # a list, as checkpoints name its weights blocks.0.…
        self.norm = Norm(hidden, eps=config.rms_norm_eps)
        self.blank_weight = nn.Parameter(torch.zeros(hidden))
        self.blank_bias = nn.Parameter(torch.zeros(1))  # DeepSpeed broadcasts no 0-dimensional parameters
        if rank := config.label_context:  # A and B of `heads.label_context`; A starts at zero
            self.label_proj = nn.Linear(hidden, rank, bias=False)
            nn.init.zeros_(self.label_proj.weight)
            self.class_context = nn.Parameter(torch.randn(config.classes + 1, rank) * rank**-0.5)

    @property
    def block(self) -> DecoderBlock:
        """The decoder block."""
        return cast("DecoderBlock", self.blocks[0])

    def weights_read(self) -> int:
        """Every weight and the LM head once; chained frames read them once a frame."""
        frame = super().weights_read() - self.layer_weights + self.config.classes * self.config.hidden_size
        return self.layer_weights + frame * (self.config.frames if self.config.chained else 1)

    @torch.no_grad()
    def start_from(self, hidden: Tensor, target: TargetView, aux_hidden: Tensor | None = None) -> None:
        """Start the output norm at the scale the LM head expects, and the blank at probability about one half.

        The block starts as the target's last layer where that is a Llama's and adds no more than twice the
        size of h; a layer adds what fits its residual stream, which can be fifty times larger than h. The queries start
        as large as a hidden state, so that frames differ from the first step on. The blank's bias is the mean
        log-normaliser of the target's logits at frames that see each other only.
        """
        super().start_from(hidden, target, aux_hidden)
        target = self.draft_view(target)
        sample = hidden.reshape(-1, hidden.shape[-1])[:512].to(self.norm.weight.dtype)
        block = self.block
        if target.layers is not None and not block.differs_from(target.layers[-1]):
            block.copy_from(target.layers[-1])
            start = block.rotation(torch.zeros_like(sample[:, :1], dtype=torch.long))
            alone = block(sample[:, None], start, grouped_attention)[:, 0]
            if root_mean_square(alone - sample) > 2 * root_mean_square(sample):
                block.start_as_identity()
        self.norm.weight.fill_(root_mean_square(sample))
        if rank := self.config.label_context:  # B starts as a random projection of the LM head: alike tokens stay alike
            lm_head = target.lm_head_weight.to(self.dtype)
            projected = lm_head @ torch.randn(lm_head.shape[1], rank, dtype=self.dtype).to(lm_head.device)
            self.class_context[:-1] = projected / root_mean_square(projected) * rank**-0.5
        if self.config.chained:
            frames = self.norm(sample)
        else:
            self.frame_queries.mul_(root_mean_square(sample) / root_mean_square(self.frame_queries))
            alone, nowhere = sample[:64, None], torch.zeros(len(sample[:64]), 1, dtype=torch.long, device=hidden.device)
            frames = self.draft_frames(alone, nowhere, grouped_attention)
        logits = target.head_logits(frames.to(target.lm_head_weight.dtype))
        self.blank_bias.copy_(logits.float().logsumexp(-1).mean())

    def context_states(self, hidden: Tensor, next_ids: Tensor, target: TargetView) -> Tensor:
        """c `[B, L, H]` from hidden `[B, L, H]` and the token after each position `[B, L]`."""
        if self.config.context == "hidden":
            return hidden
        return self.context_proj(torch.cat([self.token_states(next_ids, target), hidden], dim=-1))

    def draft_frames(self, anchor_states: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """What the LM head reads for every frame.

        anchor_states [B, A, H] are c_n; positions [B, A] the position of the base token (n+1). Returns [B, A, T, H].
        """
        batch, count, hidden = anchor_states.shape
        frames = self.config.frames
        states = (anchor_states[:, :, None] + self.frame_queries).reshape(batch, count * frames, hidden)
        offsets = torch.arange(1, frames + 1, device=positions.device)
        at = (positions[:, :, None] + offsets).reshape(batch, count * frames)
        states = self.block(states, self.block.rotation(at), attend)
        return self.norm(states).view(batch, count, frames, hidden)

    def chain_frames(self, anchor_states: Tensor, positions: Tensor, attend: Attend, target: TargetView) -> Tensor:
        """Frames one after another, each fed the most probable label of the one before: [B, A, T, H].

        anchor_states [B, A, H] are c_n; positions [B, A] that of the base token; `attend` is a `chain_attention`.
        """
        block = self.block
        frames, state = [], anchor_states
        for step in range(self.config.frames):
            frames.append(self.norm(block(state, block.rotation(positions + step), attend)))
            if step + 1 < self.config.frames:
                logits = target.head_logits(frames[-1].to(target.lm_head_weight.dtype))
                state = self.context_states(frames[-1], self.draft_tokens(logits.argmax(-1)), target)
        return torch.stack(frames, dim=2)

    def frame_logits(self, frames: Tensor, target: TargetView) -> Tensor:
        """[..., H] → [..., V+1] in float32, the blank last."""
        logits = target.head_logits(frames.to(target.lm_head_weight.dtype)).float()
        blank = target.rule.scaled(frames @ self.blank_weight).float() + self.blank_bias.float()
        return torch.cat([logits, blank[..., None]], dim=-1)

    def label_contexts(self, tokens: Tensor, target: TargetView) -> Tensor:
        """A(l) [..., r] of the tokens [...] that are the label before."""
        states = target.embed(tokens).to(self.dtype)
        contexts: Tensor = self.label_proj(F.rms_norm(states, states.shape[-1:], eps=1e-6))
        return contexts

    def label_bias(self, tokens: Tensor, target: TargetView) -> Tensor:
        """[..., V+1] in float32, what each of `tokens [...]` as the label before adds to the logits."""
        return F.linear(self.label_contexts(tokens, target), self.class_context).float()

    def emissions(self, frames: Tensor, target: TargetView) -> Callable[[Tensor], Tensor]:
        """A function from the label before, a token [n], to probabilities [n, T, V+1]; of frames [n, T, H]."""
        logits = self.frame_logits(frames, target)
        if not self.config.label_context:
            probs = logits.softmax(-1)
            return lambda before: probs
        return lambda before: (logits + self.label_bias(before, target)[:, None]).softmax(-1)

    def row_context(self, rows: Rows, target: TargetView) -> Tensor:
        """[B, L, H], the context state of every index of whole rows."""
        return self.context_states(self.row_states(rows), F.pad(rows.input_ids[:, 1:], (0, 1)), target)

    def train_frames(self, rows: Rows, anchors: Tensor, target: TargetView) -> Tensor:
        """Frames of the given anchors `[B, A]` (ascending) of a whole batch in one pass: [B, A, T, H]."""
        context = self.row_context(rows, target)
        rotation = self.block.rotation(rows.position_ids + 1)
        if self.config.chained:
            attend = causal_attention(rows.segment_ids)
            every = self.norm(self.block(context, rotation, attend))  # f_i at every index
            offsets = torch.arange(self.config.frames, device=anchors.device)
            index = (anchors[:, :, None] + offsets).clamp(max=every.shape[1] - 1)
            return at(every, index.flatten(1)).unflatten(1, index.shape[1:])
        visible = frame_mask(anchors, rows.segment_ids, self.config.frames)
        keys_values = self.block.context_keys_values(context, rotation)
        attend = anchor_attention(visible, anchors, self.config.frames, keys_values)
        return self.draft_frames(at(context, anchors), rows.position_ids.gather(1, anchors) + 1, attend)

    def drafted_frames(self, rows: Rows, anchors: Tensor, target: TargetView, anchors_at_once: int = 64) -> Tensor:
        """`train_frames` as the decoder would have them: a chain is fed its own labels, not the text's."""
        if not self.config.chained:
            return self.train_frames(rows, anchors, target)
        context = self.row_context(rows, target)
        block = self.block
        keys_values = block.context_keys_values(context, block.rotation(rows.position_ids + 1))
        pieces = []
        for some in anchors.split(anchors_at_once, dim=1):
            attend = chain_attention(keys_values, before_anchor(some, rows.segment_ids))
            positions = rows.position_ids.gather(1, some) + 1
            pieces.append(self.chain_frames(at(context, some), positions, attend, target))
        return torch.cat(pieces, dim=1)

    def tokens_after(self) -> int:
        """Chained frames read the text ahead under teacher forcing."""
        return self.config.frames if self.config.chained else 0

    def offset_log_probs(self, rows: Rows, anchors: Tensor, target: TargetView) -> Tensor:
        """See `DraftHead.offset_log_probs`: that a class follows the labels before, log Ψ(p·c) / Ψ(p).

        The collapse may end instead, so probabilities sum to less than 1.
        """
        frames = self.drafted_frames(rows, anchors, target).flatten(0, 1)  # [N, T, H]
        ahead = torch.arange(self.config.labels, device=anchors.device) + 1
        index = (anchors[:, :, None] + ahead).clamp(max=rows.input_ids.shape[1] - 1).flatten(1)
        before = rows.input_ids.gather(1, index).view(len(frames), -1)  # [N, U], the base token first
        labels = self.draft_classes(before[:, 1:]).clamp(min=0)
        scores = torch.stack(list(true_prefix_scores(before, labels, self.emissions(frames, target))), dim=1).log()
        prefixes = scores[:, :-1].gather(2, labels[..., None])
        return scores - F.pad(prefixes, (0, 0, 1, 0))

    def window_loss(self, rows: Rows, windows: Windows, target: TargetView) -> HeadLoss:
        """See `DraftHead.window_loss`."""
        config = self.config
        frames = self.train_frames(rows, windows.anchors, target)
        kept = frames[windows.valid]  # [N, T, H]
        labels, lengths, closed = (x[windows.valid] for x in (windows.labels, windows.lengths, windows.closed))
        before = torch.cat([windows.gather(rows.input_ids[..., None], ahead=1), labels], dim=1)  # tokens, base first
        counted = lengths
        if self.draft_vocab is not None:
            labels, lengths, closed = cut_before_outside(self.draft_classes(labels), lengths, closed)
        blank = self.blank_weight, self.blank_bias
        scaled = target.rule.scaled(kept)  # a scale of the states is a scale of the logits
        vocabulary, bias = target.lm_head_weight, target.scaled_bias
        lattice = vocabulary, labels, lengths, closed
        weighing = config.decay, self.accept_weight
        if config.label_context:
            contexts = self.label_contexts(before, target), self.class_context
            ctc, infeasible = ctc_loss_with_context(scaled, *blank, *contexts, *lattice, bias, None, *weighing)
        else:
            ctc, infeasible = ctc_loss_fused(scaled, *blank, *lattice, bias, None, *weighing)
        loss = HeadLoss.zero(len(kept), kept.device)
        loss.add("ctc", ctc, config.ctc_weight)
        loss.parts["infeasible_count"] = infeasible.sum()
        if config.chained:
            next_hidden = windows.gather(rows.hidden, ahead=1)  # h_{n+1}
            regression = total(F.smooth_l1_loss(kept[:, 0], next_hidden, reduction="none").mean(-1))
            soft, _ = soft_cross_entropy(scaled[:, 0].to(vocabulary.dtype), vocabulary, next_hidden, target, bias=bias)
            loss.add("regression", regression, config.regression_weight)
            loss.add("soft", soft, config.soft_weight)
        if not self.training:
            drafted = self.drafted_frames(rows, windows.anchors, target)[windows.valid] if config.chained else kept
            hits = teacher_forced_hits(drafted, before, labels, lengths, partial(self.emissions, target=target))
            # what lies after a token that cannot be drafted is missed
            loss.score(list(hits), counted, in_vocabulary(labels, lengths))
        return loss
