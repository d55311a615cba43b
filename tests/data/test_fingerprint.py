"""What two targets must share, and the error that names where they differ."""

import pytest

from draft_heads.data.fingerprint import check_fingerprint, target_fingerprint
from tests.tiny_chat import byte_tokenizer, random_llama, template, word_tokenizer

CONFIG = random_llama().config


def test_using_the_tokenizer_keeps_the_fingerprint():
    tokenizer = byte_tokenizer(template("chatml"))
    before = target_fingerprint(CONFIG, tokenizer)
    tokenizer.pad_token = "</s>"
    tokenizer(["a", "longer text"], padding=True, truncation=True, max_length=3)
    assert (before["vocab_size"], before["hidden_size"]) == (300, 32)
    check_fingerprint(before, target_fingerprint(CONFIG, byte_tokenizer(template("chatml"))), "--dataset D")


def test_every_difference_is_named():
    ours = target_fingerprint(CONFIG, byte_tokenizer(template("chatml")))
    other = target_fingerprint(random_llama(hidden_size=16).config, word_tokenizer(template("vicuna"), "a b"))
    with pytest.raises(ValueError, match=r"^--dataset D belongs to another target: hidden_size 16 against .*32"):
        check_fingerprint(other, ours, "--dataset D")
    with pytest.raises(ValueError) as error:
        check_fingerprint(other, ours, "--dataset D")
    assert all(name in str(error.value) for name in ("hidden_size", "tokenizer_hash", "chat_template_hash"))
    assert "vocab_size" not in str(error.value)


def test_template_alone_is_enough_to_differ():
    one, other = (target_fingerprint(CONFIG, byte_tokenizer(template(style))) for style in ("chatml", "vicuna"))
    assert {name for name in one if one[name] != other[name]} == {"chat_template_hash"}
