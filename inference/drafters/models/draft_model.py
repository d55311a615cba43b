"""Speculative decoding: a smaller model, or the target without some of its layers, drafts greedily."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

from torch import Tensor

from draft_heads.data.common.pretrained import load_config
from draft_heads.data.fingerprint import tokenizer_hash
from draft_heads.inference.drafters.base import Builder, Drafter, refuse_path
from draft_heads.inference.drafters.models.draft_loop import DraftLoop
from draft_heads.inference.drafters.text.base import TextDrafter, check_positive
from draft_heads.inference.target.target import Target
from draft_heads.inference.tree import DraftTree


class DraftModelDrafter(TextDrafter):
    """Drafts a chain of the draft model's next k greedy tokens after the base token."""

    sources = ("draft_model",)
    text_only = False
    kind = "draft_model"
    options: ClassVar[dict[str, Any]] = {"k": 5, "via": ""}

    def __init__(self, model: Target, inner: Drafter | None = None, max_nodes: int = 32, k: int = 5) -> None:
        """model: on the target's device; inner: drafts for the model (a cascade); k: longest draft."""
        check_positive(k=k, max_nodes=max_nodes)
        super().__init__(model.device, min(k, max_nodes), min(k, max_nodes))
        self.loop = DraftLoop(model, inner)
        self.vocabulary = model.vocab_size
        self._last_row = int(model.config.vocab_size) - 1
        self.carries_over = inner is not None and inner.carries_over
        self._text: list[int] = []

    @classmethod
    def from_options(
        cls, path: str, build: Builder, max_nodes: int = 32, via: str = "", **options: Any
    ) -> DraftModelDrafter:
        """See `Drafter.from_options`. via: `KIND[:PATH]` of a drafter for the draft model, "" for none."""
        model = build.draft_model(cls.kind, path)
        return cls(model, build.inner(via, model), max_nodes, **options)

    def members(self) -> Iterator[Drafter]:
        yield self
        if self.loop.inner is not None:
            yield from self.loop.inner.members()

    def readable(self, tokens: list[int]) -> list[int]:
        """The tokens as the draft model reads them: a target with more rows may write one that it has no row for."""
        return tokens if max(tokens, default=0) <= self._last_row else [min(t, self._last_row) for t in tokens]

    def begin(self, prompt: Tensor, capacity: int) -> None:
        super().begin(prompt, capacity)
        self.loop.begin(capacity)

    def start(self) -> None:
        self._text.clear()

    def read(self, tokens: list[int]) -> None:
        self._text += self.readable(tokens)

    def propose(self) -> DraftTree:
        """See the class; fewer tokens, or none, at the end of the draft model's context."""
        return self.chain(self.loop.draft(self._text, self.max_depth)[: self.max_depth])

    def findings(self) -> dict[str, Any]:
        """Tokens per forward of the draft model."""
        return {"tokens_a_draft_forward": self.loop.drafted / max(1, self.loop.forwards)}


class CascadeDrafter(DraftModelDrafter):
    """A draft model with a drafter of its own, by default n-grams."""

    sources = ("cascade",)
    kind = "cascade"
    options: ClassVar[dict[str, Any]] = {"k": 8, "via": "ngram"}


class SelfSpeculativeDrafter(DraftModelDrafter):
    """A draft model that shares the target's weights and has its own cache for the remaining layers."""

    sources = ("self_speculative",)
    kind = "self_speculative"
    options: ClassVar[dict[str, Any]] = {"k": 3, "skip": ""}

    @classmethod
    def from_options(  # type: ignore[override]
        cls, path: str, build: Builder, max_nodes: int = 32, skip: str = "", **options: Any
    ) -> SelfSpeculativeDrafter:
        """See `Drafter.from_options`. skip: layers from 0, as "1/3"; "": every second one, not the last."""
        refuse_path("self_speculative", path)
        target = build.target
        left = target.without_layers(skipped_layers(skip, len(target.layer_types)))
        return cls(left, None, max_nodes, **options)


def load_draft_model(kind: str, path: str, target: Target) -> Target:
    """The causal language model at a folder or hub id, on the target's device and of its type."""
    if not path:
        raise ValueError(f"{kind} drafts with a smaller model; got no path; write {kind}=DIR")
    load_config(path, f"the model of {kind}")  # a sentence, should there be none
    model = Target.from_pretrained(path, target.dtype, target.device, drafts=True)
    check_same_tokens(kind, model, target)
    model.draft_only_below(target.vocab_size)
    if target.compiled and model.fused is not None:
        model.compile()
    return model


def check_same_tokens(kind: str, model: Target, target: Target) -> None:
    """ValueError unless both have the same token ids: one tokenizer, whatever their vocabularies are padded to; where
    one has no tokenizer, equal vocabulary sizes."""
    differs = ""
    if model.tokenizer is None or target.tokenizer is None:
        if model.vocab_size != target.vocab_size:
            differs = f"has a vocabulary of {model.vocab_size} against the target's {target.vocab_size}"
    else:
        hashes = tokenizer_hash(model.tokenizer), tokenizer_hash(target.tokenizer)
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
