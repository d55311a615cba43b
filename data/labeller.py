"""The interface of a target that labels text; `inference.target.Target` implements it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase


class Labelled(NamedTuple):
    """A target's labels and hidden states of one text.

    greedy_ids  [L], `greedy_ids[i] = argmax LM(h_{i-1})`, its token for position i given the text before it; -100 at
                position 0. Example: ids [5, 7, 9] give [-100, argmax LM(h_0), argmax LM(h_1)].
    hidden      [L, H] on the CPU, or None where it was not asked for
    aux_hidden  [L, k·H], the outputs of k layers side by side, like `hidden`
    """

    greedy_ids: list[int]
    hidden: Tensor | None
    aux_hidden: Tensor | None


class Labeller(Protocol):
    """A frozen causal LM that answers prompts and gives its greedy token at every position of a text.

    name            folder or hub id it was loaded from
    adapter         PEFT adapter that was merged into it, or None
    model           the transformers model, which writes answers (`data.answers`)
    tokenizer       with the chat template in use
    """

    name: str
    adapter: str | None
    model: Any
    tokenizer: PreTrainedTokenizerBase

    @property
    def device(self) -> torch.device:
        """Where token ids go."""

    @property
    def dtype(self) -> torch.dtype:
        """Type of the hidden states."""

    @property
    def end_token_ids(self) -> tuple[int, ...]:
        """Tokens that end an answer, ascending; decoding stops at the same ones."""

    @property
    def pad_token_id(self) -> int:
        """What fills the padding, which is masked."""

    @property
    def max_positions(self) -> int:
        """How many tokens fit, prompt and answer together."""

    def fingerprint(self) -> dict[str, Any]:
        """What identifies it (`data.fingerprint`)."""

    def check_layers(self, target_layers: Sequence[int]) -> None:
        """ValueError unless these are layers whose outputs can be captured."""

    def label(self, rows: list[list[int]], keep_hidden: bool, target_layers: Sequence[int] = ()) -> list[Labelled]:
        """Labels for each row of token ids, and its hidden states if they are to be kept."""
