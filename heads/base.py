"""What every draft head shares: its configuration, the view of the frozen target it is lent, its training result.

Shapes: B batch, L length, H hidden, V vocabulary, N windows, U label offsets.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass, field, fields
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class TargetView:
    """The frozen target's embedding and LM head, lent to a head; never registered in it, saved or trained with it.

    A plain object, not a module: a head that is handed one cannot pick up its parameters by accident.
    """

    embedding: nn.Module
    lm_head_weight: Tensor  # [V, H]
    lm_head_bias: Tensor | None = None  # [V]

    def embed(self, token_ids: Tensor) -> Tensor:
        """[...] int64 → [..., H], the target's input embeddings."""
        with torch.no_grad():
            return self.embedding(token_ids)

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., H] → [..., V], the target's own LM head."""
        return nn.functional.linear(hidden, self.lm_head_weight, self.lm_head_bias)


@dataclass
class HeadLoss:
    """One training forward: what to minimise and what to report.

    total     [] sum of the loss over windows; the trainer divides by the number of windows of the global batch
    windows   [] int64, how many windows (anchors with at least one label) entered `total`
    parts     named detached scalars: sums over the same windows, or counts (names ending in `_count`)
    correct   [U] float, windows whose top-1 draft at each offset equals the label (evaluation only)
    counted   [U] float, windows that have a label at each offset (evaluation only)
    """

    total: Tensor
    windows: Tensor
    parts: dict[str, Tensor] = field(default_factory=dict)
    correct: Tensor | None = None
    counted: Tensor | None = None


@dataclass
class HeadConfig:
    """Sizes a head takes from its target, and which target that was. Subclasses add what the method needs."""

    kind: ClassVar[str] = ""

    hidden_size: int = 0
    vocab_size: int = 0
    num_attention_heads: int = 0
    num_key_value_heads: int = 0
    head_dim: int = 0
    intermediate_size: int = 0
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    end_token_ids: list[int] = field(default_factory=list)
    target: str = ""
    target_fingerprint: dict[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        return {"kind": self.kind, **asdict(self)}

    def to_json_string(self, use_diff: bool = True) -> str:
        """JSON text; the signature is the one transformers' logging callbacks call."""
        return json.dumps(self.to_dict(), indent=2, sort_keys=True) + "\n"

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        known = {f.name for f in fields(cls)}
        given = {key: value for key, value in values.items() if key != "kind"}
        unknown = sorted(set(given) - known)
        if unknown:
            raise ValueError(
                f"unknown {cls.kind} head setting {', '.join(unknown)}; valid are {', '.join(sorted(known))}"
            )
        return cls(**given)


def target_sizes(config: Any) -> dict[str, Any]:
    """The sizes of `HeadConfig` read from a transformers decoder config; missing ones get the usual defaults."""
    heads = config.num_attention_heads
    rope = getattr(config, "rope_parameters", None) or {}
    if "full_attention" in rope:  # one set of parameters per layer type
        rope = rope["full_attention"]
    return {
        "hidden_size": config.hidden_size,
        "vocab_size": config.vocab_size,
        "num_attention_heads": heads,
        "num_key_value_heads": getattr(config, "num_key_value_heads", None) or heads,
        "head_dim": getattr(config, "head_dim", None) or config.hidden_size // heads,
        "intermediate_size": getattr(config, "intermediate_size", None) or 4 * config.hidden_size,
        "rms_norm_eps": getattr(config, "rms_norm_eps", 1e-5),
        "rope_theta": float(rope.get("rope_theta") or getattr(config, "rope_theta", None) or 10000.0),
    }


class DraftHead(nn.Module, ABC):
    """A module that drafts what follows the base token, from the target's hidden states.

    `config.hidden_size` exists because DeepSpeed's `auto` values read it.
    """

    config: HeadConfig

    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        self.config = config

    @abstractmethod
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
        """The training loss of one batch.

        hidden        [B, L, H], what the target's LM head reads at each token
        input_ids     [B, L] int64, the text
        greedy_ids    [B, L] int64, `greedy_ids[i] = argmax LM(hidden[i-1])`; -100 where there is none
        mask          [B, L] bool, tokens the assistant wrote
        segment_ids   [B, L] int64, 0 = padding, 1.. = conversation inside a packed row; default: all ones
        position_ids  [B, L] int64, restarting per conversation; default: 0..L-1
        seed          chooses which anchors are sampled, the same ones on any number of processes
        """

    @abstractmethod
    def count_windows(self, input_ids: Tensor, greedy_ids: Tensor, mask: Tensor, **batch: Any) -> Tensor:
        """[] int64, how many windows `forward` would use: what the trainer normalises a global batch by."""
