"""transformers' own `generate`: the oracle's answers, and the baselines of reports beside vanilla.

Its own cache, its own loop, one token at a time or assisted in its own two ways, with greedy choices or the project's
fixed noise; stop rules beyond EOS and length by `end`, for all uses.

Shapes: L length, V vocabulary.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from draft_heads.inference.generation import Generation, GenerationSettings, room
from draft_heads.inference.sampling import Sampling, gumbel
from draft_heads.inference.target.target import Target


class PlainGenerate:
    """Answers with the target's own `generate`, as an engine that an evaluation times.

    EOS tokens and the length are `generate`'s own to watch. Stop strings and `stop` are asked after every token
    through a `StoppingCriteria`, so that nothing is decoded beyond the answer's end; without them there is none to
    ask, and on a GPU none to wait for.
    """

    def __init__(self, target: Target, **assisted: Any) -> None:
        """assisted: what `generate` drafts with, `prompt_lookup_num_tokens` or `assistant_model`; none: plainly."""
        self.target, self.assisted = target, assisted

    @classmethod
    def from_words(cls, text: str, target: Target) -> PlainGenerate:
        """`transformers`, `transformers_lookup` (10 tokens of prompt lookup) or `transformers_assisted=DIR`."""
        name, path = baseline_words(text)
        if name == "transformers_lookup":
            return cls(target, prompt_lookup_num_tokens=10)
        if not path:
            return cls(target)
        model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=target.dtype)
        return cls(target, assistant_model=model.to(target.device).eval())

    def generate(self, prompt_ids: list[int], settings: GenerationSettings) -> Generation:
        """The whole answer: one target step a token (beta 1) unless assisted, all seconds in `verify`.

        Raises ContextError (before any work) if the prompt does not fit, ValueError for stop strings without a
        tokenizer.
        """
        limit = room(self.target, len(prompt_ids), settings.max_new_tokens)
        if settings.stop_strings and self.target.tokenizer is None:
            raise ValueError("stop_strings need a tokenizer to decode the answer; the target has none; load one")
        start = time.perf_counter()
        ended = _Ended(len(prompt_ids), settings, self.target.tokenizer)
        asked = settings.stop is not None or bool(settings.stop_strings)
        with _forwards(self.target.model if self.assisted else None) as lengths:
            tokens = generated(self.target, prompt_ids, settings, limit, [ended] if asked else [], **self.assisted)
        tokens = tokens[: ended.length]
        taken = time.perf_counter() - start
        if tokens and tokens[-1] in settings.eos_token_ids:
            reason = "eos"
        elif ended.length is not None:
            reason = "stop"
        else:
            reason = "length" if limit == settings.max_new_tokens else "context"
        seconds = {"draft": 0.0, "verify": taken, "accept": 0.0, "other": 0.0, "total": taken}
        accepted = steps(lengths, len(prompt_ids), len(tokens)) if self.assisted else [1] * len(tokens)
        return Generation(tokens, accepted, [-1] * len(tokens), seconds, reason)


def baseline_words(text: str) -> tuple[str, str]:
    """The name and the path of a baseline, NAME or NAME=PATH; ValueError where a path is missing or too much."""
    name, _, path = text.partition("=")
    if bool(path) != (name == "transformers_assisted"):
        raise ValueError(
            f"the name {name!r} is reserved for transformers' own generate, a baseline and no drafter: transformers, "
            f"transformers_lookup, or transformers_assisted=DIR with a model; got {text!r}; rename the drafter"
        )
    return name, path


def steps(lengths: Sequence[int], prompt: int, new: int) -> list[int]:
    """New tokens of each target forward, from how many tokens its cache held when each began: all but the newest.

    A prompt of 10 tokens, forwards that began at 0, 10, 13 and 14, and 6 new tokens: 1, 3, 1 and 1.
    """
    held = [0, *(length + 1 - prompt for length in lengths[1:]), new]
    return [after - before for before, after in pairwise(held)]


@contextmanager
def _forwards(model: Any | None) -> Iterator[list[int]]:
    """Notes how many tokens the cache holds when a forward of the model begins; no model: nothing."""
    lengths: list[int] = []

    def note(module: Any, args: Any, kwargs: Any) -> None:
        cache = kwargs.get("past_key_values")
        lengths.append(cache.get_seq_length() if cache is not None else 0)

    hook = model.register_forward_pre_hook(note, with_kwargs=True) if model is not None else None
    try:
        yield lengths
    finally:
        if hook is not None:
            hook.remove()


@torch.inference_mode()
def generated(
    target: Target,
    prompt: Sequence[int],
    settings: GenerationSettings,
    limit: int,
    criteria: Sequence[StoppingCriteria] = (),
    prompt_lookup_num_tokens: int | None = None,
    assistant_model: Any = None,
) -> list[int]:
    """At most `limit` new tokens of `generate` on `prompt`, up to EOS (included) or where `criteria` end them.

    The last two are `generate`'s own ways to be assisted; they do not change what it says.
    """
    ids_1L = torch.tensor([list(prompt)], device=target.device)
    with _neutral_generation_config(target.model):
        output_1L = target.model.generate(
            input_ids=ids_1L,
            attention_mask=torch.ones_like(ids_1L),
            generation_config=GenerationConfig(
                do_sample=False,
                num_beams=1,
                max_new_tokens=limit,
                eos_token_id=list(settings.eos_token_ids) or None,
                pad_token_id=settings.eos_token_ids[0] if settings.eos_token_ids else 0,
                prompt_lookup_num_tokens=prompt_lookup_num_tokens,
            ),
            assistant_model=assistant_model,
            logits_processor=drawn_as(settings.sampling),
            stopping_criteria=StoppingCriteriaList(criteria),
        )
    return output_1L[0, len(prompt) :].tolist()


# ----------------------------------------------------------------------------------------------------
# Where an answer ends


def end(tokens: list[int], settings: GenerationSettings, tokenizer: Any, known: int = 0) -> int | None:
    """The length at which `stop` or a stop string ends `tokens`, None where neither does.

    The first `known` tokens are known to hold no stop string. Stop string "b", tokens of the text "abc" -> 2.
    """
    ends = settings.stop(tokens) if settings.stop is not None else None
    if ends is not None and ends > len(tokens):
        ends = None  # there, but not yet
    if settings.stop_strings:
        for length in range(known + 1, (len(tokens) if ends is None else ends) + 1):
            text = tokenizer.decode(tokens[:length], skip_special_tokens=False)
            if any(stop in text for stop in settings.stop_strings):
                return length
    return ends


class _Ended(StoppingCriteria):
    """`end` asked after every step; `length` is what it said first."""

    def __init__(self, prompt_tokens: int, settings: GenerationSettings, tokenizer: Any) -> None:
        self.prompt_tokens, self.settings, self.tokenizer = prompt_tokens, settings, tokenizer
        self.length: int | None = None
        self._known = 0

    def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
        """[1] bool."""
        if self.length is None:
            tokens = input_ids[0, self.prompt_tokens :].tolist()
            self.length = end(tokens, self.settings, self.tokenizer, self._known)
            self._known = len(tokens)
        return input_ids.new_full((1,), self.length is not None, dtype=torch.bool)


# ----------------------------------------------------------------------------------------------------
# Which tokens it says


class _FixedNoise(LogitsProcessor):
    """Adds the noise that sampling has at the next position: `generate`'s greedy choice is then the token drawn."""

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def __call__(self, input_ids: Any, scores: Any) -> Tensor:
        """[1, V] float64."""
        position = torch.tensor([input_ids.shape[1]], device=scores.device)
        return scores.double() + gumbel(self.seed, position, scores.shape[-1])


def drawn_as(sampling: Sampling | None) -> LogitsProcessorList:
    """transformers' own temperature, top-k and top-p, then the noise; nothing for greedy answers."""
    if sampling is None:
        return LogitsProcessorList()
    warpers: list[Any] = [TemperatureLogitsWarper(float(sampling.temperature))]
    warpers += [TopKLogitsWarper(sampling.top_k)] if sampling.top_k else []
    warpers += [TopPLogitsWarper(sampling.top_p)] if sampling.top_p < 1 else []
    return LogitsProcessorList([*warpers, _FixedNoise(sampling.seed)])


@contextmanager
def _neutral_generation_config(model: Any) -> Iterator[None]:
    """Hide the checkpoint's generation config: `generate` takes what is unset (penalties, EOS) from it."""
    own = model.generation_config
    model.generation_config = GenerationConfig()
    try:
        yield
    finally:
        model.generation_config = own
