"""The trained tokens of turns that call tools, in templates that write words around the calls in their own ways."""

import pytest

from draft_heads.data.text.conversations import parse_record
from draft_heads.data.text.rendering import ChatRenderer, ConversationError
from tests.tiny_chat import byte_tokenizer, trained_runs

CALL = (
    "{% for c in m.tool_calls or [] %}{{ BREAK + '<call>' + c.function.name }}"
    "{{ (c.function.arguments | tojson) + '</call>' }}{% endfor %}"
)
THINKS = (  # Qwen 3.5: prompts begin a thought, which earlier turns lose; a break stands between words and calls
    "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}"
    "{% endif %}{% endfor %}{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
    "{% if m.role == 'assistant' and loop.index0 > ns.last %}{{ '<think>\n' + (m.reasoning_content or '') }}"
    "{{ '\n</think>\n\n' }}{% endif %}{{ m.content }}"
    + CALL.replace("BREAK", "('\n\n' if m.content else '')")
    + "{{ '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>\n' }}{% endif %}"
)
RESULT_WITHIN = (  # Gemma 4: a turn goes on behind the result of its calls
    "{% for m in messages %}{% if m.role == 'user' %}{{ '<turn>user\n' + m.content + '</turn>\n<turn>model\n' }}"
    "{% elif m.role == 'assistant' %}" + CALL.replace("BREAK", "''") + "{% if m.tool_calls and not loop.last and "
    "loop.nextitem.role == 'tool' %}{{ '<result>' + loop.nextitem.content + '</result>' }}{% endif %}{{ m.content }}"
    "{% if not m.tool_calls %}{{ '</turn>\n' }}{% endif %}{% endif %}{% endfor %}"
)
CALLS = [{"type": "function", "function": {"name": "heat", "arguments": {"city": "Rome"}}}]


def conversation(words="", more=()):
    turns = [("user", "How hot?"), ("assistant", words), ("tool", "20"), ("assistant", "It is 20.")]
    messages = [{"role": role, "content": content} for role, content in turns]
    messages[1]["tool_calls"] = CALLS
    return [*messages, *more]


def renderer_of(chat_template, special):
    tokenizer = byte_tokenizer(chat_template)
    tokenizer.add_special_tokens({"additional_special_tokens": [*tokenizer.all_special_tokens[3:], *special]})
    ends = [tokenizer.convert_tokens_to_ids(token) for token in special]
    return ChatRenderer(tokenizer, ends), tokenizer


@pytest.mark.parametrize("words", ["", "Let me look."])
def test_a_call_before_a_later_question_is_trained_with_and_without_words(words):
    renderer, tokenizer = renderer_of(THINKS, ["<|im_end|>"])
    later = [{"role": "user", "content": "Thanks."}, {"role": "assistant", "content": "Bye."}]
    ids, mask = renderer.conversation(conversation(words, later))
    call = (words and words + "\n\n") + '<call>heat{"city": "Rome"}</call><|im_end|>'
    assert trained_runs(tokenizer, ids, mask) == [call, "It is 20.<|im_end|>", "Bye.<|im_end|>"]


def test_the_result_of_a_call_is_never_trained():
    renderer, tokenizer = renderer_of(RESULT_WITHIN, ["</turn>", "<result>"])
    ids, mask = renderer.conversation(conversation())
    assert trained_runs(tokenizer, ids, mask) == ['<call>heat{"city": "Rome"}</call><result>', "It is 20.</turn>"]
    with pytest.raises(ConversationError, match=r"one run of tokens, .* writes assistant turn 1 on both sides"):
        renderer.conversation(conversation("Let me look."))
    said = conversation("Let me look.")
    ids, mask = renderer.conversation([{**m, "trained": m is not said[1]} for m in said])
    assert trained_runs(tokenizer, ids, mask) == ["It is 20.</turn>"]


@pytest.mark.parametrize("arguments", [{}, {"arguments": None}, {"arguments": ""}, {"arguments": "{}"}])
def test_a_call_without_arguments_has_an_empty_object(arguments):
    calls = [{"type": "function", "function": {"name": "now", **arguments}}]
    turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": None, "tool_calls": calls}]
    (call,) = parse_record({"messages": turns}).messages[1]["tool_calls"]
    assert call["function"] == {"name": "now", "arguments": {}}
