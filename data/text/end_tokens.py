"""Which tokens end an answer: the one rule for labels and decoding."""

from __future__ import annotations

import logging

from transformers import PreTrainedTokenizerBase

from draft_heads.data.text.rendering import ChatRenderer

logger = logging.getLogger(__name__)


def end_token_ids(
    tokenizer: PreTrainedTokenizerBase | None, configured: int | list[int] | None = None
) -> tuple[int, ...]:
    """The tokens that end an answer, ascending.

    The tokenizer's EOS, the special token with which its chat template closes a turn, and `configured`, the EOS tokens
    of the generation config. A model that was trained on its chat template ends a turn with the template's token even
    where the generation config names another.
    """
    ends: set[int | None] = set(configured) if isinstance(configured, list) else {configured}
    if tokenizer is not None:
        ends |= {tokenizer.eos_token_id, closing_token(tokenizer)}
    return tuple(sorted(end for end in ends if end is not None and end >= 0))  # -1 says that there is none


def closing_token(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """`ChatRenderer.end_of_turn`; None without a chat template, or where it is unknown, as a line says."""
    try:
        return ChatRenderer(tokenizer).end_of_turn() if tokenizer.chat_template else None
    except ValueError as error:
        logger.warning("the chat template's end-of-turn token is unknown: %s", error)
        return None
