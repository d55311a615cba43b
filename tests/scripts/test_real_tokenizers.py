"""`make check-tokenizers` passes what is right and names what is broken."""

from draft_heads.data.text.rendering import ChatRenderer
from draft_heads.scripts.checks import real_tokenizers
from tests.tiny_chat import CHATML, byte_tokenizer, template


def test_a_tokenizer_is_checked_with_its_template_or_the_bundled_ones(tmp_path, monkeypatch, capsys):
    byte_tokenizer(template("chatml")).save_pretrained(tmp_path / "a")
    byte_tokenizer(None).save_pretrained(tmp_path / "b")
    monkeypatch.setattr("sys.argv", ["real_tokenizers.py", str(tmp_path)])
    assert real_tokenizers.main()
    printed = capsys.readouterr().out
    assert "a: an answer ends with </s> or <|im_end|>\n  1 turns: ⟦A pear, of course.<|im_end|>⟧" in printed
    assert "b, --chat_template vicuna" in printed and "b, --chat_template llama-2" in printed
    assert printed.endswith("2 tokenizers, 0 rules broken\n")


def test_a_broken_rule_is_counted(capsys, monkeypatch):
    tokenizer = byte_tokenizer(CHATML.replace("[GEN]", "").replace("[END]", ""))
    right = ChatRenderer.conversation
    shifted = lambda self, messages: (right(self, messages)[0], [False, *right(self, messages)[1][:-1]])  # noqa: E731
    monkeypatch.setattr(ChatRenderer, "conversation", shifted)
    assert real_tokenizers.check(tokenizer, "shifted") > 6
    assert "BROKEN: " in capsys.readouterr().out
