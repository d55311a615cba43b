"""The contract every drafter fulfils, learned or training-free (shapes: n committed tokens, H hidden, M nodes)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar, Protocol

from torch import Tensor

from draft_heads.heads.base import DraftHead
from draft_heads.inference.step import VerifiedStep
from draft_heads.inference.target.target import Target
from draft_heads.inference.tree import DraftTree


class Builder(Protocol):
    """What a drafter is built with from the command line; `registry.DrafterBuilder`.

    target     the target it drafts for; a replay has its tokenizer only, enough for drafters that are `text_only`
    max_nodes  the default node budget
    """

    target: Target
    max_nodes: int

    def head(self, kind: str, path: str) -> DraftHead:
        """The trained head at a path, on the target's device; ValueError for another kind's, or another target's."""

    def draft_model(self, kind: str, path: str) -> Target:
        """The causal language model at a path, which must have the target's tokens."""

    def inner(self, words: str, model: Target) -> Drafter | None:
        """The drafter that `words` (`KIND[:PATH]`) describe, drafting for `model`; None for none."""


class Drafter(ABC):
    """`begin` and `observe` (the prefill) once per prompt, then `propose` and `observe` once per target step.

    What outlives a step (lengths, recent tokens) is a tensor written in place, so that a captured step finds it there.

    A class declares what its drafters are called, can do and need:

    kind           its name on the command line
    options        what may follow on the command line, with defaults, whose types are the options' types
    tuned_options  options that a file of the script `tuned_by` gives (`tuned=FILE`), with their types
    text_only      it reads nothing but the text: recorded answers can be replayed through it
    on_device      neither `observe` nor `propose` reads a value back: they may be compiled, captured, run ahead
    reads_choices  `observe` looks at the target's choices elsewhere than on the accepted path
    extends_paths  it can continue any path: it has `table`, n-grams of the text, and `read(tokens)`
    proposes_levels  it has `propose_levels()`, a distribution for each depth, of which a hybrid makes its tree
    sources        the names that `DraftTree.source` counts: which drafter proposed a node
    target_layers  layers of the target whose outputs it reads beside the hidden states (`VerifiedStep.aux_hidden`)

    An instance may know better, where that depends on its options. It also has

    max_nodes  no proposal has more nodes
    max_depth  no proposal is deeper
    """

    kind: ClassVar[str] = ""
    options: ClassVar[dict[str, Any]] = {}
    tuned_options: ClassVar[dict[str, type]] = {}
    tuned_by: ClassVar[str] = ""
    text_only: ClassVar[bool] = False

    on_device: bool = True
    reads_choices: bool = False
    extends_paths: bool = False
    proposes_levels: bool = False
    sources: tuple[str, ...] = ("draft",)
    max_nodes: int
    max_depth: int

    @property
    def target_layers(self) -> tuple[int, ...]:
        """See the class."""
        return ()

    @classmethod
    def from_options(cls, path: str, build: Builder, **options: Any) -> Drafter:
        """From what the command line says: a path ("" for none) and every option, `max_nodes` among them."""
        raise TypeError(f"{cls.__name__} is made by its constructor, not from the words of a command line")

    def memory(self) -> list[Tensor]:
        """The tensors that outlive a step; where they lie, a captured step expects them."""
        return []

    @abstractmethod
    def begin(self, prompt: Tensor, capacity: int) -> None:
        """Forget the last prompt. `prompt [n]` is about to be prefilled; it and its answer take `capacity` tokens."""

    def set_visible_length(self, tokens: int) -> None:
        """Until the next call, the text and uncommitted rows after it stay within `tokens`; at first in `capacity`.

        Called between steps, with few different numbers. A drafter may read only so much of its caches, or ignore it.
        """
        return

    @abstractmethod
    def observe(self, step: VerifiedStep) -> None:
        """Take in what was committed."""

    def rewind(self, text: VerifiedStep, capacity: int) -> None:
        """What was observed last is not the text any more: `text` is, all of it, as after a prefill.

        So it goes for whoever drafts for a draft model, when the target refuses what that said. By default all is read
        again.
        """
        self.begin(text.tokens, capacity)
        self.observe(text)

    @abstractmethod
    def propose(self) -> DraftTree:
        """Draft what may come after the base token."""

    def close(self) -> None:
        """No more prompts follow: write what shall outlive the process; nothing by default."""
        return

    def findings(self) -> dict[str, Any]:
        """What the drafter has learned about itself so far, for reports; nothing by default."""
        return {}


def tempered(log_probs: Tensor, temperature: float) -> Tensor:
    """[..., V] log-probabilities as trees are built from them: `log softmax(log p / temperature)`.

    A head trained on the text it drafts is too sure of itself on other text; above 1, the temperature spreads the tree.
    """
    return log_probs if temperature == 1 else (log_probs / temperature).log_softmax(-1)


def check_max_nodes(max_nodes: int) -> int:
    """The node budget, or a ValueError for one that leaves no draft."""
    if max_nodes < 1:
        raise ValueError(f"--max_nodes must be at least 1; got {max_nodes}")
    return max_nodes
