"""What is wrong with a conversation: the errors of this room, and the check of its characters."""

from __future__ import annotations


class ConversationError(ValueError):
    """A conversation that cannot be used; the message says why and what to do."""


class ControlTokenError(ConversationError):
    """A text that holds a control token; `turn` is the index of its message, 0 beside the messages."""

    def __init__(self, message: str, turn: int) -> None:
        super().__init__(message)
        self.turn = turn


def check_unicode(text: str) -> None:
    """ConversationError for a text with a lone surrogate, which tokenizers refuse; JSON escapes can make one."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ConversationError(
            f"a text must be valid Unicode; got {text[error.start]!r}, half a character or stray byte; send it as UTF-8"
        ) from None
