"""Greedy answers from an OpenAI-compatible server; prompts and answers are sent as token ids.

The server must serve the same target. Encoding its text again need not give the tokens that it generated, so a server
that cannot return token ids (`return_token_ids` in vLLM) is refused.
"""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from draft_heads.data.answers import Answer
from draft_heads.data.loops import loop_start

_TIMEOUT = 3600.0  # seconds for one answer, which may wait in the server's queue


class AnswerServer:
    """A /v1/completions endpoint; ValueError when it cannot be reached or does not return token ids."""

    def __init__(
        self, base_url: str, end_token_ids: Sequence[int], model: str | None, concurrency: int, cut_loops: bool
    ) -> None:
        self.url = base_url.rstrip("/")
        if not self.url.startswith(("http://", "https://")):
            raise ValueError(f"--base_url {base_url} is no http(s) URL; pass for example http://127.0.0.1:8000/v1")
        self._end_token_ids = list(end_token_ids)
        self._concurrency = concurrency
        self._cut_loops = cut_loops
        if model is None:
            if not (models := self._call("/models", None)["data"]):
                raise ValueError(f"--base_url {self.url} serves no model; pass --model_name")
            model = str(models[0]["id"])
        self.model = model

    def answers(
        self, prompts: list[list[int]], limits: list[int], progress: Callable[[int], None] = lambda count: None
    ) -> list[Answer]:
        """One greedy answer per prompt, in order; `limits` as in `data.answers.answer_prompts`."""
        answers = []
        with ThreadPoolExecutor(self._concurrency) as pool:
            for answer in pool.map(self._answer, prompts, limits):
                answers.append(answer)
                progress(1)
        return answers

    def _answer(self, prompt: list[int], limit: int) -> Answer:
        asked = {"model": self.model, "prompt": prompt, "max_tokens": limit, "temperature": 0}
        asked |= {"stop_token_ids": self._end_token_ids, "return_token_ids": True}
        choice = self._call("/completions", asked)["choices"][0]
        tokens = choice.get("token_ids")
        if not isinstance(tokens, list):
            raise ValueError(
                f"--base_url {self.url} returns text but no token ids (asked with return_token_ids); re-encoded text "
                "need not be what the target generated: use a server that returns them, as vLLM does, or --engine local"
            )
        if self._cut_loops and (end := loop_start(tokens)) is not None and end < len(tokens):
            return Answer(tokens[:end], "loop")
        if tokens and tokens[-1] in self._end_token_ids:
            return Answer(tokens, "end")
        reason = choice.get("finish_reason")
        if reason != "length":
            raise ValueError(
                f"--base_url {self.url} ended an answer ({reason}) with tokens {tokens[-3:]}, none of the end-of-turn "
                f"tokens {self._end_token_ids}; serve the model that --target names, with its own tokenizer"
            )
        return Answer(tokens, "limit")

    def _call(self, path: str, body: dict[str, Any] | None) -> dict[str, Any]:
        request = urllib.request.Request(
            self.url + path,
            data=None if body is None else json.dumps(body).encode(),
            headers={"Content-Type": "application/json"},
        )
        try:
            with urllib.request.urlopen(request, timeout=_TIMEOUT) as response:
                return json.loads(response.read())
        except urllib.error.HTTPError as error:
            detail = error.read().decode(errors="replace")[:300]
            raise ValueError(f"--base_url {self.url}{path} answers {error.code}: {detail}") from None
        except (urllib.error.URLError, TimeoutError, json.JSONDecodeError) as error:
            raise ValueError(
                f"--base_url {self.url}{path} cannot be used ({error}); is the server running and the URL right?"
            ) from None
