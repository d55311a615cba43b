"""What of the arguments of transformers' `generate` drafting reads, and what it refuses because it would ignore it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import (
    EosTokenCriteria,
    GenerationConfig,
    MaxLengthCriteria,
    StoppingCriteriaList,
    StopStringCriteria,
)

from draft_heads.data.generation_config import APPLIED, NAMED, REFUSED
from draft_heads.inference.target import sharded
from draft_heads.inference.target.library_names import CACHE
from draft_heads.inference.target.weights import drops_out

WITHOUT = "generate without custom_generate"

MODES = (
    "num_beams num_beam_groups diversity_penalty penalty_alpha dola_layers constraints force_words_ids use_mtp "
    "prompt_lookup_num_tokens assistant_early_exit speculation_type"
)
"""They choose another loop than greedy decoding and sampling (`GenerationConfig.get_generation_mode`)."""
OUTPUTS = "return_dict_in_generate output_scores output_logits output_attentions output_hidden_states"
"""What is returned beside token ids."""

_CACHES = {CACHE, "past_key_values"}  # `generate` goes on taking the earlier name
_READ = {"attention_mask", "position_ids", CACHE, "inputs_embeds"}
_NOT_READ = {"use_cache", "cache_position", "logits_to_keep", "cache_implementation"}
_OF_TEXT = {"mm_encoder_outputs", "token_type_ids", "mm_token_type_ids"}
_ROW_BY_ROW = (EosTokenCriteria, MaxLengthCriteria, StopStringCriteria)


def padding_of(mask: list[int]) -> int:
    """How many tokens of padding a row of the attention mask begins with; ValueError for padding elsewhere."""
    padding = mask.count(0)
    if 0 in mask[padding:]:
        raise ValueError(
            "prompts must be padded on the left; got an attention mask with zeros after ones; set the tokenizer's "
            "padding_side to left"
        )
    return padding


def check_config(config: Any, assistant_model: Any = None) -> None:
    """ValueError for generation settings that this loop would have to ignore."""
    if outputs := [name for name in OUTPUTS.split() if getattr(config, name, None)]:
        raise ValueError(f"drafting returns token ids only; got {', '.join(outputs)}; leave it out")
    mode = config.get_generation_mode(assistant_model)
    if mode not in ("greedy_search", "sample"):
        chosen = {name: getattr(config, name, None) for name in sorted(MODES.split())}
        asked = [f"{name}={value}" for name, value in chosen.items() if value not in (None, 0, 1)]
        asked += [] if assistant_model is None else ["assistant_model"]
        raise ValueError(
            f"drafting takes the place of greedy decoding and of sampling; got {', '.join(asked)}, which ask for "
            f"{getattr(mode, 'value', mode)}; leave it out, or {WITHOUT}"
        )
    if config.cache_implementation == "quantized":
        raise ValueError(
            "drafting keeps keys and values as they are; got cache_implementation='quantized'; leave it out, or "
            f"{WITHOUT}"
        )
    neutral = {**vars(GenerationConfig()), **getattr(config, "_get_default_generation_params", dict)()}
    known = {*APPLIED, *NAMED, *REFUSED, "transformers_version"}
    for name in sorted(vars(GenerationConfig()).keys() - known):
        value = getattr(config, name, None)
        if not name.startswith("_") and value is not None and value != neutral.get(name):
            raise ValueError(f"drafting does not know the setting {name}; got {value!r}; leave it out, or {WITHOUT}")


def check_criteria(criteria: StoppingCriteriaList, sequences: int) -> None:
    """ValueError for criteria that may judge several sequences together: they are decoded one after another."""
    if sequences > 1 and (others := [type(one).__name__ for one in criteria if type(one) not in _ROW_BY_ROW]):
        raise ValueError(
            f"drafting decodes the sequences of a batch one after another, which {', '.join(others)} may not notice; "
            f"got {sequences}; generate them one by one"
        )


def _is_set(value: Any) -> bool:
    return bool(value.any()) if isinstance(value, Tensor) else bool(value)


def _check_positions(input_ids: Tensor, given: dict[str, Any]) -> None:
    """ValueError for an attention mask of another shape, and for positions not counted from the first token."""
    mask = given.get("attention_mask", torch.ones_like(input_ids))  # transformers leaves one of ones out
    if mask.shape != input_ids.shape:
        raise ValueError(
            f"the attention mask has a number for each token; got {list(mask.shape)} for input_ids of "
            f"{list(input_ids.shape)}; leave it out"
        )
    positions = given.get("position_ids")
    if positions is not None:
        usual, read = mask.long().cumsum(-1) - 1, mask != 0
        axes = positions.reshape(-1, *positions.shape[-2:])  # several where the model has them for images
        if usual.shape != axes.shape[1:] or not all(torch.equal(axis[read], usual[read]) for axis in axes):
            raise ValueError("drafting counts positions from the first token; got other position_ids; leave them out")


def check_arguments(model: Any, input_ids: Tensor, model_kwargs: dict[str, Any], generate: dict[str, Any]) -> None:
    """ValueError for arguments that this loop would have to ignore. generate: the variables of `generate` itself."""
    whole, given = model.config, {name: value for name, value in model_kwargs.items() if value is not None}
    if whole.get_text_config(decoder=True) is not whole:  # multimodal: what says that there is nothing but text
        nothing = {name for name in _OF_TEXT & given.keys() if not _is_set(given[name])}
        given = {name: value for name, value in given.items() if name not in nothing}
    if unknown := sorted(given.keys() - _READ - _NOT_READ):
        raise ValueError(
            f"drafting goes on with a text and reads nothing beside it; got {', '.join(unknown)}; {WITHOUT}"
        )
    cache = model_kwargs.get(CACHE)
    if cache is not None and cache.get_seq_length() > 0:
        raise ValueError(f"drafting starts with an empty cache; got {CACHE} that is not empty; leave it out")
    for name in sorted(_CACHES):
        if generate.get("kwargs", {}).get(name) is not None:
            raise ValueError(f"drafting has its own cache and fills no other; got {name}; leave it out")
    if torch.is_autocast_enabled(model.device.type):
        raise ValueError(f"drafting computes in the type of the weights; got torch.autocast; {WITHOUT}")
    prepare = model.prepare_inputs_for_generation
    if getattr(prepare, "__func__", None) is not type(model).prepare_inputs_for_generation:
        raise ValueError(
            "drafting gives the model's forwards tokens alone, as its class does; got a prepare_inputs_for_generation "
            f"in its place ({getattr(prepare, '__qualname__', prepare)}), as of PEFT's virtual tokens; {WITHOUT}"
        )
    if model_kwargs.get("inputs_embeds") is not None:
        raise ValueError("drafting needs token ids; got inputs_embeds; pass input_ids")
    _check_positions(input_ids, given)  # after what transformers derives positions and a mask from
    if generate.get("streamer") is not None and len(input_ids) > 1:
        raise ValueError(f"a streamer shows one sequence; got {len(input_ids)}; generate them one by one")
    if generate.get("synced_gpus") or any(sharded.is_split(p) for p in model.get_input_embeddings().parameters()):
        raise ValueError(
            "drafting takes as many steps as its drafts need, so processes cannot take them together; got synced_gpus "
            f"or weights that are split among processes; {WITHOUT}"
        )
    if any(map(drops_out, model.modules())):
        raise ValueError(
            "drafting gives the model's tokens without dropout; got a model in training mode with dropout; call "
            "model.eval() first"
        )
