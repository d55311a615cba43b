"""What distillation asks of a target; `inference.target.Target` fulfils it."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase


class Labeller(Protocol):
    """A frozen causal LM that answers prompts and says what it would write at every position of a text.

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

    def label(self, rows: list[list[int]], keep_hidden: bool) -> list[tuple[list[int], Tensor | None]]:
        """(greedy_ids [L], hidden [L, H] on the CPU or None) for each row of token ids.

        `greedy_ids[i] = argmax LM(h_{i-1})`, what the target says at position i given the text before it; -100 at
        position 0. Example: ids [5, 7, 9] give [-100, argmax LM(h_0), argmax LM(h_1)].
        """
