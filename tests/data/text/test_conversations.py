"""Reading conversations: both forms, every bad row named, or trimmed and listed."""

import gzip
import json
from datetime import datetime
from operator import attrgetter

import datasets
import pytest

from draft_heads.data.text.benchmarks import load_benchmark
from draft_heads.data.text.conversations import (
    BadRow,
    Conversation,
    ConversationError,
    conversation_of,
    parse_record,
    read_conversations,
)
from draft_heads.data.text.turn_lists import turns_of
from tests.tiny_chat import load_conversations

GOOD = {"id": "a", "conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello."}]}
MESSAGES = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello."}]


def turns(*roles, text="x"):
    return {"conversations": [{"from": role, "value": text} for role in roles]}


def write_lines(path, rows):
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows))
    return str(path)


@pytest.mark.parametrize("form", ["array", "indented array", "lines"])
def test_sharegpt_and_messages_rows_become_the_same_messages(tmp_path, form):
    rows = [GOOD, {"messages": MESSAGES}, turns("system", "user", "chatgpt", "human", "bard")]
    text = {
        "array": json.dumps(rows),
        "indented array": "\ufeff" + json.dumps(rows, indent=2),
        "lines": "\n\n".join(map(json.dumps, rows)) + "\n",
    }[form]
    file = tmp_path / "rows.json"
    file.write_text(text)
    dataset = load_conversations(str(file))
    ids = ["row-3", "row-5"] if form == "lines" else ["row-2", "row-3"]  # blank lines count
    assert dataset["id"] == ["a", *ids]
    assert dataset[0]["messages"] == dataset[1]["messages"] == MESSAGES
    assert [m["role"] for m in dataset[2]["messages"]] == ["system", "user", "assistant", "user", "assistant"]


def test_dataset_folder_is_read_through_datasets(tmp_path):
    load_conversations(write_lines(tmp_path / "rows.jsonl", [GOOD, {"messages": MESSAGES}])).save_to_disk(
        tmp_path / "d"
    )
    again = load_conversations(str(tmp_path / "d"))
    assert again["id"] == ["a", "row-2"]
    assert again[1]["messages"] == MESSAGES


BAD = [
    ('{"id": 3, "conversations": [', "malformed JSON"),
    ("[1]", "a row is an object, received list"),
    ({"id": "x", "text": "y"}, "'conversations' or 'messages', received the keys id, text"),
    ({"conversations": "Hi"}, "the turns are a list, received str"),
    ({"conversations": [{"from": "human"}, {"value": "x"}]}, r"a turn has no key 'value' \(turn 1\)"),
    ({"messages": [{"content": "x"}]}, r"a turn has no key 'role' \(turn 1\)"),
    (turns("human", "critic"), r"the role 'critic' is none of system, .* \(turn 2\)"),
    (turns("tool", "gpt"), r"a tool turn that follows no assistant turn \(turn 1\)"),
    (turns("human", "gpt", text=3), r"the text of a turn is a string, received int \(turn 1\)"),
    (turns("gpt", "human"), r"an assistant turn before the first user turn \(turn 1\)"),
    (turns("system", "gpt"), r"an assistant turn before the first user turn \(turn 2\)"),
    (turns("human", "human", "gpt"), r"two user turns in a row \(turn 2\)"),
    (turns("human", "system", "gpt"), r"a system turn that is not the first turn \(turn 2\)"),
    (turns("human"), "the conversation has no assistant turn"),
    ({"messages": [MESSAGES[0], {"role": "assistant", "content": " "}]}, r"an empty answer \(turn 2\)"),
    (turns("human", "gpt", text=" "), r"an empty question \(turn 1\)"),
    (turns(), "the conversation is empty"),
    (turns("human", "gpt", text="q\ud83d"), r"half a surrogate pair, which is no character \(turn 1\)"),
]


@pytest.mark.parametrize(("row", "reason"), BAD)
def test_bad_row_stops_the_run_with_file_row_reason_and_remedy(tmp_path, row, reason):
    file = write_lines(tmp_path / "rows.jsonl", [GOOD, "", row, GOOD])
    with pytest.raises(ConversationError, match=rf"rows\.jsonl, line 3: .*{reason}.*set skip_bad_rows"):
        load_conversations(file)


def test_a_third_list_of_turns_is_compared_with_the_first():
    row = {"conversations": GOOD["conversations"], "messages": MESSAGES, "conversation": MESSAGES[:1]}
    with pytest.raises(ConversationError, match="received 'conversations' and 'conversation', which differ"):
        parse_record(row)
    assert parse_record(row | {"conversation": MESSAGES}).messages == MESSAGES


def test_rows_are_counted_and_those_dropped_are_listed_for_their_faults_alone(tmp_path, caplog):
    file = write_lines(tmp_path / "rows.jsonl", [turns("gpt", "human", text=" ") | {"bookmarks": [1]}])
    with pytest.raises(ConversationError, match="all 1 rows are bad, the first: line 1: an assistant turn before"):
        load_conversations(file, skip_bad_rows=True)
    faults = ["an assistant turn before the first user turn", "an empty question"]
    assert caplog.messages == [f"{file}: 1 row dropped: {fault} (line 1)" for fault in faults]


def test_an_id_with_half_a_surrogate_pair_is_kept_without_it(tmp_path):
    file = write_lines(tmp_path / "rows.jsonl", [GOOD | {"id": "a\ud83d"}])
    assert load_conversations(file)["id"] == ["a?"]


def test_rows_without_a_question_and_its_answer_are_dropped_and_listed(tmp_path):
    file = write_lines(tmp_path / "rows.jsonl", [row for row, _ in BAD] + [GOOD])
    loaded = read_conversations(file, skip_bad_rows=True)
    assert loaded.dataset["id"] == ["a"]
    assert {(bad.place, bad.outcome) for bad in loaded.bad_rows} == {
        (f"line {number}", "dropped") for number in range(1, len(BAD) + 1)
    }


PAIR = turns("human", "gpt")["conversations"]


@pytest.mark.parametrize(
    ("conversation", "kept", "reasons"),
    [
        (turns("gpt", "gpt", "human", "gpt")["conversations"], 2, ["an assistant turn before the first user turn"]),
        ([*PAIR, {"from": "human", "value": "x"}, {"from": "gpt", "value": None}], 3, ["an empty answer"]),
        ([*PAIR, {"from": "human", "value": "x"}, {"from": "gpt", "value": ""}, *PAIR], 3, ["an empty answer"]),
        (
            [*PAIR, {"from": "critic", "value": "x"}, {"from": "gpt", "value": "x"}],
            2,
            ["the role 'critic' is none of "],
        ),
        ([*PAIR, *turns("human", "human", "gpt")["conversations"]], 3, ["two user turns in a row"]),
        (turns("system", "gpt", "human", "gpt", "gpt")["conversations"], 3, ["an assistant turn before", "two assis"]),
    ],
)
def test_sound_turns_of_a_bad_row_are_kept_and_what_is_trimmed_is_counted_by_reason(
    tmp_path, caplog, conversation, kept, reasons
):
    file = tmp_path / "rows.json"
    file.write_text(json.dumps([GOOD, {"conversations": conversation}]))  # one line: the row is named
    loaded = read_conversations(str(file), skip_bad_rows=True)
    assert [len(row) for row in loaded.dataset["messages"]] == [2, kept]
    assert [(bad.place, bad.outcome, bad.kept_turns) for bad in loaded.bad_rows] == [("row 2", "trimmed", kept)] * len(
        reasons
    )
    for bad, reason, line in zip(loaded.bad_rows, reasons, caplog.messages):
        assert bad.reason.startswith(reason)
        assert line == f"{file}: 1 row trimmed: {bad.reason} (row 2)"
    with pytest.raises(ConversationError, match=r"rows\.json, row 2: "):
        load_conversations(str(file))


def test_conversations_that_begin_with_the_same_question_are_held_out_together():
    asked = [{"role": "user", "content": "More?"}, {"role": "assistant", "content": "No."}]
    system = {"role": "system", "content": "Be brief."}
    one, longer, other = Conversation(MESSAGES, {}), Conversation([*MESSAGES, *asked], {}), Conversation(asked, {})
    told, tools = Conversation([system, *MESSAGES], {}), Conversation(MESSAGES, {"tools": [{"name": "add"}]})
    assert one.opening == longer.opening and one.key != longer.key
    assert len({found.opening for found in (one, other, told, tools)}) == 4


def test_questions_that_a_template_or_tokenizer_may_make_one_are_held_out_together():
    """Three rows of the same tokens under Llama 3's template, which trims, or Qwen's tokenizer, which composes."""
    texts = ("Who is Ren\u00e9?", " Who is Ren\u00e9?\n", "Who is Rene\u0301?")
    rows = [Conversation([{"role": "user", "content": text}, MESSAGES[1]], {}) for text in texts]
    assert len({row.opening for row in rows}) == 1 and len({row.key for row in rows}) == 3
    inner = Conversation([{"role": "user", "content": "Who  is Ren\u00e9?"}], {})
    assert inner.opening != rows[0].opening


def test_first_turns_beside_turns_of_which_a_later_one_is_bad_are_a_copy(tmp_path):
    asked, critic = {"role": "user", "content": "More?"}, {"role": "critic", "content": "x"}
    row = {"prompt": MESSAGES[:1], "messages": [*MESSAGES, asked, {"role": "assistant", "content": "No."}, critic]}
    (tmp_path / "rows.json").write_text(json.dumps([row]))
    loaded = read_conversations(str(tmp_path / "rows.json"), skip_bad_rows=True)
    assert [len(messages) for messages in loaded.dataset["messages"]] == [4]
    assert [bad.reason.split(" is none")[0] for bad in loaded.bad_rows] == ["the role 'critic'"]


def test_limit_reads_no_further_than_it_needs(tmp_path):
    repeated = {"id": "again", "messages": MESSAGES}
    file = write_lines(tmp_path / "rows.jsonl", [GOOD, repeated, turns("user", "gpt"), "{"])
    assert read_conversations(file, limit=3).dataset["id"] == ["a", "again", "row-3"]
    loaded = read_conversations(file, limit=2, asked=attrgetter("key"))
    assert (loaded.dataset["id"], loaded.repeated) == (["a", "row-3"], 1)
    with pytest.raises(ConversationError, match="line 4"):
        read_conversations(file, limit=4)


def test_gzipped_files_are_read_and_a_damaged_one_is_named(tmp_path):
    for name, text in (("a.json.gz", json.dumps([GOOD])), ("b.jsonl.gz", json.dumps(GOOD))):
        (tmp_path / name).write_bytes(gzip.compress(text.encode()))
        assert load_conversations(str(tmp_path / name))["id"] == ["a"]
    (tmp_path / "c.json.gz").write_bytes(gzip.compress(json.dumps([GOOD]).encode())[:-12])
    with pytest.raises(ValueError, match=r"c\.json\.gz is damaged or cut short"):
        load_conversations(str(tmp_path / "c.json.gz"))


def test_other_formats_and_missing_files_are_refused_by_their_name(tmp_path):
    for name in ("chat.csv", "chat.PARQUET", "chat.csv.gz", "chat.tar.gz"):
        (tmp_path / name).write_text(json.dumps(GOOD))
        with pytest.raises(ValueError, match=rf"received the \.\w+ file .*{name}; write its rows as JSONL"):
            load_conversations(str(tmp_path / name))
    for name in ("nowhere.json", str(tmp_path / "nowhere"), "./owner/name", "a/b/c"):
        with pytest.raises(FileNotFoundError, match="does not exist"):
            load_conversations(name)


def test_line_that_is_not_utf8_is_a_bad_row(tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_bytes(json.dumps(GOOD).encode() + b"\n{\xff}\n" + b"[" * 99_999 + b"\n" + b"9" * 5000 + b"\n")
    first, *others = read_conversations(str(file), skip_bad_rows=True).bad_rows
    assert first == BadRow("line 2", "not UTF-8 text", "invalid start byte at byte 2")
    assert [(bad.place, bad.reason) for bad in others] == [(f"line {n}", "JSON that cannot be read") for n in (3, 4)]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "is empty; pass a file"),
        ("  \n", "is empty; pass a file"),
        ("[]", "holds no conversation: no rows"),
        ('[{"a": 1} {"b": 2}]', "row 1: .*no ','"),
        ('[{"a": 1},\n {"b": ]', r"row 2: malformed JSON: .* at line 2 column 8"),
        (json.dumps([GOOD, GOOD])[:-1], "row 2: malformed JSON: no ',' or ']' after the row at line 1 column"),
        ('[{"id": 1}, ' + "9" * 5000 + "]", "row 2: JSON that cannot be read: .*4300 digits"),
    ],
)
def test_unreadable_file_is_an_error_even_when_rows_are_skipped(tmp_path, text, reason):
    file = tmp_path / "rows.json"
    file.write_text(text)
    with pytest.raises(ValueError, match=reason):
        load_conversations(str(file), skip_bad_rows=True)


def test_a_value_of_a_table_that_json_has_not_is_refused_by_name(tmp_path):
    document = {"title": "t", "text": "x", "date": datetime(2024, 5, 6)}
    rows = [{**GOOD, "documents": [document]}, {**GOOD, "id": "b", "documents": None}]
    file = tmp_path / "rows"
    datasets.Dataset.from_list(rows).save_to_disk(file)
    with pytest.raises(ConversationError, match=r"a value that JSON has not, a datetime; write it as a text"):
        load_conversations(str(file))
    loaded = read_conversations(str(file), skip_bad_rows=True)
    assert loaded.dataset["id"] == ["b"] and "a datetime" in loaded.bad_rows[0].reason


ADD = {"name": "add", "parameters": {"type": "object", "properties": {}}}


@pytest.mark.parametrize("written", ["{one!r}", "{json}", "{inner}"])
@pytest.mark.parametrize("key", ["tools", "functions"])
def test_tools_that_the_system_text_lists_are_not_listed_once_more(tmp_path, caplog, key, written):
    """As Hermes' function calls, whose column repeats what stands between <tools> tags."""
    tool = ADD if key == "functions" else {"type": "function", "function": ADD}
    text = written.format(one=tool, json=json.dumps(tool), inner=json.dumps(json.dumps(tool)))
    row = {key: json.dumps([tool]), "messages": [{"role": "system", "content": f"<tools>[{text}]</tools>"}, *MESSAGES]}
    others = [
        {**row, key: [tool, json.loads(json.dumps(tool).replace('"add"', '"sub"'))]},  # one is not in the text
        {**row, "messages": [{"role": "system", "content": 'The name is "add".'}, *MESSAGES]},
        {**row, "messages": [{"role": "system", "content": 'As {"name": "add", "parameters": {}}.'}, *MESSAGES]},
        {**row, key: "[]"},
        {**row, "messages": MESSAGES},
    ]
    read = [conversation_of(one) for one in load_conversations(write_lines(tmp_path / "r.jsonl", [row, *others]))]
    assert [len(one.extra.get("tools", ())) for one in read] == [0, 2, 1, 1, 0, 1]
    assert "rows whose system text lists the tools, and nothing else does: 1" in caplog.text
    questions = load_benchmark("own", write_lines(tmp_path / "q.jsonl", [row, *others]))
    assert [len(one.extra.get("tools", ())) for one in questions] == [0, 2, 1, 1, 0, 1]


def test_turns_that_are_a_text_are_read_as_json():
    """As columns of texts hold them; a text that is no list of turns is a prompt's own."""
    for key in ("messages", "conversations", "prompt"):
        for text in (json.dumps(MESSAGES), str(MESSAGES), json.dumps([dict(sorted(one.items())) for one in MESSAGES])):
            assert parse_record({key: text}).messages == MESSAGES
        braces = [{"content": "{a}\n{b}", "role": "user"}, MESSAGES[1]]
        assert parse_record({key: json.dumps(braces)}).messages == braces
        with pytest.raises(ConversationError, match="turns that are a text are a list in JSON \\(\"\\[\\{'role'"):
            parse_record({key: str(MESSAGES).replace("}, {", "} {")})  # as numpy writes them
    with pytest.raises(
        ConversationError, match=r"turns that are a text are JSON in which an object has a key twice \('content'"
    ):
        parse_record({"messages": '[{"role": "user", "content": "a", "content": "b"}]'})
    for prompt in (
        '[{"role": "user", "content": "Hi"}] - is this valid?',
        "[1, 2, 3]: what comes next?",
        '[{"a": 1}]',
        "['role', 'content']",
        '[{"value": 3}, {"value": 4}]',
    ):
        turns, key = turns_of({"prompt": prompt})
        assert (turns, key) == ([{"role": "user", "content": prompt}], "prompt")
