"""What stands before each generated answer of a row is the prompt that inference would have, as text."""

import pytest

from draft_heads.data.labels.answer_journal import count_answers
from draft_heads.data.labels.answers import Answer
from draft_heads.data.labels.distill_options import DistillOptions
from draft_heads.data.labels.distiller import Distiller
from draft_heads.data.text.chat_template import read_chat_template
from draft_heads.data.text.errors import ConversationError
from tests.data.text.test_chat_forms import CHAT, FORMS, SYSTEM, tokenizer_of
from tests.data.text.test_template_probe import dataset, own_target
from tests.tiny_chat import byte_tokenizer

TEXTS = ("I am fine.", "12\n\n  34", "One, two", "\n Blanks at both ends. ", "End \n")
BUNDLED = ("llama-2", "vicuna")


@pytest.mark.parametrize("form", [*FORMS, *BUNDLED])
def test_the_tokens_before_an_answer_are_the_prompt_of_its_turns(form):
    tokenizer = byte_tokenizer(read_chat_template(form)) if form in BUNDLED else tokenizer_of(form)
    target = own_target(tokenizer)

    def encode(text):
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    ends, asked = {*target.end_token_ids, *(encode(FORMS[form][1])[:1] if form in FORMS else ())}, []

    def answers(prompts, limits):
        asked.extend(prompts)
        for index, _ in enumerate(prompts):
            yield index, Answer([*encode(TEXTS[len(asked) % 5]), end], "end")

    for end in sorted(ends):
        asked.clear()
        target.end_token_ids = tuple(ends)
        distiller = Distiller(target, DistillOptions(labels="generate", max_new_tokens=40, max_length=256), answers)
        rows = list(distiller.rows(dataset([*SYSTEM, *CHAT, *CHAT, *CHAT])))
        assert all(row.skipped is None for row in rows)
        messages, questions = [*SYSTEM], [turn for turn in [*CHAT, *CHAT, *CHAT] if turn["role"] == "user"]
        answered = 0
        for row in rows:
            starts = [i for i, own in enumerate(row.mask) if own and not (i and row.mask[i - 1])]
            for start in starts:
                messages.append(questions[answered])
                text = distiller.renderer.text(messages, add_generation_prompt=True)
                assert tokenizer.decode(row.ids[:start]) == text, (end, answered)
                stop = next((i for i in range(start, len(row.ids)) if not row.mask[i]), len(row.ids))
                assert row.ids[stop - 1] == end
                said = distiller.renderer.answer_text(row.ids[start:stop], target.end_token_ids)[0]
                messages.append({"role": "assistant", "content": said})
                answered += 1
        assert answered == len(questions) == len(asked)


def test_a_row_ends_behind_bytes_of_no_letter():
    tokenizer = tokenizer_of("phi")
    target, asked = own_target(tokenizer), []
    letter = tokenizer("é", add_special_tokens=False)["input_ids"]

    def answers(prompts, limits):
        asked.extend(prompts)
        yield 0, Answer([*letter[:1], tokenizer.convert_tokens_to_ids("<|end|>")], "end")

    distiller = Distiller(target, DistillOptions(labels="generate", max_new_tokens=40, max_length=256), answers)
    rows = list(distiller.rows(dataset(CHAT)))
    assert len(letter) == 2 and len(rows) == len(asked) == 2
    assert [row.ids[: len(prompt)] for row, prompt in zip(rows, asked, strict=True)] == asked
    text = distiller.renderer.text([CHAT[0], {"role": "assistant", "content": "\ufffd"}, CHAT[2]], True)
    assert asked[1] == tokenizer(text, add_special_tokens=False)["input_ids"]


def test_turns_before_one_that_overflows_are_kept(caplog):
    tokenizer, rounds = tokenizer_of("phi"), []
    end = tokenizer.convert_tokens_to_ids("<|end|>")

    def answers(prompts, limits):
        rounds.append(len(prompts))
        for index, _ in enumerate(prompts):
            yield index, Answer([5, end], "end", True) if len(rounds) == 1 else Answer([5], "overflow", True)

    options = DistillOptions(labels="generate", max_new_tokens=40, max_length=256)
    distiller = Distiller(own_target(tokenizer), options, answers)
    (row,) = distiller.rows(dataset([*CHAT, *CHAT]))
    assert row.skipped is None and sum(row.mask) == 2 and row.ids[-2:] == [5, end]
    assert row.labelled[0] == row.own_labels() and row.labelled[0][-2:] == [5, end]
    assert rounds == [1, 1] and distiller.unasked == 3  # of four questions one is answered
    assert "row 1 (id c0): no further question is answered: the target's states" in caplog.text


@pytest.mark.parametrize("skip", [False, True])
def test_a_row_whose_states_overflow_is_named_or_left_out(skip, tmp_path):
    tokenizer, journal = tokenizer_of("phi"), tmp_path / "answers.jsonl"
    end = tokenizer.convert_tokens_to_ids("<|end|>")

    def answers(prompts, limits):
        for index, _ in enumerate(prompts):
            yield index, Answer([5], "overflow", True) if index else Answer([5, end], "end", True)

    options = DistillOptions(labels="generate", max_new_tokens=40, max_length=256, skip_bad_rows=skip)
    rows = Distiller(own_target(tokenizer), options, answers).rows(dataset(CHAT, CHAT), 0, journal)
    reason = "are no finite numbers in its type: take --dtype bfloat16 or float32, and another output"
    if not skip:
        with pytest.raises(ConversationError, match=f"row 2 .*{reason}; or set skip_bad_rows"):
            list(rows)
        return
    by_number = {row.number: row for row in rows if row.skipped or row.number == 0}
    assert reason in by_number[1].skipped and not by_number[1].mask and any(by_number[0].mask)
    assert count_answers(journal) == 1 + sum(turn["role"] == "user" for turn in CHAT)  # also that, with its reason


def test_a_recorded_row_whose_states_overflow_is_named(monkeypatch):
    def overflows(texts, *rest):
        error = ValueError("states")
        error.row = len(texts) - 1
        raise error

    target = own_target(tokenizer_of("phi"))
    distiller = Distiller(target, DistillOptions(labels="argmax", max_length=256))
    rows = list(distiller.rows(dataset(CHAT, [*CHAT, *CHAT])))  # in the order of their lengths
    monkeypatch.setattr(target, "label", overflows, raising=False)
    with pytest.raises(ValueError, match=r"row 2 \(id c1\): the target's states .* another output, or leave it out"):
        list(distiller.records(rows))
