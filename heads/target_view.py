"""What heads borrow of the frozen target: its embedding, its LM head, and what is done to the product of that.

Shapes: H hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class LogitsRule:
    """What a model does to the product of its LM head: logits = soft cap(product · multiplier / divisor).

    multiplier  Cohere's `logit_scale`; divisor: Granite's `logits_scaling`; 1 leaves the product as it is
    cap         Gemma's `final_logit_softcapping` c: c · tanh(logits / c); None for none
    """

    multiplier: float = 1.0
    divisor: float = 1.0
    cap: float | None = None

    @property
    def factor(self) -> float:
        """What scales the logits before the cap."""
        return self.multiplier / self.divisor

    def scaled(self, product: Tensor) -> Tensor:
        """[...] → [...], without the cap; divides where the model divides, so that values round as the model's do."""
        product = product if self.multiplier == 1 else product * self.multiplier
        return product if self.divisor == 1 else product / self.divisor

    def __call__(self, product: Tensor) -> Tensor:
        """[...] → [...], the model's own logits."""
        logits = self.scaled(product)
        return logits if self.cap is None else torch.tanh(logits / self.cap) * self.cap


@dataclass(frozen=True)
class TargetView:
    """The frozen target's embedding and LM head as heads use them; never registered, saved or trained with a head.

    `DraftHead.draft_view` leaves the rows of the head's draft vocabulary in the LM head; the embedding stays whole.
    A plain object, not a module, so that a head which stores one does not register its parameters.
    """

    embedding: nn.Module
    lm_head_weight: Tensor  # [V, H]
    lm_head_bias: Tensor | None = None  # [V]
    layers: nn.ModuleList | None = None  # where the target has a list of decoder layers
    rule: LogitsRule = LogitsRule()
    renew: Callable[[], TargetView | None] | None = None  # gives a view of the target's new weights, if they changed

    def current(self) -> TargetView:
        """This view, or a new one where the target has found other weights in its model since (`Target.refresh`)."""
        return (self.renew and self.renew()) or self

    @property
    def device(self) -> torch.device:
        """Where heads draft."""
        return self.lm_head_weight.device

    def embed(self, token_ids: Tensor) -> Tensor:
        """[...] int64 → [..., H], the target's input embeddings."""
        with torch.no_grad():
            return self.embedding(token_ids)

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., H] → [..., V], the target's own logits."""
        return self.rule(self.product(hidden))

    def head_logits(self, states: Tensor) -> Tensor:
        """[..., H] → [..., V], logits of a head's states: the target's LM head and scale, without its cap.

        Heads learn their states through the fused losses, which have no cap, and draft from the same numbers. Drafts
        cannot change what the target accepts, and a cap leaves the order of logits as it is.
        """
        return self.rule.scaled(self.product(states))

    def product(self, hidden: Tensor) -> Tensor:
        """[..., H] → [..., V], the LM head alone."""
        return nn.functional.linear(hidden, self.lm_head_weight, self.lm_head_bias)

    @property
    def scaled_bias(self) -> Tensor | None:
        """[V], the bias at the scale of `head_logits`, for losses that are given scaled states."""
        return None if self.lm_head_bias is None else self.lm_head_bias * self.rule.factor
