"""Names of conversations by the prompts that a chat template makes of them: rows of one prompt are one question."""

from __future__ import annotations

import hashlib
from typing import Any

from transformers import PreTrainedTokenizerBase

from draft_heads.data.text.chat_template import template_source, without_date
from draft_heads.data.text.conversations import Conversation
from draft_heads.data.text.rendering import ChatRenderer, ConversationError, Messages
from draft_heads.data.text.thoughts import MARKS

NAMED_BY = "prompt"
"""What a manifest says of names that are those of prompts; older folders have names of turns as they are in rows."""


class QuestionNames:
    """Names of a chat template's prompts.

    Rows that the template makes one prompt have one name, as those with and without an empty system turn. A date that
    it writes counts as its form, as `%d %b`. A conversation that has no prompt has the name of its turns.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._renderer, self._source = ChatRenderer(without_date(tokenizer)), template_source(tokenizer)

    def opening(self, conversation: Conversation) -> str:
        """By the prompt for the first answer, of `Conversation.first_asked`."""
        return self._name(conversation.first_asked, conversation.extra) or conversation.opening

    def all_asked(self, conversation: Conversation) -> str:
        """By the prompt for the last answer: the target answers conversations of one name alike."""
        messages, extra = conversation
        last = max((number for number, turn in enumerate(messages) if turn["role"] == "user"), default=-1)
        # checked whole: else a row that will be left out had the name of one that can be answered
        # a setting may say what later prompts show of answers with thoughts, or without, which are unknown
        answers = ["a", *(f"{begin}t{end}a" for begin, end in MARKS.items() if end in self._source)]
        names = [self._name(with_answer(messages[: last + 1], answer), extra, whole=True) for answer in answers]
        return " ".join(filter(None, names)) or conversation.key

    def _name(self, messages: Messages, extra: dict[str, Any], whole: bool = False) -> str:
        """A digest of the prompt; "" where the template refuses the turns, or a text of them holds a control token.

        whole: also where the template leaves something of them out
        """
        try:
            if whole:
                text = self._renderer.checked_text(messages, add_generation_prompt=True, extra=extra)
            else:
                self._renderer.check_texts(messages, answers=False, extra=extra)
                text = self._renderer.text(messages, add_generation_prompt=True, extra=extra)
        except ConversationError:
            return ""
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def with_answer(messages: Messages, text: str) -> Messages:
    """The messages with the same answer to all questions, which stands for those that the target will write."""
    return [{"role": "assistant", "content": text} if turn["role"] == "assistant" else turn for turn in messages]
