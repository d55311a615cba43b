"""Where parts of an answer begin and end, against counting one by one."""

import random

import pytest

from draft_heads.data.text.errors import ControlTokenError, ConversationError
from draft_heads.data.text.rendering import ChatRenderer
from draft_heads.data.text.token_spans import between_blocks, left_out
from tests.tiny_chat import byte_tokenizer

USER, ANSWER = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Salut"}


def test_what_must_go_from_an_answers_start_is_the_least_that_leaves_the_rest_shown():
    draw = random.Random(0)
    for _ in range(300):
        answer = "".join(draw.choices("ab \n", k=draw.randrange(9)))
        shown = "".join(draw.choices("ab", k=draw.randrange(9)))
        words = answer.replace(" ", "").replace("\n", "")
        least = min(count for count in range(len(words) + 1) if words[count:] in shown)
        assert left_out(answer, shown) == least


def test_what_stands_between_two_blocks_of_a_turn_is_not_trained_on():
    tokenizer = byte_tokenizer(
        "{% for m in messages %}{% if m.role == 'assistant' %}{{ '[A]' }}{% generation %}{{ m.content }}"
        "{% endgeneration %}{{ ' (shown by the server) ' }}{% generation %}{{ 'Bye' + eos_token }}{% endgeneration %}"
        "{% else %}{{ m.content }}{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '[A]' }}{% endif %}"
    )
    chat = [USER, ANSWER, USER, ANSWER]
    own = tokenizer.apply_chat_template(chat, return_dict=True, return_assistant_tokens_mask=True)
    ids, mask, spans = ChatRenderer(tokenizer, [tokenizer.eos_token_id]).spans(chat)
    assert (ids, [int(trained) for trained in mask]) == (own["input_ids"], own["assistant_masks"])
    ends = [place + 1 for place, token in enumerate(ids) if token == tokenizer.eos_token_id]
    assert [(turn, last) for turn, (_, last) in spans.items()] == [(1, ends[0]), (3, ends[1])]
    text, offsets = "a b  c", [(0, 1), (1, 3), (3, 5), (5, 6)]
    assert between_blocks(0, 4, text, offsets, [True, False, False, True]) == {1, 2}
    assert between_blocks(0, 4, text, offsets, [False] * 4) == between_blocks(1, 2, text, offsets, [True] * 4) == set()


_BODY = (
    "{{ '<|im_start|>' + m.role + '\n' }}{% if m.role == 'assistant' %}{% generation %}{{ m.content + eos_token }}"
    "{% endgeneration %}{% else %}{{ m.content }}{% endif %}{{ '\n' }}"
)


@pytest.mark.parametrize(
    "form",
    [
        "{% macro turn(m) %}BODY{% endmacro %}{% for m in messages %}{{ turn(m) }}{% endfor %}",
        "{% for m in messages %}{% set t %}BODY{% endset %}{{ t }}{% endfor %}",
        "{% for m in messages %}{% filter trim %}BODY{% endfilter %}{{ '\n' }}{% endfor %}",
        "{% macro turn(m) %}BODY{% endmacro %}{% for m in messages %}{% if m.weight %}{{ turn(m) }}{% else %}BODY"
        "{% endif %}{% endfor %}",
        "{% macro turn(m) %}{{ caller() }}{% endmacro %}{% for m in messages %}{% call turn(m) %}BODY{% endcall %}"
        "{% endfor %}",
        "{% for m in messages recursive %}BODY{% endfor %}",
        "{% for m in messages %}BODY{% endfor %}",
    ],
    ids=["macro", "set", "filter", "macro of some turns", "call", "recursive", "plain"],
)
def test_a_block_that_transformers_finds_around_another_text_is_refused(form):
    """It counts places by what a template has yielded, which a macro does at its end."""
    tokenizer = byte_tokenizer(
        form.replace("BODY", _BODY) + "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )
    renderer, chat = ChatRenderer(tokenizer, [tokenizer.eos_token_id]), [USER, ANSWER | {"content": "Salut, " * 9}]
    if form.startswith("{% for m in messages %}BODY{% endfor"):
        ids, mask = renderer.conversation(chat)
        assert tokenizer.decode([i for i, own in zip(ids, mask) if own]) == "Salut, " * 9 + tokenizer.eos_token
        return
    with pytest.raises(ConversationError, match=r"a macro, .*, where transformers misplaces it; move it out"):
        renderer.conversation(chat)


def test_white_space_between_two_blocks_of_a_turn_is_trained_on():
    tokenizer = byte_tokenizer(
        "{% for m in messages %}{% if m.role == 'assistant' %}{{ '[A]' }}{% if m.reasoning_content %}{% generation %}"
        "{{ '(' + m.reasoning_content + ')' }}{% endgeneration %}{{ '\n\n' }}{% endif %}{% generation %}"
        "{{ m.content + eos_token }}{% endgeneration %}{% else %}{{ m.content }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '[A]' }}{% endif %}"
    )
    chat = [USER, ANSWER | {"reasoning_content": "French."}]
    ids, mask = ChatRenderer(tokenizer, [tokenizer.eos_token_id]).conversation(chat)
    trained = [token for token, kept in zip(ids, mask) if kept]
    assert tokenizer.decode(trained) == f"(French.)\n\nSalut{tokenizer.eos_token}"


@pytest.mark.parametrize("marked", [True, False])
def test_blocks_are_counted_where_the_template_moves_the_tools_to_the_last_question(marked):
    """As Mistral's, so that no earlier prompt is the beginning of the conversation."""
    begin, end = ("{% generation %}", "{% endgeneration %}") if marked else ("", "")
    tokenizer = byte_tokenizer(
        "{% set ns = namespace(last=0) %}{% for m in messages if m.role == 'user' %}{% set ns.last = m.content %}"
        "{% endfor %}{% for m in messages %}{% if m.role == 'assistant' %}[A]" + begin + "{% for call in m.tool_calls "
        "or [] %}{{ call.function | tojson }}{% endfor %}{{ m.content + eos_token }}" + end + "{% else %}"
        "{% if tools and m.content == ns.last %}{{ tools | tojson }}{% endif %}{{ '[Q]' + m.content }}{% endif %}"
        "{% endfor %}{% if add_generation_prompt %}{{ '[A]' }}{% endif %}"
    )
    call = {"id": "a", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    tool = {"role": "tool", "content": "1", "tool_call_id": "a"}
    chat = [USER, {"role": "assistant", "content": "", "tool_calls": [call]}, tool, {**ANSWER}]
    chat += [{"role": "user", "content": "Bye"}, {"role": "assistant", "content": "Adieu"}]
    tools = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]
    renderer = ChatRenderer(tokenizer, [tokenizer.eos_token_id])
    if not marked:
        with pytest.raises(ConversationError, match="mark each answer with one "):
            renderer.conversation(chat, {"tools": tools})
        return
    own = tokenizer.apply_chat_template(chat, tools=tools, return_dict=True, return_assistant_tokens_mask=True)
    ids, mask = renderer.conversation(chat, {"tools": tools})
    assert (ids, [int(trained) for trained in mask]) == (own["input_ids"], own["assistant_masks"])
    chat[3]["trained"] = False
    _, without = renderer.conversation(chat, {"tools": tools})
    assert tokenizer.decode([i for i, a, b in zip(ids, mask, without) if a and not b]) == "Salut" + tokenizer.eos_token


def special(tokenizer, *tokens):
    tokenizer.add_special_tokens({"additional_special_tokens": list(tokens)})
    return ChatRenderer(tokenizer, [tokenizer.eos_token_id])


def test_a_control_token_as_the_name_of_a_parameter_is_one_in_someones_text():
    renderer = special(
        byte_tokenizer(
            "{{ tools | tojson if tools }}{% for m in messages %}{{ '<|start|>' + m.role + m.content + eos_token }}"
            "{% endfor %}{% if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}"
        ),
        "<|start|>",
    )
    for name in ("<|start|>", "a"):
        tools = [{"type": "function", "function": {"name": "f", "parameters": {"properties": {name: {}}}}}]
        if name == "a":
            assert renderer.prompt([USER], {"tools": tools})
            continue
        with pytest.raises(ControlTokenError, match=r"'<\|start\|>' in 'tools'"):
            renderer.prompt([USER], {"tools": tools})


@pytest.mark.parametrize("default", ["Think between <think> and </think>. ", ""], ids=["quoted", "not"])
def test_the_marks_of_a_recorded_thought_are_no_control_tokens(default):
    """Special tokens too, which the template quotes, or writes around an empty thought."""
    renderer = special(
        byte_tokenizer(
            f"{{{{ '{default}' }}}}"
            "{% for m in messages %}{% if m.role == 'assistant' %}{{ '<|a|>' }}"
            "{{ m.content if '<think>' in m.content else '<think></think>' + m.content }}"
            "{% else %}{{ '<|u|>' + m.content }}{% endif %}{{ eos_token }}{% endfor %}"
            "{% if add_generation_prompt %}{{ '<|a|>' }}{% endif %}"
        ),
        *("<think>", "</think>", "<|a|>", "<|u|>"),
    )
    thought = {"role": "assistant", "content": "<think>French.</think>Salut"}
    trained = [token for token, kept in zip(*renderer.conversation([USER, thought])) if kept]
    assert renderer.tokenizer.decode(trained) == thought["content"] + renderer.tokenizer.eos_token
    for message in (USER | {"content": "What is <think>?"}, ANSWER | {"content": "<|u|> is it."}):
        with pytest.raises(ControlTokenError):
            renderer.conversation([message, ANSWER] if message["role"] == "user" else [USER, message])


CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
NEEDS_TOOLS = "{% for tool in tools %}{{ tool | tojson }}{% endfor %}"
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {}}}]


@pytest.mark.parametrize(
    "form,good",
    [
        ("{{ tools | tojson }}" + CHATML, True),
        ("{{ tools | tojson }}" + CHATML.replace("<|im_end|>", "<|eot|>"), False),
        ("{{ tools | tojson }}" + CHATML.replace("m.content", "m.content[0].text"), False),
        (
            "{{ tools | tojson }}"
            + CHATML.replace("{{ '<|im_start|>' + m.role", "{% generation %}{{ '<|im_start|>' + m.role").replace(
                "{% endfor %}", "{% endgeneration %}{% endfor %}"
            ),
            False,
        ),
        (NEEDS_TOOLS + CHATML, True),
        (NEEDS_TOOLS + CHATML.replace("<|im_end|>", "<|eot|>"), False),
        ("{% for tool in tools %}" + CHATML, False),
    ],
    ids=["same", "end", "parts", "block", "needs tools", "needs tools, end", "broken"],
)
def test_a_template_of_its_own_for_tools_has_the_form_of_the_default_one(form, good):
    tokenizer = byte_tokenizer(CHATML)
    tokenizer.chat_template = {"default": CHATML, "tool_use": form}
    renderer = special(tokenizer, "<|im_start|>", "<|im_end|>", "<|eot|>")
    assert renderer.conversation([USER, ANSWER])
    if good:
        assert '"name": "f"' in tokenizer.decode(renderer.conversation([USER, ANSWER], {"tools": TOOLS})[0])
        return
    for use in (renderer.conversation, renderer.prompt):
        with pytest.raises(ValueError, match="has another for those with tools"):
            use([USER, ANSWER] if use == renderer.conversation else [USER], {"tools": TOOLS})


def test_the_mark_of_a_thought_that_ends_turns_may_not_stand_in_an_answer():
    renderer = special(
        byte_tokenizer(
            "{% for m in messages %}{{ '<|u|>' if m.role == 'user' else '<|a|>' }}{{ m.content + '</think>' }}"
            "{% endfor %}"
            "{% if add_generation_prompt %}{{ '<|a|>' }}{% endif %}"
        ),
        *("</think>", "<|a|>", "<|u|>"),
    )
    assert renderer.conversation([USER, ANSWER])
    with pytest.raises(ControlTokenError, match="</think>"):
        renderer.conversation([USER, ANSWER | {"content": "a</think>b"}, USER, ANSWER])
