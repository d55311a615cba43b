"""The contract every drafter fulfils, learned or training-free (shapes: n committed tokens, H hidden, M nodes)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from draft_heads.inference.tree import DraftTree


@dataclass(frozen=True)
class VerifiedStep:
    """What one target step committed: the tokens now in the target's cache, and what follows each of them.

    Sizes are known beforehand, values lie on the device: only the first `count` of A rows are committed, the others
    repeat the last of them. What a drafter writes for them lies behind its text and is overwritten.

    tokens       [A] int64, newly committed tokens in order (the prompt after the prefill; afterwards the old base
                 token followed by the accepted drafts)
    next_tokens  [A] int64, the token after each; behind the last committed one stands the next base token
    hidden       [A, H], the target's hidden state at each of them, as the LM head reads it
    count        [] int64, at least 1
    choices      [R] int64, the target's own choice at every row of the forward (R = 1 + M), −1 at a row that was not
                 verified (a node that a composed tree left out); None after the prefill
    tree         the tree that was verified; None after the prefill
    """

    tokens: Tensor
    next_tokens: Tensor
    hidden: Tensor
    count: Tensor
    choices: Tensor | None = None
    tree: DraftTree | None = None

    @classmethod
    def of_prompt(cls, prompt: Tensor, hidden: Tensor, base: Tensor) -> VerifiedStep:
        """After the prefill of `prompt [n]`: hidden [n, H], base [] the target's own next token."""
        return cls(prompt, torch.cat([prompt[1:], base[None]]), hidden, torch.full_like(base, len(prompt)))

    def tensors(self) -> list[Tensor]:
        """All of them, the tree's included."""
        own = [self.tokens, self.next_tokens, self.hidden, self.count]
        return (
            own + ([] if self.choices is None else [self.choices]) + ([] if self.tree is None else self.tree.tensors())
        )

    def map(self, change: Callable[[Tensor], Tensor]) -> VerifiedStep:
        """The same with every tensor changed."""
        return VerifiedStep(
            change(self.tokens),
            change(self.next_tokens),
            change(self.hidden),
            change(self.count),
            None if self.choices is None else change(self.choices),
            None if self.tree is None else self.tree.map(change),
        )

    @property
    def base(self) -> Tensor:
        """[] int64, the target's own next token after the last committed one."""
        return self.next_tokens[-1]


class Drafter(Protocol):
    """`begin` and `observe` (the prefill) once per prompt, then `propose` and `observe` once per target step.

    What outlives a step (lengths, recent tokens) is a tensor written in place, so that a captured step finds it there.

    max_nodes  no proposal has more nodes
    max_depth  no proposal is deeper
    reads_choices  whether `observe` looks at what the target said elsewhere than on the accepted path
    extends_paths  whether it can say what follows any path: it has `table`, n-grams of the text, and `read(tokens)`
    proposes_levels  whether it has `propose_levels()`, distributions by depth that a hybrid makes its tree of
    sources    what `DraftTree.source` counts: who may have drafted a node; a drafter alone is its only source
    """

    max_nodes: int
    max_depth: int
    reads_choices: bool = False
    extends_paths: bool = False
    proposes_levels: bool = False
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

    def generate_fn(self, streamer: Any = None) -> Callable[..., Tensor]:
        """For `model.generate(…, custom_generate=…)` of transformers; see `inference.generate`."""
        from draft_heads.inference.generate import generate_fn  # which needs the engine, and that needs this contract

        return generate_fn(self, streamer)


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
