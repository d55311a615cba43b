"""Which rows are one question: those of which a chat template makes one prompt that the target can be asked."""

import pytest

from draft_heads.data.labels.questions import QuestionNames
from draft_heads.data.text.conversations import parse_record
from draft_heads.data.text.rendering import ChatRenderer, ConversationError
from tests.data.text.test_chat_forms import tokenizer_of

CHAT = [{"role": "user", "content": "How are you?"}, {"role": "assistant", "content": "Fine."}]
TOOLS = {"tools": [{"type": "function", "function": {"name": "add", "description": "Adds two numbers."}}]}


def test_a_row_that_is_refused_has_not_the_name_of_one_that_is_answered():
    names = QuestionNames(tokenizer_of("phi"))  # whose template reads no tools
    plain, with_tools = parse_record({"messages": CHAT}), parse_record({"messages": CHAT, **TOOLS})
    asked = [names.all_asked(one) for one in (plain, with_tools, plain, with_tools)]
    assert asked[:2] == asked[2:] and asked[0] != asked[1]
    assert names.opening(plain) == names.opening(with_tools)  # they are held out together, or trained on


def test_a_template_that_knows_no_thoughts_does_what_asks_for_none():
    renderer = ChatRenderer(tokenizer_of("phi"), ())
    for name in ("enable_thinking", "thinking"):
        renderer.check_read(CHAT, {name: False})
        with pytest.raises(ConversationError, match=f"does not read '{name}'"):
            renderer.check_read(CHAT, {name: True})
