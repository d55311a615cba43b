"""The interface of a target that labels text; `inference.target.Target` implements it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from draft_heads.data.text.errors import ConversationError


class Labelled(NamedTuple):
    """A target's labels and hidden states of one text, the states on the CPU, or None where not asked for.

    Example: the ids [5, 7, 9] have the greedy_ids [-100, argmax LM(h_0), argmax LM(h_1)].
    """

    greedy_ids: list[int]  # [L], the target's token for each position given the text before it; -100 for none
    hidden: Tensor | None  # [L, H]
    aux_hidden: Tensor | None  # [L, k·H], the outputs of k layers side by side


class Labeller(Protocol):
    """A frozen causal LM that gives its greedy tokens after the beginnings of a text."""

    name: str  # folder or hub id it was loaded from
    adapter: str | None  # PEFT adapter that was merged into it
    chat_template: str | None  # the option that chose its chat template, None for the tokenizer's own
    model: Any  # the transformers model
    tokenizer: PreTrainedTokenizerBase  # with the chat template in use

    @property
    def device(self) -> torch.device:
        """Where token ids go."""

    @property
    def dtype(self) -> torch.dtype:
        """Type of the hidden states."""

    @property
    def vocab_size(self) -> int:
        """Token ids are 0 to vocab_size − 1; a tokenizer may have entries beyond, for which there are no weights."""

    @property
    def end_token_ids(self) -> tuple[int, ...]:
        """Tokens that end an answer, ascending; decoding stops at the same ones."""

    @property
    def max_positions(self) -> int:
        """How many tokens fit, prompt and answer together."""

    def refresh(self) -> None:
        """Update what was derived from the model's weights if they have changed since the last answer."""

    def fingerprint(self) -> dict[str, Any]:
        """What identifies it (`data.fingerprint`)."""

    def check_layers(self, target_layers: Sequence[int]) -> None:
        """ValueError unless these are layers whose outputs can be captured."""

    def label(
        self,
        rows: list[list[int]],
        keep_hidden: bool,
        target_layers: Sequence[int] = (),
        masks: Sequence[Sequence[bool]] | None = None,
    ) -> list[Labelled]:
        """Labels for each row of token ids, and its hidden states if they are to be kept.

        masks: which tokens get a label, the assistant's; there the checkpoint's own generation
            settings decide too, as in decoding. None: all, but for those settings.
        """


def checked_ids(target: Labeller, ids: list[int], text: str = "a prompt") -> list[int]:
    """The same token ids; ConversationError (a ValueError) for one that the target does not have.

    Every way in calls it: prompts of all forms, rows to label, answers of a server. Beyond the vocabulary an embedding
    on the CPU raises an IndexError, and one on a GPU ends the process.
    """
    if ids and not 0 <= min(ids) <= max(ids) < target.vocab_size:
        outside = next(token for token in ids if not 0 <= token < target.vocab_size)
        tokenizer = target.tokenizer
        named = tokenizer is not None and 0 <= outside < len(tokenizer)
        spelled = f" ({tokenizer.convert_ids_to_tokens(outside)!r})" if named else ""
        raise ConversationError(
            f"token ids are 0 to {target.vocab_size - 1}, the vocabulary of {target.name}; got {outside}"
            f"{spelled} in {text}; encode it with this target's tokenizer, or, if that has "
            "added tokens, resize the model's embedding and train it"
        )
    return ids
