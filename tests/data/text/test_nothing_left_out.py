"""What a conversation holds is rendered and, where it is trained on, trained on whole; else its row is refused."""

import json
from contextlib import suppress

import pytest

from draft_heads.data.datastore_build import build_datastore
from draft_heads.data.text.chat_template import template_variables
from draft_heads.data.text.conversations import _sound_part, conversation_of, parse_record, read_conversations
from draft_heads.data.text.rendering import ChatRenderer, ConversationError
from tests.tiny_chat import STYLES, byte_tokenizer, template, trained_runs

USER, ANSWER = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Salut"}
RESULT = {"role": "tool", "content": "20"}
MARKS = "<|start|> <|message|> <|end|> <|call|> <|return|>"


def calls(*cities):
    return [{"type": "function", "function": {"name": "w", "arguments": {"c": city}}} for city in cities]


def called(text, *cities, **further):
    return {"role": "assistant", "content": text, "tool_calls": calls(*cities), **further}


def renderer(chat_template, *ends):
    tokenizer = byte_tokenizer(chat_template)
    tokenizer.add_special_tokens({"additional_special_tokens": [*tokenizer.all_special_tokens[3:], *MARKS.split()]})
    return ChatRenderer(tokenizer, tokenizer.convert_tokens_to_ids(list(ends)))


def in_channels(first, block=("", "")):
    """gpt-oss: words and calls are messages of their own, and the target goes on after the end of its words.

    first: whether of several calls the first alone is rendered
    """
    begin, end = block
    each = "(m.tool_calls or [])[:1]" if first else "m.tool_calls or []"
    return (
        "{% for m in messages %}{% if m.role == 'assistant' %}"
        f"{begin}"
        "{% if m.content %}{{ '<|start|>assistant<|message|>' + m.content }}"
        "{{ '<|return|>' if loop.last and not m.tool_calls else '<|end|>' }}{% endif %}"
        f"{{% for call in {each} %}}"
        "{% set c = call.function %}{{ '<|start|>assistant to=' + c.name + '<|message|>' + c.arguments | tojson }}"
        "{% endfor %}{{ '<|call|>' if m.tool_calls }}"
        f"{end}"
        "{% else %}{{ '<|start|>' + m.role + '<|message|>' + m.content + '<|end|>' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}"
    )


# ---- calls are trained on with the words before them ------------------------------------------------------------


@pytest.mark.parametrize("block", [("", ""), ("{% generation %}", "{% endgeneration %}")], ids=["unmarked", "block"])
@pytest.mark.parametrize("after", [[], [RESULT, ANSWER]], ids=["last", "before a result"])
@pytest.mark.parametrize("words", ["I look.", ""])
def test_calls_in_messages_of_their_own_are_trained_on(words, after, block):
    form = renderer(in_channels(False, block), "<|return|>", "<|call|>")
    ids, mask = form.conversation([USER, called(words, "Paris"), *after])
    said = "I look.<|end|><|start|>assistant" if words else ""  # what stands before each answer is the template's
    assert trained_runs(form.tokenizer, ids, mask) == [
        said + ' to=w<|message|>{"c": "Paris"}<|call|>',
        *(["Salut<|return|>"] if after else []),
    ]


@pytest.mark.parametrize("marked", [False, True], ids=["unmarked", "block"])
@pytest.mark.parametrize("words", ["I look.", ""])
def test_calls_after_the_end_at_which_the_target_stops_are_refused(words, marked):
    call = "{{ '<|assistant|>call ' + m.tool_calls[0].function | tojson + eos_token }}"
    begin, end = ("{% generation %}", "{% endgeneration %}") if marked else ("", "")
    form = renderer(
        "{% for m in messages %}{{ '<|' + m.role + '|>' }}{% if m.role == 'assistant' %}"
        f"{begin}{{{{ m.content + eos_token }}}}{end}{{% if m.tool_calls %}}{begin}{call}{end}{{% endif %}}"
        "{% else %}{{ m.content }}{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
    )
    with pytest.raises(
        ConversationError, match=r"writes '</s>', where the target stops, in the midst of assistant turn 1"
    ):
        form.conversation([USER, called(words, "Paris"), RESULT, ANSWER])
    ids, mask = form.conversation([USER, called(words, "Paris", trained=False), RESULT, ANSWER])
    assert trained_runs(form.tokenizer, ids, mask) == ["Salut</s>"]


# ---- what the template does not read ------------------------------------------------------------------------------


@pytest.mark.parametrize("further", [{}, {"trained": False}])
def test_a_second_call_that_the_template_leaves_out_is_refused(further):
    chat = [USER, called("", "Paris", "Rome", **further), RESULT, ANSWER]
    first, all_of_them = (renderer(in_channels(first), "<|return|>", "<|call|>") for first in (True, False))
    assert '"Rome"' in all_of_them.tokenizer.decode(all_of_them.conversation(chat)[0])
    for render in (first.conversation, lambda chat: first.prompt(chat[:3])):
        with pytest.raises(ConversationError, match=r"does not read 'tool_calls\[1\]\.name', .*take it out"):
            render(chat)


def test_names_without_arguments_are_not_enough_of_a_call():
    form = template("chatml").replace("| trim +", "| trim + (m.tool_calls[0].function.name if m.tool_calls else '') +")
    with pytest.raises(ConversationError, match=r"does not read 'tool_calls\[0\]\.arguments'"):
        ChatRenderer(byte_tokenizer(form)).conversation([USER, called("", "Paris")])


@pytest.mark.parametrize(
    ("document", "unread"),
    [
        ({"title": "A", "text": "x"}, None),
        ({"title": "A", "content": "THE PASSAGE"}, "documents[1].content"),
        ({"title": "A", "text": "x", "author": {"name": "Bo"}}, "documents[1].author.name"),
        ({"title": "A", "text": "x", "author": " ", "page": 3}, None),
    ],
)
def test_every_text_of_a_document_is_read(document, unread):
    form = "{% for d in documents or [] %}{{ d.title | upper ~ ': ' ~ d.text }}{% endfor %}" + template("chatml")
    render, extra = ChatRenderer(byte_tokenizer(form)), {"documents": [{"title": "B", "text": "y"}, document]}
    if unread is None:
        assert "A: x<|im_start|>" in render.tokenizer.decode(render.conversation([USER, ANSWER], extra)[0])
    else:
        with pytest.raises(ConversationError) as error:
            render.conversation([USER, ANSWER], extra)
        assert f"does not read {unread!r}, which" in str(error.value)


def test_every_tool_is_read():
    form = "{{ tools[0] | tojson if tools else '' }}" + template("chatml")
    tools = [{"type": "function", "function": {"name": name}} for name in ("add", "sub")]
    render = ChatRenderer(byte_tokenizer(form))
    assert render.conversation([USER, ANSWER], {"tools": tools[:1]})[0]
    with pytest.raises(ConversationError, match=r"does not read 'tools\[1\]\.name'"):
        render.conversation([USER, ANSWER], {"tools": tools})


def test_a_setting_is_read_if_it_is_a_variable_of_the_template():
    form = template("chatml").replace("| trim +", "| trim + (m.thinking or '') +")
    render = ChatRenderer(byte_tokenizer(form + "{% set name = 'Bo' %}{{ name }}"))
    for extra in ({"thinking": True}, {"name": "Bob"}, {"m": True}):
        with pytest.raises(ConversationError, match=f"does not read '{next(iter(extra))}'"):
            render.conversation([USER, ANSWER], extra)
    default = "{% if thinking is not defined %}{% set thinking = false %}{% endif %}{{ '!' if thinking }}"
    assert ChatRenderer(byte_tokenizer(form + default)).conversation([USER, ANSWER], {"thinking": False})[0]
    assert template_variables(
        "{% generation %}{% for a in b %}{{ a.c ~ loop.index }}{% endfor %}{% endgeneration %}"
    ) == {"b"}


@pytest.mark.parametrize("drops", [False, True], ids=["kept", "dropped"])
def test_a_thought_before_calls_is_trained_on_or_the_row_refused(drops):
    """As gpt-oss's template: it refuses words beside calls and a thought, and leaves the thought of a call out where an
    answer follows (`drops`)."""
    form = (
        "{% for m in messages %}{% if m.role == 'assistant' %}{% if m.tool_calls and m.content and m.thinking %}"
        "{{ raise_exception('both content and thinking') }}{% endif %}"
        f"{{% if m.thinking and not ({drops} and not loop.last) %}}"
        "{{ '<|start|>assistant<|message|>' + m.thinking + '<|end|>' }}{% endif %}"
        "{% for call in m.tool_calls or [] %}{{ '<|start|>assistant to=' + call.function.name }}"
        "{{ '<|message|>' + call.function.arguments | tojson + '<|call|>' }}{% endfor %}"
        "{% if m.content %}{{ '<|start|>assistant<|message|>' + m.content + '<|return|>' }}{% endif %}"
        "{% else %}{{ '<|start|>' + m.role + '<|message|>' + m.content + '<|end|>' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}"
    )
    made = renderer(form, "<|return|>", "<|call|>")
    chat = [USER, called("", "Paris", thinking="A city."), RESULT, ANSWER]
    if drops:
        with pytest.raises(ConversationError, match=r"leaves out at least 6 characters of assistant turn 1"):
            made.conversation(chat)
        made.conversation([USER, {**chat[1], "trained": False}, RESULT, ANSWER])
        return
    ids, mask = made.conversation(chat)
    assert trained_runs(made.tokenizer, ids, mask) == [
        '<|message|>A city.<|end|><|start|>assistant to=w<|message|>{"c": "Paris"}<|call|>',
        "Salut<|return|>",
    ]


CALLS_ALONE = template("chatml").replace(
    "m['content'] | trim", "(m.tool_calls | map(attribute='function') | list | tojson if m.tool_calls else m.content)"
)


def test_words_beside_calls_that_the_template_leaves_out_are_refused():
    render = ChatRenderer(byte_tokenizer(CALLS_ALONE))
    chat = [USER, called("I look.", "Paris", trained=False), RESULT, ANSWER]
    for ask in (render.conversation, lambda chat: render.prompt(chat[:3])):
        with pytest.raises(
            ConversationError, match=r"leaves out the assistant's text .*'I look.'.* pass a chat_template"
        ):
            ask(chat)
        assert ask([USER, called("", "Paris", trained=False), RESULT, ANSWER])


def test_words_beside_calls_may_be_thoughts_that_later_turns_put_out_of_sight():
    form = "{% for m in messages %}{{ '<|im_start|>' + m.role }}{% if loop.last or not m.tool_calls %}{{ m.content }}"
    form += "{% endif %}{{ m.tool_calls | tojson if m.tool_calls else '' }}{{ '<|im_end|>' }}{% endfor %}"
    render = ChatRenderer(
        byte_tokenizer(form + "{% if add_generation_prompt %}{{ '<|im_start|>assistant' }}{% endif %}")
    )
    chat = [USER, called("I look.", "Paris", trained=False), RESULT, ANSWER]
    assert "I look." not in render.tokenizer.decode(render.prompt(chat[:3]))
    assert trained_runs(render.tokenizer, *render.conversation(chat)) == ["Salut<|im_end|>"]


def test_a_datastore_has_no_row_of_which_the_template_leaves_something_out(tmp_path):
    no_system = "{% for m in messages if m.role != 'system' %}" + template("chatml").partition("%}")[2]
    rows = [[{"role": "system", "content": "In French."}, USER, ANSWER], [USER, ANSWER]]
    (tmp_path / "rows.jsonl").write_text("\n".join(json.dumps({"messages": row}) for row in rows))
    with pytest.raises(ConversationError, match=r"line 1: .*leaves out the system's text"):
        build_datastore(str(tmp_path / "rows.jsonl"), byte_tokenizer(no_system), tmp_path / "store")
    whole = build_datastore(str(tmp_path / "rows.jsonl"), byte_tokenizer(template("chatml")), tmp_path / "store")
    assert whole["conversations"] == 2


def test_a_prompt_does_not_end_with_the_end_of_an_answer():
    llama = ChatRenderer(byte_tokenizer(template("llama2")))
    with pytest.raises(
        ConversationError, match=r"last message is the assistant's, .*'assistant'.*; end with a user's or"
    ):
        llama.prompt([USER, ANSWER])
    assert llama.prompt([USER, ANSWER, USER])
    chatml = ChatRenderer(byte_tokenizer(template("chatml")))
    assert chatml.tokenizer.decode(chatml.prompt([USER, ANSWER])).endswith("<|im_end|>\n<|im_start|>assistant\n")


ELSE = "{% for m in messages %}{{ 'USER: ' + m.content if m.role == 'user' else 'ASSISTANT: ' + m.content + '</s>' }}"
ELSE += "{% endfor %}{{ ' ASSISTANT:' if add_generation_prompt }}"
BARE = "{% for m in messages %}{{ '<user>' + m.content + '<AI>' if m.role == 'user' else m.content }}{% endfor %}"


def test_a_first_system_text_that_is_closed_as_an_answer_is_refused():
    """MiniCPM's form puts it bare before all turns, as an answer too, which is meant."""
    rules = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello there."}]
    with pytest.raises(ConversationError, match="the role of a system turn, which it takes for an answer"):
        ChatRenderer(byte_tokenizer(ELSE)).prompt(rules)
    tokenizer = byte_tokenizer(BARE)
    assert tokenizer.decode(ChatRenderer(tokenizer).prompt(rules)) == "Be brief.<user>Hello there.<AI>"


@pytest.mark.parametrize("blank", ["", " ", "\n"])
@pytest.mark.parametrize("form", [*map(template, STYLES), ELSE, BARE])
def test_a_text_may_be_empty(form, blank):
    """As the system text of a user interface with an empty box; it is rendered as the template does, or refused."""
    tokenizer = byte_tokenizer(form)
    whole = [{"role": role, "content": "Hi"} for role in ("system", "user", "assistant", "user", "assistant", "tool")]
    for number in range(len(whole)):
        chat = [{**one, "content": blank} if place == number else one for place, one in enumerate(whole)]
        for messages in (chat[:2], chat[:4], chat[1:2], chat[1:4], chat):
            try:
                ids = ChatRenderer(tokenizer).prompt(messages)
            except ConversationError:
                assert form in (ELSE, BARE) or messages == chat or number in (1, 3)  # a tool's turn, a question
            else:
                said = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
                assert tokenizer.decode(ids) == said
        answered = [*chat[:2], {"role": "assistant", "content": "Yes"}]
        with suppress(ConversationError):
            ids, _ = ChatRenderer(tokenizer).conversation(answered)
            assert tokenizer.decode(ids) == tokenizer.apply_chat_template(answered, tokenize=False)
    system = ChatRenderer(byte_tokenizer(template("chatml"))).prompt([{"role": "system", "content": blank}, USER])
    assert system  # refused by none


@pytest.mark.parametrize("form", [ELSE.replace("{{ ' ASSISTANT:' if add_generation_prompt }}", ""), BARE])
def test_a_prompt_that_ends_with_an_answer_where_none_begins_after_it_is_refused(form):
    tokenizer = byte_tokenizer(form)
    chat = [{"role": "user", "content": "Hello there."}, {"role": "assistant", "content": "I am fine"}]
    with pytest.raises(ConversationError, match="begins no answer after it"):
        ChatRenderer(tokenizer).prompt(chat)
    assert ChatRenderer(tokenizer).prompt([*chat, {"role": "user", "content": "And then?"}])


@pytest.mark.parametrize("key", ["arguments", "parameters", "input", "args"])
def test_the_arguments_of_a_call_have_one_name_whoever_wrote_it(key):
    answer = {"role": "assistant", "content": "", "tool_calls": [{"name": "add", key: {"a": 1}}]}
    assert parse_record({"messages": [USER, answer]}).messages[1]["tool_calls"] == [
        {"name": "add", "arguments": {"a": 1}}
    ]
    answer["tool_calls"] = [{"type": "function", "function": {"name": "add", key: {"a": 1}, "x": "LOST"}}]
    with pytest.raises(ConversationError, match="the key 'x' of one of 'tool_calls' is unknown"):
        parse_record({"messages": [USER, answer]})


# ---- a template that cuts or rewrites a text --------------------------------------------------------------------

LONG = "Count the days of June and then those of July.\nAnswer with their sum."


@pytest.mark.parametrize("role", ["user", "system"])
@pytest.mark.parametrize(
    "shown,word",
    [
        ("m.content[:50]", "answer"),
        ("m.content.split('\\n')[0]", "answer"),
        ("m.content if 'June' not in m.content else ''", "count"),
        ("m.content.split('Ju')[-1]", "count"),
    ],
)
def test_a_template_that_cuts_a_text_by_what_it_says_is_refused(role, shown, word):
    cut = renderer(
        "{% for m in messages %}{{ m.role }}: "
        f"{{{{ ({shown}) if m.role == '{role}' else m.content }}}}{{{{ '<|end|>' }}}}"
        "{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}",
        "<|end|>",
    )
    messages = [{"role": "system", "content": "Be brief."}, USER]
    chat = [message | ({"content": LONG} if message["role"] == role else {}) for message in messages]
    for use in (lambda: cut.prompt(chat), lambda: cut.conversation([*chat, ANSWER])):
        with pytest.raises(ConversationError, match=f"(?i)leaves out a part of {role} turn 1, with '{word}'"):
            use()
    assert cut.prompt(messages) and cut.conversation([*messages, ANSWER])


def test_a_template_that_rewrites_a_text_or_reads_a_command_in_it_is_used():
    other = renderer(
        "{% for m in messages %}{{ m.role }}: "
        "{{ m.content.replace('/no_think', '').replace(\"{'reasoning': True}\", '').replace('<image>', '')"
        ".replace('\\n', ' ') | upper }}{{ '<|end|>' }}"
        "{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}",
        "<|end|>",
    )
    asked = [{"role": "system", "content": "/no_think"}, {"role": "user", "content": f"<image>{LONG} /no_think"}]
    assert LONG.replace("\n", " ").upper() in other.tokenizer.decode(other.prompt(asked))
    for text in ("二加二等于几？/no_think", "(/no_think) hi", "{'reasoning': True}", "Groß, İstanbul/no_think"):
        assert other.prompt([asked[0], {"role": "user", "content": text}])


def test_the_thoughts_of_an_earlier_answer_may_go():
    silent = renderer(
        "{% for m in messages %}{{ m.role }}: {{ m.content.split('</think>')[-1] if m.role == 'assistant' else "
        "m.content }}{{ '<|end|>' }}{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}",
        "<|end|>",
    )
    thought = {"role": "assistant", "content": "<think>French it is.</think>Salut"}
    assert "French" not in silent.tokenizer.decode(silent.prompt([USER, thought, USER]))


@pytest.mark.parametrize("key", ["context", "instruction", "input", "prompt", "question"])
def test_a_passage_that_an_answer_quotes_is_nowhere_in_its_question(key):
    row = {key: "The code is 42.", "messages": [USER, {"role": "assistant", "content": "The code is 42."}]}
    asked = {key: "Hi", "messages": row["messages"]}
    for generate in (False, True):
        assert not _sound_part("row 1", asked, generate)[2]
        (fault,) = _sound_part("row 1", row, generate)[2]
        assert fault.reason.startswith(f"the key '{key}' holds text that no turn has")
    said = row | {key: "", "output": "The code is 42."}
    assert not _sound_part("row 1", said)[2] and not _sound_part("row 1", said, True)[2]


def test_an_empty_setting_is_no_missing_one():
    """Llama 3.1's form writes a date of its own where none is given."""
    dated = renderer(
        "{% if not date_string is defined %}{% set date_string = '26 Jul' %}{% endif %}Today: {{ date_string }};"
        "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ '<|end|>' }}{% endfor %}",
        "<|end|>",
    )
    for value, told in (("", "Today: ;"), ("1 May", "Today: 1 May;"), (None, "Today: 26 Jul;")):
        row = {"messages": [USER, ANSWER], "chat_template_kwargs": {"date_string": value, "tools": "", "other": ""}}
        messages, extra = parse_record(row)
        assert dated.checked_text(messages, extra=extra).startswith(told)


def test_metadata_that_a_template_writes_beside_a_role_reaches_it(tmp_path):
    """GLM-4's form: the name of the tool that a turn calls."""
    form = "{% for m in messages %}<|start|>{{ m.role }} {{ m.metadata }}<|message|>{{ m.content }}<|end|>{% endfor %}"
    row = {"messages": [USER, ANSWER | {"metadata": "get_weather"}]}
    (tmp_path / "a.jsonl").write_text(json.dumps(row))
    messages, extra = conversation_of(read_conversations(str(tmp_path / "a.jsonl")).dataset[0])
    assert "assistant get_weather<|message|>Salut" in renderer(form, "<|end|>").checked_text(messages, extra=extra)
    plain = renderer(form.replace(" {{ m.metadata }}", ""), "<|end|>")
    ids, mask = plain.conversation(messages, extra)
    assert trained_runs(plain.tokenizer, ids, mask) == ["Salut<|end|>"]


def test_a_verdict_on_an_answer_is_no_note():
    for verdict in ({"is_error": True}, {"has_errors": "true"}, {"status": "incomplete"}, {"used_in_training": False}):
        for row in ({"messages": [USER, ANSWER | verdict]}, {"messages": [USER, ANSWER], **verdict}):
            with pytest.raises(ConversationError, match=f"the key '{next(iter(verdict))}'"):
                parse_record(row)
    parse_record({"messages": [USER, ANSWER | {"is_error": False, "used_in_training": True}]})


def test_answers_that_are_written_anew_may_have_any_form():
    parts = [{"type": "thinking", "thinking": "Hm."}, {"type": "text", "text": "Salut"}]
    united = {"from": "gpt", "value": "x", "content": None}  # as Arrow joins files of two forms
    asked = {"conversations": [{"from": "human", "value": "Hi", "content": None}, united]}
    assert _sound_part("row 1", asked, True)[1:] == _sound_part("row 1", asked, False)[1:]
    for content in (parts, 42, [{"type": "image_url", "image_url": {"url": "x"}}]):
        row = {"messages": [USER, {"role": "assistant", "content": content}, {"role": "user", "content": "More"}]}
        conversation = _sound_part("row 1", row, True)[1]
        assert [turn["content"] for turn in conversation.messages] == ["Hi", "", "More"]
        assert _sound_part("row 1", row)[2]
