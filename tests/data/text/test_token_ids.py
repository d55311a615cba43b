"""A tokenizer with a token beyond the embedding: one sentence wherever its text would enter the target."""

import pytest
from transformers import AutoTokenizer

from draft_heads.data.labels.answer_server import AnswerServer
from draft_heads.data.labels.distill_options import DistillOptions
from draft_heads.data.labels.distiller import Distiller
from draft_heads.data.text.errors import ConversationError
from draft_heads.inference.answers import TargetAnswerer, answer_prompts
from draft_heads.inference.batch import BatchEngine
from draft_heads.inference.drafters.base import VanillaDrafter
from draft_heads.inference.drafters.registry import DrafterSpec
from draft_heads.inference.engine import DecodingEngine
from draft_heads.inference.evaluation.replay import replay, text_drafters
from draft_heads.inference.target.target import Target
from tests.tiny_chat import render_prompt, save_target

TOLD = r"token ids are 0 to 299, the vocabulary of .*; got 300 \('<tool>'\) in {}; encode it .* resize the model's emb"
TEXT = "Call <tool> now."


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    """A target of 300 tokens, whose tokenizer has one more."""
    folder = save_target(tmp_path_factory.mktemp("target"))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert len(tokenizer) == 300
    tokenizer.add_tokens(["<tool>"])
    tokenizer.save_pretrained(folder)
    return Target.from_pretrained(folder, device="cpu")


def conversation(*texts):
    roles = ("user", "assistant")
    messages = [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)]
    return {"messages": messages, "place": "chat.json, row 1", "id": "a"}


def test_every_form_of_prompt_is_checked(target):
    messages = [{"role": "user", "content": TEXT}]
    ids = render_prompt(target.tokenizer, messages)
    assert 300 in ids
    engine, batch = DecodingEngine(target, VanillaDrafter()), BatchEngine(target, VanillaDrafter(slots=2))
    for prompt in (TEXT, messages, ids):
        for decode in (engine.generate, lambda one: next(engine.stream(one)), lambda one: batch.generate([[5], one])):
            with pytest.raises(ValueError, match=TOLD.format("a prompt")):
                decode(prompt)
    with pytest.raises(ValueError, match=TOLD.format("a prompt")):
        batch.generate_or_none([ids])
    with pytest.raises(ValueError, match=TOLD.format("a prompt")):
        answer_prompts(target, [[5], ids], [3, 3], 2)


def test_a_batch_takes_every_form_of_prompt(target):
    forms = [
        "Hi",
        [{"role": "user", "content": "Hi"}],
        render_prompt(target.tokenizer, [conversation("Hi")["messages"][0]]),
    ]
    answers = BatchEngine(target, VanillaDrafter(slots=3)).generate(forms)
    assert len({tuple(answer.tokens) for answer in answers}) == 1


@pytest.mark.parametrize(
    "labels,texts", [("argmax", (TEXT, "Yes.")), ("argmax", ("Hi", TEXT)), ("generate", (TEXT, "Yes."))]
)
def test_a_row_to_label_is_refused_by_name_or_skipped(target, labels, texts):
    rows = [conversation(*texts), conversation("Hi", "Yes.")]
    options = {"labels": labels, "max_new_tokens": 4}
    with pytest.raises(ConversationError, match=r"chat.json, row 1 \(id a\): " + TOLD.format("the conversation")):
        list(Distiller(target, DistillOptions(**options), TargetAnswerer(target)).rows(rows))
    bad, good = Distiller(target, DistillOptions(**options, skip_bad_rows=True), TargetAnswerer(target)).rows(rows)
    assert "got 300 ('<tool>')" in bad.skipped and good.skipped is None and sum(good.mask) > 0


def test_a_row_is_used_where_the_token_lies_beyond_its_end(target):
    distiller = Distiller(target, DistillOptions(labels="argmax", max_length=30))
    (row,) = distiller.rows([conversation("Hi", "Yes " * 40 + TEXT)])
    assert row.skipped is None and row.cut and max(row.ids) < 300


def test_answers_of_a_server_are_checked_against_the_model(target, monkeypatch):
    replies = {"/models": {"data": [{"id": "m"}]}, "/completions": {"choices": [{"token_ids": [300, 2]}]}}
    monkeypatch.setattr(AnswerServer, "_call", lambda self, path, body, read, *_: read(replies[path]))
    options = DistillOptions(labels="generate", engine="openai", base_url="http://localhost")
    with pytest.raises(ValueError, match=r"returns tokens that the target has not \(of 300: \[300, 2\]"):
        list(AnswerServer(target, options)([[5]], [4]))


def test_a_replay_without_a_target_takes_any_token(target):
    drafter = text_drafters([DrafterSpec.parse("ngram")], target.tokenizer, 8)["ngram"]
    assert replay(drafter, [300, 5, 300], [5, 300, 5, 2]).tokens == [5, 300, 5, 2]
