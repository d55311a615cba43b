"""Sample answers of a report: texts, steps, sources and trees of each token."""

import json
from dataclasses import replace

import pytest

from draft_heads.data.text.benchmarks import Question
from draft_heads.inference.batch import BatchEngine
from draft_heads.inference.drafters.registry import DrafterSpec, build_drafter
from draft_heads.inference.engine import DecodingEngine
from draft_heads.inference.evaluation import samples
from draft_heads.inference.evaluation.evaluate import Benchmark
from draft_heads.inference.evaluation.lossless import Oracle
from draft_heads.inference.evaluation.report import build_report, report_json
from draft_heads.inference.evaluation.samples import accepted_nodes, node_text, sample_answers, token_texts, whole_steps
from draft_heads.inference.generation import Generation, GenerationSettings
from draft_heads.inference.target.target import Target
from tests.inference.models import make_head
from tests.inference.stub_engine import evaluate

SETTINGS = GenerationSettings(max_new_tokens=40)
QUESTIONS = [Question(7, "a", ["Count: one two one two one two one"]), Question(8, "b", ["Say it again."])]


@pytest.fixture(scope="module")
def target():
    return Target.from_pretrained("data/tiny_target", device="cpu")


@pytest.fixture(scope="module")
def decoded(target):
    """An evaluation and its engines: without drafts, n-grams, lookahead and a hybrid."""
    words = ("vanilla", "ngram", "lookahead", "both=ngram+prompt_lookup")
    specs = [DrafterSpec.parse(word) for word in words]
    engines = {spec.name: DecodingEngine(target, build_drafter(spec, target, 8)) for spec in specs}
    evaluation = evaluate(engines, Oracle(target, SETTINGS), [Benchmark("q", QUESTIONS)], target.renderer.prompt)
    return evaluation, engines


def test_each_drafter_has_a_sample_whose_counts_are_the_measured_answers(target, decoded):
    evaluation, engines = decoded
    found = sample_answers(evaluation, engines, target, SETTINGS)
    assert [(one["drafter"], one["question_id"]) for one in found] == [("ngram", 7), ("lookahead", 7), ("both", 7)]
    measured = {turn.drafter: turn for turn in evaluation.records if turn.question_id == 7}
    for one in found:
        turn = measured[one["drafter"]]
        assert one["question"] == QUESTIONS[0].turns[0]
        assert one["answer_tokens"] == len(turn.generation.tokens) == len(one["texts"]) == len(one["sources"])
        assert sum(one["accept_lengths"]) == len(one["texts"])
        assert one["measured_steps"] == turn.generation.target_steps
        assert "".join(one["texts"]).strip() == turn.text
        assert len(one["trees"]) == len(one["accept_lengths"]) and one["trees"][0] is None
    assert json.loads(json.dumps(found)) == found


def test_the_accepted_nodes_of_each_tree_are_the_drafted_tokens_of_its_step(target, decoded):
    evaluation, engines = decoded
    drafted = 0
    for one in sample_answers(evaluation, engines, target, SETTINGS):
        start = 0
        for tree, length in zip(one["trees"], one["accept_lengths"]):
            sources = [source for source in one["sources"][start : start + length] if source >= 0]
            if tree is not None:
                accepted = tree["accepted"]
                assert [tree["sources"][node] for node in accepted] == sources
                assert [tree["parents"][node] for node in accepted] == [-1, *accepted][: len(accepted)]
                assert all(parent < node for node, parent in enumerate(tree["parents"]))
                assert len(tree["texts"]) == len(tree["parents"]) == len(tree["sources"])
                assert len(tree["parents"]) <= engines[one["drafter"]].drafter.max_nodes
                drafted += len(accepted)
            start += length
    assert drafted > 3


def test_a_long_answer_is_cut_after_whole_steps(target, decoded):
    evaluation, engines = decoded
    for one in sample_answers(evaluation, engines, target, SETTINGS, most_tokens=9):
        assert 1 < sum(one["accept_lengths"]) == len(one["texts"]) <= 9 < one["answer_tokens"]
        assert len(one["trees"]) == len(one["accept_lengths"])
    answer = Generation([5, 6, 7, 8, 9], [1, 3, 1], [-1, 0, 0, -1, -1])
    cut = whole_steps(answer, 3)
    assert (cut.tokens, cut.accept_lengths, cut.sources) == ([5], [1], [-1])
    assert whole_steps(answer, 5).accept_lengths == [1, 3, 1]


def test_trees_are_shown_of_a_drafter_that_takes_other_steps_since_it_has_learnt(target, decoded):
    """Its last whole step within the most tokens ends elsewhere than the measured run's."""
    evaluation, engines = decoded
    turn = next(turn for turn in evaluation.records if (turn.drafter, turn.question_id) == ("ngram", 7))
    one_by_one = replace(turn.generation, accept_lengths=[1, 6, *[1] * (len(turn.generation.tokens) - 7)])
    slower = replace(evaluation, records=[replace(turn, generation=one_by_one)])
    usual, whole = (sample_answers(slower, engines, target, SETTINGS, most)[0] for most in (5, 40))
    assert len(usual["trees"]) == len(usual["accept_lengths"]) and 1 < len(usual["texts"]) <= 5
    assert (usual["measured_steps"], whole["measured_steps"]) == (2, one_by_one.target_steps)


def test_a_measured_answer_with_other_tokens_is_shown_without_trees(target, decoded):
    evaluation, engines = decoded
    changed = []
    for turn in evaluation.records:
        answer = turn.generation
        changed.append(replace(turn, generation=replace(answer, tokens=[*answer.tokens[:-1], 17])))
    for one in sample_answers(replace(evaluation, records=changed), engines, target, SETTINGS):
        measured = next(turn.generation for turn in changed if turn.drafter == one["drafter"])
        assert one["trees"] is None and one["accept_lengths"] == measured.accept_lengths


def test_answers_of_a_batch_have_the_trees_that_they_have_one_by_one(tmp_path, monkeypatch):
    monkeypatch.setattr("draft_heads.inference.evaluation.evaluate.WARM_UP_TOKENS", 4)
    settings = replace(SETTINGS, eos_token_ids=())
    small = Target.from_pretrained("tests/tiny_target", device="cpu")
    make_head(small, "medusa", scale=0.01).save_pretrained(tmp_path)
    words = ("vanilla", "both=ngram+prompt_lookup", f"medusa={tmp_path}", "itself=draft_model:tests/tiny_target")
    specs, found = [DrafterSpec.parse(word) for word in words], list[list[dict]]()
    for kind, slots in ((DecodingEngine, 1), (BatchEngine, 3)):
        engines = {spec.name: kind(small, build_drafter(spec, small, 8, slots)) for spec in specs}
        asked = [Benchmark("q", QUESTIONS)]
        evaluation = evaluate(engines, Oracle(small, settings), asked, small.renderer.prompt, group_size=slots)
        found += [sample_answers(evaluation, engines, small, settings, most) for most in (12, 160)]
    assert found[:2] == found[2:]
    short, whole = found[-2][-1], found[-1][-1]
    assert len(whole["trees"]) == len(whole["accept_lengths"]) > 3 and max(whole["accept_lengths"]) == 6
    # the next step is not shown, and the tokens that it would add do not shorten those that are
    assert short["accept_lengths"] == whole["accept_lengths"][: len(short["trees"])] == [1, 6]


def test_the_timed_engine_and_its_drafter_are_left_as_they_are(target, decoded):
    evaluation, engines = decoded
    before = {name: (engine.steps, vars(engine.drafter).keys()) for name, engine in engines.items()}
    sample_answers(evaluation, engines, target, SETTINGS, most_tokens=4)
    assert before == {name: (engine.steps, vars(engine.drafter).keys()) for name, engine in engines.items()}


def test_token_texts_join_to_the_answer_and_give_a_character_to_the_token_that_completes_it(target):
    tokens = target.tokenizer("tea 🙂é\n\nso", add_special_tokens=False)["input_ids"]
    pieces = token_texts([*tokens, target.end_token_ids[0]], lambda ids: samples.unstripped_text(target, ids))
    assert "".join(pieces) == "tea 🙂é\n\nso" and pieces[-1] == ""
    smile = next(place for place, piece in enumerate(pieces) if "🙂" in piece)
    assert pieces[smile] == "🙂" and pieces[smile - 1] == ""
    assert any(piece.startswith("\n") for piece in pieces)
    assert token_texts([1, 2], lambda ids: {1: "a .", 2: "a."}[len(ids)]) == ["a", "."]  # a decoder that mends
    assert token_texts([], lambda ids: "") == []


def test_a_node_is_shown_with_its_blank(target):
    first, second = target.tokenizer("one two", add_special_tokens=False)["input_ids"][:2]
    assert node_text(target, first, second) == target.tokenizer.decode([first, second])[3:]


def test_accepted_nodes_follow_the_path():
    assert accepted_nodes([5, 6, 7], [-1, -1, 0], [5, 7]) == [0, 2]
    assert accepted_nodes([5, 6, 7], [-1, -1, 0], []) == []
    assert accepted_nodes([5, 5], [-1, 0], [5, 5]) == [0, 1]


def test_report_json_has_one_line_for_each_sample(decoded, target):
    evaluation, engines = decoded
    found = sample_answers(evaluation, engines, target, SETTINGS)
    described = {"path": "t", "parameters": 1, "dtype": "float32", "device": "cpu"}
    report = build_report(evaluation, described, {"max_new_tokens": 40}, 0, samples=found)
    text = report_json(report)
    assert json.loads(text) == json.loads(json.dumps(report))
    assert sum(line.startswith('    {"benchmark"') or '"samples": [{' in line for line in text.splitlines()) == 3
