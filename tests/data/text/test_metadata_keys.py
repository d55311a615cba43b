"""Which keys say nothing of the text, by the words of their names, and which repeat a turn."""

import json
from operator import attrgetter

import pytest

from draft_heads.data.text.benchmarks import BenchmarkError, load_benchmark
from draft_heads.data.text.conversations import ConversationError, parse_record, read_conversations
from draft_heads.data.text.metadata_keys import carries_no_meaning
from draft_heads.data.text.row_keys import further_of_row

CHAT = [{"role": "user", "content": "Add 1 and 2."}, {"role": "assistant", "content": "Their sum is 3."}]

WANTED = ("label", "is_chosen", "is_preferred", "is_correct", "is_good", "is_accepted", "is_selected", "is_complete")
UNWANTED = ("is_rejected", "is_bad", "is_wrong", "is_spam", "is_deleted", "deleted", "is_truncated", "truncated")


@pytest.mark.parametrize(
    "keys",
    [
        "source_url page_url user_id conversation_id prompt_id message_tree_id parent_id original_question_ids row_id",
        "answer_source row_hash turn_count is_english has_code num_turns id url task_category langdetect problem_type",
        "openai_id token_counter top_p system_fingerprint used_in chosen_model rejected_model",
    ],
)
def test_ids_and_addresses_of_the_row_itself_say_nothing_of_its_text(keys):
    for key in keys.split():
        assert carries_no_meaning(key, "a1") and parse_record({"messages": CHAT, key: "a1"}).messages == CHAT


def test_the_tags_of_magpie_say_nothing_of_the_text():
    """Its categories are words with blanks, and each tag names the model that gave it."""
    tags = {"task_category": "Information seeking", "other_task_category": ["Creative writing", "Advice seeking"]}
    tags |= {"gen_response_configs": {"temperature": 0.0}, "pre_query_template": "<|im_start|>user\n"}
    made_by = {f"{tag}_generator": "some/model" for tag in ("task_category", "difficulty", "quality")}
    row = {"instruction": CHAT[0]["content"], "response": CHAT[1]["content"], "messages": CHAT, "repeat_count": 3}
    assert parse_record(row | tags | made_by).messages == CHAT
    with pytest.raises(ConversationError, match="the key 'story_generator' is unknown"):
        parse_record(row | {"story_generator": "Begin with a dragon."})


def test_notes_that_hold_words_are_listed(tmp_path, caplog):
    rows = [{"messages": CHAT, "title": "My chat", "source": "web"}, {"messages": CHAT, "topics": ["Sums", "Two sums"]}]
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps(row) for row in [*rows, rows[0] | {"id": "a b c"}]))
    read_conversations(str(tmp_path / "a.jsonl"))
    (told,) = caplog.messages
    assert told.endswith("taken for notes on the texts of rows, and not read: 'title' of 2, 'topics' of 1")
    caplog.clear()
    (tmp_path / "a.jsonl").write_text(json.dumps({"messages": CHAT, "source": "web", "num_turns": 2, "score": 0.5}))
    read_conversations(str(tmp_path / "a.jsonl"))
    assert not caplog.messages


def test_the_index_of_a_table_says_nothing_and_its_other_columns_without_a_name_may():
    index = {"Unnamed: 0": 7, "Unnamed: 0.1": "7", "__index_level_1__": 3}
    assert parse_record({"messages": CHAT} | index).messages == CHAT
    assert not carries_no_meaning("Unnamed: 0", "A rhyme, please.") and not carries_no_meaning("Unnamed: 2", 7)


def test_ids_and_addresses_of_what_the_text_may_be_about_are_unknown():
    names = "img gif media file pdf document context user_img attachment"
    for key in [f"{name}_{end}" for name in names.split() for end in ("id", "ids", "url")]:
        assert not carries_no_meaning(key, "a1")
        for row in ({"messages": CHAT, key: "a1"}, {"messages": [CHAT[0] | {key: "a1"}, CHAT[1]]}):
            with pytest.raises(ConversationError, match=f"the key '{key}' (is unknown|.*changes the text)"):
                parse_record(row)


def test_a_question_about_a_file_is_no_question_of_a_benchmark(tmp_path):
    (tmp_path / "a.jsonl").write_text(json.dumps({"turns": ["Describe"], "img_url": "http://x/c.png"}))
    with pytest.raises(BenchmarkError, match="'img_url' is unknown; take it out"):
        load_benchmark("mine", str(tmp_path / "a.jsonl"))


@pytest.mark.parametrize("key", ["system", "system_prompt", "reasoning", "tools", "tool_calls"])
def test_metadata_that_holds_what_a_row_is_read_for_is_refused(key):
    for row in (
        {"messages": CHAT, "metadata": {key: "Rhyme."}},
        {"messages": CHAT, "metadata": {"origin": [{"settings": {key: "Rhyme."}}]}},
        {"messages": CHAT, "metadata": {"origin": json.dumps([{key: "Rhyme."}])}},
        {"messages": [CHAT[0], CHAT[1] | {"meta": {key: ["x"]}}]},
        {"messages": [CHAT[0], CHAT[1] | {"meta": json.dumps({key: ["x"]})}]},
    ):
        with pytest.raises(ConversationError, match=f"'{key}' in '(metadata|meta)' .*changes the text"):
            parse_record(row)
    none = {key: None, "name": "web", "reasoning": True}
    for metadata in (none, json.dumps(none), json.dumps([none]), "{" + key, '{"a": 1, "a": 2}', "web"):
        assert parse_record({"messages": CHAT, "metadata": metadata}).messages == CHAT


def test_a_text_under_any_key_may_repeat_a_turn():
    numina = {"problem": "Add 1 and 2.", "solution": "Their sum\nis 3."}
    assert parse_record({"messages": CHAT} | numina).messages == CHAT
    assert parse_record({"messages": [CHAT[0] | {"raw": "Add 1 and 2."}, CHAT[1]]}).messages == CHAT
    with pytest.raises(ConversationError, match="'solution' is unknown"):
        parse_record({"messages": CHAT, "solution": "4"})


def test_answers_beside_a_prompt_are_counted_and_not_read_where_the_target_answers(tmp_path, caplog):
    rows = [{"prompt": "a", "answer": "3"}, {"prompt": "b", "answer": "4", "ground_truth": "4"}]
    rows.append({"prompt": CHAT[:1], "completion": CHAT[1:]})
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    assert len(read_conversations(str(tmp_path / "a.jsonl"), asked=attrgetter("key")).dataset) == 3
    counted = [message.partition(": ")[2].partition(";")[0] for message in caplog.messages]
    assert counted == ["rows with 'answer': 2", "rows with 'ground_truth': 1", "rows with 'completion': 1"]
    with pytest.raises(ConversationError, match="line 1: the key 'answer' holds text that no turn has"):
        read_conversations(str(tmp_path / "a.jsonl"))


@pytest.mark.parametrize(
    ("beside", "told"),
    [
        ({"answer": "3"}, True),  # stands in the answer, as a word
        ({"answer": "Their  sum"}, True),
        ({"question": "1 and 2"}, True),
        ({"answer": "4"}, False),
        ({"answer": "um is"}, False),
        ({"answer": "sum is 3. And more"}, False),
        ({"reasoning": "on"}, True),
        ({"reasoning": "They are added."}, False),
        ({"src_id": "a-1", "multiturn": False, "datasplit": "eval"}, True),
    ],
)
def test_a_text_that_stands_in_a_turn_is_told_by_it(beside, told):
    if told:
        assert parse_record({"messages": CHAT, **beside}).messages == CHAT
    else:
        with pytest.raises(ConversationError, match=r"holds text that no turn has|is unknown"):
            parse_record({"messages": CHAT, **beside})


def test_labels_and_metadata_that_repeats_the_turns_say_nothing():
    for more in (
        {"task": "question answering", "source": "Stack Exchange", "topic": "Travel to France", "info": {"n": 3}},
        {"source": "Alice et al. (2020).", "topics": ["Who is Alan Turing?"], "info": {"instruction": "Add 1 and 2."}},
        {"metadata": {"instruction": "Add 1 and 2.", "context": ""}, "sources": ["https://a.b/c?d=1 (2023)"]},
    ):
        assert parse_record({"messages": CHAT, **more}).messages == CHAT


PASSAGE = "一七八九年" * 13  # 65 characters, none of them a blank or the end of a sentence


@pytest.mark.parametrize("key", ["source", "topics", "info"])
def test_a_passage_without_blanks_is_a_passage(key):
    for value in (PASSAGE, [["web"], [PASSAGE]]):
        with pytest.raises(ConversationError, match=f"'{key}' holds text that no turn has"):
            parse_record({"messages": CHAT, key: value})
    labels = [
        "数学",
        "百科全书：法国大革命",
        "中华人民共和国住房和城乡建设部关于印发建筑工程施工许可管理办法的通知全文附件",
    ]
    labels += [
        "Математика: теория вероятностей и математическая статистика",
        "https://ja.wikipedia.org/wiki/" + "大戦" * 40,
    ]
    for value in labels:
        assert parse_record({"messages": CHAT, key: value}).messages == CHAT


def test_a_short_value_of_a_key_by_form_has_no_sentence_in_any_script():
    for value in ("把下面的句子翻译成英文。", PASSAGE, {"a": [PASSAGE]}):
        with pytest.raises(ConversationError, match="'prompt_source' is unknown"):
            parse_record({"messages": CHAT, "prompt_source": value})
    assert parse_record({"messages": CHAT, "prompt_source": "百科全书"}).messages == CHAT


@pytest.mark.parametrize("key", [*WANTED, *UNWANTED])
def test_an_answer_that_is_not_wanted_is_refused_however_a_row_says_so(key):
    wanted = key in WANTED
    words = [("Yes", "n")] if key != "label" else []  # there they may be classes
    for yes, no in [(True, False), (1, 0), ("true", "False"), ("1", "0"), *words]:
        good, bad = ({key: yes}, {key: no}) if wanted else ({key: no}, {key: yes})
        assert parse_record({"messages": CHAT, **good}).messages == CHAT
        assert parse_record({"messages": [CHAT[0], CHAT[1] | good]}).messages == CHAT
        for row in ({"messages": CHAT, **bad}, {"messages": [CHAT[0], CHAT[1] | bad]}):
            with pytest.raises(ConversationError, match=f"'{key}' .*changes the text or the mask"):
                parse_record(row)
        assert parse_record({"messages": [CHAT[0] | bad, CHAT[1]]}).messages == CHAT  # of the question


@pytest.mark.parametrize("value", ["incorrect", -1, "maybe", "NOT"])
def test_what_is_said_of_an_answer_in_other_words_is_refused(value):
    with pytest.raises(ConversationError, match="'is_correct' changes the text or the mask"):
        parse_record({"messages": CHAT, "is_correct": value})
    assert parse_record({"messages": CHAT, "label": value}).messages == CHAT  # names, in most datasets
    assert parse_record({"messages": CHAT, "is_correct": None}).messages == CHAT


def test_what_is_said_of_a_recorded_answer_asks_nothing_where_the_target_writes_it_anew(tmp_path):
    rows = [{"messages": CHAT, "is_correct": False}, {"messages": [CHAT[0], CHAT[1] | {"label": False}]}]
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps(row | {"id": n}) for n, row in enumerate(rows)))
    assert len(read_conversations(str(tmp_path / "a.jsonl"), asked=attrgetter("key")).dataset) == 1  # they ask the same
    with pytest.raises(ConversationError, match="line 1: the key 'is_correct' changes"):
        read_conversations(str(tmp_path / "a.jsonl"))


def test_metadata_may_be_nested_as_deeply_as_json_may():
    deep = json.loads("[" * 900 + "]" * 900)
    for key in ("metadata", "source", "num_sources"):
        assert parse_record({"messages": CHAT, key: deep}).messages == CHAT


@pytest.mark.parametrize("key", ["builtin_tools", "xml_tools", "python_tools"])
def test_tools_of_a_row_are_a_list_also_where_they_are_written_as_json(tmp_path, key):
    """A template that goes through a text finds its letters."""
    chat = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Salut"}]}
    for value, kept in ((["search"], {key: ["search"]}), ('["search"]', {key: ["search"]}), ([], {}), ("[]", {})):
        for row in (chat | {key: value}, chat | {"chat_template_kwargs": {key: value}}):
            assert parse_record(row).extra == kept
    for value in ('"search"', "search", '{"a": 1}', {"a": 1}):
        with pytest.raises(ConversationError, match=f"'{key}' is "):
            parse_record(chat | {key: value})


def test_a_flag_of_tools_is_true_or_false_also_where_it_is_written_as_a_text():
    chat = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Salut"}]}
    found = [parse_record(chat | {"tools_in_user_message": value}).extra for value in (False, "false", "True")]
    assert [extra["tools_in_user_message"] for extra in found] == [False, False, True]
    with pytest.raises(ConversationError, match="'tools_in_user_message' of a row is true or false, received str"):
        parse_record(chat | {"tools_in_user_message": "sometimes"})


def test_keys_that_differ_on_whether_a_turn_is_trained_on_are_refused():
    """As the values of a row's keys are."""
    turns = [CHAT[0], CHAT[1] | {"train": True, "weight": 0}]
    with pytest.raises(ConversationError, match="trained on or it is not, and 'train' and 'weight' say otherwise"):
        parse_record({"messages": turns})
    turns[1] |= {"train": "false"}
    with pytest.raises(ConversationError, match="'train' of a turn is true, false, 1 or 0, received 'false'"):
        parse_record({"messages": turns})
    turns[1] |= {"train": False}
    turns += CHAT
    assert parse_record({"messages": turns}).messages[1]["trained"] is False


def test_answers_that_the_target_writes_anew_refuse_no_row(tmp_path):
    answer = CHAT[1] | {"function_call": {"name": "f"}, "image": "a.png", "mood": "glad"}
    rows = [{"messages": [CHAT[0], answer]}, {"prompt": "Add 2 and 3.", "chosen": "5", "rejected": "6"}]
    made = {"reasoning": "Let me add.", "generations": ["9"], "finish_reasons": ["stop"], "chain_of_thought": "Hm."}
    rows.append({"messages": [{"role": "user", "content": "Add 4 and 5."}], **made})
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    loaded = read_conversations(str(path), "train", False, None, attrgetter("key"))
    assert len(loaded.dataset) == 3 and not loaded.bad_rows
    with pytest.raises(ConversationError, match="'function_call' of a turn changes the text"):
        read_conversations(str(path), "train", False)


@pytest.mark.parametrize(
    ("question", "key", "value"),
    [
        ("小明有2个苹果，又买了3个，一共多少？", "answer", "5"),
        ("请把你好世界翻译成英文", "input", "你好世界"),
        ("แปลคำว่าสวัสดีเป็นภาษาอังกฤษ", "input", "สวัสดี"),
        ("서울은 어디에 있나요?", "input", "서울"),
        ("把你好world翻译成英文", "input", "你好"),
    ],
)
def test_copies_are_found_in_scripts_without_spaces(question, key, value):
    chat = [{"role": "user", "content": question}, {"role": "assistant", "content": "答案是5个。"}]
    assert parse_record({"messages": chat, key: value}).messages == chat


@pytest.mark.parametrize("value", ["1", "15个", "你号"])
def test_what_is_a_part_of_a_number_or_stands_nowhere_is_no_copy_in_them(value):
    chat = [{"role": "user", "content": "一共14个, 你好"}, {"role": "assistant", "content": "是15."}]
    with pytest.raises(ConversationError, match="the key 'answer' holds text that no turn has"):
        parse_record({"messages": chat, "answer": value})


def test_a_passage_of_the_system_text_beside_the_turns_is_a_copy():
    row = {"messages": CHAT, "system": "Use this: sums are small."}
    assert parse_record(row | {"context": "sums are small."}).messages[1:] == CHAT
    with pytest.raises(ConversationError, match="the key 'context' holds text that no turn has"):
        parse_record(row | {"context": "sums are large."})


@pytest.mark.parametrize("key", ["is_reasoning_complete", "is_target"])
def test_an_answer_that_is_told_to_be_no_good_is_refused_under_these_names(key):
    for value in (True, [True, True]):
        assert parse_record({"messages": CHAT, key: value}).messages == CHAT
    for value in (False, [False, True]):
        with pytest.raises(ConversationError, match=f"the key '{key}' changes the text or the mask"):
            parse_record({"messages": CHAT, key: value})


@pytest.mark.parametrize("key", ["is_reasoning_complete", "correctness_math_verify"])
def test_of_flags_of_several_generations_that_of_the_answer_decides(key):
    row = {"messages": CHAT, "generations": ["Hm.", CHAT[1]["content"], "Oh."]}
    unread = {"generations"}
    assert not further_of_row(row | {key: [False, True, None]}, CHAT, {"messages", *unread}).unknown
    for value in ([True, False, True], [True, False]):
        with pytest.raises(ConversationError, match=f"the key '{key}' changes the text or the mask"):
            further_of_row(row | {key: value}, CHAT, {"messages", *unread})


def test_rejected_answers_hold_no_turn_that_the_row_lacks():
    """Under labels generate, where the answers are passed over."""
    question, system = {"role": "user", "content": "And 2 + 2?"}, {"role": "system", "content": "Rhyme."}
    asked = [*CHAT, question]
    pair = {key: [*asked, {"role": "assistant", "content": key}] for key in ("chosen", "rejected")}
    used = {"prompt", *pair}
    assert not further_of_row(pair | {"prompt": asked}, asked, used, answers_anew=True).unknown
    with_system = {key: [system, *turns] for key, turns in pair.items()}
    assert further_of_row(with_system | {"system": "Rhyme."}, asked, used, answers_anew=True).system == "Rhyme."
    empty = {key: [{"role": "system", "content": ""}, *turns] for key, turns in pair.items()}
    assert not further_of_row(empty, asked, used, answers_anew=True).unknown
    as_text = {key: json.dumps(turns) for key, turns in with_system.items()}
    for row, turns in ((pair, [question]), (with_system, asked), (as_text, asked)):
        with pytest.raises(ConversationError, match="the key 'chosen' holds a turn before the answer that the row's"):
            further_of_row(row, turns, used, answers_anew=True)


def test_a_cell_that_pandas_left_empty_is_absent():
    row = json.loads(json.dumps({"messages": [CHAT[0], {**CHAT[1], "weight": float("nan")}], "system": float("nan")}))
    assert parse_record(row) == (CHAT, {})


@pytest.mark.parametrize("text", [False, True], ids=["list", "JSON"])
def test_functions_and_tools_are_one_form_for_templates(text):
    bare = {"name": "add", "parameters": {"type": "object", "properties": {}}}
    tools = [{"type": "function", "function": bare}]
    as_text = {**bare, "parameters": json.dumps(bare["parameters"])}
    forms = ({"tools": tools}, {"functions": [bare]}, {"functions": tools}, {"functions": tools, "tools": tools})
    forms += ({"functions": [as_text]}, {"tools": [{"type": "function", "function": as_text}]})
    for row in forms:
        row = {key: json.dumps(value) if text else value for key, value in row.items()}
        assert parse_record({"messages": CHAT, **row}).extra == {"tools": tools}
    assert parse_record({"messages": CHAT, "tools": "null", "documents": "null"}).extra == {}
    for other in ("", "none", "{'type': 'object'}"):
        assert (
            parse_record({"messages": CHAT, "tools": [{**bare, "parameters": other}]}).extra["tools"][0]["name"]
            == "add"
        )
