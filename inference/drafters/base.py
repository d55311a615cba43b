"""The contract every drafter fulfils, learned or training-free (shapes: n committed tokens, H hidden, M nodes)."""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor

from draft_heads.inference.step import VerifiedStep
from draft_heads.inference.tree import DraftTree


class Drafter(Protocol):
    """`begin` and `observe` (the prefill) once per prompt, then `propose` and `observe` once per target step.

    What outlives a step (lengths, recent tokens) is a tensor written in place, so that a captured step finds it there.

    max_nodes  no proposal has more nodes
    max_depth  no proposal is deeper
    reads_choices  whether `observe` looks at what the target said elsewhere than on the accepted path
    sources    what `DraftTree.source` counts: who may have drafted a node; a drafter alone is its only source
    """

    max_nodes: int
    max_depth: int
    reads_choices: bool = False
    sources: tuple[str, ...] = ("draft",)

    @property
    def on_device(self) -> bool:
        """Whether neither `observe` nor `propose` reads a value back: they may be compiled, captured, run ahead."""
        return True

    def prepare(self) -> None:
        """Steps will run as compiled programs: make what only those use; nothing by default."""
        return

    def memory(self) -> list[Tensor]:
        """The tensors that outlive a step; where they lie, a captured step expects them."""
        return []

    def begin(self, prompt: Tensor, capacity: int) -> None:
        """Forget the last prompt. `prompt [n]` is about to be prefilled; it and its answer take `capacity` tokens."""

    def reach(self, tokens: int) -> None:
        """Until this is said again, neither the text nor rows behind it that do not count go beyond so many tokens.

        Said between steps, in numbers of which there are few; nothing need be done about it. Not said: `capacity`.
        """
        return

    def observe(self, step: VerifiedStep) -> None:
        """Take in what was committed."""

    def rewind(self, text: VerifiedStep, capacity: int) -> None:
        """What was observed last is not the text any more: `text` is, all of it, as after a prefill.

        So it goes for whoever drafts for a draft model, when the target refuses what that said. By default all is read
        again.
        """
        self.begin(text.tokens, capacity)
        self.observe(text)

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
