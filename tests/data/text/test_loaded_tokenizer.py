"""The tokenizer that is loaded is the one that its tokenizer.json describes."""

import json
from pathlib import Path

import pytest
from transformers import AutoTokenizer, LlamaTokenizer

from draft_heads.data.text import chat_template
from tests.tiny_chat import save_target


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return Path(save_target(tmp_path_factory.mktemp("target")))


def test_another_kind_of_tokenizer_than_its_file_says_is_refused(folder, monkeypatch):
    """As transformers 5.17 makes one for files of bytes whose settings name LlamaTokenizer: blanks and line ends go."""
    described = json.loads((folder / "tokenizer.json").read_text())
    assert described["pre_tokenizer"]["type"] == "ByteLevel"
    made = LlamaTokenizer(vocab=described["model"]["vocab"], merges=[tuple(m) for m in described["model"]["merges"]])
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", lambda path: made)
    with pytest.raises(ValueError, match=r"--target .* as its tokenizer.json says; .* makes a LlamaTokenizer of it"):
        chat_template.load_tokenizer(str(folder))


def test_without_the_file_there_is_nothing_to_compare(folder, tmp_path, monkeypatch):
    own = chat_template.load_tokenizer(str(folder))
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", lambda path: own)
    assert chat_template.load_tokenizer(str(tmp_path)) is own
