"""Parameters of the OpenAI API and of other servers that this one does not have: clients send them with values that
change nothing, which are accepted; any other value is refused by name."""

from __future__ import annotations

from typing import Any

NEUTRAL: dict[str, tuple[Any, ...]] = {
    # OpenAI
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "logit_bias": ({}, []),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "verbosity": ("medium",),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    # vLLM and SGLang
    "min_p": (0,),
    "length_penalty": (1,),
    "use_beam_search": (False,),
    "early_stopping": (False,),
    "ignore_eos": (False,),
    "include_stop_str_in_output": (False,),
    "no_stop_trim": (False,),
    "skip_special_tokens": (True, False),  # those that mark turns are never shown, others (`<filename>`) always
    "spaces_between_special_tokens": (True, False),
    "detokenize": (True,),
    "include_reasoning": (True,),
    "separate_reasoning": (True,),
    "stream_reasoning": (True,),
    "bad_words": ([],),
    "logits_processors": ([],),
    "documents": ([],),
    "mm_processor_kwargs": ({},),
    "vllm_xargs": ({},),
    "priority": (0,),
    "return_tokens_as_token_ids": (False,),
    "return_hidden_states": (False,),
    # TGI
    "decoder_input_details": (False,),
    "return_full_text": (False,),
    "top_n_tokens": (0,),
    "typical_p": (1,),
    "watermark": (False,),
    # llama.cpp
    "tfs_z": (1,),
    "top_a": (0,),
    "top_n_sigma": (-1,),
    "mirostat": (0,),
    "mirostat_mode": (0,),
    "dynatemp_range": (0,),
    "xtc_probability": (0,),
    "dry_multiplier": (0,),
    "penalize_nl": (False,),
    "n_keep": (0,),
    "n_probs": (0,),
    "n_indent": (0,),
    "min_keep": (0,),
    "t_max_predict_ms": (0,),
    "id_slot": (-1,),
    "grammar": ("",),
    "lora": ([],),
    "image_data": ([],),
    "post_sampling_probs": (False,),
    "return_tokens": (False,),
    "return_progress": (False,),
    "timings_per_token": (False,),
}
"""Parameter → the values that change nothing. null never does: clients send it for what they leave out."""

CHECKPOINTS: dict[str, tuple[str, float]] = {
    "repetition_penalty": ("repetition_penalty", 1),
    "repeat_penalty": ("repetition_penalty", 1),
    "min_tokens": ("min_new_tokens", 0),
    "min_new_tokens": ("min_new_tokens", 0),
}
"""Parameter → the checkpoint's own generation setting that decides instead, and what holds where it has none. A request
may say what holds anyway; nothing else is neutral."""

IGNORED = frozenset(
    (
        # whom or what a request is for, and what a provider keeps of it
        *("user", "metadata", "store", "service_tier", "safety_identifier", "parallel_tool_calls"),
        *("prompt_cache_key", "prompt_cache_options", "prompt_cache_retention", "cache_prompt", "cache_salt"),
        *("request_id", "rid"),
        # details of methods that are off, see above
        *("repeat_last_n", "mirostat_tau", "mirostat_eta", "dynatemp_exponent", "xtc_threshold"),
        *("dry_base", "dry_allowed_length", "dry_penalty_last_n", "dry_sequence_breakers"),
    )
)
"""Parameters whose values never change an answer."""


def is_neutral(value: Any, neutral: tuple[Any, ...]) -> bool:
    """Whether a value is null or one of `neutral`; 0 and 0.0 are the same, 0 and False are not."""
    return value is None or any(value == one and isinstance(value, bool) is isinstance(one, bool) for one in neutral)
