"""Figures of turns that follow from their steps alone."""

from types import SimpleNamespace

import pytest

from draft_heads.inference.evaluation.metrics import (
    accept_length_histogram,
    acceptance_by_position,
    beta_by_context_length,
    beta_by_output_position,
    beta_by_turn,
    slow_steps,
    verify_cost,
)
from draft_heads.inference.generation import Generation


def test_histogram_leaves_the_prefill_out():
    answer = Generation([5] * 7, [1, 3, 1, 2])
    assert accept_length_histogram([answer]) == [1, 1, 1]
    answer.sources = [-1, 0, 0, -1, -1, 0, 0]  # it ends with a draft
    assert accept_length_histogram([answer]) == [1, 0, 2]
    assert accept_length_histogram([]) == []


def test_acceptance_by_position_of_all_steps_and_of_those_that_got_so_far():
    found = acceptance_by_position([1, 2, 0, 1])  # four steps kept 0, 1, 1 and 3 drafts
    assert found == {"unconditional": [0.75, 0.25, 0.25], "conditional": [0.75, pytest.approx(1 / 3), 1.0]}
    assert acceptance_by_position([5]) == acceptance_by_position([]) == {"unconditional": [], "conditional": []}


def test_beta_by_position_in_the_answer_by_context_and_by_turn():
    def answered(turn, prompt, lengths):
        return SimpleNamespace(turn=turn, prompt_tokens=prompt, accept_lengths=lengths)

    records = [answered(0, 100, [1, 3, *[4] * 32]), answered(1, 250, [1, 2, 5]), answered(0, 40, [1, 1])]
    first, later = [1, 3, *[4] * 31, 1, 2, 5, 1, 1], [4]  # the last of 32 steps begins at token 128
    assert beta_by_output_position(records) == [sum(first) / len(first), 4.0]
    assert beta_by_turn(records) == [(1 + 3 + 128 + 1 + 1) / 36, 8 / 3]
    by_context = {row["from"]: row["beta"] for row in beta_by_context_length(records)}
    below = [3, *[4] * 6]  # from 101; 104, 108, … 124
    middle = [*[4] * 26, 2, 5]  # from 128 to 228; 251 and 253
    assert later and by_context == {
        **{32: 1.0, 64: sum(below) / len(below), 128: sum(middle) / len(middle)},
    }


def test_beta_stands_where_its_steps_began_though_none_began_between():
    answer = SimpleNamespace(turn=2, prompt_tokens=9, accept_lengths=[1, 257, 10, 3])  # at 0, 1, 258 and 268
    assert beta_by_output_position([answer]) == [129.0, None, 6.5]
    assert beta_by_turn([answer]) == [None, None, 271 / 4]
    assert beta_by_output_position([]) == beta_by_turn([]) == []


def test_verify_cost_is_the_median_of_the_steps_with_so_many_nodes():
    def answered(nodes, seconds):
        return SimpleNamespace(generation=Generation(step_nodes=nodes, step_seconds=seconds))

    vanilla = [answered([0, 0, 0], [2.0, 9.0, 1.0])]
    drafted = [answered([8, 4], [3.0, 2.5]), answered([8, 8], [5.0, 4.0])]
    four = {"nodes": 4, "steps": 1, "seconds": 2.5, "over_plain_step": 1.25}
    assert verify_cost(drafted, vanilla) == [four, {"nodes": 8, "steps": 3, "seconds": 4.0, "over_plain_step": 2.0}]
    assert verify_cost(drafted, [])[0] == {**four, "over_plain_step": None}
    assert verify_cost([answered([], [])], vanilla) is None


def test_questions_that_were_decoded_beside_other_work_are_told_with_the_speed_without_them():
    def answered(question, *steps, nodes=0):
        taken = {"step_seconds": [float(step) for step in steps], "step_nodes": [nodes] * len(steps)}
        answer = Generation(**taken, seconds={"total": float(sum(steps))})
        about = {"question": question, "question_id": f"q{question}", "turn": 0, "new_tokens": 10}
        return SimpleNamespace(**about, wall_time=answer.seconds["total"], generation=answer)

    plain = [answered(number, *[1] * 10) for number in range(4)]
    drafted = [answered(number, *[1] * 5) for number in range(4)]
    assert slow_steps(drafted, plain, 0) is None
    drafted[2] = answered(2, *[20] * 5)
    assert slow_steps(drafted, plain, 0) == {"questions": {"q2": 20.0}, "gamma_without": 2.0}
    plain[1] = answered(1, *[4] * 10)
    assert slow_steps(drafted, plain, 0) == {"questions": {"q2": 20.0}, "gamma_without": 2.0}
    assert slow_steps(plain, plain, 0) == {"questions": {"q1": 4.0}, "gamma_without": 1.0}
    usual = [answered(number, *[1] * 5, 4) for number in range(4)]  # a step of each
    assert slow_steps(usual, usual, 0) is None
    larger = [answered(0, *[4] * 5, nodes=64), *usual]  # trees of another size
    assert slow_steps(larger, usual, 0) is None
    short = [*(answered(number, *[1] * 99) for number in range(9)), answered(9, 4)]  # too little to matter
    assert slow_steps(short, short, 0) is None
