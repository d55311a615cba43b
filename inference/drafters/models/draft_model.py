"""Speculative decoding: a smaller model, or the target without some of its layers, drafts greedily."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from draft_heads.configs.options import option
from draft_heads.data.common.pretrained import load_config
from draft_heads.data.fingerprint import tokenizer_hash
from draft_heads.inference.drafters.base import Builder, Drafter
from draft_heads.inference.drafters.models.draft_loop import DraftLoop
from draft_heads.inference.drafters.options import TreeOptions
from draft_heads.inference.drafters.text.base import TextDrafter
from draft_heads.inference.target.target import Target
from draft_heads.inference.tree import DraftTree

logger = logging.getLogger(__name__)


class ModelDrafter(TextDrafter):
    """What drafters with a draft model share: its decoding loop, and the text as the model reads it."""

    text_only: ClassVar[bool] = False
    loads = "MODEL"

    def __init__(self, model: Target, inner: Drafter | None, max_nodes: int, max_depth: int) -> None:
        """model: on the target's device; inner: drafts for the model (a cascade)."""
        super().__init__(model.device, max_nodes, max_depth)
        self.loop = DraftLoop(model, inner)
        self.vocabulary = model.vocab_size
        self._last_row = int(model.config.vocab_size) - 1
        self._text: list[int] = []

    def members(self) -> Iterator[Drafter]:
        yield self
        if self.loop.inner is not None:
            yield from self.loop.inner.members()

    def readable(self, tokens: list[int]) -> list[int]:
        """The tokens as the draft model reads them: a target with more rows may write one that it has no row for."""
        return tokens if max(tokens, default=0) <= self._last_row else [min(t, self._last_row) for t in tokens]

    def begin(self, slot: int, prompt: Tensor, capacity: int) -> None:
        super().begin(slot, prompt, capacity)
        self.loop.begin(capacity)

    def start(self) -> None:
        self._text.clear()

    def read(self, tokens: list[int]) -> None:
        self._text += self.readable(tokens)

    def findings(self) -> dict[str, Any]:
        """How many tokens the draft model drafted, in how many forwards: counts, which add up over slots and runs."""
        return {"draft_tokens": self.loop.drafted, "draft_forwards": self.loop.forwards}


@dataclass(frozen=True)
class ChainOptions(TreeOptions):
    k: int = option(5, "most tokens of a draft", least=1)


@dataclass(frozen=True)
class DraftModelOptions(ChainOptions):
    via: str = option("", "KIND[:PATH] of a drafter for the draft model (empty: none)")


class DraftModelDrafter(ModelDrafter):
    """Drafts a chain of the draft model's next k greedy tokens after the base token."""

    sources = ("draft_model",)
    kind = "draft_model"
    title = "k tokens of a smaller model"
    options_type: ClassVar[type[ChainOptions]] = DraftModelOptions
    options: ChainOptions

    def __init__(self, model: Target, inner: Drafter | None = None, **options: Any) -> None:
        """model: on the target's device; inner: the drafter that `via` names, made for the model; options: those
        of the class's `options_type`."""
        self.options = self.options_type(**options)
        depth = min(self.options.k, self.options.max_nodes)
        super().__init__(model, inner, max_nodes=depth, max_depth=depth)
        self.carries_over = inner is not None and inner.carries_over

    @classmethod
    def from_options(cls, path: str, build: Builder, **options: Any) -> DraftModelDrafter:
        model = build.draft_model(cls.kind, path)
        return cls(model, build.inner(options["via"], model), **options)

    def propose(self) -> DraftTree:
        """See the class; fewer tokens, or none, at the end of the draft model's context."""
        return self.chain(self.loop.draft(self._text, self.max_depth)[: self.max_depth])


@dataclass(frozen=True)
class CascadeOptions(DraftModelOptions):
    k: int = option(8, "most tokens of a draft", least=1)
    via: str = option("ngram", "KIND[:PATH] of a drafter for the draft model (empty: none)")


class CascadeDrafter(DraftModelDrafter):
    """A draft model with a drafter of its own, by default n-grams."""

    sources = ("cascade",)
    kind = "cascade"
    title = "k tokens of a smaller model that has a drafter of its own"
    options_type = CascadeOptions


@dataclass(frozen=True)
class SelfSpeculativeOptions(ChainOptions):
    k: int = option(3, "most tokens of a draft", least=1)
    skip: str = option("", "layers left out, from 0, as in skip=1/3 (default: 1, 3, 5 …, never the last)")


class SelfSpeculativeDrafter(DraftModelDrafter):
    """A draft model that shares the target's weights and has its own cache for the remaining layers."""

    sources = ("self_speculative",)
    kind = "self_speculative"
    title = "k tokens of the target without some layers"
    loads = ""
    options_type = SelfSpeculativeOptions

    @classmethod
    def from_options(cls, path: str, build: Builder, **options: Any) -> SelfSpeculativeDrafter:
        target = build.target
        model = target.without_layers(skipped_layers(options["skip"], len(target.layer_types)))
        return cls(model, **options)


def load_draft_model(kind: str, path: str, target: Target) -> Target:
    """The causal language model at a folder or hub id, on the target's device and of its type.

    The log says where its context, and so the drafting, ends before the target's.
    """
    load_config(path, f"the model of {kind}")  # a sentence, should there be none
    model = Target.from_pretrained(path, target.dtype, target.device, drafts=True)
    check_same_tokens(kind, model, target)
    if model.max_positions < target.max_positions:
        logger.warning(
            "a %s drafter should have the target's %d positions; %s has %d, after which nothing is drafted: pick a "
            "model of a longer context for longer texts",
            kind,
            target.max_positions,
            model.name,
            model.max_positions,
        )
    model.draft_only_below(target.vocab_size)
    return model


def check_same_tokens(kind: str, model: Target, target: Target) -> None:
    """ValueError unless both have the same token ids: one tokenizer, whatever their vocabularies are padded to; where
    one has no tokenizer, equal vocabulary sizes."""
    differs = ""
    if model.tokenizer is None or target.tokenizer is None:
        if model.vocab_size != target.vocab_size:
            differs = f"has a vocabulary of {model.vocab_size} against the target's {target.vocab_size}"
    else:
        hashes = [tokenizer_hash(one.tokenizer, special=False) for one in (model, target)]
        if hashes[0] != hashes[1]:
            differs = f"has the tokenizer {hashes[0]} against the target's {hashes[1]}"
    if differs:
        raise ValueError(
            f"a {kind} drafter must share the target's tokenizer; {model.name} {differs}; pick a model of the target's "
            "family, or train one with the target's tokenizer"
        )


def skipped_layers(skip: str, layers: int) -> list[int]:
    """The numbers in `skip`; "": 1, 3, 5, … up to the last but one. ValueError unless some layers remain."""
    numbers = skip.split("/") if skip else [str(layer) for layer in range(1, layers - 1, 2)]
    chosen = [int(number) if number.isdecimal() else -1 for number in numbers]
    if not chosen or not 0 <= min(chosen) <= max(chosen) < layers or len(set(chosen)) == layers:
        raise ValueError(
            f"drafter option skip names some but not all of the target's layers 0 to {layers - 1}; got "
            f"{skip or 'none'!r}; write e.g. skip={max(layers - 1, 0)}"
        )
    return chosen
