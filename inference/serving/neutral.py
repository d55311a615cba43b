"""Parameters of the OpenAI API and of other servers (vLLM, SGLang, TGI, llama.cpp) that this one does not have: clients
send them with values that change nothing, which are accepted; any other value is refused by name."""

from __future__ import annotations

from typing import Any

_NUMBERS = (
    *("presence_penalty", "frequency_penalty", "top_logprobs", "min_p", "priority", "top_n_tokens", "top_a"),
    *("mirostat", "mirostat_mode", "dynatemp_range", "xtc_probability", "dry_multiplier"),
    *("n_keep", "n_probs", "n_indent", "min_keep", "t_max_predict_ms"),
)
_SWITCHES = (
    *("logprobs", "echo", "use_beam_search", "early_stopping", "ignore_eos", "include_stop_str_in_output"),
    *("no_stop_trim", "return_tokens_as_token_ids", "return_hidden_states", "decoder_input_details"),
    *("return_full_text", "watermark", "post_sampling_probs", "return_tokens", "return_progress"),
    *("timings_per_token",),
)
_PENALTIES = ("repetition_penalty", "repeat_penalty")
_LISTS = ("tools", "functions", "bad_words", "logits_processors", "documents", "lora", "image_data")

NEUTRAL: dict[str, tuple[Any, ...]] = {
    **{name: (0,) for name in _NUMBERS},
    **{name: (1,) for name in ("best_of", "length_penalty", "typical_p", "tfs_z")},
    **{name: (-1,) for name in ("top_n_sigma", "id_slot")},
    **{name: (False,) for name in _SWITCHES},
    **{name: (True,) for name in ("detokenize", "include_reasoning", "separate_reasoning", "stream_reasoning")},
    "spaces_between_special_tokens": (True, False),  # fast tokenizers write none
    **{name: ([],) for name in _LISTS},
    **{name: ({},) for name in ("mm_processor_kwargs", "vllm_xargs")},
    **{name: ("",) for name in ("suffix", "grammar")},
    **{name: ("none", "auto") for name in ("tool_choice", "function_call")},
    "logit_bias": ({}, []),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "verbosity": ("medium",),
}
"""Parameter → the values that change nothing. null never does: clients send it for what they leave out."""

LEFT_OUT: dict[str, tuple[Any, ...]] = {"seed": (-1,), "top_k": (0, -1)}
"""Parameter → the values with which other servers' clients leave it out, as with null."""

CHECKPOINTS: dict[str, tuple[str, float, tuple[str, ...]]] = {
    **{name: ("repetition_penalty", 1, ("encoder_repetition_penalty",)) for name in _PENALTIES},
    **{name: ("min_new_tokens", 0, ("min_length",)) for name in ("min_tokens", "min_new_tokens")},
}
"""Parameter → the checkpoint's own generation setting that decides instead, what holds where it has none, and settings
beside which the parameter has no value that says what holds. A request may say what holds anyway; nothing else is
neutral."""

WHOLE_TEXT: dict[str, float] = {"repeat_last_n": -1, "penalize_nl": True}
"""Parameter of llama.cpp → the value with which a repetition penalty is what it is here: of the whole text. Where the
checkpoint has no penalty, every value changes nothing."""

IGNORED = frozenset(
    (
        # whom or what a request is for, and what a provider keeps of it
        *("user", "metadata", "store", "service_tier", "safety_identifier", "parallel_tool_calls"),
        *(
            "prompt_cache_key",
            "prompt_cache_options",
            "prompt_cache_retention",
            "cache_prompt",
            "cache_salt",
            "prediction",
        ),
        *("request_id", "rid"),
        # details of methods that are off, see above
        *("mirostat_tau", "mirostat_eta", "dynatemp_exponent", "xtc_threshold"),
        *("dry_base", "dry_allowed_length", "dry_penalty_last_n", "dry_sequence_breakers"),
    )
)
"""Parameters whose values never change an answer."""


def neutral_in(given: dict[str, Any]) -> dict[str, tuple[Any, ...]]:
    """`NEUTRAL` for one request, with values that change nothing beside its others."""
    bias = given.get("logit_bias")
    zero = isinstance(bias, dict) and all(is_neutral(one, (0,)) for one in bias.values())
    return NEUTRAL | {"best_of": (given.get("n") or 1,), "logit_bias": ({}, [], bias if zero else None)}


def is_neutral(value: Any, neutral: tuple[Any, ...]) -> bool:
    """Whether a value is null or one of `neutral`; 0 and 0.0 are the same, 0 and False are not."""
    return value is None or any(value == one and isinstance(value, bool) is isinstance(one, bool) for one in neutral)
