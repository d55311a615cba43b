"""Reading conversations: both forms, and every bad row named or listed."""

import json

import pytest

from draft_heads.data.conversations import ConversationError, load_conversations, read_conversations

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
    assert dataset["id"] == ["a", "row-1", "row-2"]
    assert dataset[0]["messages"] == dataset[1]["messages"] == MESSAGES
    assert [m["role"] for m in dataset[2]["messages"]] == ["system", "user", "assistant", "user", "assistant"]


def test_dataset_folder_is_read_through_datasets(tmp_path):
    load_conversations(write_lines(tmp_path / "rows.jsonl", [GOOD, {"messages": MESSAGES}])).save_to_disk(
        tmp_path / "d"
    )
    again = load_conversations(str(tmp_path / "d"))
    assert again["id"] == ["a", "row-1"]
    assert again[1]["messages"] == MESSAGES


BAD = [
    ('{"id": 3, "conversations": [', "malformed JSON"),
    ("[1]", "a row is an object, received list"),
    ({"id": "x", "text": "y"}, "'conversations' or 'messages', received the keys: id, text"),
    ({"conversations": "Hi"}, "the turns are a list, received str"),
    ({"conversations": [{"from": "human"}, {"value": "x"}]}, "turn 0 has no key 'value'"),
    ({"messages": [{"content": "x"}]}, "turn 0 has no key 'role'"),
    (turns("human", "tool"), "turn 1 has the unknown role 'tool'; known: system, human"),
    (turns("human", "gpt", text=3), r"turn 0 \(human\): text is a string, received int"),
    (turns("gpt", "human"), "starts with the assistant"),
    (turns("system", "gpt"), "starts with the assistant"),
    (turns("human", "human", "gpt"), "turns 0 and 1 are both of the user"),
    (turns("human", "gpt", "gpt"), "turns 1 and 2 are both of the assistant"),
    (turns("human", "system", "gpt"), "turn 1 is a system turn"),
    (turns("human"), "no assistant turn"),
    (turns("human", "gpt", text=" "), r"turn 1 \(assistant\) is blank"),
    (turns(), "is empty"),
]


@pytest.mark.parametrize(("row", "reason"), BAD)
def test_bad_row_stops_the_run_with_file_line_row_and_reason(tmp_path, row, reason):
    file = write_lines(tmp_path / "rows.jsonl", [GOOD, "", row, GOOD])
    with pytest.raises(ConversationError, match=rf"rows\.jsonl, line 3, row 1: .*{reason}.*--skip_bad_rows"):
        load_conversations(file)


def test_skipped_bad_rows_are_counted_and_listed(tmp_path, caplog):
    file = write_lines(tmp_path / "rows.jsonl", [row for row, _ in BAD] + [GOOD])
    loaded = read_conversations(file, skip_bad_rows=True)
    assert loaded.dataset["id"] == ["a"]
    assert [int(bad.split(": ")[0].rpartition(" ")[2]) for bad in loaded.bad_rows] == list(range(len(BAD)))
    assert len(caplog.messages) == len(BAD)
    assert f"{file}, line 8, row 7" in caplog.text


def test_bad_row_of_an_array_is_named_by_its_line(tmp_path):
    file = tmp_path / "rows.json"
    file.write_text(json.dumps([GOOD, turns("gpt")], indent=1))
    line = file.read_text().split("\n").index(" {", 2) + 1
    with pytest.raises(ConversationError, match=rf"line {line}, row 1: .*starts with the assistant"):
        load_conversations(str(file))


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "is empty; pass a file"),
        ("  \n", "is empty; pass a file"),
        ("[]", "holds no conversation: no rows"),
        ('[{"a": 1} {"b": 2}]', "line 1, row 0: .*no ','"),
        ('[{"a": 1},\n {"b": ]', r"line 2, row 1: malformed JSON: .* at line 2 column 8"),
    ],
)
def test_unreadable_file_is_an_error_even_when_rows_are_skipped(tmp_path, text, reason):
    file = tmp_path / "rows.json"
    file.write_text(text)
    with pytest.raises(ValueError, match=reason):
        load_conversations(str(file), skip_bad_rows=True)


def test_array_cut_short_is_an_error(tmp_path):
    file = tmp_path / "rows.json"
    file.write_text(json.dumps([GOOD, GOOD])[:-1])
    with pytest.raises(ValueError, match="cut short after 2 rows"):
        load_conversations(str(file))


def test_missing_file_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"nowhere\.json does not exist"):
        load_conversations(str(tmp_path / "nowhere.json"))
