"""What a row says beside the roles and texts of its turns is used, or known to mean nothing, or refused by name."""

import json
from operator import attrgetter

import datasets
import pytest

from draft_heads.data.text.conversations import ConversationError, conversation_of, read_conversations
from draft_heads.data.text.rendering import ChatRenderer
from draft_heads.data.text.row_keys import prompt_messages
from tests.tiny_chat import byte_tokenizer, load_conversations, render_prompt, template, trained_runs

USER, ANSWER = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Salut"}
PAIR = [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Salut"}]
FRENCH = {"role": "system", "content": "Answer in French."}
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"a": {"type": "integer", "default": None}}}}]
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": None}}}


def read(tmp_path, *rows, **options):
    """What a file of these rows holds: (the conversations, its bad rows as text)."""
    file = tmp_path / "rows.json"
    file.write_text(json.dumps(rows))
    loaded = read_conversations(str(file), **options)
    return [tuple(conversation_of(row)) for row in loaded.dataset], [str(bad) for bad in loaded.bad_rows]


def test_a_system_text_beside_the_turns_is_the_first_message(tmp_path):
    for key in ("system", "system_prompt", "system_message"):
        rows = [{key: "Answer in French.", "conversations": PAIR}, {"messages": [USER, ANSWER], key: ""}]
        assert read(tmp_path, *rows)[0] == [([FRENCH, USER, ANSWER], {}), ([USER, ANSWER], {})]
    twice = {"system": "Answer in French.", "messages": [FRENCH, USER, ANSWER]}
    assert read(tmp_path, twice)[0] == [([FRENCH, USER, ANSWER], {})]
    for other in (twice | {"system": "No."}, {"system": "a", "system_prompt": "b", "conversations": PAIR}):
        with pytest.raises(ConversationError, match=r"rows\.json, row 1: a row has one system text, received"):
            read(tmp_path, other)


def test_further_arguments_of_the_chat_template_are_kept_with_the_conversation(tmp_path):
    chat = {"messages": [USER, ANSWER]}
    documents = [{"title": "t", "text": "x"}]
    rows = [
        chat | {"tools": TOOLS},
        chat | {"tools": json.dumps(TOOLS)},
        chat | {"functions": [TOOLS[0]["function"]]},
        chat | {"chat_template_kwargs": {"tools": TOOLS, "enable_thinking": False, "other": None}},
        chat | {"documents": documents, "tools": []},
        chat | {"reasoning_effort": "low", "tools": "[]"},
        chat,
    ]
    found = [extra for _, extra in read(tmp_path, *rows)[0]]
    tools = {"tools": TOOLS}
    assert found == [
        *(tools, tools, tools, tools | {"enable_thinking": False}),
        *({"documents": documents}, {"reasoning_effort": "low"}, {}),
    ]


def test_what_a_turn_has_reaches_the_message_and_what_means_nothing_does_not(tmp_path):
    thought = {**ANSWER, "reasoning_content": "French it is."}
    openai = {"role": "assistant", "content": None, "tool_calls": [{"id": "c1", **CALL, "index": None}]}
    openai["tool_calls"][0]["function"] = CALL["function"] | {"arguments": json.dumps(CALL["function"]["arguments"])}
    result = {"role": "tool", "content": "1", "tool_call_id": "c1"}
    turns = [{**USER, "name": "Bo", "timestamp": 3}, openai, result, {**thought, "refusal": None, "score": 0.5}]
    found, bad = read(tmp_path, {"messages": turns, "source": "s", "model": "m", "conversation_hash": "h"})
    calls = [{"id": "c1", **CALL}]
    called = {"role": "assistant", "content": "", "tool_calls": calls}
    assert found == [([{**USER, "name": "Bo"}, called, result, thought], {})] and not bad


def test_parts_that_are_texts_are_a_text(tmp_path):
    parts = [{"type": "text", "text": "Hi."}, {"type": "text", "text": "You?", "image_url": None}]
    asked = USER | {"content": "Hi.You?"}
    assert read(tmp_path, {"messages": [USER | {"content": parts}, ANSWER]})[0] == [([asked, ANSWER], {})]
    image = [*parts, {"type": "image_url", "image_url": {"url": "x"}}]
    with pytest.raises(ConversationError, match=r"the parts of a turn are texts, received image_url \(turn 1\)"):
        read(tmp_path, {"messages": [USER | {"content": image}, ANSWER]})


@pytest.mark.parametrize("key", ["weight", "train", "training", "loss"])
def test_turns_that_are_not_to_be_trained_on_are_marked(tmp_path, key):
    no, yes = (0, 1) if key == "weight" else (False, True)
    turns = [PAIR[0] | {key: no}, PAIR[1] | {key: no}, PAIR[0] | {key: None}, PAIR[1] | {key: yes}]
    assert read(tmp_path, {"conversations": turns})[0] == [([USER, ANSWER | {"trained": False}, USER, ANSWER], {})]
    for turns, reason in [
        ([PAIR[0], PAIR[1] | {key: no}], "no answer is to be trained on"),
        ([PAIR[0], PAIR[1] | {key: 0.5}], rf"'{key}' of a turn is true, false, 1 or 0, received 0.5 \(turn 2\)"),
        ([PAIR[0] | {key: yes}, PAIR[1]], rf"'{key}' asks for a user turn to be trained on, .*\(turn 1\)"),
    ]:
        with pytest.raises(ConversationError, match=reason):
            read(tmp_path, {"conversations": turns})


REFUSED = [
    ({"context": "In 1789 …"}, "'context' holds text that no turn has"),
    ({"instruction": "Be brief."}, "'instruction' holds text that no turn has"),
    ({"context": "Passage: Salut is French. Question: Hi"}, "'context' holds text that no turn has"),
    ({"prompt": "You are a pirate. Always rhyme. Hi Salut"}, "'prompt' holds text that no turn has"),
    ({"prompt": [ANSWER | {"weight": 0}]}, "'prompt' holds turns that are not the row's first or last"),
    ({"text": "<|user|>Hi<|assistant|>Salut!"}, "'text' holds text that no turn has"),
    ({"text": "<|user|><image>Hi<|assistant|>Salut"}, "'text' holds text that no turn has"),
    ({"question": "User: Hi"}, "'question' holds text that no turn has"),
    ({"response": "Salut Hi"}, "'response' holds text that no turn has"),
    ({"tools": '[{"name": "add", "name": "sub"}]'}, "'tools' is JSON in which an object has a key twice .*'name'"),
    ({"image": "a.png"}, "'image' changes the text or the mask, and nothing reads it"),
    ({"chosen": [USER]}, "'chosen' changes"),
    ({"attachment_url": "x.pdf"}, "'attachment_url' changes the text or the mask"),
    ({"is_rejected": True}, "'is_rejected' changes the text or the mask"),
    ({"label": False}, "'label' changes the text or the mask"),
    ({"tools": "add(a, b)"}, "'tools' is text that is no JSON"),
    ({"tools": "{}"}, "'tools' is a list of objects, received dict"),
    ({"tools": ['{"name"']}, "'tools' is a list of objects, received a list with '{\"name\"'; write each as an object"),
    ({"conversations": "[]"}, "the turns are a list, received str; write them as one, in JSONL"),
    ({"label": 0}, "'label' changes the text or the mask"),
    ({"meta": {"system_prompt": "Rhyme."}}, "'system_prompt' in 'meta' changes the text or the mask"),
    ({"metadata": ' {"seed": 3, "tools": [{"name": "add"}]}'}, "'tools' in 'metadata' changes the text or the mask"),
    ({"metadata": {"persona": "a pirate"}}, "'persona' in 'metadata' changes the text or the mask"),
    ({"meta": '{"made": [{"context": "In 1789"}]}'}, "'context' in 'meta' changes the text or the mask"),
    ({"sources": [{"title": "T", "text": "A long passage"}]}, "'text' in 'sources' changes the text or the mask"),
    ({"task": "Translate to French."}, "'task' holds text that no turn has"),
    ({"info": ["Always answer in French:"]}, "'info' holds text that no turn has"),
    ({"subtask": "用法语回答。"}, "'subtask' holds text that no turn has"),
    ({"task": "फ़्रेंच में उत्तर दो।"}, "'task' holds text that no turn has"),
    ({"task": "ဖြေပါ။"}, "'task' holds text that no turn has"),
    ({"task": "ہمیشہ فرانسیسی میں جواب دیں۔"}, "'task' holds text that no turn has"),
    ({"source": "word " * 21}, "'source' holds text that no turn has"),
    ({"chat_template_kwargs": {"add_generation_prompt": True}}, "'add_generation_prompt' among"),
    ({"weight": 0.5}, "a row's 'weight' is 1 or true, received 0.5"),
    ({"tools": TOOLS, "functions": [{"name": "sub"}]}, "one value of 'tools', received two that differ"),
]


@pytest.mark.parametrize(("key", "reason"), REFUSED)
def test_a_row_whose_text_would_be_lost_is_refused_or_dropped_and_counted(tmp_path, key, reason):
    row = {"conversations": PAIR} | key
    with pytest.raises(ConversationError, match=rf"row 2: .*{reason}"):
        read(tmp_path, {"conversations": PAIR}, row)
    found, bad = read(tmp_path, {"conversations": PAIR}, row, skip_bad_rows=True)
    assert len(found) == 1 and len(bad) == 1 and bad[0].startswith("row 2: ")


def test_an_unknown_key_is_refused_by_name_or_left_out_and_counted_by_name(tmp_path):
    rows = [
        {"persona": "a pirate", "conversations": [PAIR[0] | {"mood": "glad"}, PAIR[1]]},
        {"messages": [USER, ANSWER]},
    ]
    with pytest.raises(ConversationError, match=r"row 1: the key 'mood' is unknown \(turn 1\)"):
        read(tmp_path, *rows)
    found, bad = read(tmp_path, *rows, skip_bad_rows=True)
    assert [messages for messages, _ in found] == [[USER, ANSWER]] * 2
    assert bad == ["row 1: the key 'mood' is unknown (turn 1)", "row 1: the key 'persona' is unknown"]


@pytest.mark.parametrize(
    "further",
    [
        {"knowledge": "Austen wrote Emma."},
        {"knowledge": "Austen wrote Emma.", "intent": None, "difficulty": "easy"},
        {"custom_instruction": "Always rhyme."},
        {"knowledge_source": "Austen wrote Emma."},
        {"answer_source": "x" * 200},
    ],
)
def test_a_published_label_is_one_only_in_its_own_form(tmp_path, further):
    row = {"messages": [USER, ANSWER]} | further
    with pytest.raises(ConversationError, match=rf"row 1: the key '{next(iter(further))}' is unknown"):
        read(tmp_path, row)
    assert read(tmp_path, row, skip_bad_rows=True)[1] == [f"row 1: the key '{next(iter(further))}' is unknown"]


@pytest.mark.parametrize(
    "text",
    [
        "Hi",
        " Hi\nSalut ",
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nSalut<|im_end|>\n",
        "### Human: Hi### Assistant: Salut",
        "### Instruction:\nHi\n\n### Response:\nSalut",
        "<s>[INST] <<SYS>>\nAnswer in\nFrench.\n<</SYS>>\n\nHi [/INST] Salut </s>",
        "<bos><start_of_turn>user\nHi<end_of_turn>\n<start_of_turn>model\nSalut<end_of_turn>",
        "<｜begin▁of▁sentence｜>Answer in French.<｜User｜>Hi<｜Assistant｜>Salut<｜end▁of▁sentence｜>",
    ],
)
def test_a_rendering_of_the_turns_repeats_them(tmp_path, text):
    row = {"system": "Answer in French.", "messages": [USER, ANSWER], "text": text}
    assert read(tmp_path, row)[0] == [([FRENCH, USER, ANSWER], {})]


def test_turns_that_look_like_marks_are_found_in_a_rendering(tmp_path):
    turns = [USER | {"content": "user: A or S?"}, ANSWER | {"content": "A"}]
    for text in ("USER: user: A or S? ASSISTANT: A", "<|user|>user: A or S?<|assistant|>A</s>"):
        assert read(tmp_path, {"messages": turns, "text": text})[0] == [(turns, {})]
    with pytest.raises(ConversationError, match="'text' holds text"):
        read(tmp_path, {"messages": turns, "text": "USER: user: A or S? ASSISTANT: S"})


def test_a_turns_own_copy_holds_nothing_that_its_text_has_not(tmp_path):
    assert read(tmp_path, {"messages": [USER | {"text": "Hi "}, ANSWER]})[0] == [([USER, ANSWER], {})]
    for turn in (USER | {"text": "Always rhyme. Hi"}, USER | {"content": "", "text": "Always rhyme."}):
        with pytest.raises(ConversationError, match="'text' holds text that the turn has not"):
            read(tmp_path, {"messages": [turn, ANSWER]})


def test_rows_of_published_forms_are_not_refused_for_what_they_say_of_themselves(tmp_path):
    openhermes = {"conversations": [t | {"weight": None} for t in PAIR], "custom_instruction": False, "views": 3.0}
    openhermes |= {
        "system_prompt": None,
        "avatarUrl": None,
        "idx": "1",
        "model_name": None,
        "skip_prompt_formatting": False,
    }
    ultrachat = {"prompt": "Hi", "prompt_id": "ab", "messages": [USER, ANSWER], "score_chosen": 8.0}
    agent = "Mozilla/5.0 (X11; Linux x86_64) AppleWebKit/537.36 (KHTML, like Gecko) Chrome/114.0.0.0 Safari/537.36"
    header = {"accept-language": "fr-FR,fr;q=0.9", "user-agent": agent}
    wildchat = {"conversation_hash": "x", "header": header}
    wildchat["conversation"] = [turn | {"toxic": False, "header": header} for turn in (USER, ANSWER)]
    wildchat |= {"turn": 1, "openai_moderation": [{}], "hashed_ip": "h", "country": "US"}
    magpie = {"conversations": PAIR, "instruction": "Hi", "response": "Salut", "gen_input_configs": {"temperature": 1}}
    magpie |= {"intent": "to greet", "knowledge": "Some French.", "difficulty": "easy", "input_quality": "good"}
    rendered = {"messages": [USER, ANSWER], "text": "<|user|>Hi<|assistant|>Salut</s>", "prompt": [USER]}
    rendered |= {"completion": [ANSWER], "source": "web"}
    found, bad = read(tmp_path, openhermes, ultrachat, wildchat, magpie, rendered)
    assert found == [([USER, ANSWER], {})] * 5 and not bad


def test_two_lists_of_turns_are_one_or_refused(tmp_path):
    assert read(tmp_path, {"messages": [USER, ANSWER], "conversations": PAIR})[0] == [([USER, ANSWER], {})]
    with pytest.raises(ConversationError, match="'conversations' and 'messages', which differ"):
        read(tmp_path, {"messages": [USER, ANSWER], "conversations": PAIR * 2})


def test_a_dataset_folder_of_both_forms_and_of_all_keys_is_read_as_its_rows_are(tmp_path):
    rows = [
        {"system": "Answer in French.", "conversations": [*PAIR, PAIR[0], PAIR[1] | {"weight": 0}]},
        {"messages": [USER, {**ANSWER, "reasoning_content": "Hm."}], "tools": json.dumps(TOOLS)},
        {"messages": [USER, {"role": "assistant", "content": None, "tool_calls": [CALL]}]},
    ]
    expected, _ = read(tmp_path, *rows)
    saved = tmp_path / "saved"
    load_conversations(str(tmp_path / "rows.json")).save_to_disk(saved)  # as this project stores them
    assert [tuple(conversation_of(row)) for row in load_conversations(str(saved))] == expected
    columns = {key: [row.get(key) for row in rows[:2]] for key in ("system", "conversations", "messages", "tools")}
    datasets.Dataset.from_dict(columns).save_to_disk(tmp_path / "filled")  # each row has the columns of all
    again = load_conversations(str(tmp_path / "filled"))
    assert [tuple(conversation_of(row)) for row in again] == expected[:2]


def test_a_null_reads_alike_from_a_file_and_from_its_folder(tmp_path):
    row = {"messages": [USER, {"role": "assistant", "content": None, "tool_calls": [CALL]}], "tools": TOOLS}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row))
    for source in (tmp_path / "rows.jsonl", tmp_path):
        (messages, extra) = conversation_of(load_conversations(str(source))[0])
        assert messages == [USER, {"role": "assistant", "content": "", "tool_calls": [CALL]}]
        assert extra["tools"] == TOOLS


def test_another_channel_or_recipient_than_the_answers_is_refused(tmp_path):
    final = ANSWER | {"channel": "final", "recipient": "all"}
    assert read(tmp_path, {"messages": [USER, final]})[0] == [([USER, ANSWER], {})]
    for key, value in (("channel", "analysis"), ("recipient", "python")):
        row = {"messages": [USER, ANSWER, USER, ANSWER | {key: value}]}
        with pytest.raises(ConversationError, match=rf"'{key}' of a turn changes the text .*\(turn 4\)"):
            read(tmp_path, row)
        assert len(read(tmp_path, row, skip_bad_rows=True)[0][0][0]) == 3


def test_rows_that_differ_only_beside_their_turns_are_no_repeats(tmp_path):
    rows = [
        {"messages": [USER]},
        {"system": "Answer in French.", "messages": [USER]},
        {"tools": TOOLS, "messages": [USER]},
    ]
    rows += [{"messages": [USER | {"name": "Bo"}]}, {"messages": [USER, ANSWER, USER, ANSWER]}]
    rows += [{"messages": [USER, ANSWER | {"weight": 0}, USER, ANSWER]}]
    repeats = [{"conversations": PAIR}, {"messages": [USER, ANSWER | {"reasoning_content": "Hm."}]}]
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join(map(json.dumps, rows + repeats)))
    loaded = read_conversations(str(file), asked=attrgetter("key"))
    assert (len(loaded.dataset), loaded.repeated) == (6, 2)


def test_prompts_alone_are_rows_where_the_target_answers(tmp_path):
    rows = [{"messages": [USER]}, {"prompt": "What?"}, {"prompt": [USER | {"content": "Who?"}], "id": 7}]
    rows += [{"conversations": [PAIR[0] | {"value": "Why?"}, {"from": "gpt", "value": ""}]}]
    found, bad = read(tmp_path, *rows, asked=attrgetter("key"))
    assert [messages[0]["content"] for messages, _ in found] == ["Hi", "What?", "Who?", "Why?"] and not bad
    with pytest.raises(ConversationError, match="row 1: the conversation has no assistant turn"):
        read(tmp_path, *rows)


def test_a_conversation_with_tools_is_answered_up_to_the_first_result(tmp_path):
    row = {"messages": [USER, ANSWER | {"tool_calls": [CALL]}, {"role": "tool", "content": "1"}, ANSWER]}
    assert len(read(tmp_path, row)[0][0][0]) == 4
    with pytest.raises(ConversationError, match=r"a tool turn: the target, which answers anew, .* \(turn 3\)"):
        read(tmp_path, row, asked=attrgetter("key"))
    found, _ = read(tmp_path, row, asked=attrgetter("key"), skip_bad_rows=True)
    assert [turn["role"] for turn in found[0][0]] == ["user", "assistant"]


# ---- what the chat template reads ----------------------------------------------------------------------------

READS = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
    "{% if m.reasoning_content and loop.last %}{{ '<think>' + m.reasoning_content + '</think>' }}{% endif %}"
    "{{ m.content }}{% if m.tool_calls %}{{ m.tool_calls | tojson }}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
    "{% if enable_thinking is defined and not enable_thinking %}{{ '<think></think>' }}{% endif %}{% endif %}"
)
THOUGHT = ANSWER | {"reasoning_content": "Hm."}


@pytest.mark.parametrize(
    ("messages", "extra", "name"),
    [
        ([USER, ANSWER], {"tools": TOOLS}, "tools"),
        ([USER, THOUGHT], {}, "reasoning_content"),
        ([USER, ANSWER | {"tool_calls": [CALL]}], {}, "tool_calls"),
        ([USER, ANSWER], {"enable_thinking": True}, "enable_thinking"),
        ([USER, THOUGHT, USER, ANSWER], {}, "reasoning_content"),  # of an earlier turn
    ],
)
def test_a_key_that_the_chat_template_does_not_read_is_refused_for_that_target(messages, extra, name):
    assert ChatRenderer(byte_tokenizer(READS)).conversation(messages, extra)[0]
    plain = ChatRenderer(byte_tokenizer(template("chatml")))
    for render in (plain.conversation, plain.prompt):
        with pytest.raises(ConversationError, match=f"does not read '{name}', .*pass a chat_template"):
            render(messages, extra)


def test_a_name_that_no_template_reads_is_refused_but_of_a_tools_result():
    result = {"role": "tool", "content": "1", "name": "add", "tool_call_id": "c1"}
    renderer = ChatRenderer(byte_tokenizer(READS))
    assert renderer.conversation([USER, ANSWER | {"tool_calls": [CALL]}, result, ANSWER])[0]
    with pytest.raises(ConversationError, match="does not read 'name'"):
        renderer.conversation([USER | {"name": "Bo"}, ANSWER])


@pytest.mark.parametrize("gap", ["\n", ""], ids=["line break", "nothing"])
@pytest.mark.parametrize("thought", ["", "<think>\n\n</think>\n\n"], ids=["", "thought"])
def test_an_answer_of_calls_alone_is_trained_on_whatever_stands_between_text_and_calls(gap, thought):
    between = "{% if m.content %}{{ " + json.dumps(gap) + " }}{% endif %}"
    last = "{% if loop.last and m.role == 'assistant' %}{{ " + json.dumps(thought) + " }}{% endif %}{{ m.content }}"
    form = READS.replace("{{ m.tool_calls", between + "{{ m.tool_calls").replace("{{ m.content }}", last)
    tokenizer = byte_tokenizer(form)
    chat = [USER, {"role": "assistant", "content": "", "tool_calls": [CALL]}, {"role": "tool", "content": "1"}, ANSWER]
    ids, mask = ChatRenderer(tokenizer).conversation(chat)
    called, answer = trained_runs(tokenizer, ids, mask)
    assert (called, answer) == (json.dumps([CALL]) + "<|im_end|>", "Salut<|im_end|>")
    ids, mask = ChatRenderer(tokenizer).conversation(chat[:2])
    assert trained_runs(tokenizer, ids, mask) == [json.dumps([CALL]) + "<|im_end|>"]


def test_a_marked_turn_is_rendered_and_not_trained(tmp_path):
    turns = [*PAIR, PAIR[0], PAIR[1] | {"value": "Non.", "weight": 0}, PAIR[0], PAIR[1] | {"value": "Oui."}]
    tokenizer = byte_tokenizer(template("chatml"))
    (messages, extra), *_ = read(tmp_path, {"conversations": turns})[0]
    ids, mask = ChatRenderer(tokenizer).conversation(messages, extra)
    assert trained_runs(tokenizer, ids, mask) == ["Salut<|im_end|>", "Oui.<|im_end|>"]
    assert "Non." in tokenizer.decode(ids)


def test_prompts_of_server_and_chat_obey_the_same_list():
    known = [{"role": "developer", "content": "x"}, USER | {"id": 3, "name": None}]
    assert prompt_messages(known) == [{"role": "system", "content": "x"}, USER]
    for wrong, reason in [
        (USER | {"mood": 1}, "'mood' is unknown; leave it out"),
        (ANSWER | {"weight": 0}, "'weight' is for training; leave it out"),
        (USER | {"context": "x"}, "'context' holds text that the turn has not"),
        (USER | {"content": [{"type": "image"}]}, "parts of a turn are texts, received image"),
        ({"role": "critic", "content": "x"}, "the role 'critic' is none of"),
        ("Hi", "a turn is an object, received str"),
    ]:
        with pytest.raises(ConversationError, match=reason):
            prompt_messages([wrong])


def test_a_prompt_has_the_tools_of_its_conversation():
    tokenizer = byte_tokenizer(READS)
    with_tools = tokenizer.decode(render_prompt(tokenizer, [USER], {"tools": TOOLS}))
    assert '"name": "add"' in with_tools and with_tools.endswith(tokenizer.decode(render_prompt(tokenizer, [USER])))


def test_what_is_empty_or_off_is_absent_at_every_depth(tmp_path):
    chat = {"messages": [USER, ANSWER]}
    off = {"thinking": "", "custom_instructions": "", "enable_thinking": False, "python_tools": [], "xml_tools": []}
    rows = [
        chat | {"chat_template_kwargs": off},  # as SmolTalk2 has it
        {"messages": [USER, ANSWER | {"tool_calls": "[]", "prefix": False}], "train_on_inputs": False},
        chat | {"conversations": []},
        {"messages": [], "conversations": PAIR},
        chat | {"label": True, "is_rejected": False, "row_source": "web", "num_turns": 2, "score_ids": ["a-1", 2]},
    ]
    found = [extra for messages, extra in read(tmp_path, *rows)[0] if messages == [USER, ANSWER]]
    assert found == [{"custom_instructions": "", "enable_thinking": False}, {}, {}, {}, {}]
    with pytest.raises(ConversationError, match="is a text, 'false'; write true or false unquoted"):
        read(tmp_path, chat | {"chat_template_kwargs": {"clear_thinking": "false"}})
    with pytest.raises(ConversationError, match="an empty answer"):
        read(tmp_path, {"messages": [USER, {"role": "assistant", "content": "", "tool_calls": "[]"}]})
