"""Replayed answers: steps as the engine takes them, prompts, and what cannot be replayed."""

import pytest
import torch

from draft_heads.data.text.benchmarks import Question
from draft_heads.data.text.chat_template import read_chat_template
from draft_heads.data.text.rendering import ChatRenderer
from draft_heads.inference.drafters.base import VanillaDrafter
from draft_heads.inference.drafters.registry import DrafterSpec
from draft_heads.inference.drafters.text.ngram import NgramDrafter
from draft_heads.inference.engine import DecodingEngine
from draft_heads.inference.evaluation.answer_files import Answer, AnsweredTurn
from draft_heads.inference.evaluation.decoded import TurnRecord
from draft_heads.inference.evaluation.evaluate import time_engines, warm_up
from draft_heads.inference.evaluation.meter import Meter
from draft_heads.inference.evaluation.metrics import result_rows
from draft_heads.inference.evaluation.replay import (
    AnswerStates,
    States,
    accepted_sources,
    answer_tokens,
    end_of_answer,
    match_questions,
    recorded_turns,
    replay,
    replay_all,
    replayed_drafters,
    text_drafters,
)
from draft_heads.inference.generation import Generation, GenerationSettings
from draft_heads.inference.target.target import Target
from draft_heads.inference.tree import DraftTree
from tests.inference.models import RANDOM_TARGETS, load_target
from tests.inference.stub_engine import benchmark, question, render
from tests.tiny_chat import byte_tokenizer, template


@pytest.fixture(scope="module")
def target():
    return load_target(next(iter(RANDOM_TARGETS)), torch.float64)


def test_steps_of_a_small_answer():
    """After 1 2 3 the base token 1 is known; 2 3 1 2 3 1 is drafted, and 9 ends the answer."""
    done = replay(NgramDrafter(n=3, k=6), [1, 2, 3], [1, 2, 3, 1, 9])
    assert done.accept_lengths == [1, 4]
    assert done.sources == [-1, 0, 0, 0, -1]
    assert replay(NgramDrafter(n=3, k=6), [1, 2, 3], [1, 2, 3, 1]).accept_lengths == [1, 3]
    assert replay(NgramDrafter(), [1, 2, 3], []).target_steps == 0


def test_what_warms_an_evaluation_up_teaches_no_drafter(target):
    """A replay, which has no warm-up, takes the same steps; the warm-up's answer is that of a palindrome, the same."""
    settings, words = GenerationSettings(40, ()), "ab cd ab"
    prompt = render([{"content": words}])
    kept = NgramDrafter(keep=1)
    engine = DecodingEngine(target, kept)
    warm_up({"kept": engine}, settings, [benchmark([question(1, None, words)])], render, Meter([target.device]))
    answer = engine.generate(prompt, settings)
    alone = replay(NgramDrafter(keep=1), prompt, answer.tokens)
    assert answer.accept_lengths == alone.accept_lengths
    mirrored = [*prompt, *prompt[::-1]]
    kept.forget()
    totals = time_engines({0: engine}, [mirrored], settings)
    answer = DecodingEngine(target, VanillaDrafter()).generate(mirrored, settings)
    assert totals[0][:2] == (40, replay(NgramDrafter(keep=1), mirrored, answer.tokens).target_steps)


def test_the_longest_path_counts():
    tree = DraftTree.build(torch.tensor([[4, 5, 6, 7, 8]]), torch.tensor([[-1, -1, 1, 0, 2]]))
    assert accepted_sources(tree, [5, 6, 8, 1]) == [0, 0, 0]
    assert accepted_sources(tree, [5, 6]) == [0, 0]
    assert accepted_sources(tree, [4, 6]) == [0]
    assert accepted_sources(tree, [9]) == []


class Letters:
    """A tokenizer of single characters."""

    bos_token_id, eos_token_id = 1, 2

    def __call__(self, text, **options):
        return {"input_ids": [ord(letter) for letter in text]}

    def __len__(self):
        return 256


class LettersRenderer:
    """Renders the texts alone."""

    def prompt(self, messages, extra):
        return [ord(letter) for message in messages for letter in message["content"]]

    def answer_after(self, messages, answer, extra):
        return [ord(letter) for letter in answer]


ANSWERS = {
    (None, 7): Answer(7, (AnsweredTurn("ab", 3, 3, 1.0), AnsweredTurn("cd", 2, 2, 1.0))),
    (None, 8): Answer(8, (AnsweredTurn("ef", 3, 3, 1.0),)),
}
QUESTIONS = [Question(8, "math", ["x"]), Question(7, "writing", ["y", "z"]), Question(9, "math", ["not answered"])]


def test_eos_is_added_where_more_tokens_were_counted_than_the_text_has():
    assert answer_tokens([97, 98], 3, 2) == [97, 98, 2]
    assert answer_tokens([97, 98], 2, 2) == [97, 98]
    assert answer_tokens([97, 98], 20, 2) == [97, 98, 2]


@pytest.mark.parametrize("form", ["chatml", "vicuna", "spaced"])
def test_an_answer_is_tokenised_as_it_follows_its_prompt(form):
    """Its tokens are those that a conversation with it is trained on.

    A recorded text lacks the blank at its start, which the target writes where a prompt ends with "ASSISTANT:"; where
    the prompt ends with the blank, the answer has none.
    """
    source = template("chatml") if form == "chatml" else read_chat_template("vicuna")
    if form == "spaced":
        prompt = "add_generation_prompt -%}{{- 'ASSISTANT:"
        assert prompt in source
        source = source.replace(prompt, f"{prompt} ")
    renderer = ChatRenderer(byte_tokenizer(source, eos="</s>"))
    messages = [{"role": "user", "content": "Hi"}]
    ids = renderer.answer_after(messages, "Sure, why not")
    if form != "spaced":
        trained, mask = renderer.conversation([*messages, {"role": "assistant", "content": "Sure, why not"}])
        assert [token for token, own in zip(trained, mask) if own][:-1] == ids
    assert renderer.tokenizer.decode(ids) == (" " if form == "vicuna" else "") + "Sure, why not"
    assert renderer.answer_after(messages, "") == []


def test_a_recorded_answer_ends_as_the_chat_template_closes_it():
    """As in Gemma's form, where the tokenizer's EOS is another token."""
    tokenizer = byte_tokenizer(template("chatml"), eos="</s>")
    assert end_of_answer(tokenizer) == tokenizer.convert_tokens_to_ids("<|im_end|>") != tokenizer.eos_token_id
    tokenizer.chat_template = "{% if %}"  # which no prompt is rendered with
    assert end_of_answer(tokenizer) == tokenizer.eos_token_id
    tokenizer.chat_template = None
    assert end_of_answer(tokenizer) == tokenizer.eos_token_id is not None


def test_a_recorded_reason_decides_whether_eos_is_added():
    assert answer_tokens([97, 98], 3, 2, "length") == answer_tokens([97, 98], 3, 2, "stop") == [97, 98]
    assert answer_tokens([97, 98], 2, 2, "eos") == [97, 98, 2]
    (key, answer), other = (
        next(iter(ANSWERS.items())),
        Answer(8, (AnsweredTurn("ef", 3, 3, 1.0, finish_reason="length"),)),
    )
    turns = recorded_turns("file", {key: answer, (None, 8): other}, match_questions(ANSWERS, None), Letters(), None, 2)
    assert [turn.generation.tokens for turn in turns] == [[97, 98, 2], [99, 100], [101, 102]]


def test_token_ids_are_replayed_where_they_are_of_this_tokenizer(monkeypatch):
    """The file's third token ended the answer, after a text that has other tokens now."""
    monkeypatch.setattr("draft_heads.inference.evaluation.replay.tokenizer_hash", lambda tokenizer: "mine")
    turn = AnsweredTurn("ab", 3, 3, 1.0, finish_reason="eos", token_ids=(120, 121, 9))
    for renderer in (None, LettersRenderer()):
        for hashed, tokens in (("mine", [120, 121, 9]), ("other", [97, 98, 2]), (None, [97, 98, 2])):
            answers = {(None, 8): Answer(8, (turn,), tokenizer=hashed)}
            asked = match_questions(answers, QUESTIONS)
            (found,) = recorded_turns("file", answers, asked, Letters(), renderer, 2)
            assert found.generation.tokens == tokens


def test_prompts_are_the_conversation_so_far():
    asked = match_questions(ANSWERS, QUESTIONS)
    assert [question.question_id for question in asked] == [7, 8]

    turns = list(recorded_turns("file", ANSWERS, asked, Letters(), LettersRenderer(), 2))
    assert [(turn.question, turn.turn, bytes(turn.prompt).decode()) for turn in turns] == [
        (0, 0, "y"),
        (0, 1, "yabz"),
        (1, 0, "x"),
    ]
    assert [turn.generation.tokens for turn in turns] == [[97, 98, 2], [99, 100], [101, 102, 2]]


def test_turns_that_were_not_answered_are_not_asked():
    first = {(None, 7): Answer(7, ANSWERS[None, 7].turns[:1])}
    asked = match_questions(first, QUESTIONS)
    assert asked[0].turns == ["y"] and QUESTIONS[1].turns == ["y", "z"]
    turns = list(recorded_turns("file", first, asked, Letters(), LettersRenderer(), 2))
    (row,) = (
        row
        for row in result_rows(replay_all("file", {"vanilla": VanillaDrafter()}, asked, turns), 0)
        if not row["category"]
    )
    assert (row["turns"], row["skipped"]) == (1, 0)


def test_without_questions_prompts_are_what_was_answered_before():
    turns = list(recorded_turns("file", ANSWERS, match_questions(ANSWERS, None), Letters(), None, 2))
    assert [turn.prompt for turn in turns] == [(1,), (1, 97, 98, 2), (1,)]
    bare = Letters()
    bare.bos_token_id = bare.eos_token_id = None
    with pytest.raises(ValueError, match="BOS or EOS"):
        list(recorded_turns("file", ANSWERS, match_questions(ANSWERS, None), bare, None, 2))


def test_questions_that_do_not_fit_are_named():
    with pytest.raises(ValueError, match="it lacks 7, 8; pass the file that was answered"):
        match_questions(ANSWERS, QUESTIONS[2:])
    with pytest.raises(ValueError, match="question 7 has 1 turns in --questions and 2 answers"):
        match_questions(ANSWERS, [Question(7, None, ["y"]), QUESTIONS[0]])


def test_figures_by_category_without_times():
    asked = match_questions(ANSWERS, QUESTIONS)
    turns = [
        TurnRecord("file", 0, 7, "writing", 0, "", (5, 6, 5), "…", Generation([6, 5, 6, 5, 6])),
        TurnRecord("file", 1, 8, "math", 0, "", (5,), "…", Generation([7, 8])),
    ]
    moved = []
    drafters = {"vanilla": VanillaDrafter(), "ngram": NgramDrafter()}
    evaluation = replay_all("file", drafters, asked, turns, lambda *where: moved.append(where))
    assert moved[0] == ("file", 0, 4) and moved[-1] == ("replayed", 4, 4)
    rows = {(row["category"], row["drafter"]): row for row in result_rows(evaluation, 0)}
    assert [(key, row["new_tokens"], row["target_steps"]) for key, row in rows.items()] == [
        ((None, "vanilla"), 7, 7),
        ((None, "ngram"), 7, 4),
        (("writing", "vanilla"), 5, 5),
        (("writing", "ngram"), 5, 2),
        (("math", "vanilla"), 2, 2),
        (("math", "ngram"), 2, 2),
    ]
    row = rows["writing", "ngram"]
    assert (row["beta"], row["accept_length_histogram"]) == (2.5, [0, 0, 0, 0, 1])  # it ends with a draft
    nothing = (
        "wall_seconds",
        "gamma",
        "gamma_ci95",
        "tokens_per_second",
        "lossless",
        "time_share",
        "over_transformers",
        "cut",
    )
    assert all(row[key] is None for row in rows.values() for key in nothing)


def test_drafters_that_need_a_target_are_refused(target):
    made = text_drafters([DrafterSpec.parse(words) for words in ("ngram", "wide=ngram,branches=2")], Letters(), 9)
    assert [(name, drafter.max_nodes) for name, drafter in made.items()] == [("ngram", 7), ("wide", 9)]
    assert text_drafters([DrafterSpec.parse("h=ngram+prompt_lookup")], Letters(), 9)["h"].max_nodes == 9
    for words in ("mine=ctc:runs/head", "both=ngram+medusa:runs/head"):
        with pytest.raises(ValueError, match=r"needs the target for a head, .*; pass the target instead"):
            text_drafters([DrafterSpec.parse(words)], Letters(), 9)
    models = ("small=draft_model:runs/small", "cascade=runs/small", "ouroboros=runs/small")
    for words in ("lookahead", "h=ngram+lookahead", "self_speculative", *models):
        for drafters_of in (text_drafters, replayed_drafters):
            with pytest.raises(ValueError, match=r"heads and text-only drafters; .*; measure it with"):
                drafters_of([DrafterSpec.parse(words)], Letters() if drafters_of is text_drafters else target, 9)
    with pytest.raises(ValueError, match="known kinds are"):
        text_drafters([DrafterSpec.parse("x=magic:path")], Letters(), 9)


@pytest.mark.parametrize("penalty", [1.0, 1.7])
def test_answers_that_the_target_would_not_write_are_counted(target, monkeypatch, penalty):
    """One token of `generate`'s own answer is replaced, in one of two turns."""
    monkeypatch.setattr(target.model.generation_config, "repetition_penalty", penalty)
    prompt = torch.randint(3, 200, (1, 12), generator=torch.Generator().manual_seed(3))
    written = target.model.generate(prompt, max_new_tokens=20, do_sample=False, eos_token_id=None)[0, 12:].tolist()
    other = [*written[:9], written[9] + 1, *written[10:]]
    states = AnswerStates(target, [VanillaDrafter()])
    for tokens in (written, other):
        states(TurnRecord("t", 0, 0, None, 0, "", tuple(prompt[0].tolist()), "", Generation(tokens)))
    assert (states.turns, states.not_greedy) == (2, 1)
    assert states.note().startswith("1 of 2 answers are not token for token what the target would write greedily")
    assert "ear ties" not in states.note()
    monkeypatch.setattr(Target, "dtype", torch.bfloat16)
    assert states.note().endswith("Near ties count too: in bfloat16 one forward rounds otherwise than step after step.")


def test_which_of_several_end_tokens_was_written_does_not_count(target, monkeypatch):
    """A recorded text does not say it."""
    prompt = torch.randint(3, 200, (1, 12), generator=torch.Generator().manual_seed(3))
    written = target.model.generate(prompt, max_new_tokens=20, do_sample=False, eos_token_id=None)[0, 12:].tolist()
    other = written[-1] + 1
    for ends, not_greedy in (((written[-1], other), 0), ((other,), 1)):
        monkeypatch.setattr(target, "end_token_ids", ends)
        states = AnswerStates(target, [VanillaDrafter()])
        states(TurnRecord("t", 0, 0, None, 0, "", tuple(prompt[0].tolist()), "", Generation([*written[:-1], other])))
        assert states.not_greedy == not_greedy


def test_an_answer_beyond_the_targets_positions_is_refused(target):
    turn = TurnRecord("t", 0, 7, None, 0, "", (5,) * target.max_positions, "", Generation([6]))
    with pytest.raises(ValueError, match=r"positions; those of question 7 are \d+ tokens; leave"):
        AnswerStates(target, [])(turn)


def test_each_drafter_reads_its_own_layers():
    columns = {layer: torch.full((5, 2), float(layer)) for layer in (1, 4, 7)}
    states = States(torch.zeros(5, 2), torch.cat([*columns.values()], dim=-1), (1, 4, 7))
    assert torch.equal(states.of_layers((4,)), columns[4])
    assert torch.equal(states.of_layers((7, 1)), torch.cat([columns[7], columns[1]], dim=-1))
    assert states.of_layers(()) is None
