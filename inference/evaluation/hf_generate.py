"""transformers' own `generate`: the oracle's answers, and a baseline that reports show beside vanilla.

It uses its own cache and its own loop, greedily or with the project's fixed sampling noise, and the checkpoint's own
generation config (`data.generation_config`). Stop rules other than EOS and length are `stop_length`'s.

Shapes: L length, V vocabulary.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from draft_heads.data.generation_config import generate_config, with_config
from draft_heads.inference.generation import Generation, GenerationSettings, room
from draft_heads.inference.sampling import Sampling, gumbel
from draft_heads.inference.target.target import Target


class HFGenerate:
    """An engine that answers with the target's own `generate`, which itself stops at EOS and at the length.

    Stop strings and `settings.stop` are checked after every token by a `StoppingCriteria`, so that nothing is decoded
    past the answer's end; without them no criterion is added, which on a GPU would synchronise.
    """

    def __init__(self, target: Target) -> None:
        self.target = target

    def generate(self, prompt_ids: list[int], settings: GenerationSettings) -> Generation:
        """The whole answer: one target step a token (beta 1), all seconds in `verify`.

        Raises ContextError if the prompt does not fit, ValueError for stop strings without a tokenizer.
        """
        limit = room(self.target, len(prompt_ids), settings.max_new_tokens)
        if settings.stop_strings and self.target.tokenizer is None:
            raise ValueError("stop_strings need a tokenizer to decode the answer; the target has none; load one")
        start = time.perf_counter()
        stop_rule = _StopRule(len(prompt_ids), settings, self.target.tokenizer)
        criteria = [stop_rule] if settings.stop is not None or settings.stop_strings else []
        tokens = hf_generate(self.target, prompt_ids, settings, limit, criteria)[: stop_rule.length]
        elapsed = time.perf_counter() - start
        reason = "length" if limit == settings.max_new_tokens else "context"
        if tokens and tokens[-1] in settings.ends(self.target):
            reason = "eos"
        elif stop_rule.length is not None:
            reason = "stop"
        seconds = {"draft": 0.0, "verify": elapsed, "accept": 0.0, "other": 0.0, "total": elapsed}
        return Generation(tokens, [1] * len(tokens), [-1] * len(tokens), seconds, reason)


@torch.inference_mode()
def hf_generate(
    target: Target,
    prompt: Sequence[int],
    settings: GenerationSettings,
    limit: int,
    criteria: Sequence[StoppingCriteria] = (),
) -> list[int]:
    """At most `limit` new tokens of `generate` on `prompt`, up to EOS (included) or where `criteria` stop it."""
    ids_1L = torch.tensor([list(prompt)], device=target.device)
    own_processors = settings.processors is None  # else those of the settings stand for the checkpoint's
    config = generate_config(target.model, limit, settings.ends(target), own_processors)
    processors = [*(settings.processors or ()), *sampling_processors(settings.sampling)]
    output_1L = with_config(target.model, config).generate(
        input_ids=ids_1L,
        attention_mask=torch.ones_like(ids_1L),
        generation_config=config,
        logits_processor=LogitsProcessorList(processors),
        stopping_criteria=StoppingCriteriaList(criteria),
    )
    return output_1L[0, len(prompt) :].tolist()


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
