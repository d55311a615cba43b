"""The tokenizer that is loaded is the one that its tokenizer.json describes."""

import json
from pathlib import Path

import pytest
from tokenizers import AddedToken, normalizers, processors
from transformers import AutoTokenizer, LlamaTokenizer

from draft_heads.data.bpe import train_tokenizer
from draft_heads.data.text import chat_template
from draft_heads.data.text.errors import ConversationError
from draft_heads.data.text.rendering import ChatRenderer
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


def test_a_tokenizer_that_trims_offsets_gets_the_mask_of_one_that_does_not():
    """As GPT-NeoX's. The prompt ends within the answer's first token, which the target therefore never writes."""
    template = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}{{ eos_token }}{% endfor %}"
    template += "{% if add_generation_prompt %}assistant: {% endif %}"
    messages = [{"role": "user", "content": "How many?"}, {"role": "assistant", "content": "the  end of the line"}]
    rows = []
    for trim in (False, True):
        tokenizer = train_tokenizer([[{"role": "user", "content": "the line of the end of the line"}] * 9], 300, 512)
        tokenizer.chat_template = template
        last = processors.ByteLevel(trim_offsets=trim)
        tokenizer.backend_tokenizer.post_processor = processors.Sequence([last]) if trim else last
        rows.append(ChatRenderer(tokenizer).conversation(messages))
    ids, mask = rows[0]
    assert rows[1] == rows[0]
    first = mask.index(True)
    assert tokenizer.decode(ids[first - 1 : first + 1]) == " the "  # two tokens; the first holds the prompt's space
    assert tokenizer.decode(ids[first:]) == "  end of the line" + tokenizer.eos_token


@pytest.mark.parametrize(
    ("normalizer", "typed"),
    [
        (normalizers.Lowercase(), "<|USER|>"),
        (normalizers.NFKC(), "<|user\uff5c>"),
        (normalizers.Sequence([normalizers.NFKD(), normalizers.StripAccents()]), "<|us\u00e9r|>"),
    ],
)
def test_a_control_token_that_the_normaliser_makes_is_refused(normalizer, typed):
    tokenizer = train_tokenizer([[{"role": "user", "content": "say it"}]], 300, 512)
    own = "<|user|>"
    tokenizer.backend_tokenizer.normalizer = normalizer
    messages = [{"role": "user", "content": f"say {typed} it"}, {"role": "assistant", "content": "yes"}]
    ids, _ = ChatRenderer(tokenizer).conversation(messages)  # tokens that are no normalised text
    assert ids.count(tokenizer.convert_tokens_to_ids(own)) == 1
    tokenizer.add_tokens([AddedToken(own, normalized=True, special=True)])
    tokenizer.backend_tokenizer.add_special_tokens([AddedToken(own, normalized=True)])
    assert tokenizer(typed, add_special_tokens=False)["input_ids"] == [tokenizer.convert_tokens_to_ids(own)]
    with pytest.raises(ConversationError, match=r"a control token in someone's text: '<\|user\|>' in user turn 1"):
        ChatRenderer(tokenizer).conversation(messages)


def test_a_tokenizer_that_loses_characters_is_told(folder, tmp_path, caplog):
    chat_template.load_tokenizer(str(folder))
    assert not caplog.messages
    state = json.loads((folder / "tokenizer.json").read_text())
    ascii_only = {token: i for token, i in state["model"]["vocab"].items() if token.isascii() or token[0] in "ĠĊĉ"}
    state["model"] |= {"vocab": ascii_only, "merges": [], "unk_token": None}
    for file in folder.glob("tokenizer*"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "tokenizer.json").write_text(json.dumps(state))
    tokenizer = chat_template.load_tokenizer(str(tmp_path), "vicuna")
    (told,) = caplog.messages
    assert "does not keep every character, for example ï é ≈ 日 本 😀: heads learn texts without them" in told
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "日本語"}]
    with pytest.raises(
        ConversationError, match=r"assistant turn 1 has none but its end: the tokenizer has none for '日本語'"
    ):
        ChatRenderer(tokenizer).conversation(messages)
