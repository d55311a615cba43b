"""transformers' own `generate`: the oracle's answers, and a baseline that reports show beside vanilla.

It uses its own cache and its own loop, greedily or with the project's fixed sampling noise, and the checkpoint's own
generation config (`data.generation_config`). It knows EOS and length only; `stop_length` cuts the oracle's answers.

Shapes: L length, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
from draft_heads.inference.generation import Clock, Generation, GenerationSettings, Stopper, room
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
        stopper = Stopper(settings, self.target, room(self.target, len(prompt_ids), settings.max_new_tokens))
        answer, clock = Generation(), Clock()
        criteria = [_StopRule(stopper, answer)] if has_stop_rules(settings) else []
        tokens = hf_generate(self.target, prompt_ids, settings, stopper.limit, criteria)
        clock.lap("verify")
        if not criteria:
            stopper.extend(answer, tokens, [-1] * len(tokens))
        answer.accept_lengths, answer.seconds = [1] * len(answer.tokens), clock.seconds(self.target.device)
        return answer


@torch.inference_mode()
def hf_generate(
    target: Target,
    prompt: Sequence[int],
    settings: GenerationSettings,
    limit: int,
    criteria: Sequence[StoppingCriteria] = (),
    changes: Mapping[str, Any] | None = None,
    more: Mapping[str, Any] | None = None,
) -> list[int]:
    """At most `limit` new tokens of `generate` on `prompt`, up to EOS (included) or where `criteria` stop it.

    changes: settings of the generation config; more: further arguments of `generate`
    """
    ids_1L = torch.tensor([list(prompt)], device=target.device)
    own_processors = settings.processors is None  # else those of the settings stand for the checkpoint's
    config = generate_config(target.model, limit, settings.ends(target), own_processors)
    config.update(**(changes or {}))
    processors = [*(settings.processors or ()), *sampling_processors(settings.sampling)]
    output_1L = with_config(target.model, config).generate(
        input_ids=ids_1L,
        attention_mask=torch.ones_like(ids_1L),
        generation_config=config,
        logits_processor=LogitsProcessorList(processors),
        stopping_criteria=StoppingCriteriaList(criteria),
        **(more or {}),
    )
    return output_1L[0, len(prompt) :].tolist()


def has_stop_rules(settings: GenerationSettings) -> bool:
    """Whether an answer may end elsewhere than at EOS and at its length, which is all that `generate` itself knows."""
    return settings.stop is not None or bool(settings.stop_strings)


def stop_length(tokens: list[int], settings: GenerationSettings, tokenizer: Any) -> int | None:
    """The length at which `stop` or a stop string ends `tokens`, None where neither does.

    Stop string "b", tokens of the text "abc" -> 2. Asks each rule by itself, unlike `Stopper`, which it checks.
    """
    length_by_rule = settings.stop(tokens) if settings.stop is not None else None
    if length_by_rule is not None and length_by_rule > len(tokens):
        length_by_rule = None  # a later token will end the answer
    if settings.stop_strings:
        for length in range(1, (len(tokens) if length_by_rule is None else length_by_rule) + 1):
            text = tokenizer.decode(tokens[:length], skip_special_tokens=False, clean_up_tokenization_spaces=False)
            if any(stop in text for stop in settings.stop_strings):
                return length
    return length_by_rule


class _StopRule(StoppingCriteria):
    """Gives an answer every new token, up to where a stopper ends it."""

    def __init__(self, stopper: Stopper, answer: Generation) -> None:
        self.stopper, self.answer = stopper, answer

    def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
        """[1] bool."""
        if not self.answer.finish_reason:  # on some devices transformers asks once more than it writes
            self.stopper.extend(self.answer, [int(input_ids[0, -1])], [-1])
        return input_ids.new_full((1,), bool(self.answer.finish_reason), dtype=torch.bool)


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
