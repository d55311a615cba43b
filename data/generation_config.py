"""The checkpoint's own generation settings: what its generation_config.json asks, and what is done about it.

Every field of transformers' `GenerationConfig` stands in exactly one of three tables (a test fails for a field of a new
version that is in none):

APPLIED  the engine's tokens are those of `generate` with this field
NAMED    the field is not applied; a line says so when the target is loaded, reports carry it, and the oracle drops it
REFUSED  a target whose checkpoint sets it is not loaded

A call of `generate` with a drafter refuses settings that are in none (`inference.generate_arguments`). So before a new
field is added here, see what `generate` does with it: what makes processors, stopping criteria or inputs is checked as
such, what chooses another loop belongs into `MODES` there, what is returned beside token ids into `OUTPUTS`.

`generate` itself makes the logits processors: it is called with a `custom_generate` that only keeps them.
"""

from __future__ import annotations

import json
import logging
import warnings
from collections.abc import Collection, Mapping, Sequence
from copy import copy, deepcopy
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessorList
from transformers.utils import cached_file

from draft_heads.data.common.pretrained import MAY_BE_MISSING

logger = logging.getLogger(__name__)

PROCESSORS: dict[str, tuple[Any, ...]] = {
    **{name: (1.0,) for name in ("repetition_penalty", "encoder_repetition_penalty")},
    **{name: (0,) for name in ("no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "min_length", "min_new_tokens")},
    **{name: (False,) for name in ("remove_invalid_values", "renormalize_logits")},
    **{name: () for name in ("forced_bos_token_id", "forced_eos_token_id", "exponential_decay_length_penalty")},
    **{name: () for name in ("suppress_tokens", "begin_suppress_tokens", "bad_words_ids", "sequence_bias")},
}
"""Fields that change logits, applied in verification and labels → the values beside None that ask for nothing."""

_TOKENS = ("eos_token_id", "bos_token_id", "pad_token_id")  # the end tokens are ours too, the others change no answer
_WITHOUT_INFLUENCE = (  # on the tokens of one answer without beams: they change what else is returned, memory or speed
    *("return_dict_in_generate", "output_scores", "output_logits", "output_attentions", "output_hidden_states"),
    *("use_cache", "cache_config", "max_cache_len", "prefill_chunk_size", "low_memory", "continuous_batching_config"),
    *("compile_config", "disable_compile", "is_assistant", "num_assistant_tokens", "num_assistant_tokens_schedule"),
    *("assistant_confidence_threshold", "assistant_early_exit", "assistant_lookbehind", "target_lookbehind"),
    *("prompt_lookup_num_tokens", "max_matching_ngram_size", "speculation_type", "use_mtp"),
    *("early_stopping", "length_penalty", "diversity_penalty", "num_beam_groups"),  # of beam search
    *("decoder_start_token_id",),  # of encoder-decoder models
)
APPLIED = frozenset({*PROCESSORS, *_TOKENS, *_WITHOUT_INFLUENCE})

_SAMPLING = "temperature, top_k and top_p of the decoding settings say how to sample; without them decoding is greedy"
_LENGTH = "max_new_tokens of the decoding settings is the limit"
_STRATEGY = "one token after another is decoded, without beams or another strategy"
_CACHES = ("dynamic", "static", "offloaded", "offloaded_static", "hybrid", "hybrid_chunked", "sliding_window")
NAMED: dict[str, tuple[str, tuple[Any, ...]]] = {
    "do_sample": (_SAMPLING, (False,)),
    **{name: (_SAMPLING, (1.0,)) for name in ("temperature", "top_p", "typical_p")},
    **{name: (_SAMPLING, (0,)) for name in ("top_k", "epsilon_cutoff", "eta_cutoff")},
    **{name: (_SAMPLING, ()) for name in ("min_p", "top_h")},
    **{name: (_LENGTH, ()) for name in ("max_length", "max_new_tokens", "max_time")},
    "stop_strings": ("GenerationSettings.stop_strings and a server's `stop` take such texts", ("", [])),
    **{name: (_STRATEGY, (1,)) for name in ("num_beams", "num_return_sequences", "guidance_scale")},
    **{name: (_STRATEGY, ()) for name in ("penalty_alpha", "dola_layers", "constraints", "force_words_ids")},
    "assistant_ensemble_weight": (_STRATEGY, ()),
    "token_healing": ("prompts are taken as they are", (False,)),
    "cache_implementation": ("keys and values are kept as they are", _CACHES),
}
"""Fields that are not applied → what holds instead, and the values beside None that ask for nothing."""

REFUSED: dict[str, str] = {"watermarking_config": "text without the mark is not the checkpoint's own"}
"""Fields that are refused → why."""


def processor_settings(config: GenerationConfig | None) -> dict[str, Any]:
    """The checkpoint's settings that change logits and are applied, by field."""
    return _non_neutral(config, PROCESSORS)


def configured_ends(model: Any, config: Any) -> int | list[int] | None:
    """The end tokens that a model's generation config names, else its `config`."""
    ends = getattr(model.generation_config, "eos_token_id", None)
    return copy(getattr(config, "eos_token_id", None) if ends is None else ends)


def unapplied_settings(config: GenerationConfig | None) -> dict[str, Any]:
    """The checkpoint's settings that are not applied, by field; those of newer versions' fields among them."""
    return _non_neutral(config, {name: NAMED[name][1] if name in NAMED else () for name in _unapplied_fields()})


def _unapplied_fields() -> frozenset[str]:
    """NAMED, and what a newer transformers may have added."""
    return frozenset(NAMED) | (fields() - APPLIED - REFUSED.keys())


def fields() -> frozenset[str]:
    """The fields of this version's `GenerationConfig`."""
    notes = {"transformers_version"}  # about the file
    return frozenset(name for name in vars(GenerationConfig()) if not name.startswith("_") and name not in notes)


def _non_neutral(config: GenerationConfig | None, neutral: Mapping[str, Collection[Any]]) -> dict[str, Any]:
    values = {name: getattr(config, name, None) for name in neutral}
    return {name: value for name, value in values.items() if value is not None and value not in neutral[name]}


def check_file(path: str) -> None:
    """ValueError unless the generation_config.json of a folder or hub id, if it has one, can be read.

    transformers takes the model's config instead of a file that is no JSON, and says nothing.
    """
    file = cached_file(path, "generation_config.json", **MAY_BE_MISSING)
    if file is None:
        return
    try:
        values = json.loads(Path(file).read_text(encoding="utf-8"))
        if not isinstance(values, dict):
            raise ValueError(f"it holds a {type(values).__name__}, not an object")
        ends = GenerationConfig.from_dict(values).eos_token_id
        if not all(isinstance(end, int) for end in (ends if isinstance(ends, list) else [ends or 0])):
            raise ValueError(f"eos_token_id is a token id or a list of them, not {ends!r}")
    except (ValueError, TypeError) as error:
        raise ValueError(
            f"generation_config.json must hold settings of transformers' generate; that of {path} cannot be read "
            f"({error}); correct the file, or copy it again"
        ) from None


def check_settings(model: Any, name: str) -> None:
    """ValueError where the model's generation config sets what is refused, or what its own processors cannot apply.

    A line says what is not applied, and one what is.
    """
    config = getattr(model, "generation_config", None)
    for field, reason in REFUSED.items():
        if getattr(config, field, None) is not None:
            raise ValueError(
                f"{field} of a target's generation_config.json must be unset, because {reason}; {name} sets it; "
                "take it out of a copy of the checkpoint, or pick another target"
            )
    if asked := processor_settings(config):
        vocabulary = int(model.config.get_text_config(decoder=True).vocab_size)
        try:  # one token after another one, at which each of them applies
            with warnings.catch_warnings(action="ignore"):  # the answer is shorter than some ask
                prompt, scores = torch.zeros(1, 1, dtype=torch.long), torch.zeros(1, vocabulary)
                process_logits(make_processors(model, prompt, 1, (0,)), prompt, scores)
        except (ValueError, TypeError, IndexError, RuntimeError) as error:
            raise ValueError(
                f"generation settings must suit the model; those of {name} are {settings_text(asked)}, "
                f"which transformers cannot apply ({error}); correct its generation_config.json"
            ) from None
        logger.info(
            "the generation settings of %s ask for %s, which is applied to each token's logits on the host: steps "
            "run without CUDA graphs",
            name,
            settings_text(asked),
        )
    if unapplied := unapplied_settings(config):
        instead = dict.fromkeys(NAMED[field][0] if field in NAMED else "unknown here" for field in unapplied)
        logger.warning(
            "the generation settings of %s ask for %s; not applied: %s",
            name,
            settings_text(unapplied),
            "; ".join(instead),
        )


def settings_text(settings: Mapping[str, Any]) -> str:
    """`a=1, b=2`, long values cut."""
    values = {name: str(value) for name, value in settings.items()}
    return ", ".join(f"{name}={text if len(text) < 60 else text[:57] + '…'}" for name, text in values.items())


def own_processors(
    target: Any, prompt: Sequence[int], max_new_tokens: int, end_token_ids: Sequence[int] | None = None
) -> LogitsProcessorList | None:
    """What the checkpoint of a target changes of the logits of an answer to `prompt`; None, at no cost, for nothing.

    end_token_ids  None: the target's own
    """
    if not processor_settings(getattr(target.model, "generation_config", None)):
        return None
    ends = target.end_token_ids if end_token_ids is None else end_token_ids
    return make_processors(target.model, torch.tensor([list(prompt)], device=target.device), max_new_tokens, ends)


def process_logits(processors: LogitsProcessorList, text: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    """[B, V] float32: `logits [B, V]` of what follows `text [B, L]`, changed in single precision as in `generate`."""
    return processors(text, logits.to(torch.float32, copy=True))  # type: ignore[arg-type]


def generate_config(
    model: Any, max_new_tokens: int, end_token_ids: Sequence[int], processors: bool = True
) -> GenerationConfig:
    """The checkpoint's own settings for `generate`, without those that are named, greedily and with our stop rules.

    processors: keep what changes logits
    """
    config = deepcopy(getattr(model, "generation_config", None)) or GenerationConfig()
    for name in (*_unapplied_fields(), *_WITHOUT_INFLUENCE, *(() if processors else PROCESSORS)):
        if hasattr(config, name):
            setattr(config, name, None)
    config.do_sample, config.num_beams, config.max_new_tokens = False, 1, max_new_tokens
    config.eos_token_id, config.pad_token_id = list(end_token_ids) or None, (*end_token_ids, 0)[0]
    if not end_token_ids:  # it raises the logits of end tokens
        config.exponential_decay_length_penalty = None
    return config


def with_config(model: Any, config: GenerationConfig) -> Any:
    """The same model, of the same weights, whose `generate` takes what `config` leaves unset from nowhere else.

    A copy, because other threads may read the model's own config meanwhile.
    """
    same = copy(model)
    same.generation_config = config
    return same


@torch.inference_mode()
def make_processors(
    model: Any, prompt: torch.Tensor, max_new_tokens: int, end_token_ids: Sequence[int]
) -> LogitsProcessorList:
    """The processors that `generate` makes for `prompt [1, L]`, where it would answer with so many tokens at most."""
    found = LogitsProcessorList()

    def keep(model: Any, input_ids: Any, logits_processor: LogitsProcessorList, **_: Any) -> Any:
        found.extend(logits_processor)
        return input_ids

    config = generate_config(model, max_new_tokens, end_token_ids)
    with_config(model, config).generate(
        input_ids=prompt, attention_mask=torch.ones_like(prompt), generation_config=config, custom_generate=keep
    )
    return found
