"""What every draft head shares: the text it reads, its view of the frozen target, its training result.

Shapes: B batch, L length, H hidden, V vocabulary, N windows, U label offsets.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar

import torch
from huggingface_hub import HfApi
from torch import Tensor, nn
from transformers.utils import ModelOutput

from draft_heads.data.common.files import sha256, write_tensors, write_text
from draft_heads.heads.accept_weight import accept_weights
from draft_heads.heads.accuracy import offset_hits
from draft_heads.heads.card import model_card, without_folders
from draft_heads.heads.config import CARD, CONFIG, FORMAT_VERSION, PROVENANCE, WEIGHTS, WEIGHTS_SHA256, HeadConfig
from draft_heads.heads.cross_entropy import (
    label_losses,
    linear_cross_entropy,
    soft_cross_entropy,
    weighted_cross_entropy,
)
from draft_heads.heads.draft_vocab import check_draft_vocab, classes_of, in_vocabulary
from draft_heads.heads.target_view import TargetView
from draft_heads.heads.windows import Windows, choose_windows, label_windows


@dataclass
class HeadLoss(ModelOutput):
    """One training forward: what to minimise and what to report; the last three fields in evaluation only.

    DeepSpeed and DDP look for tensors in what a forward returns, and see into a `ModelOutput`.
    """

    total: Tensor  # [] sum of the loss over windows; the trainer divides by the windows of the global batch
    windows: Tensor = None  # type: ignore[assignment]  # [] int64, how many (anchors with a label) entered `total`
    parts: dict[str, Tensor] = None  # type: ignore[assignment]  # [] each, detached: sums, or counts (named `…_count`)
    correct: Tensor | None = None  # [U, 5] float, windows whose label is among the 1, 2, … 5 best drafts
    counted: Tensor | None = None  # [U] float, windows that have a label at each offset
    scored: Tensor | None = None  # [U] float, those of them whose label has a loss: the head can draft it

    @classmethod
    def zero(cls, windows: int, device: torch.device) -> HeadLoss:
        """The empty sum over this many windows."""
        return cls(torch.zeros((), device=device), torch.full((), windows, device=device), {})

    def sums(self) -> Tensor:
        """[2] float64, detached: the sum of the loss over windows and their number."""
        return torch.stack([self.total.detach().double(), self.windows.double()])

    def add(self, name: str, value: Tensor, weight: float = 1.0) -> None:
        """Add a part to the total and name its unweighted value."""
        self.total = self.total + weight * value
        self.parts[name] = value.detach()

    def score(self, hits: list[Tensor], lengths: Tensor, scored: Tensor) -> None:
        """Store the hits `[5]` of every offset, for windows of `lengths [N]`, and which of their labels have a loss,
        `scored [N, U]` bool; the list is empty in training."""
        if hits:
            self.correct = torch.stack(hits)
            self.counted = torch.stack([(lengths > offset).sum() for offset in range(len(hits))]).float()
            self.scored = scored.sum(0).float()


@dataclass(frozen=True)
class Readout:
    """What a head predicts at one offset: logits = states · vocabularyᵀ + bias, in the vocabulary's type."""

    states: Tensor  # [n, H'], of the windows that were asked for
    vocabulary: Tensor  # [C, H'], the target's may have fewer bits than the head's states
    bias: Tensor | None = None  # [C]
    soft_hidden: Tensor | None = None  # [n, H]: learn the target's distribution after these states, not the label
    terms: dict[str, tuple[Tensor, float]] = field(default_factory=dict)  # name → (summed loss [], its weight)

    def logits(self, states: Tensor) -> Tensor:
        """[..., H'] → [..., C]"""
        return nn.functional.linear(states.to(self.vocabulary.dtype), self.vocabulary, self.bias)


@dataclass(frozen=True)
class Rows:
    """A batch of text as a head reads it."""

    hidden: Tensor  # [B, L, H], what the target's LM head reads at each token
    input_ids: Tensor  # [B, L] int64, the text
    segment_ids: Tensor  # [B, L] int64, 0 = padding, 1.. = conversation inside a packed row
    position_ids: Tensor  # [B, L] int64, restarting per conversation
    aux_hidden: Tensor | None = None  # [B, L, k·H], the outputs of the k `target_layers` side by side, if any

    @classmethod
    def of(
        cls,
        hidden: Tensor,
        input_ids: Tensor,
        segment_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        aux_hidden: Tensor | None = None,
    ) -> Rows:
        """Rows with one conversation each where segments and positions are left out."""
        if segment_ids is None:
            segment_ids = torch.ones_like(input_ids)
        if position_ids is None:
            position_ids = torch.arange(input_ids.shape[1], device=input_ids.device).expand_as(input_ids)
        return cls(hidden, input_ids, segment_ids, position_ids, aux_hidden)


def root_mean_square(states: Tensor) -> Tensor:
    """[] float32, the size of a typical entry."""
    return states.float().pow(2).mean().sqrt()


class DraftHead(nn.Module):
    """A module that drafts what follows the base token, from the target's hidden states.

    Subclasses define start values (`start_from`) and what they predict (`readouts`), from which the loss, accuracies
    and `offset_log_probs` follow; one whose offsets are no separate predictions overrides `window_loss` and
    `offset_log_probs`. Drafters call the other methods of a subclass.

    A head scores `config.classes` tokens: `draft_classes` and `draft_tokens` translate, `draft_view` selects their rows
    of the target's LM head. DeepSpeed's `auto` values read `config.hidden_size`.
    """

    config: HeadConfig
    tables: ClassVar[tuple[str, ...]] = ()
    """Names of two-dimensional parameters whose rows stand alone: looked up or scored, not maps between spaces."""

    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        self.config = config
        self.provenance: dict[str, Any] = {}  # where the weights come from, as `provenance.json` has it
        self.draft_vocab: Tensor | None  # [D] int64, ascending: the token of each class; None: the whole vocabulary
        size = config.draft_vocab_size
        self.register_buffer("draft_vocab", torch.arange(size) if size else None)
        if layers := len(config.target_layers):
            self.layer_projection = nn.Linear(layers * config.hidden_size, config.hidden_size, bias=False)
            nn.init.zeros_(self.layer_projection.weight)  # starts as the head without them

    def save_pretrained(self, folder: str | Path, provenance: dict[str, Any] | None = None) -> None:
        """Write a checkpoint folder, `config.json` last; each file appears complete or not at all, and an older
        checkpoint there is none any more from the start.

        The provenance is by default the one the head was loaded with; the model card is written from it.
        """
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / CONFIG).unlink(missing_ok=True)
        write_tensors(folder / WEIGHTS, self.state_dict())
        provenance = self.provenance if provenance is None else provenance
        known = {**provenance, WEIGHTS_SHA256: sha256(folder / WEIGHTS)}
        write_text(folder / PROVENANCE, json.dumps(known, indent=2, sort_keys=True) + "\n")
        write_text(folder / CARD, model_card(self.config, sum(p.numel() for p in self.parameters()), provenance))
        config = {**self.config.to_dict(), "format_version": FORMAT_VERSION}
        write_text(folder / CONFIG, json.dumps(config, indent=2, sort_keys=True) + "\n")

    def push_to_hub(self, repo_id: str, private: bool = True) -> str:
        """Upload the checkpoint into a new repository or as a new commit; returns its address. Its files name no
        folders of this machine.

        Needs `hf auth login` or HF_TOKEN; errors are those of huggingface_hub.
        """
        api = HfApi()
        api.create_repo(repo_id, private=private, exist_ok=True)
        with TemporaryDirectory() as folder:
            self.save_pretrained(folder)
            for path in (Path(folder, CONFIG), Path(folder, PROVENANCE)):
                known = without_folders(json.loads(path.read_text(encoding="utf-8")))
                write_text(path, json.dumps(known, indent=2, sort_keys=True) + "\n")
            return str(api.upload_folder(repo_id=repo_id, folder_path=folder))

    def target_states(self, hidden: Tensor, aux_hidden: Tensor | None) -> Tensor:
        """[..., H], what the head reads of the target: h, with `target_layers` h + W [low; middle; high]."""
        if aux_hidden is None:
            return hidden.to(self.dtype)
        states: Tensor = hidden.to(self.dtype) + self.layer_projection(aux_hidden.to(self.dtype))
        return states

    def row_states(self, rows: Rows) -> Tensor:
        """[B, L, H], what the head reads at every index of whole rows."""
        return self.target_states(rows.hidden, rows.aux_hidden)

    def set_draft_vocab(self, ids: Tensor) -> None:
        """Draft from these tokens, of which there must be `config.draft_vocab_size`; before `start_from`."""
        config = self.config
        check_draft_vocab(ids, config.draft_vocab_size, config.vocab_size, config.end_token_ids)
        assert self.draft_vocab is not None
        self.draft_vocab.copy_(ids)

    def draft_classes(self, tokens: Tensor) -> Tensor:
        """[...] int64 tokens → the classes the head scores; `OUTSIDE` for tokens it cannot draft."""
        return tokens if self.draft_vocab is None else classes_of(tokens, self.draft_vocab)

    def draft_tokens(self, classes: Tensor) -> Tensor:
        """[...] int64 classes → tokens."""
        return classes if self.draft_vocab is None else self.draft_vocab[classes]

    def draft_view(self, view: TargetView) -> TargetView:
        """The view with the draft vocabulary's rows of the LM head: a copy, made once by whoever drafts.

        A view that has as many rows as the head has classes is taken as it is.
        """
        if self.draft_vocab is None or len(view.lm_head_weight) == len(self.draft_vocab):
            return view
        bias = view.lm_head_bias
        return replace(
            view,
            lm_head_weight=view.lm_head_weight.detach().index_select(0, self.draft_vocab),
            lm_head_bias=None if bias is None else bias.detach().index_select(0, self.draft_vocab),
        )

    @property
    def accept_weight(self) -> float:
        """α of `heads.accept_weight` while the head is trained; 0 in evaluation."""
        return self.config.accept_weight if self.training else 0.0

    @property
    def dtype(self) -> torch.dtype:
        """The type of the head's own weights."""
        return next(self.parameters()).dtype

    @property
    def layer_weights(self) -> int:
        """Weights of the projection of `target_layers`, which a draft reads once however many levels it has."""
        return self.layer_projection.weight.numel() if self.config.target_layers else 0

    def weights_read(self) -> int:
        """Weights that one draft of full depth reads from memory, the target's LM head included."""
        return sum(p.numel() for p in self.parameters())

    @torch.no_grad()
    def start_from(self, hidden: Tensor, target: TargetView, aux_hidden: Tensor | None = None) -> None:
        """Start values that depend on the target: `hidden [..., H]` is a sample of what its LM head reads, `aux_hidden`
        the same of its `target_layers`.

        Here: `token_scale`, by which embeddings, often tens of times smaller than hidden states, get their scale.
        """
        tokens = target.embed(torch.arange(min(self.config.vocab_size, 4096), device=hidden.device))
        self.config.token_scale = float(root_mean_square(hidden) / root_mean_square(tokens))

    def token_states(self, token_ids: Tensor, target: TargetView) -> Tensor:
        """[...] int64 → [..., H], the target's embeddings at the scale of its hidden states."""
        return target.embed(token_ids).to(self.dtype) * self.config.token_scale

    def readouts(self, rows: Rows, windows: Windows, wanted: Tensor, target: TargetView) -> Iterator[Readout]:
        """What the head predicts at each offset in turn, for the windows `wanted[:, offset]` only; wanted [N, U] bool.

        Label u of the window at anchor n is the token at n+2+u; the tokens before it are known and may be read.
        `target` is the head's `draft_view`. Not abstract: a head whose loss is no sum over offsets (CTC) overrides
        `window_loss` and `offset_log_probs`, the two that call this.
        """
        raise NotImplementedError(
            f"{type(self).__name__} must define readouts(rows, windows, wanted, target), or window_loss and "
            "offset_log_probs"
        )

    def window_loss(self, rows: Rows, windows: Windows, target: TargetView) -> HeadLoss:
        """The summed loss of the given windows; in evaluation mode also the hits per offset.

        Σ_k weight(k) · cross entropy at offset k and the readout's further terms, over the windows that have a label
        there. `target` is the head's `draft_view`; labels are tokens. One that the head cannot draft has no loss and
        is a miss. The cross entropies are weighed by `accept_weight`, further terms are not.
        """
        labels, lengths = self.draft_classes(windows.labels[windows.valid]), windows.lengths[windows.valid]
        loss = HeadLoss.zero(len(labels), labels.device)
        scored, hits = in_vocabulary(labels, lengths), []
        # that a draft is right up to here
        log_reached = torch.zeros_like(lengths, dtype=torch.promote_types(self.dtype, torch.float32))
        for k, read in enumerate(self.readouts(rows, windows, scored, target)):
            which = scored[:, k]
            y, states, vocabulary = labels[which, k], read.states, read.vocabulary
            weights = accept_weights(log_reached[which], self.accept_weight) if self.accept_weight else None
            name, losses = "ce", None  # −log-probabilities of the labels, where weights of the next offset need them
            if read.soft_hidden is not None:
                name = "soft"
                value, _ = soft_cross_entropy(states, vocabulary, read.soft_hidden, target, weights, read.bias)
                if weights is not None and k + 1 < labels.shape[1]:
                    losses = label_losses(states, vocabulary, y, read.bias)
            elif weights is not None:
                value, losses = weighted_cross_entropy(states, vocabulary, y, weights, read.bias)
            else:
                value = linear_cross_entropy(states, vocabulary, y, read.bias)
            loss.add(f"{name}_{k}", value, self.config.offset_weight(k))
            if losses is not None:
                log_reached[which] -= losses
                log_reached[~which] = -torch.inf  # what cannot be drafted is as far as a draft gets
            for name, (value, weight) in read.terms.items():
                loss.add(f"{name}_{k}", value, weight)
            if not self.training:
                hits.append(offset_hits(read.logits, states, y))
        loss.score(hits, lengths, scored)
        return loss

    def offset_log_probs(self, rows: Rows, anchors: Tensor, target: TargetView) -> Tensor:
        """[N, U, C] log-probabilities in float32 at every offset of the anchors `[B, A]` of whole rows, N = B·A.

        The tokens before each offset are those of the text. `target` is the head's `draft_view`.
        """
        shape = *anchors.shape, self.config.offsets
        labels, lengths = anchors.new_zeros(shape), torch.full_like(anchors, shape[-1])
        every = torch.ones_like(anchors, dtype=torch.bool)
        windows = Windows(anchors, every, labels, lengths, every)
        wanted = torch.ones_like(labels, dtype=torch.bool).flatten(0, 1)
        logits = [read.logits(read.states) for read in self.readouts(rows, windows, wanted, target)]
        return torch.stack(logits, dim=1).float().log_softmax(-1)

    def forward(
        self,
        hidden: Tensor,
        input_ids: Tensor,
        greedy_ids: Tensor,
        mask: Tensor,
        target: TargetView,
        segment_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        aux_hidden: Tensor | None = None,
        seed: int = 0,
    ) -> HeadLoss:
        """The training loss of one batch; see `Rows` for the text's tensors.

        greedy_ids    [B, L] int64, `greedy_ids[i] = argmax LM(hidden[i-1])`; -100 where there is none
        mask          [B, L] bool, tokens the assistant wrote
        seed          chooses which anchors are sampled, the same ones on any number of processes
        """
        rows = Rows.of(hidden.to(self.dtype), input_ids, segment_ids, position_ids, aux_hidden)
        windows = self.windows(input_ids, greedy_ids, mask, rows.segment_ids, seed)
        return self.window_loss(rows, windows, self.draft_view(target))

    def windows(
        self, input_ids: Tensor, greedy_ids: Tensor, mask: Tensor, segment_ids: Tensor, seed: int = 0
    ) -> Windows:
        """The anchors this step trains on, with their labels; every one in evaluation mode."""
        text, config = (input_ids, greedy_ids, mask, segment_ids), self.config
        rule = config.offsets, config.end_token_ids, config.cut_at_disagreement, config.reads_base_token
        every = label_windows(*text, *rule, self.tokens_after())
        return choose_windows(every, input_ids, segment_ids, config.anchors if self.training else 0, seed)

    def tokens_after(self) -> int:
        """Tokens of the same conversation that must follow an anchor in training."""
        return 0

    def count_windows(
        self, input_ids: Tensor, greedy_ids: Tensor, mask: Tensor, segment_ids: Tensor, seed: int = 0, **batch: Any
    ) -> Tensor:
        """[] int64, how many windows `forward` would use: what the trainer normalises a global batch by."""
        return self.windows(input_ids, greedy_ids, mask, segment_ids, seed).valid.sum()
