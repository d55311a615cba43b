"""Greedy answers from an OpenAI-compatible server; prompts and answers are sent as token ids.

The server must serve the same target. Encoding its text again need not give the tokens that it generated, so a server
that cannot return token ids (`return_token_ids` of vLLM and scripts/serve.py) is refused. OPENAI_API_KEY is sent if it
is set.
"""

from __future__ import annotations

import http.client
import json
import logging
import os
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.pool import ThreadPool
from typing import Any, TypeVar

from draft_heads.data.generation_config import processor_settings, settings_text
from draft_heads.data.labels.answers import Answer
from draft_heads.data.labels.distill_options import DistillOptions
from draft_heads.data.labels.labeller import Labeller
from draft_heads.data.labels.loops import GOES_ON, loop_start

logger = logging.getLogger(__name__)

_Read = TypeVar("_Read")
_TIMEOUT = 900.0  # seconds for one answer, which may wait in the server's queue, and for each of its tokens:
_PER_TOKEN = 0.5
_BUSY = (429, 500, 502, 503, 504)  # statuses after which the same request may succeed
_PAUSES = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0)  # seconds before a request that failed is repeated


class AnswerServer:
    """A /v1/completions endpoint; ValueError when it cannot be reached or does not return the target's token ids."""

    def __init__(self, target: Labeller, options: DistillOptions) -> None:
        """The server of `options`, with the target's end tokens and its own generation settings.

        ValueError for settings that change its answers in a way that no server can be asked for.
        """
        self.url = (options.base_url or "").rstrip("/")
        if not self.url.startswith(("http://", "https://")):
            raise ValueError(
                f"base_url {options.base_url} is no http(s) URL; pass for example http://127.0.0.1:8000/v1"
            )
        own = processor_settings(target.model.generation_config)
        penalty = own.pop("repetition_penalty", 1.0)
        if further := {name: own[name] for name in own.keys() - {"renormalize_logits", "remove_invalid_values"}}:
            raise ValueError(
                f"engine openai asks a server for no generation settings but repetition_penalty; {target.name} has "
                f"{settings_text(further)} in its generation_config.json; use engine local, or take them out of a copy"
            )
        # a server may take others from its own copy of the generation config, and the text would not be the target's
        self._penalties = {"repetition_penalty": penalty, "presence_penalty": 0.0, "frequency_penalty": 0.0}
        self._end_token_ids, self._vocab_size = list(target.end_token_ids), target.vocab_size
        self._concurrency, self._cut_loops = options.concurrency, options.cut_loops
        self._told = False  # whether a line has said that a request failed
        self._answered = time.monotonic()  # when the server last answered any request
        self.model = options.model_name
        if self.model is None:
            if not (models := self._call("/models", None, _models)):
                raise ValueError(f"base_url {self.url} serves no model; pass model_name")
            names = [str(model.get("id")) for model in models]
            if len(names) > 1:  # as vLLM lists a model and then its adapters
                raise ValueError(
                    f"base_url {self.url} serves {len(names)} models ({', '.join(names[:6])}); pass model_name with "
                    "that of the target"
                )
            self.model = names[0]

    def __call__(self, prompts: Sequence[list[int]], limits: Sequence[int]) -> Iterator[tuple[int, Answer]]:
        """See `data.labels.answers.Answerer`.

        Ctrl-C and errors end it at once, whatever the server does: the pool drops what was not sent yet and does not
        wait for its threads (those of concurrent.futures would be waited for).
        """

        def answer(job: tuple[int, tuple[list[int], int]]) -> tuple[int, Answer]:
            number, (prompt, limit) = job
            return number, self._answer(prompt, limit)

        with ThreadPool(min(self._concurrency, len(prompts)) or 1) as pool:
            yield from pool.imap_unordered(answer, enumerate(zip(prompts, limits)))

    def _answer(self, prompt: list[int], limit: int) -> Answer:
        body = {"model": self.model, "prompt": prompt, "max_tokens": limit, "temperature": 0}
        body |= {"stop_token_ids": self._end_token_ids, "return_token_ids": True, **self._penalties}
        choice = self._call("/completions", body, _first_choice, _TIMEOUT + _PER_TOKEN * limit)
        tokens = choice.get("token_ids")
        if not isinstance(tokens, list):
            raise ValueError(
                f"base_url {self.url} returns text but no token ids (asked with return_token_ids); re-encoded text "
                "need not be what the target generated: use a server that returns them, as vLLM and scripts/serve.py "
                "do, or engine local"
            )
        if not all(type(token) is int and 0 <= token < self._vocab_size for token in tokens):
            raise ValueError(
                f"base_url {self.url} returns tokens that the target has not (of {self._vocab_size}: "
                f"{tokens[:8]} …); serve the model that is the target"
            )
        longer, tokens = len(tokens) > limit, tokens[:limit]  # a server may not know max_tokens,
        # and one that does not know these tokens may write on after them
        tokens = tokens[: next((i for i, token in enumerate(tokens, 1) if token in self._end_token_ids), None)]
        ended = bool(tokens) and tokens[-1] in self._end_token_ids
        loop = loop_start(tokens, goes_on=GOES_ON) if self._cut_loops else None
        if loop is not None and not (ended and loop == len(tokens)):
            return Answer(tokens[:loop], "loop")
        if ended:
            return Answer(tokens, "end")
        reason = choice.get("finish_reason")
        if reason != "length" and not longer:
            raise ValueError(
                f"base_url {self.url} ended an answer ({reason}) with tokens {tokens[-3:]}, none of the end-of-turn "
                f"tokens {self._end_token_ids}; serve the model that is the target, with its own tokenizer"
            )
        if len(tokens) < limit:
            raise ValueError(
                f"base_url {self.url} ended an answer after {len(tokens)} tokens as too long; {limit} were asked for; "
                "raise the server's own limit, or lower max_new_tokens or max_length, with another output"
            )
        return Answer(tokens, "limit")

    def _call(
        self, path: str, body: dict[str, Any] | None, read: Callable[[Any], _Read], timeout: float | None = None
    ) -> _Read:
        """What the server answers; a request that fails, or is answered by garbage, is repeated after a pause.

        read: takes from a reply what was asked for; ValueError for garbage
        timeout: seconds that an answer may take; None: `_TIMEOUT`

        One that a full queue refuses (429), or in which it waits too long, is repeated for as long as the server
        answers others, and counts as no failure.
        """
        url, data = self.url + path, None if body is None else json.dumps(body).encode()
        key = os.environ.get("OPENAI_API_KEY", "").strip()
        headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
        try:
            request = urllib.request.Request(url, data=data, headers=headers)
        except ValueError as error:
            raise ValueError(f"base_url must be an address as http://localhost:8000/v1; got {url} ({error})") from None
        repeated, failed, longest, remedy = 0, 0, timeout or _TIMEOUT, ""
        while True:
            full = False
            try:
                with urllib.request.urlopen(request, timeout=longest) as response:
                    answer = read(json.loads(response.read()))
                    self._answered = time.monotonic()
                    return answer
            except urllib.error.HTTPError as error:
                full = error.code == 429 and time.monotonic() - self._answered < longest
                fault = f"status {error.code}: {_text_of(error)[:300]}"
                if error.code not in _BUSY:
                    break
            except (OSError, http.client.HTTPException, ValueError) as error:  # ValueError: no JSON
                full = isinstance(error, TimeoutError) and time.monotonic() - self._answered < longest
                fault = f"{type(error).__name__}: {error}"
                if isinstance(error, http.client.InvalidURL):
                    break
                if isinstance(error, TimeoutError):
                    remedy = f"If an answer takes more than {longest:.0f} s, lower --concurrency, or, with another "
                    remedy += "output, --max_new_tokens. "
            if failed >= len(_PAUSES) and not full:
                break
            if not full and not self._told:
                self._told = True
                logger.warning("%s failed (%s); a request that fails is repeated %d times", url, fault, len(_PAUSES))
            time.sleep(_PAUSES[min(repeated if full else failed, len(_PAUSES) - 1)])
            repeated, failed = repeated + full, failed + (not full)
        raise ValueError(
            f"base_url {url} cannot be used ({' '.join(fault.split())}); is the server running, and the URL right? "
            f"{remedy}The same command, without --overwrite, goes on where this one ended"
        )


def _models(reply: Any) -> list[dict[str, Any]]:
    """The models that a reply lists; ValueError for another form."""
    models = (reply.get("data") or []) if isinstance(reply, dict) else None
    if not isinstance(models, list) or (models and not (isinstance(models[0], dict) and "id" in models[0])):
        raise ValueError(
            f"a list of models has 'data' with an 'id' each; received {json.dumps(reply)[:300]}; or pass model_name"
        )
    return models


def _first_choice(reply: Any) -> dict[str, Any]:
    """The first of a reply's answers; ValueError for another form, as that of an error."""
    choices = reply.get("choices") if isinstance(reply, dict) else None
    if not isinstance(choices, list) or not choices or not isinstance(choices[0], dict):
        raise ValueError(f"a completion has 'choices'; received {json.dumps(reply)[:300]}")
    return choices[0]


def _text_of(error: urllib.error.HTTPError) -> str:
    """The body of a response that says what failed, as far as it came."""
    try:
        return error.read().decode(errors="replace")
    except (OSError, http.client.HTTPException) as broken:
        return f"{error.reason} ({type(broken).__name__})"
