"""Who answers what, in which order, and the rows of a report, on an engine that costs a fixed time."""

import gc
import itertools
from dataclasses import replace

import pytest
import torch

from draft_heads.data.text.errors import ConversationError
from draft_heads.inference.evaluation.evaluate import (
    drafter_order,
)
from draft_heads.inference.evaluation.metrics import result_rows
from draft_heads.inference.generation import Clock, ContextError, GenerationSettings
from tests.inference.stub_engine import (
    QUESTIONS,
    DecodedInMemory,
    StubEngine,
    StubOracle,
    benchmark,
    evaluate,
    question,
    render,
)


def run(engines, benchmarks=None, **options):
    return evaluate(engines, StubOracle(), benchmarks or [benchmark()], render, **options)


def rows(evaluation, seed=0):
    return {(row["category"], row["drafter"]): row for row in result_rows(evaluation, seed)}


def test_the_conversation_grows_by_the_drafters_own_answers():
    engine = StubEngine()
    evaluation = run({"vanilla": engine})
    first = [record for record in evaluation.records if record.question_id == 1]
    assert [record.text for record in first] == ["dcba", "gfe"]
    assert bytes(first[1].prompt) == b"abcd\0dcba\0efg\0"


def test_prompts_have_the_system_text_and_the_arguments_of_their_question():
    asked = replace(question(1, None, "ab", "cd"), system="S", extra={"tools": [{}]})
    given = []

    def noting(messages, extra):
        given.append(extra)
        return render(messages)

    evaluation = evaluate({"vanilla": StubEngine()}, StubOracle(), [benchmark([asked])], noting)
    assert [bytes(record.prompt) for record in evaluation.records] == [b"S\0ab\0", b"S\0ab\0ba\0cd\0"]
    assert given == [{"tools": [{}]}] * 3  # the warm-up too


def test_each_drafter_is_at_every_place_as_often_and_behind_every_other():
    orders = [drafter_order("abcd", index) for index in range(200)]
    for start in range(0, 200, 4):
        assert all(sorted(places) == list("abcd") for places in zip(*orders[start : start + 4]))
    behind = {pair for names in orders for pair in itertools.pairwise(names)}
    assert len(behind) == 4 * 3


def test_drafters_take_turns_in_changing_order():
    log = []
    engines = {name: StubEngine(log=log, name=name) for name in ("vanilla", "a", "b")}
    run(engines, [benchmark([question(i, None, "x") for i in range(4)])])
    warm_up, timed = log[:3], log[3:]
    assert warm_up == ["vanilla", "a", "b"]
    assert timed == [name for index in range(4) for name in drafter_order(["vanilla", "a", "b"], index)]


def test_the_warm_up_is_short_and_leaves_no_record():
    engine = StubEngine()
    evaluation = run({"vanilla": engine})
    assert engine.prompts[0] == ("abcd", 64)
    assert {most for _, most in engine.prompts[1:]} == {64}
    assert len(evaluation.records) == 4


def test_old_objects_are_not_walked_through_while_answers_are_timed():
    before, frozen = gc.get_freeze_count(), []

    class Watching(DecodedInMemory):
        def put(self, group, part):
            super().put(group, part)
            if part.expected is None:
                frozen.append(gc.get_freeze_count())

    run({"vanilla": StubEngine()}, store=Watching())
    assert frozen and min(frozen) > before and gc.get_freeze_count() == 0

    class Stopping(DecodedInMemory):
        def put(self, group, part):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run({"vanilla": StubEngine()}, store=Stopping())
    assert gc.get_freeze_count() == 0


def test_vanilla_must_run():
    with pytest.raises(ValueError, match="needs the drafter 'vanilla'"):
        run({"ctc": StubEngine()})


def test_beta_counts_every_target_step_and_gamma_compares_seconds_per_token():
    fast = StubEngine(per_step=2, seconds_per_token=0.004)
    table = rows(run({"vanilla": StubEngine(), "fast": fast}))
    row = table[None, "fast"]
    # answers of 5, 4, 3, 3 tokens in 1 + ceil((n - 1) / 2) = 3, 3, 2, 2 steps
    assert (row["new_tokens"], row["target_steps"], row["questions"], row["turns"]) == (15, 10, 3, 4)
    assert row["beta"] == 1.5
    assert row["gamma"] == pytest.approx(2.5)
    assert row["gamma_ci95"] == pytest.approx([2.5, 2.5])
    assert row["wall_seconds"] == pytest.approx(0.06)
    assert row["tokens_per_second"] == pytest.approx(250)
    assert row["time_share"] == {"draft": 0.25, "verify": 0.5, "accept": 0.125, "other": 0.125}
    assert row["accept_length_histogram"] == [1, 5]  # 2+2, 2+1, 2, 2
    vanilla = table[None, "vanilla"]
    assert (vanilla["beta"], vanilla["gamma"], vanilla["gamma_ci95"]) == (1.0, 1.0, [1.0, 1.0])
    assert vanilla["accept_length_histogram"] == [11]


def test_a_single_question_has_no_interval():
    fast = StubEngine(per_step=2, seconds_per_token=0.004)
    one = benchmark([question(1, "a", "abcd")])
    row = rows(evaluate({"vanilla": StubEngine(), "fast": fast}, StubOracle(), [one], render))[None, "fast"]
    assert row["gamma"] == pytest.approx(2.5) and row["gamma_ci95"] is row["beta_ci95"] is None


def test_parts_of_a_step_that_cannot_be_timed_apart_have_no_share():
    """A GPU computes beside the host, which starts a step's parts and waits for all of them in one."""
    clock = Clock()
    clock.parts = {"draft": 1.0, "verify": 2.0, "accept": 4.0, "other": 1.0}
    assert clock.seconds(torch.device("cpu"), 0.5) == {"draft": 0.5, "verify": 1, "accept": 2, "other": 0.5, "total": 4}
    assert clock.seconds(torch.device("cuda", 1)) == clock.seconds(torch.device("mps")) == {"total": 8.0}

    class OnGPU(StubEngine):
        def generate(self, prompt_ids, settings):
            answer = super().generate(prompt_ids, settings)
            return replace(answer, seconds={"total": answer.seconds["total"]})

    row = rows(run({"vanilla": StubEngine(), "fast": OnGPU(per_step=2, seconds_per_token=0.004)}))[None, "fast"]
    assert row["time_share"] is None and row["wall_seconds"] == pytest.approx(0.06)
    assert row["gamma"] == pytest.approx(2.5)


def test_speed_over_transformers_is_of_turns_both_answered_and_null_without_it():
    class Short(StubEngine):
        """A baseline that answers first turns only."""

        def generate(self, prompt_ids, settings):
            if 0 in prompt_ids[:-1]:
                raise ContextError("a second turn")
            return super().generate(prompt_ids, settings)

    class Slower(StubEngine):
        """Takes 0.01 s a token in first turns, 0.09 in second ones."""

        def generate(self, prompt_ids, settings):
            self.seconds_per_token = 0.09 if 0 in prompt_ids[:-1] else 0.01
            return super().generate(prompt_ids, settings)

    engines = {"vanilla": StubEngine(), "transformers": Short(seconds_per_token=0.03), "slower": Slower()}
    table = rows(run(engines))
    assert table[None, "slower"]["over_transformers"] == pytest.approx(3.0)
    assert table[None, "slower"]["gamma"] == pytest.approx(15 / (11 + 4 * 9))
    assert table[None, "vanilla"]["over_transformers"] == pytest.approx(3.0)
    assert rows(run({"vanilla": StubEngine()}))[None, "vanilla"]["over_transformers"] is None


def test_categories_have_rows_that_add_up():
    table = rows(run({"vanilla": StubEngine(), "fast": StubEngine(2)}))
    assert [key for key in table if key[1] == "fast"] == [
        (None, "fast"),
        ("writing", "fast"),
        ("math", "fast"),
    ]
    assert table["writing", "fast"]["turns"] == 2
    assert table["math", "fast"]["new_tokens"] == 6
    for field in ("questions", "turns", "new_tokens", "target_steps"):
        assert table[None, "fast"][field] == table["writing", "fast"][field] + table["math", "fast"][field]


def test_the_interval_is_seeded_and_spans_the_questions():
    class Uneven(StubEngine):
        """Twice vanilla's speed on words that start with a to g, vanilla's on others."""

        def generate(self, prompt_ids, settings):
            self.seconds_per_token = 0.005 if prompt_ids[0] < ord("h") else 0.01
            return super().generate(prompt_ids, settings)

    evaluation = run({"vanilla": StubEngine(), "uneven": Uneven()})
    row = rows(evaluation)[None, "uneven"]
    low, high = row["gamma_ci95"]
    assert low < row["gamma"] < high
    assert low == pytest.approx(1.0)
    assert high == pytest.approx(2.0)
    assert rows(evaluation)[None, "uneven"] == row


def test_accuracy_is_of_questions_with_a_reference():
    table = rows(run({"vanilla": StubEngine()}))
    assert table[None, "vanilla"]["score"] == {"accuracy": 0.5}
    assert table["math", "vanilla"]["score"] == {"accuracy": 0.5}
    assert table["writing", "vanilla"]["score"] is None


def test_a_reference_belongs_to_the_last_turn():
    asked = question(1, None, "ab", "cd", reference="dc")
    table = rows(run({"vanilla": StubEngine()}, [benchmark([asked])]))
    assert table[None, "vanilla"]["score"] == {"accuracy": 1.0}


def test_gamma_is_per_token_not_per_answer():
    class Brief(StubEngine):
        """Stops after two tokens."""

        def generate(self, prompt_ids, settings):
            whole = super().generate(prompt_ids, settings)
            seconds = {part: 2 * self.seconds_per_token * (part in ("verify", "total")) for part in whole.seconds}
            return replace(whole, tokens=whole.tokens[:2], accept_lengths=[1, 1], seconds=seconds)

    table = rows(run({"vanilla": StubEngine(), "brief": Brief()}))
    assert table[None, "brief"]["gamma"] == pytest.approx(1.0)


def test_a_turn_that_does_not_fit_ends_its_question_and_is_counted():
    long = question(9, "long", "a" * 12, "b" * 30, "c")  # the second prompt has 13 + 13 + 31 tokens
    huge = question(8, "huge", "a" * 50)
    evaluation = run({"vanilla": StubEngine()}, [benchmark([huge, long, QUESTIONS[1]])])
    table = rows(evaluation)
    assert (table["long", "vanilla"]["turns"], table["long", "vanilla"]["skipped"]) == (1, 2)
    assert (table["huge", "vanilla"]["turns"], table["huge", "vanilla"]["skipped"]) == (0, 1)
    assert table["huge", "vanilla"]["beta"] is None
    assert table["huge", "vanilla"]["gamma"] is None
    assert table["huge", "vanilla"]["time_share"] is None
    row = table[None, "vanilla"]
    assert (row["questions"], row["turns"], row["skipped"]) == (3, 2, 3)
    assert row["score"] == {"accuracy": 1.0}


def test_a_turn_whose_history_the_chat_template_refuses_ends_its_question_and_is_told(caplog):
    """As gpt-oss's does after an answer that was cut in its analysis; the other questions are measured."""

    def refusing(messages, extra):
        if any("ih" in message["content"] for message in messages):
            raise ConversationError("channels in content")
        return render(messages, extra)

    asked = [question(8, None, "hi", "x", "y"), question(9, None, "ab", "c")]
    evaluation = evaluate({"vanilla": StubEngine()}, StubOracle(), [benchmark(asked)], refusing)
    row = rows(evaluation)[None, "vanilla"]
    assert (row["questions"], row["turns"], row["skipped"]) == (2, 3, 2)
    assert "bench, question 8, is left out from turn 2 on for vanilla: channels in content" in caplog.text
    with pytest.raises(ConversationError, match="channels in content"):  # which is no answer's fault
        evaluate({"vanilla": StubEngine()}, StubOracle(), [benchmark([question(8, None, "ih")])], refusing)


def test_every_turn_is_judged_against_the_oracle():
    evaluation = run({"vanilla": StubEngine(), "broken": StubEngine(spoil=1)})
    table = rows(evaluation)
    assert table[None, "vanilla"]["lossless"] == {
        "identical_turns": 4,
        "turns": 4,
        "near_ties": 0,
        "unexplained": 0,
    }
    assert table[None, "broken"]["lossless"]["unexplained"] == 4
    broken = [record for record in evaluation.records if record.drafter == "broken"]
    assert {record.difference.position for record in broken} == {1}


@pytest.mark.parametrize(
    ("rules", "assisted", "again"),
    [
        ({}, False, False),
        ({"stop_strings": ("x",)}, False, True),
        ({"stop": lambda tokens: None}, False, True),
        ({}, True, True),
    ],
)
def test_the_oracle_takes_the_answers_of_plain_generate_where_no_stop_rule_cuts_them(
    rules, assisted, again, monkeypatch
):
    class Generate(StubEngine):
        pass

    class Assisted(Generate):
        pass

    monkeypatch.setattr("draft_heads.inference.evaluation.evaluate.HFGenerate", Generate)

    class Counting(StubOracle):
        def __init__(self, settings):
            super().__init__(settings)
            self.given, self.asked = set(), set()

        def add_answers(self, answers):
            self.given |= answers.keys()

        def answer(self, prompt):
            if prompt not in self.given:
                self.asked.add(prompt)
            return super().answer(prompt)

    settings = GenerationSettings(max_new_tokens=64, eos_token_ids=(0,), **rules)
    oracle = Counting(settings)
    engines = {"vanilla": StubEngine(spoil=0), "transformers": Assisted() if assisted else Generate()}
    evaluation = evaluate(engines, oracle, [benchmark()], render)
    wrong = {row.drafter for row in evaluation.records if row.difference is not None}
    assert wrong == {"vanilla"}
    own = {row.prompt for row in evaluation.records if row.drafter == "transformers"}
    others = {row.prompt for row in evaluation.records} - own
    assert others and oracle.asked == (own | others if again else others)


def test_settings_reach_the_engine():
    engine = StubEngine()
    oracle = StubOracle(settings=GenerationSettings(max_new_tokens=7))
    evaluate({"vanilla": engine}, oracle, [benchmark()], render)
    assert {most for _, most in engine.prompts[1:]} == {7}  # behind the warm-up
