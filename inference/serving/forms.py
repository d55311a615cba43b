"""How each endpoint writes its answers: the objects and events of the OpenAI API."""

from __future__ import annotations

import json
import time
import uuid
from abc import ABC, abstractmethod
from typing import Any

from draft_heads.inference.serving.worker import Piece


def event(data: dict[str, Any]) -> str:
    """One server-sent event, in ASCII: some clients end a line at U+2028 and the like, which answers may have."""
    return f"data: {json.dumps(data)}\n\n"


class Form(ABC):
    """How one endpoint writes its answers."""

    path, prefix, kind, chunk_kind = "", "", "", ""

    def __init__(self, model: str, prompt_tokens: int, token_ids: bool, streams_usage: bool = False) -> None:
        """token_ids: whether choices have theirs; streams_usage: whether a stream ends with the tokens counted."""
        self._prompt_tokens, self.token_ids, self.streams_usage = prompt_tokens, token_ids, streams_usage
        self._head = {"id": f"{self.prefix}-{uuid.uuid4().hex}", "created": int(time.time()), "model": model}

    def head(self, kind: str = "") -> dict[str, Any]:
        """The fields that all parts of an answer share."""
        return {**self._head, "object": kind or self.chunk_kind}

    def usage(self, tokens: int) -> dict[str, int]:
        """The tokens of prompts and answers."""
        return {
            "prompt_tokens": self._prompt_tokens,
            "completion_tokens": tokens,
            "total_tokens": self._prompt_tokens + tokens,
        }

    def openings(self, choices: int) -> list[dict[str, Any]]:
        """The chunks before the first text."""
        return []

    def chunk(self, index: int, piece: Piece) -> dict[str, Any]:
        """One event of a stream."""
        return self._event(self._choice(index, piece, streamed=True))

    def last(self, tokens: int) -> dict[str, Any]:
        """The event after the answers, with the tokens counted."""
        return {**self.head(), "choices": [], "usage": self.usage(tokens)}

    def _event(self, choice: dict[str, Any]) -> dict[str, Any]:
        """An event of one choice; where the last event has the usage, it is null in all others."""
        return {**self.head(), "choices": [choice]} | ({"usage": None} if self.streams_usage else {})

    def whole(self, answers: list[Piece]) -> dict[str, Any]:
        """The response of all answers."""
        written = [self._choice(index, answer, streamed=False) for index, answer in enumerate(answers)]
        tokens = sum(len(answer.tokens) for answer in answers)
        return {**self.head(self.kind), "choices": written, "usage": self.usage(tokens)}

    def _choice(self, index: int, piece: Piece, streamed: bool) -> dict[str, Any]:
        ids = {"token_ids": piece.tokens} if self.token_ids else {}
        return {
            "index": index,
            **self._text(piece.text, streamed),
            "logprobs": None,
            "finish_reason": piece.finish_reason,
            **ids,
        }

    @abstractmethod
    def _text(self, text: str, streamed: bool) -> dict[str, Any]:
        """The text of a choice in the endpoint's own fields."""


class ChatForm(Form):
    """`chat.completion`."""

    path, prefix = "/v1/chat/completions", "chatcmpl"
    kind, chunk_kind = "chat.completion", "chat.completion.chunk"

    def openings(self, choices: int) -> list[dict[str, Any]]:
        opening = {"delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
        return [self._event({"index": index, **opening}) for index in range(choices)]

    def _text(self, text: str, streamed: bool) -> dict[str, Any]:
        if streamed:
            return {"delta": {"content": text}}
        return {"message": {"role": "assistant", "content": text, "refusal": None}}


class CompletionForm(Form):
    """`text_completion`."""

    path, prefix = "/v1/completions", "cmpl"
    kind = chunk_kind = "text_completion"

    def _text(self, text: str, streamed: bool) -> dict[str, Any]:
        return {"text": text}
