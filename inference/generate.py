"""Drafting inside transformers: `model.generate(…, custom_generate=generate_fn(drafter))`.

A local callable replaces `generate`'s decoding loop and gives the same tokens: stopping criteria are checked after
every token, left-padded batches are decoded one sequence after another, and `generate`'s own `streamer` receives token
after token, for one sequence only. What would give other tokens raises ValueError. The model is left as it was found,
in training mode or not. transformers does not pass its `tokenizer` on to a callable: instead of `stop_strings`, give a
`StopStringCriteria`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    EosTokenCriteria,
    GenerationMixin,
    LogitNormalization,
    LogitsProcessorList,
    MaxLengthCriteria,
    StoppingCriteriaList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from draft_heads.inference.drafters.base import Drafter
from draft_heads.inference.engine import DecodingEngine
from draft_heads.inference.generate_arguments import (
    WITHOUT,
    check_arguments,
    check_config,
    check_criteria,
    padding_of,
)
from draft_heads.inference.generation import Generation, GenerationSettings
from draft_heads.inference.processors import of_the_text
from draft_heads.inference.target.target import TARGET_OF, TRYING, Target

_WARPERS = {TemperatureLogitsWarper: "temperature", TopKLogitsWarper: "top_k", TopPLogitsWarper: "top_p"}
_GENERATE = inspect.unwrap(GenerationMixin.generate).__code__


def generate_fn(drafter: Drafter) -> Callable[..., Tensor]:
    """A `custom_generate` of transformers that decodes with `drafter`."""
    engines: dict[int, DecodingEngine] = {}

    def decode(
        model: Any,
        input_ids: Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: Any,
        **model_kwargs: Any,
    ) -> Tensor:
        attention_mask = model_kwargs.get("attention_mask")  # a parameter of this name would be passed twice
        padding = [0] * len(input_ids) if attention_mask is None else [*map(padding_of, attention_mask.tolist())]
        processors = of_the_text(logits_processor, len(input_ids), max(padding))
        sampling = sampling_options(generation_config, logits_processor, processors)
        given = _arguments_of_generate(model)
        streamer = given.get("streamer")
        check_config(generation_config, given.get("assistant_model"))
        check_arguments(model, input_ids, model_kwargs, given)
        check_criteria(stopping_criteria, len(input_ids))
        # from torch's own generator; equal prompts differ
        draws = [{**sampling, "seed": int(torch.randint(2**62, ()))} if sampling else {} for _ in input_ids]
        prompts = [ids[skip:].tolist() for ids, skip in zip(input_ids, padding)]
        # end tokens come as a criterion; the user's own ones may have such a field and judge otherwise
        of_ends = [one for one in stopping_criteria if type(one) is EosTokenCriteria]
        ends = tuple(int(token) for one in of_ends for token in one.eos_token_id)
        with _evaluation_mode(model):
            if id(model) not in engines:
                with TRYING:  # another thread may be making its target
                    engines[id(model)] = DecodingEngine(TARGET_OF.get(id(model)) or Target(model), drafter)
            # the limit comes as a criterion too: the user's, where one is given, in place of the settings'
            limits = [one.max_length for one in stopping_criteria if type(one) is MaxLengthCriteria]
            most = min(limits, default=generation_config.max_length) - input_ids.shape[1]
            most = max(most, 1)  # criteria are asked after a token
            engine = engines[id(model)]

            def answer(row: int, most: int, stop: Callable[[list[int]], int | None] | None) -> list[int]:
                settings = GenerationSettings(most, ends, stop=stop, processors=processors, **draws[row])
                return _answer(engine, prompts[row], settings, streamer)

            try:
                rules = [_stop_rule(stopping_criteria, ids) for ids in input_ids]
                answers = [answer(row, most, rule) for row, rule in enumerate(rules)]
            finally:
                if streamer is not None:
                    streamer.end()
            longest = max(map(len, answers))
            if not ends:
                # generate pads only where there are end tokens; otherwise every sequence goes on until the last ends
                answers = [
                    tokens if len(tokens) == longest else answer(row, longest, None)
                    for row, tokens in enumerate(answers)
                ]
        pad = _pad_token(generation_config)
        filled = [tokens + [pad] * (longest - len(tokens)) for tokens in answers]
        return torch.cat([input_ids, torch.tensor(filled, device=input_ids.device)], dim=1)

    return decode


def _answer(engine: DecodingEngine, prompt: list[int], settings: GenerationSettings, streamer: Any) -> list[int]:
    """The answer, which the streamer receives token after token; ValueError where the target's context ends it."""
    result = Generation()
    for tokens in engine.stream(prompt, settings, result):
        if streamer is not None:
            for token in tokens:
                streamer.put(torch.tensor([token]))
    if result.finish_reason == "context":
        positions, length = engine.target.max_positions, len(prompt)
        raise ValueError(
            f"drafting ends at the target's {positions} positions, where generate goes on; got a prompt of {length} "
            f"tokens and {settings.max_new_tokens} new ones; ask for {positions - length}, or {WITHOUT}"
        )
    return result.tokens


def _pad_token(config: Any) -> int:
    """Where it is not set, transformers' own choice: the first end token; without any, nothing is padded."""
    if config.pad_token_id is not None:
        return int(config.pad_token_id)
    chosen = getattr(config, "_pad_token_tensor", None)
    return 0 if chosen is None else int(chosen)


def _arguments_of_generate(model: Any) -> dict[str, Any]:
    """The local variables of the `generate` of this model that called our callable, itself or through another callable:
    transformers passes neither the streamer nor some other arguments on. Empty where nothing of the kind called it."""
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_code is _GENERATE and frame.f_locals.get("self") is model:
            return dict(frame.f_locals)
        frame = frame.f_back
    return {}


@contextmanager
def _evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Inside, the model is in evaluation mode; afterwards it is trained and in training mode where it was."""
    training = [module for module in model.modules() if module.training]
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True
        for parameter in trained:
            parameter.requires_grad_(True)


def _stop_rule(criteria: StoppingCriteriaList, prompt: Tensor) -> Callable[[list[int]], int | None]:
    """transformers' stopping criteria as the `stop` rule of `GenerationSettings`."""

    def stop(tokens: list[int]) -> int | None:
        sequence = torch.cat([prompt, prompt.new_tensor(tokens)])[None]
        return len(tokens) if bool(criteria(sequence, None).any()) else None

    return stop


def sampling_options(
    config: Any, processors: LogitsProcessorList, of_text: LogitsProcessorList | tuple[()] = ()
) -> dict[str, Any]:
    """The sampling that `generate` prepared, as fields of `GenerationSettings`; {} for greedy decoding.

    ValueError for any logits processors but temperature, top-k and top-p as `generate` makes them, in its order: after
    those `of_text`, which the engine applies.
    """
    names = list(_WARPERS.values())
    options: dict[str, Any] = {}
    for processor in processors:
        if processor in of_text:
            if options and type(processor) is not LogitNormalization:  # a sum that is 1 again changes no choice
                raise ValueError(
                    f"drafting applies processors of the text before temperature, top_k and top_p; got a "
                    f"{type(processor).__name__} after them; give {', '.join(options)} as settings, or {WITHOUT}"
                )
            continue
        name, received = _WARPERS.get(type(processor)), type(processor).__name__
        if name is None:
            raise ValueError(
                f"drafting supports temperature, top_k, top_p and transformers' processors of the text so far; got "
                f"{received}; leave its setting out, or {WITHOUT}"
            )
        if any(names.index(other) >= names.index(name) for other in options):
            raise ValueError(
                "drafting applies temperature, top_k and top_p in this order, each once; got "
                f"{', '.join(type(one).__name__ for one in processors)}; give them as settings, or {WITHOUT}"
            )
        keeps = processor.min_tokens_to_keep if name == "top_p" else 1  # top_k is at least that many already
        if keeps != 1 or getattr(processor, "filter_value", -float("inf")) != -float("inf"):
            raise ValueError(
                f"drafting leaves out what {name} excludes; got a {received} with filter_value "
                f"{processor.filter_value} and min_tokens_to_keep {keeps}; give {name} as a setting, or {WITHOUT}"
            )
        options[name] = getattr(processor, name)
    if not config.do_sample:
        if options:
            raise ValueError(f"{', '.join(options)} need do_sample=True; got do_sample=False; set it or leave them out")
        return {}
    return {"temperature": 1.0, **options}
