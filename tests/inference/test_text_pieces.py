"""The text of an answer as it grows, token by token."""

from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from draft_heads.data.text.chat_template import load_chat_tokenizer
from draft_heads.inference.generation import TextPieces


def test_streamed_text_holds_back_a_character_that_is_not_whole():
    tokenizer = load_chat_tokenizer("tests/tiny_target")
    tokens, before, after = (
        tokenizer(text, add_special_tokens=False)["input_ids"] for text in ("tea 🙂é", "tea ", "tea 🙂")
    )
    smile = range(len(before), len(after))
    assert len(smile) > 2  # the embedded tokenizer has no token for it
    pieces = TextPieces(tokenizer)
    shown = [pieces.add([token]) for token in tokens]
    assert "".join(shown) == "tea 🙂é" and pieces.end() == ""
    assert [shown[place] for place in smile] == [""] * (len(smile) - 1) + ["🙂"]
    broken = TextPieces(tokenizer)
    assert broken.add(tokens[: smile[-1]]) == "tea " and broken.end() == "\ufffd"


def test_bytes_that_are_no_text_are_streamed_too():
    names = ["<unk>", "\u2581a", "b", *(f"<0x{byte:02X}>" for byte in range(256))]  # as Llama 2 has them
    tokenizer = Tokenizer(models.BPE({name: i for i, name in enumerate(names)}, [], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer)

    def streamed(*shown, before=()):
        pieces = TextPieces(fast, [names.index(name) for name in before])
        return "".join(pieces.add([names.index(name)]) for name in shown) + pieces.end()

    assert streamed("\u2581a", "<0xC3>", "<0xA9>", "b", "\u2581a") == "aéb a"
    assert streamed("<0x0A>", "<0xE4>", "b", "\u2581a") == "\n\ufffdb a"
    assert streamed("<0xC3>", "<0xA9>", "<0xE4>", "b").endswith("b")
    assert streamed("\u2581a", "<0xE4>") == "a\ufffd"
    # the text before is not shown again, but the space behind it is
    assert streamed("\u2581a", "b", before=["\u2581a"] * 9) == " ab"
    assert streamed("b", "\u2581a", before=["\u2581a", "b"]) == "b a"
    many = [f"<0x{byte:02X}>" for byte in "中文字日本".encode()]  # 15 tokens: 8 of them begin within a character
    assert streamed("\u2581a", before=many) == " a"
    assert streamed("<0xA9>", "b", before=["\u2581a", "<0xC3>"]) == "\ufffdb"  # half a character is not
