"""A random-weight target of single characters, and a command line that evaluates it."""

import json

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

TEMPLATE = (
    "{% for message in messages %}{{ '<' + message['role'] + '>' + message['content'] + '</s>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
)


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    """A folder with a two-layer Llama and a tokenizer of single characters."""
    folder = tmp_path_factory.mktemp("target")
    letters = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789 .,?!#$+-*/=<>"
    special = ["</s>", "<user>", "<assistant>"]
    vocabulary = {token: index for index, token in enumerate([*special, *letters])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.add_special_tokens(special)
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", chat_template=TEMPLATE)
    wrapped.save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(vocabulary),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        initializer_range=0.3,
        bos_token_id=None,
        eos_token_id=0,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture
def command(target, tmp_path):
    """The arguments that both scripts need."""
    two_turns = [
        {"question_id": 5, "category": "writing", "turns": ["Write.", "Shorter!"]},
        {"question_id": 6, "category": "math", "turns": ["1 + 1?", "And 2 + 2?"], "reference": ["2", "4"]},
        {"question_id": 7, "category": "math", "turns": ["long " * 30]},
    ]
    problems = [{"question": f"{i} + {i}?", "answer": f"{i} + {i} = {2 * i} #### {2 * i}"} for i in range(4)]
    for name, rows in (("mt.jsonl", two_turns), ("gsm.jsonl", problems)):
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return [
        *("--target", str(target), "--drafters", "plain=vanilla", "--output", str(tmp_path / "out")),
        *("--benchmarks", f"mt_bench={tmp_path / 'mt.jsonl'}", f"sums={tmp_path / 'gsm.jsonl'}"),
        *("--max_new_tokens", "8", "--dtype", "float64", "--device", "cpu", "--threads", "1"),
    ]
