"""Tokenizers with a chat template, for what renders conversations without a target at hand."""

from __future__ import annotations

from transformers import PreTrainedTokenizerBase

from draft_heads.data.frozen_target import load_tokenizer

VICUNA_TEMPLATE = (
    "{{ bos_token }}A chat between a curious user and an artificial intelligence assistant. The assistant gives "
    "helpful, detailed, and polite answers to the user's questions. "
    "{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}{{ ' ' + message['content'] }}{{ eos_token }}"
    "{% elif message['role'] == 'user' %}{{ 'USER: ' + message['content'] + ' ASSISTANT:' }}"
    "{% else %}{{ message['content'] + ' ' }}{% endif %}"
    "{% endfor %}"
)
"""Vicuna v1.1 and later: `… questions. USER: Hi ASSISTANT: Hello.</s>USER: …`, the prompt ends in `ASSISTANT:`."""


def chat_tokenizer(path: str, chat_template: str | None = None) -> PreTrainedTokenizerBase:
    """The tokenizer in a folder or behind a hub id; one without a chat template takes Vicuna's.

    `chat_template` is a .jinja file laid over it. ValueError where there is no tokenizer.
    """
    try:
        tokenizer = load_tokenizer(path, chat_template)
    except (OSError, ValueError, KeyError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"--tokenizer {path} is no tokenizer's folder or hub id ({reason}); check the path") from None
    if not tokenizer.chat_template:
        tokenizer.chat_template = VICUNA_TEMPLATE
    return tokenizer
