"""Drafting inside transformers: `model.generate(…, custom_generate=generate_fn(drafter))`.

A local callable replaces `generate`'s decoding loop and gives the same tokens: stopping criteria are checked after
every token, left-padded batches are decoded one sequence after another. `generate`'s own `streamer` receives the tokens
of each target step, for one sequence only. Unsupported arguments raise ValueError. transformers does not pass its
`tokenizer` on to a callable: instead of `stop_strings`, give a `StopStringCriteria`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    StoppingCriteriaList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from draft_heads.inference.drafters.base import Drafter
from draft_heads.inference.engine import DecodingEngine
from draft_heads.inference.generation import GenerationSettings
from draft_heads.inference.processors import of_the_text
from draft_heads.inference.target.library_names import CACHE
from draft_heads.inference.target.target import TARGET_OF, Target

_READ = {"attention_mask", "position_ids", CACHE, "inputs_embeds"}
_CHANGING_NOTHING = {"use_cache", "cache_position", "logits_to_keep", "cache_implementation"}
_OF_TEXT = {"mm_encoder_outputs", "token_type_ids", "mm_token_type_ids"}
_UNSUPPORTED = (
    "return_dict_in_generate",
    "output_scores",
    "output_logits",
    "output_attentions",
    "output_hidden_states",
)


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
        most_padding = 0 if attention_mask is None else max(padding_of(row) for row in attention_mask.tolist())
        processors = of_the_text(logits_processor, len(input_ids), most_padding)
        others = LogitsProcessorList(one for one in logits_processor if one not in processors)
        sampling = sampling_options(generation_config, others)
        streamer = _streamer_of_caller()
        check_supported(model, generation_config, model_kwargs, streamer, len(input_ids))
        if id(model) not in engines:
            engines[id(model)] = DecodingEngine(TARGET_OF.get(id(model)) or Target(model), drafter)
        answers = []
        for row, ids in enumerate(input_ids):
            padding = 0 if attention_mask is None else padding_of(attention_mask[row].tolist())
            rule = _stop_rule(stopping_criteria, ids)  # end tokens are among the criteria
            if row and sampling:
                sampling = {**sampling, "seed": random_seed()}  # with one for all, equal prompts had equal answers
            limit = generation_config.max_length - len(ids)
            settings = GenerationSettings(limit, (), stop=rule, processors=processors, **sampling)
            new: list[int] = []
            for tokens in engines[id(model)].stream(ids[padding:].tolist(), settings):
                new += tokens
                if streamer is not None:
                    streamer.put(torch.tensor(tokens))
            answers.append(new)
        if streamer is not None:
            streamer.end()
        longest = max(map(len, answers))
        pad = generation_config.pad_token_id
        if pad is None:  # transformers' own choice, the first end token; without any all answers are of one length
            chosen = getattr(generation_config, "_pad_token_tensor", None)
            pad = 0 if chosen is None else int(chosen)
        filled = [answer + [pad] * (longest - len(answer)) for answer in answers]
        return torch.cat([input_ids, torch.tensor(filled, device=input_ids.device)], dim=1)

    return decode


def _streamer_of_caller() -> Any:
    """The `streamer` of the `generate` that called our callable, to which transformers does not pass it."""
    frame = inspect.currentframe()
    for _ in range(2):
        frame = frame and frame.f_back
    return frame and frame.f_locals.get("streamer")


def _stop_rule(criteria: StoppingCriteriaList, prompt: Tensor) -> Callable[[list[int]], int | None]:
    """transformers' stopping criteria as the `stop` rule of `GenerationSettings`."""

    def stop(tokens: list[int]) -> int | None:
        sequence = torch.cat([prompt, prompt.new_tensor(tokens)])[None]
        return len(tokens) if bool(criteria(sequence, None).any()) else None

    return stop


def sampling_options(config: Any, processors: LogitsProcessorList) -> dict[str, Any]:
    """The sampling that `generate` prepared, as fields of `GenerationSettings`; {} for greedy decoding.

    ValueError for any other logits processor but temperature, top-k and top-p.
    """
    options: dict[str, Any] = {}
    for processor in processors:
        if isinstance(processor, TemperatureLogitsWarper):
            options["temperature"] = float(processor.temperature)
        elif isinstance(processor, TopKLogitsWarper):
            options["top_k"] = int(processor.top_k)
        elif isinstance(processor, TopPLogitsWarper):
            options["top_p"] = float(processor.top_p)
        else:
            raise ValueError(
                "drafting supports temperature, top_k, top_p and transformers' processors of the text so far; got "
                f"{type(processor).__name__}; leave its setting out, or generate without custom_generate"
            )
    if not config.do_sample:
        if options:
            raise ValueError(f"{', '.join(options)} need do_sample=True; got do_sample=False; set it or leave them out")
        return {}
    return {"temperature": 1.0, **options, "seed": random_seed()}


def padding_of(mask: list[int]) -> int:
    """How many tokens of padding a row of the attention mask begins with; ValueError for padding elsewhere."""
    padding = mask.count(0)
    if 0 in mask[padding:]:
        raise ValueError("prompts must be padded on the left; got an attention mask with zeros behind ones")
    return padding


def random_seed() -> int:
    """From torch's own generator."""
    return int(torch.randint(2**62, ()))


def _says_something(value: Any) -> bool:
    return bool(value.any()) if isinstance(value, Tensor) else bool(value)


def check_supported(model: Any, config: Any, model_kwargs: dict[str, Any], streamer: Any, sequences: int) -> None:
    """Raise ValueError for arguments that this loop would have to ignore."""
    unsupported = [name for name in _UNSUPPORTED if getattr(config, name, None)]
    if unsupported:
        raise ValueError(f"drafting returns token ids only; got {', '.join(unsupported)}; leave it out")
    if (config.num_beams or 1) > 1:
        raise ValueError(f"drafting supports one beam; got num_beams={config.num_beams}; set it to 1")
    whole, given = model.config, {name: value for name, value in model_kwargs.items() if value is not None}
    if whole.get_text_config(decoder=True) is not whole:  # multimodal: what says that there is nothing but text
        nothing = {name for name in _OF_TEXT & given.keys() if not _says_something(given[name])}
        given = {name: value for name, value in given.items() if name not in nothing}
    if unknown := sorted(given.keys() - _READ - _CHANGING_NOTHING):
        raise ValueError(
            f"drafting goes on with a text and reads nothing beside it; got {', '.join(unknown)}; generate without "
            "custom_generate"
        )
    positions = given.get("position_ids")
    if positions is not None:
        ones = positions.new_ones(positions.shape[-2:])
        mask = given.get("attention_mask", ones)  # transformers leaves one of ones out
        usual, read = mask.long().cumsum(-1) - 1, mask != 0
        axes = positions.reshape(-1, *positions.shape[-2:])  # several where the model has them for images
        if usual.shape != axes.shape[1:] or not all(torch.equal(axis[read], usual[read]) for axis in axes):
            raise ValueError("drafting counts positions from the first token; got other position_ids; leave them out")
    cache = model_kwargs.get(CACHE)
    if cache is not None and cache.get_seq_length() > 0:
        raise ValueError(f"drafting starts with an empty cache; got {CACHE} that is not empty; leave it out")
    if model_kwargs.get("inputs_embeds") is not None:
        raise ValueError("drafting needs token ids; got inputs_embeds; pass input_ids")
    if streamer is not None and sequences > 1:
        raise ValueError(f"a streamer shows one sequence; got {sequences}; generate them one by one")
