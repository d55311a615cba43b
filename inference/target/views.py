"""What a target lends to draft heads, in training and in drafting; its methods of these names."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

from draft_heads.heads.base import DraftHead, TargetView
from draft_heads.inference.target import sharded
from draft_heads.inference.target.linear import DraftingView

Target = Any  # a `target.Target`, whose module imports this one


def view(target: Target) -> TargetView:
    """The embedding and LM head, lent to a draft head."""
    layers = getattr(target.decoder, "layers", None)
    weight, bias = target.lm_head.weight.to(target.device), getattr(target.lm_head, "bias", None)
    bias = None if bias is None else bias.to(target.device)
    return TargetView(target.embedding, weight, bias, layers, target.rule, if_changed(target, target.view))


def drafting_view(target: Target, head: DraftHead) -> TargetView:
    """The same with the rows of the head's draft vocabulary, its logits fast for a few rows."""
    renew = if_changed(target, lambda: target.drafting_view(head))
    view = head.draft_view(replace(target.view(), renew=renew))
    if view.lm_head_weight is not target.lm_head.weight:
        return DraftingView.of(view)
    return view if target.fused is None else DraftingView.of(view, target.fused.logits)


def if_changed(target: Target, lend: Callable[[], TargetView]) -> Callable[[], TargetView | None]:
    """What lends the target's weights again: calls `lend` once they are other ones than now, until then gives None."""
    changes = target.changes
    return lambda: None if target.changes == changes else lend()


def whole_layers(target: Target) -> AbstractContextManager[Any]:
    """The weights of the first and last layer, which heads may start from, are whole in here."""
    layers = target.modules.layers or ()
    return sharded.whole(p for layer in (*layers[:1], *layers[-1:]) for p in layer.parameters())
