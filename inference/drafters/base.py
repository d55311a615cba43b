"""The interface of all drafters, learned or training-free (shapes: B texts, n committed tokens, H hidden, M nodes)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from draft_heads.configs.options import check_whole
from draft_heads.heads.base import DraftHead
from draft_heads.inference.drafters.options import DrafterOptions
from draft_heads.inference.step import VerifiedStep
from draft_heads.inference.target.cuda_graphs import CapturedSteps
from draft_heads.inference.target.target import Target
from draft_heads.inference.tree import DraftTree


class Builder(Protocol):
    """What a drafter is built with from the command line; implemented by `registry.DrafterBuilder`.

    target     the target it drafts for; a replay has its tokenizer only, which is enough for `text_only` drafters
    max_nodes  the default node budget
    slots      texts that it drafts for at once
    """

    target: Target
    max_nodes: int
    slots: int

    def head(self, kind: str, path: str) -> DraftHead:
        """The trained head at a path, on the target's device; ValueError for another kind's, or another target's."""

    def draft_model(self, kind: str, path: str) -> Target:
        """The causal language model at a path; ValueError unless it has the target's vocabulary."""

    def inner(self, words: str, model: Target) -> Drafter | None:
        """The drafter for `model` that `words` (`KIND[:PATH]`) describe; None for \"\"."""


class Drafter(ABC):
    """Drafts for the texts of B slots: `begin` and `observe` (the prefill) once per prompt, for its slot; then
    `propose` and `observe` once per target step, for all slots together.

    State that outlives a step (lengths, recent tokens) is kept in tensors written in place: a CUDA graph holds their
    addresses. A drafter that keeps the state of one text has one slot; `SlotLoop` makes one of B such drafters.

    Class attributes declare a drafter's name, options and properties:

    kind           its name on the command line
    title          what it drafts, for tables
    loads          the path that it needs, as a table writes it (`kind=PATH`); "" where it loads nothing
    options_type   the dataclass of its options
    text_only      it reads nothing but the text, so recorded answers can be replayed through it
    on_device      neither `observe` nor `propose` copies a value to the host: they may be captured, run ahead
    reads_choices  `observe` reads the target's choices at nodes off the accepted path
    extends_paths  it can continue any path: it has `table`, n-grams of the text, and `read(tokens)`
    proposes_levels  it has `propose_levels()`, one distribution per depth, from which a hybrid builds its tree
    carries_over   what it keeps of earlier texts changes its drafts or its time for the next: β and γ depend on those
    keeps_text     where it carries over, it is text, so that one that comes again is known to it
    sources        names of the draft sources, indexed by `DraftTree.source`
    target_layers  layers of the target whose outputs it reads beside the hidden states (`VerifiedStep.aux_hidden`)

    An instance may override those that depend on its options. It also has

    slots       B, texts that it drafts for at once
    options     an object of `options_type`
    max_nodes   upper bound of a proposal's nodes
    max_depth   upper bound of a proposal's depth
    deepest_draft  upper bound of the depth of its candidates, where other nodes may be deeper: `max_depth`
    window_nodes  upper bound of a proposal's nodes that are no candidates (`DraftTree.candidate`)
    vocabulary  it proposes token ids below this one only; 0: none but those of the text and the target's choices
    drafts_for  the text that it was begun with, which the engine that began it sets; another object for a batch
    graphs      set while a step drafts: parts that draft on the device may do so as CUDA graphs; None: eagerly
    """

    kind: ClassVar[str] = ""
    title: ClassVar[str] = ""
    loads: ClassVar[str] = ""
    options_type: ClassVar[type[DrafterOptions]] = DrafterOptions
    text_only: ClassVar[bool] = False

    on_device: bool = True
    reads_choices: bool = False
    extends_paths: bool = False
    proposes_levels: bool = False
    carries_over: bool = False
    keeps_text: bool = True
    sources: tuple[str, ...] = ("draft",)
    slots: int = 1
    options: DrafterOptions = DrafterOptions()
    max_nodes: int
    max_depth: int
    window_nodes: int = 0
    vocabulary: int = 0
    drafts_for: object = None
    graphs: CapturedSteps | None = None

    @property
    def deepest_draft(self) -> int:
        return self.max_depth

    @property
    def target_layers(self) -> tuple[int, ...]:
        return ()

    @classmethod
    def from_options(cls, path: str, build: Builder, **options: Any) -> Drafter:
        """Build from a path ("" where `loads` is) and all options, of `build.slots` or of one slot; by default a
        drafter of one slot that loads nothing."""
        make: Any = cls
        drafter: Drafter = make(build.target.device, **options)
        return drafter

    def members(self) -> Iterator[Drafter]:
        """The drafter and those inside it, all of which keep the state of the same texts."""
        yield self

    def memory(self) -> list[Tensor]:
        """The tensors that outlive a step, whose addresses CUDA graphs hold."""
        return []

    def of_slot(self, slot: int) -> Drafter:
        """The drafter that keeps the state of this slot's text: itself, unless each slot has one of its own."""
        return self

    @abstractmethod
    def begin(self, slot: int, prompt: Tensor, capacity: int) -> None:
        """Start a new text: `prompt [n]` is prefilled next; it and its answer have at most `capacity` tokens."""

    def reserve(self, capacity: int) -> None:
        """Room for texts of `capacity` tokens: after it `begin` moves no `memory()` for them. Nothing by default."""
        return

    def forget(self) -> None:
        """Forget what earlier texts taught it itself (`carries_over`), not those inside it. Nothing by default."""
        return

    def set_visible_length(self, tokens: int) -> None:
        """Until the next call, texts and rows after them stay within `tokens`, one of few values; may be ignored."""
        return

    @abstractmethod
    def observe(self, step: VerifiedStep, slot: int | None = None) -> None:
        """Read the committed tokens and their hidden states: of all texts, or after a prefill of the one in `slot`."""

    def end(self, slot: int, tokens: list[int]) -> None:
        """A text has ended with these `tokens`, of a step that no `observe` follows: what carries over may learn them.
        Nothing by default."""
        return

    def end_texts(self) -> None:
        """No slot has a text any more, as after a batch that was left before its end. Nothing by default."""
        return

    def rewind(self, text: VerifiedStep, capacity: int) -> None:
        """Replace the observed text by `text`, given whole as after a prefill, after the target rejected a draft."""
        self.begin(0, text.tokens[0], capacity)
        self.observe(text, 0)

    @abstractmethod
    def propose(self) -> DraftTree:
        """Draft continuations of the B base tokens: trees [B, M]; that of a slot without a text is never read."""

    def settings(self) -> dict[str, Any]:
        """Every option with its value, for reports."""
        return asdict(self.options)

    def findings(self) -> dict[str, Any]:
        """The drafter's own statistics so far, for reports; nothing by default."""
        return {}


def forget_all(drafter: Drafter) -> None:
    """A drafter and those inside it begin with nothing again: a warm-up's text changes no later draft."""
    for member in drafter.members():
        member.forget()


class VanillaDrafter(Drafter):
    """No drafts: with the empty tree, the engine runs the plain decoding loop, the baseline of all other drafters."""

    kind = "vanilla"
    title = "nothing: the plain loop"
    text_only = True
    max_nodes = 0
    max_depth = 0

    def __init__(self, device: torch.device | str = "cpu", slots: int = 1) -> None:
        self.slots, self._tree = slots, DraftTree.empty(device, slots)

    @classmethod
    def from_options(cls, path: str, build: Builder, **options: Any) -> VanillaDrafter:
        """See `Drafter.from_options`."""
        return cls(build.target.device, build.slots)

    def members(self) -> Iterator[Drafter]:
        """None: it keeps no state, so engines may share it."""
        yield from ()

    def begin(self, slot: int, prompt: Tensor, capacity: int) -> None:
        """Nothing to forget."""

    def observe(self, step: VerifiedStep, slot: int | None = None) -> None:
        """Nothing to observe."""

    def propose(self) -> DraftTree:
        return self._tree


class SlotLoop(Drafter):
    """B drafters of one text each as one drafter of B slots, one after another: for what drafts on the host."""

    def __init__(self, each: Sequence[Drafter], device: torch.device | str = "cpu") -> None:
        """each: alike, and each its own; ValueError for one that is given twice."""
        members = [id(member) for drafter in each for member in drafter.members()]
        if len(set(members)) < len(members):
            raise ValueError(
                f"each of the {len(each)} texts of a batch needs a drafter of its own; got one twice; make a new one "
                "for each"
            )
        self.each, self.slots = each, len(each)
        for name in _DESCRIPTION:
            setattr(self, name, getattr(each[0], name))
        self._proposed: list[DraftTree | None] = [None] * len(each)  # None: the slot has no text
        self._none = DraftTree.empty(device)

    @property
    def deepest_draft(self) -> int:
        return self.each[0].deepest_draft

    @property
    def target_layers(self) -> tuple[int, ...]:
        return self.each[0].target_layers

    def members(self) -> Iterator[Drafter]:
        """See `Drafter.members`."""
        for drafter in self.each:
            yield from drafter.members()

    def memory(self) -> list[Tensor]:
        """See `Drafter.memory`."""
        return [tensor for drafter in self.each for tensor in drafter.memory()]

    def of_slot(self, slot: int) -> Drafter:
        """See `Drafter.of_slot`."""
        return self.each[slot]

    def reserve(self, capacity: int) -> None:
        """See `Drafter.reserve`."""
        for drafter in self.each:
            drafter.reserve(capacity)

    def begin(self, slot: int, prompt: Tensor, capacity: int) -> None:
        """See `Drafter.begin`."""
        self.each[slot].begin(0, prompt, capacity)
        self._proposed[slot] = None

    def end(self, slot: int, tokens: list[int]) -> None:
        """See `Drafter.end`."""
        self.each[slot].end(0, tokens)

    def end_texts(self) -> None:
        """See `Drafter.end_texts`."""
        self._proposed = [None] * len(self.each)

    def set_visible_length(self, tokens: int) -> None:
        """See `Drafter.set_visible_length`."""
        for drafter in self.each:
            drafter.set_visible_length(tokens)

    def observe(self, step: VerifiedStep, slot: int | None = None) -> None:
        """Each drafter sees the tree that it proposed itself, not padded; `new_tokens` says which text has ended."""
        if slot is not None:
            self.each[slot].observe(step, 0)
            self._proposed[slot] = self._none
            return
        for index, tree in enumerate(self._proposed):
            if step.new_tokens is not None and not step.new_tokens[index]:
                self._proposed[index] = None
            elif tree is not None:
                self.each[index].observe(step.of_text(index, tree))

    def propose(self) -> DraftTree:
        for index, drafter in enumerate(self.each):
            if self._proposed[index] is not None:
                self._proposed[index] = drafter.propose()
        return DraftTree.stack([self._none if tree is None else tree for tree in self._proposed])

    def settings(self) -> dict[str, Any]:
        """See `Drafter.settings`; they are alike."""
        return self.each[0].settings()

    def findings(self) -> dict[str, Any]:
        """See `Drafter.findings`; those of the first slot, which had its share of the texts."""
        return self.each[0].findings()


_DESCRIPTION = (
    *("kind", "title", "loads", "options_type", "text_only", "on_device", "reads_choices", "extends_paths"),
    *("proposes_levels", "carries_over", "keeps_text", "sources", "options"),
    *("max_nodes", "max_depth", "window_nodes", "vocabulary"),
)
"""What drafters that are alike have in common."""


def tempered(log_probs: Tensor, temperature: float) -> Tensor:
    """[..., V] log-probabilities as trees are built from them: `log softmax(log p / temperature)`.

    A head is overconfident on text unlike its training data; a temperature above 1 widens the tree.
    """
    return log_probs if temperature == 1 else (log_probs / temperature).log_softmax(-1)


def check_max_nodes(max_nodes: int) -> int:
    """The node budget; ValueError for one that is no whole number above 0."""
    check_whole("max_nodes", max_nodes, least=1, remedy="32 is usual")
    return max_nodes


def check_vocabulary(drafter: Drafter, target: Target) -> None:
    """ValueError for a drafter that may propose token ids beyond the target's vocabulary."""
    if drafter.vocabulary > target.vocab_size:
        raise ValueError(
            f"a drafter proposes tokens of the target's vocabulary, {target.vocab_size} for {target.name}; got one of "
            f"kind {drafter.kind or type(drafter).__name__} with {drafter.vocabulary}; make it with `build_drafter`, "
            "which leaves out those beyond, or use one that was made for this target"
        )
