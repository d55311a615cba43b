"""Benchmark readers and the number rule of word problems."""

import json
import re
from datetime import datetime
from decimal import Decimal

import datasets
import pytest

from draft_heads.data.text.benchmarks import (
    BenchmarkError,
    CodeTask,
    Question,
    gsm8k_answer,
    load_benchmark,
    questions_checksum,
)


def write(path, *rows):
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows))
    return str(path)


def test_fastchat_questions_keep_their_turns(tmp_path):
    file = write(
        tmp_path / "q.jsonl",
        {"question_id": 81, "category": "writing", "turns": ["Write.", "Rewrite."]},
        {"question_id": 82, "category": "math", "turns": ["1+1?"], "reference": ["2", "two"]},
    )
    for name, column in (("mt_bench", None), ("vicuna_bench", None), ("spec_bench", "multi-turn")):
        assert load_benchmark(name, file) == [
            Question(81, "writing", ["Write.", "Rewrite."], None, column=column),
            Question(82, "math", ["1+1?"], "2\n\ntwo", column=column),
        ]


def test_every_list_of_turns_is_a_conversation_and_none_is_absent(tmp_path):
    hi = [{"role": "user", "content": "Hi"}]
    for key in ("conversation", "messages", "prompt"):
        assert load_benchmark("q", write(tmp_path / "c.jsonl", {key: hi, "turn": 1})) == [
            Question("row-1", None, ["Hi"])
        ]
    nothing = dict.fromkeys(("question_id", "category", "reference", "messages"))
    assert load_benchmark("q", write(tmp_path / "n.jsonl", {"turns": ["Hi"], **nothing})) == [Question(0, None, ["Hi"])]


def test_word_problems_and_code_prompts(tmp_path):
    file = write(tmp_path / "g.jsonl", {"question": "2+2?", "answer": "2+2=4\n#### 4"})
    assert load_benchmark("gsm8k", file) == [Question(0, None, ["2+2?"], "2+2=4\n#### 4", score="accuracy")]
    file = write(tmp_path / "h.jsonl", {"task_id": "HumanEval/0", "prompt": "def f():", "canonical_solution": "  pass"})
    (question,) = load_benchmark("humaneval", file)
    assert (question.question_id, question.reference, question.score) == ("HumanEval/0", "  pass", None)
    assert (
        question.turns[0].startswith("Complete this Python function.")
        and "```python\ndef f():\n```" in question.turns[0]
    )


def test_every_form_has_its_id_under_the_same_keys(tmp_path):
    forms = ({"turns": ["Hi"]}, {"question": "2+2?", "answer": "4"}, {"messages": [{"role": "user", "content": "Hi"}]})
    for row in forms:
        for key in ("question_id", "prompt_id", "id"):
            file = write(tmp_path / "q.jsonl", row | {key: "a"}, row | {key: "b"})
            assert [one.question_id for one in load_benchmark("q", file)] == ["a", "b"]
    with pytest.raises(BenchmarkError, match="line 2: it has the id 'a' of line 1; ids must be unique: change one"):
        load_benchmark("q", write(tmp_path / "q.jsonl", forms[0] | {"id": "a"}, forms[0] | {"id": "a"}))


def test_a_reference_may_be_a_number_and_a_key_a_list(tmp_path):
    row = {"question": "9+9?", "answer": 18}
    assert load_benchmark("gsm8k", write(tmp_path / "g.jsonl", row))[0].reference == "18"
    write(tmp_path / "c.jsonl", {"question": "Which?", "choices": ["a", 2], "answer_number": 2.5})
    described = "source: c.jsonl\nkeys: [question, choices]\nreference: answer_number\nscore: accuracy\n"
    (tmp_path / "c.yaml").write_text(described + 'prompt: "{question}\\n{choices}"')
    (asked,) = load_benchmark("c", str(tmp_path / "c.yaml"))
    assert (asked.turns, asked.reference, gsm8k_answer(asked.reference)) == (["Which?\na\n2"], "2.5", Decimal("2.5"))
    for bad, found in (
        ([], "list"),
        ([{}], "list"),
        (True, "bool 'True'; write a text or a list of texts or a number"),
    ):
        with pytest.raises(BenchmarkError, match=f"'answer' is a non-empty text, received {found}"):
            load_benchmark("gsm8k", write(tmp_path / "g.jsonl", row | {"answer": bad}))
    with pytest.raises(BenchmarkError, match="take it out, or name it under unread: of a YAML file"):
        load_benchmark("gsm8k", write(tmp_path / "g.jsonl", row | {"persona": "x"}))


def test_user_turns_of_conversations_are_asked(tmp_path):
    turns = [("gpt", "Hello."), ("human", "One?"), ("gpt", None), ("human", "Two?"), ("tool", "x")]
    sharegpt = {"id": "a", "conversations": [{"from": role, "value": text} for role, text in turns]}
    messages = {"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]}
    file = write(tmp_path / "own.jsonl", sharegpt, messages, "{")
    assert load_benchmark("own", file, limit=2) == [
        Question("a", None, ["One?", "Two?"]),
        Question("row-2", None, ["Hi"], system="Be brief."),
    ]


def test_the_places_of_rows_are_no_ids_of_others(tmp_path):
    rows = [{"turns": ["a"]}, {"question_id": 0, "turns": ["b"]}, {"turns": ["c"]}]
    (tmp_path / "q.jsonl").write_text("\n".join(map(json.dumps, rows)))
    found = load_benchmark("own", str(tmp_path / "q.jsonl"))
    assert [(one.question_id, one.turns) for one in found] == [("row-1", ["a"]), (0, ["b"]), (2, ["c"])]
    rows += [{"question_id": "row-1", "turns": ["d"]}, {"question_id": 2, "turns": ["e"]}]
    (tmp_path / "q.jsonl").write_text("\n".join(map(json.dumps, rows)))
    assert [one.question_id for one in load_benchmark("own", str(tmp_path / "q.jsonl"))] == [
        "row-1'",
        0,
        "row-3",
        "row-1",
        2,
    ]
    asked = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "x"}]
    rows = [{"messages": asked, "response": "x"}, {"id": "row-1", "messages": asked, "answer": "x"}]
    (tmp_path / "c.jsonl").write_text("\n".join(map(json.dumps, rows)))
    assert [one.question_id for one in load_benchmark("own", str(tmp_path / "c.jsonl"))] == ["row-1'", "row-1"]


def test_copies_of_recorded_answers_and_verdicts_on_them_say_nothing_to_a_question(tmp_path):
    answer = {"role": "assistant", "content": "So $\\boxed{4}$.", "is_error": True, "status": "incomplete"}
    row = {"messages": [{"role": "user", "content": "2 + 2?", "metadata": "web"}, answer], "expected_answer": "4"}
    row |= {"prompt": [{"role": "user", "content": "2 + 2?"}], "max_tokens": "", "stop_tokens": []}
    (question,) = load_benchmark("own", write(tmp_path / "q.jsonl", row))
    assert question.turns == ["2 + 2?"]


@pytest.mark.parametrize("key", ["max_tokens", "temperature", "n_predict", "max_output_tokens"])
def test_a_question_that_asks_for_other_decoding_is_refused(tmp_path, key):
    with pytest.raises(BenchmarkError, match=rf"the key '{key}' says it of one; take it out"):
        load_benchmark("own", write(tmp_path / "q.jsonl", {"turns": ["a"], key: 1}))


TOOLS = [{"type": "function", "function": {"name": "add"}}]


def test_a_system_text_and_further_arguments_belong_to_every_prompt_of_a_question(tmp_path):
    further = {"system": "Be brief.", "tools": json.dumps(TOOLS), "source": "web", "documents": []}
    forms = [
        {"question_id": 1, "turns": ["a", "b"]},
        {"question": "a", "answer": "#### 4"},
        {"task_id": "HumanEval/0", "prompt": "a", "entry_point": "f", "test": "def check(f): …"},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}], "system": None},
    ]
    for number, form in enumerate(forms):
        (question,) = load_benchmark("own", write(tmp_path / f"{number}.jsonl", form | further))
        assert re.search(r"^a$", question.turns[0], re.MULTILINE) and question.extra == {"tools": TOOLS}
        assert question.opening == [{"role": "system", "content": "Be brief."}]
        plain = load_benchmark("own", write(tmp_path / f"{number}.jsonl", form))[0]
        assert (plain.opening, plain.extra) == ([], {})
    for form in forms:
        for key, reason in (("context", "holds text that no turn has"), ("persona", "is unknown; take it out")):
            with pytest.raises(BenchmarkError, match=rf"q\.jsonl, line 1: the key '{key}' {reason}"):
                load_benchmark("own", write(tmp_path / "q.jsonl", form | {key: "In 1789 …"}))


def test_a_value_that_json_has_not_is_refused_by_name(tmp_path):
    """As a time stamp in a Parquet file."""
    document = {"title": "t", "text": "x", "date": datetime(2024, 5, 6)}
    datasets.Dataset.from_list([{"turns": ["a"], "documents": [document]}]).save_to_disk(tmp_path / "rows")
    with pytest.raises(BenchmarkError, match=r"row 1.*: a value that JSON has not, a datetime; write it as a text"):
        load_benchmark("own", str(tmp_path / "rows"))


def test_turns_that_would_change_a_prompt_are_read_or_refused(tmp_path):
    asked, answer = (
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": None, "tool_calls": [{"name": "f"}]},
    )
    result, rules = {"role": "tool", "content": "4"}, {"role": "system", "content": "Be brief."}
    (question,) = load_benchmark("own", write(tmp_path / "q.jsonl", {"messages": [rules, asked, answer, result]}))
    assert (question.system, question.turns) == ("Be brief.", ["a"])
    for turns, reason in [
        ([asked, answer, result, asked], "a tool turn before a user's"),
        ([asked, rules], "a system turn is the first"),
        ([asked | {"name": "Bo"}], "received the key 'name'"),
        ([asked | {"content": " "}], "the user's turns are non-empty texts and nothing else, received str ' '"),
        ([asked | {"role": "critic"}], "the role 'critic' is none of"),
    ]:
        with pytest.raises(BenchmarkError, match=reason):
            load_benchmark("own", write(tmp_path / "q.jsonl", {"messages": turns}))


def test_conversations_that_share_an_id_are_told_apart_by_their_place(tmp_path):
    rows = [{"id": name, "messages": [{"role": "user", "content": "a"}]} for name in ("web", "web", 0, "web")]
    found = load_benchmark("own", write(tmp_path / "q.jsonl", *rows))
    assert [question.question_id for question in found] == ["web", "web (line 2)", 0, "web (line 4)"]


@pytest.mark.parametrize("name", ["gsm8k", "problems"])
def test_a_folder_of_parquet_files_is_read_whatever_the_benchmark_is_called(tmp_path, name):
    rows = [{"question": "2+2?", "answer": "#### 4"}, {"question": "1+1?", "answer": "#### 2"}]
    (tmp_path / "folder").mkdir()
    datasets.Dataset.from_list(rows).to_parquet(tmp_path / "folder" / "test-00000.parquet")
    assert [q.turns for q in load_benchmark(name, str(tmp_path / "folder"))] == [["2+2?"], ["1+1?"]]
    (tmp_path / "folder" / "README.md").write_text(
        "---\nconfigs:\n- config_name: main\n  data_files: test-*.parquet\n- config_name: socratic\n"
        "  data_files: none-*.parquet\n---\n"
    )  # a copy of the hub's repository
    assert len(load_benchmark("gsm8k", str(tmp_path / "folder"))) == 2


FASTCHAT, PROBLEM = {"question_id": 0, "turns": ["a"]}, {"question": "a", "answer": "#### 1"}
HUMANEVAL = {"task_id": "t", "prompt": "p", "entry_point": "f", "test": "def check(f): …"}


@pytest.mark.parametrize(
    ("good", "bad", "reason"),
    [
        (FASTCHAT, '{"question_id": 1,', "malformed JSON"),
        (FASTCHAT, {"question_id": 1, "turns": []}, "'turns' is a non-empty list of texts, received list"),
        (FASTCHAT, {"question_id": 1, "turns": ["a", 2]}, "'turns' is a non-empty list"),
        (FASTCHAT, {"question_id": 1, "turns": ["a", " "]}, "'turns' is a non-empty list"),
        (FASTCHAT, {"question_id": 0, "turns": ["a"]}, "it has the id 0 of line 1; ids must be unique"),
        (FASTCHAT, {"question_id": True, "turns": ["a"]}, "an id is a whole number or a text, received bool 'True'"),
        (FASTCHAT, {"question_id": 8.5, "turns": ["a"]}, "an id is a whole number or a text, received float '8.5'"),
        (PROBLEM, {"question": "a"}, "'answer' is a non-empty text, received nothing"),
        (
            PROBLEM,
            {"question": "a", "answer": "four"},
            "the answer of a GSM8K problem .* ends with 'four'",
        ),
        (
            PROBLEM,
            {"question": "Is 17 prime?", "answer": "Yes, 17 is prime."},
            "the answer of a GSM8K problem .* ends with 'Yes, 17 is prime",
        ),
        (PROBLEM, {"question": " ", "answer": "#### 1"}, "'question' is a non-empty text, received str ' '"),
        (HUMANEVAL, {"task_id": "x"}, "'prompt' is a non-empty text"),
        (HUMANEVAL, "[3]", "a row is an object, received list"),
        ({"messages": [{"role": "user", "content": "a"}]}, {"messages": []}, "the user's turns are non-empty texts"),
        ("", {"text": "a", "id": 2}, "a file of questions has rows with 'turns' .* received the keys: text, id"),
    ],
)
def test_bad_question_is_named_by_file_and_line(tmp_path, good, bad, reason):
    file = write(tmp_path / "q.jsonl", good, bad)
    with pytest.raises(BenchmarkError, match=rf"q\.jsonl, line 2: {reason}"):
        load_benchmark("any name", file)


@pytest.mark.parametrize(
    "answer", ["42", "That is 6 × 7 = **42**.", "42 boxes\n#### 42", "#### 42 boxes", "It is $42."]
)
def test_an_answer_that_ends_with_its_number_is_scored_by_it(tmp_path, answer):
    (question,) = load_benchmark("own", write(tmp_path / "q.jsonl", {"question": "6 × 7?", "answer": answer}))
    assert (question.score, gsm8k_answer(question.reference)) == ("accuracy", Decimal(42))


def test_a_key_that_a_row_has_twice_is_named_by_file_and_line(tmp_path):
    file = write(tmp_path / "q.jsonl", FASTCHAT, '{"question_id": 1, "turns": ["First"], "turns": ["Second"]}')
    with pytest.raises(BenchmarkError, match=r"q\.jsonl, line 2: an object has a key twice: 'turns'; keep one of them"):
        load_benchmark("own", file)


def test_empty_file_is_an_error_and_ids_count_from_0(tmp_path):
    with pytest.raises(ValueError, match=r"e\.jsonl is empty"):
        load_benchmark("gsm8k", write(tmp_path / "e.jsonl"))
    questions = load_benchmark("own", write(tmp_path / "q.jsonl", {"turns": ["a"]}, {"turns": ["b"]}))
    assert [question.question_id for question in questions] == [0, 1]


def test_a_whole_id_of_a_column_of_floats_is_whole_and_an_empty_category_is_none(tmp_path):
    rows = [
        {"question_id": 81.0, "category": "", "turns": ["a"]},
        {"question_id": 82.0, "category": " ", "turns": ["b"]},
    ]
    found = load_benchmark("q", write(tmp_path / "q.jsonl", *rows))
    assert [(type(one.question_id), one.question_id, one.category) for one in found] == [
        (int, 81, None),
        (int, 82, None),
    ]


def test_the_checksum_of_questions_changes_with_each_field():
    changes = [{"question_id": "1"}, {"category": "m"}, {"turns": ["b"]}, {"reference": "x"}, {"score": "rouge2"}]
    changes += [{"system": "s"}, {"extra": {"tools": []}}, {"column": "c"}, {"code": CodeTask("p", "f", "t")}]
    given = {"question_id": 1, "category": None, "turns": ["a"]}
    found = {questions_checksum([Question(**(given | change))]) for change in [{}, *changes]}
    assert len(found) == 10 and questions_checksum([Question(1, None, ["a"])]) in found
    assert questions_checksum([Question(**given)] * 2) not in found


def test_half_a_character_is_named_with_its_row_wherever_it_stands(tmp_path):
    row = {"question_id": "a", "category": "b", "turns": ["c"], "reference": ["d"]}
    for key in row:
        broken = row | {"question_id": "e", key: ["\ud800"] if isinstance(row[key], list) else "\ud800"}
        (tmp_path / "a.jsonl").write_text(json.dumps(row) + "\n" + json.dumps(broken))
        with pytest.raises(BenchmarkError, match=r"a\.jsonl, line 2: half a surrogate pair"):
            load_benchmark("mine", str(tmp_path / "a.jsonl"))
