"""Small tokenizers with hand-written chat templates of the three common styles, and a random-weight target.

The byte-level BPE knows a few words and every byte; `<s>`, `</s>`, `<|im_start|>`, `<|im_end|>` are special.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from draft_heads.data.text.conversations import read_conversations
from draft_heads.data.text.rendering import ChatRenderer, Messages

if TYPE_CHECKING:  # the tests of vLLM's plugin run without `datasets`
    from datasets import Dataset

SPECIAL = ["<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"]
CORPUS = ["USER: Hello there. ASSISTANT: I am fine, thank you. user system assistant [INST] [/INST] answer 12 34"] * 4

VICUNA = (
    "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'system' %}{{ m['content'] + ' ' }}"
    "{% elif m['role'] == 'user' %}{{ 'USER: ' + m['content'] + ' ' }}"
    "{% else %}{{ 'ASSISTANT:' }}[GEN]{{ ' ' + m['content'] + eos_token }}[END]{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"
)
LLAMA2 = (
    "{% if messages[0]['role'] == 'system' %}"
    "{% set system = '<<SYS>>\\n' + messages[0]['content'] + '\\n<</SYS>>\\n\\n' %}"
    "{% set rest = messages[1:] %}{% else %}{% set system = '' %}{% set rest = messages %}{% endif %}"
    "{% for m in rest %}{% if m['role'] == 'user' %}"
    "{{ bos_token + '[INST] ' + (system if loop.index0 == 0 else '') + m['content'].strip() + ' [/INST]' }}"
    "{% else %}[GEN]{{ ' ' + m['content'].strip() + ' ' + eos_token }}[END]{% endif %}{% endfor %}"
)
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' }}"
    "{% if m['role'] == 'assistant' %}[GEN]{{ m['content'] | trim + '<|im_end|>' }}[END]{{ '\\n' }}"
    "{% else %}{{ m['content'] + '<|im_end|>\\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
STYLES = {"vicuna": VICUNA, "llama2": LLAMA2, "chatml": CHATML}


def template(style: str, marked: bool = False) -> str:
    """The template of a style, its assistant text in a generation block when `marked`."""
    begin, end = ("{% generation %}", "{% endgeneration %}") if marked else ("", "")
    return STYLES[style].replace("[GEN]", begin).replace("[END]", end)


def byte_tokenizer(chat_template: str, eos: str = "</s>") -> PreTrainedTokenizerFast:
    """Byte-level BPE of 300 entries."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return _wrapped(tokenizer, chat_template, eos)


def word_tokenizer(chat_template: str, words: str, eos: str = "</s>") -> PreTrainedTokenizerFast:
    """One token a word or mark of `words`; spaces are no tokens, line breaks are."""
    split = pre_tokenizers.Split(Regex(r"\n|\w+|[^\w\s]"), behavior="removed", invert=True)
    names = SPECIAL + ["\n"] + sorted(set(words.split()))
    tokenizer = Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = split
    tokenizer.add_special_tokens(SPECIAL)
    return _wrapped(tokenizer, chat_template, eos)


def _wrapped(tokenizer: Tokenizer, chat_template: str, eos: str) -> PreTrainedTokenizerFast:
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token=eos,
        unk_token="<unk>",
        additional_special_tokens=["<|im_start|>", "<|im_end|>"],
    )
    wrapped.chat_template = chat_template
    return wrapped


def render_prompt(
    tokenizer: PreTrainedTokenizerFast, messages: Messages, extra: dict[str, Any] | None = None
) -> list[int]:
    """`ChatRenderer.prompt` of a fresh renderer."""
    return ChatRenderer(tokenizer).prompt(messages, extra)


def render_conversation(
    tokenizer: PreTrainedTokenizerFast, messages: Messages, extra: dict[str, Any] | None = None
) -> tuple[list[int], list[bool]]:
    """`ChatRenderer.conversation` of a fresh renderer."""
    return ChatRenderer(tokenizer).conversation(messages, extra)


def load_conversations(source: str, skip_bad_rows: bool = False) -> Dataset:
    """The rows that `read_conversations` keeps of a source."""
    return read_conversations(source, skip_bad_rows=skip_bad_rows).dataset


def trained_runs(tokenizer: PreTrainedTokenizerFast, ids: list[int], mask: list[bool]) -> list[str]:
    """The decoded text of each run of trained tokens."""
    runs: list[list[int]] = []
    for i, trained in enumerate(mask):
        if trained and (i == 0 or not mask[i - 1]):
            runs.append([])
        if trained:
            runs[-1].append(ids[i])
    return [tokenizer.decode(run, skip_special_tokens=False, clean_up_tokenization_spaces=False) for run in runs]


def random_llama(vocab_size: int = 300, **changes: int) -> LlamaForCausalLM:
    """Two layers, hidden 32, weights large enough that greedy text varies; 256 positions."""
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
    }
    config = LlamaConfig(
        vocab_size=vocab_size, initializer_range=0.3, bos_token_id=1, eos_token_id=2, **sizes | changes
    )
    return LlamaForCausalLM(config).eval()


def save_target(folder: Path, style: str = "chatml", extra_end: int | None = None, **changes: int) -> str:
    """A random-weight target with its tokenizer; `extra_end` ends an answer beside the tokenizer's own EOS."""
    model = random_llama(**changes)
    model.generation_config.eos_token_id = 2 if extra_end is None else [2, extra_end]
    model.save_pretrained(folder)
    byte_tokenizer(template(style)).save_pretrained(folder)
    return str(folder)


def write_sharegpt(path: Path, conversations: int = 10, turns: int = 2) -> str:
    """A ShareGPT file of short conversations of growing length, ids c0, c1, …"""
    names = ("human", "gpt")
    rows = [
        {
            "id": f"c{c}",
            "conversations": [
                {"from": names[t % 2], "value": f"Turn {t} of {c}: " + "Hello there. " * (1 + (c + t * (c % 3)) % 4)}
                for t in range(2 * turns)
            ],
        }
        for c in range(conversations)
    ]
    path.write_text(json.dumps(rows))
    return str(path)
