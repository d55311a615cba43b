"""The generated corpus: right arithmetic, splits that never meet, rows in the public formats."""

import random
import re

import pytest

from draft_heads.data.synthetic.corpus import _collect, conversations, questions, split_of, word_problems
from draft_heads.data.synthetic.problems import MAX_OPERAND, draw_drill, draw_problem, operands, working
from draft_heads.data.synthetic.texts import read_texts, scenarios, topics
from draft_heads.data.text.conversations import parse_record

EQUATION = re.compile(r"\d+(?: [+\-*] \d+)?(?: = \d+(?: [+\-*] \d+)?)+")


def human_texts(rows: list[dict]) -> list[str]:
    return [turn["value"] for row in rows for turn in row["conversations"] if turn["from"] == "human"]


def test_working_adds_tens_and_ones_and_carries_nothing_unseen():
    assert working(27, "+", 45) == "27 + 45 = 60 + 12 = 72"
    assert working(72, "-", 18) == "72 - 18 = 60 - 6 = 54"
    assert working(78, "-", 12) == "78 - 12 = 60 + 6 = 66"
    assert working(72, "-", 20) == "72 - 20 = 50 + 2 = 52"
    assert working(7, "+", 8) == "7 + 8 = 15"
    assert working(6, "*", 8) == "6 * 8 = 48"


@pytest.mark.parametrize("split", ["train", "heldout"])
def test_every_equation_of_every_answer_holds(split):
    for row in word_problems(1500, 3, split):
        equations = EQUATION.findall(row["answer"])
        assert equations, row
        for equation in equations:
            # The pattern admits digits and + - * = only.
            assert len({eval(side) for side in equation.split(" = ")}) == 1, row
        assert row["answer"].rpartition("#### ")[2] == equations[-1].rpartition(" = ")[2], row


def test_drills_ask_for_every_sum_they_work_out():
    rng = random.Random(4)
    for _ in range(500):
        (_, *sums), question, answer = draw_drill(rng)
        asked = re.findall(r"\d+ [+\-*] \d+", question)
        assert asked == [f"{a} {operation} {b}" for a, operation, b in sums]
        for line, sum_ in zip(answer.split("\n"), asked):
            assert line.startswith(f"{sum_} = ") and line.endswith(f" {eval(sum_)}")


def test_problems_are_solved_from_the_numbers_in_their_question():
    rng = random.Random(0)
    for _ in range(2000):
        (_, index, *numbers), question, answer = draw_problem(rng)
        expression = str(numbers[0])
        for operation, number in zip(scenarios()[index].operations, numbers[1:]):
            expression = f"({expression} {operation} {number})"
        assert int(answer.rpartition("#### ")[2]) == eval(expression)
        assert sorted(map(int, re.findall(r"\d+", question))) == sorted(numbers)


@pytest.mark.parametrize("operations", ["+-", "++", "--", "-+", "*+", "*-", "+*", "+", "-", "*"])
def test_operands_and_intermediate_values_stay_in_range(operations):
    rng = random.Random(1)
    for _ in range(500):
        numbers = operands(rng, operations)
        assert len(numbers) == len(operations) + 1
        assert all(1 <= n <= MAX_OPERAND for n in numbers)
        first = eval(f"{numbers[0]} {operations[0]} {numbers[1]}")
        assert 1 <= first <= MAX_OPERAND
        if len(operations) == 2:
            assert 1 <= eval(f"{first} {operations[1]} {numbers[2]}") <= 2 * MAX_OPERAND


def test_splits_share_no_question_whatever_the_seeds():
    train = set(human_texts(conversations(6000, 0, "train")) + human_texts(conversations(6000, 9, "train")))
    heldout = human_texts(conversations(800, 0, "heldout")) + human_texts(conversations(800, 4, "heldout"))
    # Follow-ups such as "Is it worth the trouble?" are common property; what names content is not.
    assert not train & {text for text in heldout if any(mark.isdigit() for mark in text)}
    first = {row["turns"][0] for row in questions(800, 2, "heldout")}
    first |= {row["question"] for row in word_problems(800, 2, "heldout")}
    assert not train & first


def test_split_depends_on_content_and_not_on_wording_or_names():
    rng, contents = random.Random(2), {}
    for _ in range(3000):
        content, question, _ = draw_problem(rng, steps=1)
        contents.setdefault(content, set()).add(question)
    assert max(map(len, contents.values())) > 1
    assert {split_of(content) for content in contents} == {"train", "heldout"}


def test_every_question_form_names_the_slots_that_decide_its_split():
    for kind in read_texts("dialogues")["first"].values():
        for form in kind["forms"]:
            assert all(f"{{{key}}}" in form["question"] for key in kind["keys"]), form


def test_same_seed_gives_the_same_rows_and_another_seed_others():
    assert conversations(50, 1, "train") == conversations(50, 1, "train")
    assert conversations(50, 1, "train") != conversations(50, 2, "train")


def test_conversations_are_valid_sharegpt_of_one_to_three_turns():
    rows = conversations(1000, 0, "train")
    turns, systems = set(), 0
    for row in rows:
        messages = parse_record(row).messages
        systems += messages[0]["role"] == "system"
        turns.add(sum(message["role"] == "user" for message in messages))
        assert not re.search(r"[{}]\w+}", row["conversations"][-1]["value"]), "an unfilled slot"
    assert turns == {1, 2, 3}
    assert 50 < systems < 200
    assert len({row["id"] for row in rows}) == 1000


def test_questions_are_mt_bench_rows_over_several_categories():
    rows = questions(300, 0, "heldout")
    assert [row["question_id"] for row in rows] == list(range(1, 301))
    assert all(len(row["turns"]) == 2 and all(row["turns"]) for row in rows)
    assert {"math", "coding", "writing", "advice", "lists"} <= {row["category"] for row in rows}


def test_steps_selects_one_step_or_two_step_problems():
    assert all("Then" not in row["answer"] for row in word_problems(100, 0, "train", steps=1))
    assert all(len(EQUATION.findall(row["answer"])) == 2 for row in word_problems(100, 0, "train", steps=2))


def test_topic_phrases_are_all_different():
    phrases = [p for t in topics() for p in (t.name, *t.tools, *t.steps, *t.gains, *t.slips, t.sign)]
    assert len(phrases) == len(set(phrases))


def test_unknown_split_is_refused_with_the_valid_ones():
    with pytest.raises(ValueError, match=r"one of train, heldout; got 'test'"):
        conversations(1, 0, "test")


def test_count_beyond_the_different_questions_is_refused():
    with pytest.raises(ValueError, match="found 1 of 2, lower it"):
        _collect(2, 0, "train", lambda rng: ((1,), "the only question", {}))


def test_topics_and_scenarios_have_the_phrases_that_forms_name():
    for topic in topics():
        assert tuple(map(len, (topic.tools, topic.steps, topic.gains, topic.slips))) == (3, 4, 2, 2), topic
    for scenario in scenarios():
        assert len(scenario.questions) == 3 and len(scenario.steps) == len(scenario.operations), scenario
        assert set(scenario.operations) <= set("+-*"), scenario
