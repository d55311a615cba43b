"""Benchmark readers and the number rule of word problems."""

import json
from decimal import Decimal

import pytest

from draft_heads.data.benchmarks import BenchmarkError, Question, gsm8k_answer, load_benchmark


def write(path, *rows):
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows))
    return str(path)


def test_fastchat_questions_keep_their_turns(tmp_path):
    file = write(
        tmp_path / "q.jsonl",
        {"question_id": 81, "category": "writing", "turns": ["Write.", "Rewrite."]},
        {"question_id": 82, "category": "math", "turns": ["1+1?"], "reference": ["2", "two"]},
    )
    for name in ("mt_bench", "vicuna_bench", "spec_bench"):
        assert load_benchmark(name, file) == [
            Question(81, "writing", ["Write.", "Rewrite."], None),
            Question(82, "math", ["1+1?"], "2\n\ntwo"),
        ]


def test_word_problems_and_code_prompts(tmp_path):
    file = write(tmp_path / "g.jsonl", {"question": "2+2?", "answer": "2+2=4\n#### 4"})
    assert load_benchmark("gsm8k", file) == [Question(0, None, ["2+2?"], "2+2=4\n#### 4", numeric=True)]
    file = write(tmp_path / "h.jsonl", {"task_id": "HumanEval/0", "prompt": "def f():", "canonical_solution": "  pass"})
    assert load_benchmark("humaneval", file) == [Question("HumanEval/0", None, ["def f():"], "  pass")]


def test_user_turns_of_conversations_are_asked(tmp_path):
    turns = [("gpt", "Hello."), ("human", "One?"), ("gpt", None), ("human", "Two?"), ("tool", "x")]
    sharegpt = {"id": "a", "conversations": [{"from": role, "value": text} for role, text in turns]}
    messages = {"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]}
    file = write(tmp_path / "own.jsonl", sharegpt, messages, "{")
    assert load_benchmark("own", file, limit=2) == [
        Question("a", None, ["One?", "Two?"]),
        Question("row-2", None, ["Hi"], system="Be brief."),
    ]


FASTCHAT, PROBLEM = {"question_id": 0, "turns": ["a"]}, {"question": "a", "answer": "#### 1"}
HUMANEVAL = {"task_id": "t", "prompt": "p"}


@pytest.mark.parametrize(
    ("good", "bad", "reason"),
    [
        (FASTCHAT, '{"question_id": 1,', "malformed JSON"),
        (FASTCHAT, {"question_id": 1, "turns": []}, "'turns' is a non-empty list of texts, received list"),
        (FASTCHAT, {"question_id": 1, "turns": ["a", 2]}, "'turns' is a non-empty list"),
        (FASTCHAT, {"question_id": 0, "turns": ["a"]}, "it has the id 0 of line 1; ids must be unique"),
        (PROBLEM, {"question": "a"}, "'answer' is a non-empty text, received nothing"),
        (
            PROBLEM,
            {"question": "a", "answer": "four"},
            "the answer of a GSM8K problem .* ends with 'four'",
        ),
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


def test_empty_file_is_an_error_and_ids_count_from_0(tmp_path):
    with pytest.raises(ValueError, match=r"e\.jsonl is empty"):
        load_benchmark("gsm8k", write(tmp_path / "e.jsonl"))
    questions = load_benchmark("own", write(tmp_path / "q.jsonl", {"turns": ["a"]}, {"turns": ["b"]}))
    assert [question.question_id for question in questions] == [0, 1]


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("3 + 4 = 7\n#### 42", "42"),
        ("#### 1 then #### 2 then 3", "2"),
        ("#### $1,234.50.", "1234.50"),
        ("#### -7", "-7"),
        ("#### none, but 5 before", "5"),
        ("He has 18 apples and pays $20.", "20"),
        ("It costs -$3.50", "-3.50"),
        ("It costs $-3.50.", "-3.50"),
        ("x = −4", "-4"),
        ("10-7", "7"),
        ("8 - 3", "3"),
        ("1,234,567", "1234567"),
        ("1,000, then 2", "2"),
        ("about .5", "0.5"),
        ("5% of it", "5"),
        ("12,34", "34"),
        ("#### Step 2: Total\n7 + 5 = **12**", "12"),
        ("#### 2. Total\nThat is 12.", "12"),
        ("#### **42**", "42"),
        ("#### 42.\nShe has 7 apples and 3 pears", "42"),
        ("#### 18.\n\nQuestion: Tom has 5 apples", "18"),
        ("#### The answer is 42\nNote 7", "42"),
        ("#### Answer: 42\nNote 7", "42"),
        ("#### \\boxed{42} since 7", "42"),
        ("#### -$7\nNote 8", "-7"),
        ("That is \\$1{,}234", "1234"),
    ],
)
def test_answer_number(text, number):
    assert gsm8k_answer(text) == Decimal(number)


def test_equal_numbers_are_equal_however_written():
    assert gsm8k_answer("#### 42.00") == gsm8k_answer("so 42.")
    assert gsm8k_answer("I do not know") is None
