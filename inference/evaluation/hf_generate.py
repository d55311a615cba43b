"""transformers' own `generate`: the oracle's answers, and the baselines that reports show beside vanilla.

It uses its own cache and its own loop, token by token or with its own two ways of assisted generation, greedily or with
the project's fixed sampling noise. Stop rules other than EOS and length are `stop_length`'s.

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


class HFGenerate:
    """An engine that answers with the target's own `generate`.

    `generate` itself stops at EOS and at the length. Stop strings and `settings.stop` are checked after every token by
    a `StoppingCriteria`, so that nothing is decoded past the answer's end; without them no criterion is added, which
    on a GPU would synchronise.
    """

    def __init__(self, target: Target, **assisted: Any) -> None:
        """assisted: `generate`'s `prompt_lookup_num_tokens` or `assistant_model`; neither: no drafts."""
        self.target, self.assisted = target, assisted

    @classmethod
    def parse(cls, text: str, target: Target) -> HFGenerate:
        """`transformers`, `transformers_lookup` (10 tokens of prompt lookup) or `transformers_assisted=DIR`."""
        name, path = parse_baseline(text)
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
        stop_rule = _StopRule(len(prompt_ids), settings, self.target.tokenizer)
        criteria = [stop_rule] if settings.stop is not None or settings.stop_strings else []
        with _record_cache_lengths(self.target.model if self.assisted else None) as lengths:
            tokens = hf_generate(self.target, prompt_ids, settings, limit, criteria, **self.assisted)
        tokens = tokens[: stop_rule.length]
        elapsed = time.perf_counter() - start
        if tokens and tokens[-1] in settings.eos_token_ids:
            reason = "eos"
        elif stop_rule.length is not None:
            reason = "stop"
        else:
            reason = "length" if limit == settings.max_new_tokens else "context"
        seconds = {"draft": 0.0, "verify": elapsed, "accept": 0.0, "other": 0.0, "total": elapsed}
        accepted = tokens_per_forward(lengths, len(prompt_ids), len(tokens)) if self.assisted else [1] * len(tokens)
        return Generation(tokens, accepted, [-1] * len(tokens), seconds, reason)


def parse_baseline(text: str) -> tuple[str, str]:
    """(name, path) of a baseline given as NAME or NAME=PATH; ValueError for a missing or superfluous path."""
    name, _, path = text.partition("=")
    if bool(path) != (name == "transformers_assisted"):
        raise ValueError(
            f"the name {name!r} is reserved for transformers' own generate, a baseline and no drafter: transformers, "
            f"transformers_lookup, or transformers_assisted=DIR with a model; got {text!r}; rename the drafter"
        )
    return name, path


def tokens_per_forward(lengths: Sequence[int], prompt: int, new: int) -> list[int]:
    """New tokens of each target forward, from the cache's length at its start (which lacks the newest token).

    A prompt of 10 tokens, forwards that start at lengths 0, 10, 13 and 14, and 6 new tokens: 1, 3, 1 and 1.
    """
    known = [0, *(length + 1 - prompt for length in lengths[1:]), new]
    return [after - before for before, after in pairwise(known)]


@contextmanager
def _record_cache_lengths(model: Any | None) -> Iterator[list[int]]:
    """Record the cache's length at the start of every forward of the model; without a model, nothing."""
    lengths: list[int] = []

    def record(module: Any, args: Any, kwargs: Any) -> None:
        cache = kwargs.get("past_key_values")
        lengths.append(cache.get_seq_length() if cache is not None else 0)

    hook = model.register_forward_pre_hook(record, with_kwargs=True) if model is not None else None
    try:
        yield lengths
    finally:
        if hook is not None:
            hook.remove()


@torch.inference_mode()
def hf_generate(
    target: Target,
    prompt: Sequence[int],
    settings: GenerationSettings,
    limit: int,
    criteria: Sequence[StoppingCriteria] = (),
    prompt_lookup_num_tokens: int | None = None,
    assistant_model: Any = None,
) -> list[int]:
    """At most `limit` new tokens of `generate` on `prompt`, up to EOS (included) or where `criteria` stop it.

    The last two arguments turn on `generate`'s assisted generation, which does not change its output.
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
            logits_processor=sampling_processors(settings.sampling),
            stopping_criteria=StoppingCriteriaList(criteria),
        )
    return output_1L[0, len(prompt) :].tolist()


# ----------------------------------------------------------------------------------------------------
# Where an answer ends


def stop_length(tokens: list[int], settings: GenerationSettings, tokenizer: Any, checked: int = 0) -> int | None:
    """The length at which `stop` or a stop string ends `tokens`, None where neither does.

    The first `checked` tokens contain no stop string. Stop string "b", tokens of the text "abc" -> 2.
    """
    length_by_rule = settings.stop(tokens) if settings.stop is not None else None
    if length_by_rule is not None and length_by_rule > len(tokens):
        length_by_rule = None  # a later token will end the answer
    if settings.stop_strings:
        for length in range(checked + 1, (len(tokens) if length_by_rule is None else length_by_rule) + 1):
            text = tokenizer.decode(tokens[:length], skip_special_tokens=False)
            if any(stop in text for stop in settings.stop_strings):
                return length
    return length_by_rule


class _StopRule(StoppingCriteria):
    """Applies `stop_length` after every token; `length` is its first result that is not None."""

    def __init__(self, prompt_tokens: int, settings: GenerationSettings, tokenizer: Any) -> None:
        self.prompt_tokens, self.settings, self.tokenizer = prompt_tokens, settings, tokenizer
        self.length: int | None = None
        self._checked = 0

    def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
        """[1] bool."""
        if self.length is None:
            tokens = input_ids[0, self.prompt_tokens :].tolist()
            self.length = stop_length(tokens, self.settings, self.tokenizer, self._checked)
            self._checked = len(tokens)
        return input_ids.new_full((1,), self.length is not None, dtype=torch.bool)


# ----------------------------------------------------------------------------------------------------
# Sampling


class _FixedNoise(LogitsProcessor):
    """Adds the fixed noise of the next position, so that `generate`'s greedy choice is the sampled token."""

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def __call__(self, input_ids: Any, scores: Any) -> Tensor:
        """[1, V] float64."""
        position = torch.tensor([input_ids.shape[1]], device=scores.device)
        return scores.double() + gumbel(self.seed, position, scores.shape[-1])


def sampling_processors(sampling: Sampling | None) -> LogitsProcessorList:
    """transformers' own temperature, top-k and top-p warpers, then the fixed noise; empty for greedy decoding."""
    if sampling is None:
        return LogitsProcessorList()
    warpers: list[Any] = [TemperatureLogitsWarper(float(sampling.temperature))]
    warpers += [TopKLogitsWarper(sampling.top_k)] if sampling.top_k else []
    warpers += [TopPLogitsWarper(sampling.top_p)] if sampling.top_p < 1 else []
    return LogitsProcessorList([*warpers, _FixedNoise(sampling.seed)])


@contextmanager
def _neutral_generation_config(model: Any) -> Iterator[None]:
    """Hide the checkpoint's generation config, from which `generate` would take unset values (penalties, EOS)."""
    own = model.generation_config
    model.generation_config = GenerationConfig()
    try:
        yield
    finally:
        model.generation_config = own
