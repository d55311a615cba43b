"""The server through the official client: the engine's own answers, as texts, chunks and labels."""

from types import SimpleNamespace

import httpx
import openai
import pytest

from draft_heads.data.labels.answer_server import AnswerServer
from draft_heads.data.labels.answers import in_order
from draft_heads.data.labels.distill_options import DistillOptions
from draft_heads.data.text.token_spans import AnswerForm
from draft_heads.inference.drafters.base import VanillaDrafter
from draft_heads.inference.engine import DecodingEngine
from draft_heads.inference.generation import GenerationSettings
from draft_heads.inference.serving.prometheus import ServerMetrics
from draft_heads.inference.serving.worker import AnswerText, Job, Worker
from draft_heads.inference.target.target import Target
from tests.inference.serving.served import KEY, QUESTIONS, chat, metrics, serve, text_of
from tests.tiny_chat import render_prompt, save_target


@pytest.mark.parametrize("question", QUESTIONS)
def test_an_answer_is_the_engines_own_plain_and_streamed(target, engine, client, question):
    alone = engine.generate(question, GenerationSettings(32))
    answer = chat(client, question)
    assert answer.choices[0].message.content == text_of(target, alone.tokens) != ""
    assert answer.choices[0].finish_reason == ("stop" if alone.finish_reason == "eos" else "length")
    assert answer.usage.completion_tokens == len(alone.tokens)
    assert answer.usage.prompt_tokens == len(render_prompt(target.tokenizer, [{"role": "user", "content": question}]))
    *chunks, last = chat(client, question, stream=True, stream_options={"include_usage": True})
    assert "".join(chunk.choices[0].delta.content for chunk in chunks) == answer.choices[0].message.content
    assert chunks[0].choices[0].delta.role == "assistant" and len(chunks) > 2
    assert chunks[-1].choices[0].finish_reason == answer.choices[0].finish_reason and last.usage == answer.usage


def test_conversations_have_system_messages_and_parts(target, engine, client):
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Name a fruit."}]
    alone = text_of(target, engine.generate(messages, GenerationSettings(16)).tokens)
    parts = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Name a "}, {"type": "text", "text": "fruit."}]},
    ]
    for asked in (messages, parts):
        answer = client.chat.completions.create(model="tiny", messages=asked, max_completion_tokens=16)
        assert answer.choices[0].message.content == alone


def test_stop_texts_end_an_answer_and_are_not_part_of_it(target, engine, client):
    whole = text_of(target, engine.generate(QUESTIONS[3], GenerationSettings(32)).tokens)
    for stop in (whole[5:9], [whole[-3:], whole[7:12]], "never written"):
        stops = [stop] if isinstance(stop, str) else stop
        ends = [whole.find(one) for one in stops if one in whole]
        answer = chat(client, QUESTIONS[3], stop=stop)
        assert answer.choices[0].message.content == (whole[: min(ends)] if ends else whole)
        streamed = chat(client, QUESTIONS[3], stop=stop, stream=True)
        assert "".join(chunk.choices[0].delta.content for chunk in streamed) == answer.choices[0].message.content
        assert answer.choices[0].finish_reason == "stop" or not ends


@pytest.mark.parametrize("tokens", [1, 2, 7])
def test_max_tokens_is_exact(client, tokens):
    answer = chat(client, QUESTIONS[3], max_tokens=tokens)
    assert answer.usage.completion_tokens == tokens and answer.choices[0].finish_reason == "length"


def test_a_seed_repeats_its_samples(target, engine, client):
    ask = {"temperature": 1.5, "top_p": 0.9, "seed": 5}
    answers = chat(client, QUESTIONS[3], n=3, **ask).choices
    alone = [
        engine.generate(QUESTIONS[3], GenerationSettings(32, temperature=1.5, top_p=0.9, seed=seed)).tokens
        for seed in (5, 6, 7)
    ]
    assert [choice.message.content for choice in answers] == [text_of(target, tokens) for tokens in alone]
    streamed = [""] * 3
    for chunk in chat(client, QUESTIONS[3], n=3, stream=True, **ask):
        streamed[chunk.choices[0].index] += chunk.choices[0].delta.content
    assert streamed == [choice.message.content for choice in answers] and len(set(streamed)) > 1
    free = {chat(client, QUESTIONS[3], temperature=1.5).choices[0].message.content for _ in range(4)}
    assert len(free) > 1


def test_completions_continue_texts_and_token_ids(target, engine, client):
    ids = [target.tokenizer(text)["input_ids"] for text in QUESTIONS[:2]]
    alone = [text_of(target, engine.generate(one, GenerationSettings(16)).tokens) for one in ids]
    for prompt in (QUESTIONS[:2], ids):
        answer = client.completions.create(model="tiny", prompt=prompt)  # 16 tokens: the API's default
        assert [choice.text for choice in answer.choices] == alone
    assert client.completions.create(model="tiny", prompt=ids[0]).choices[0].text == alone[0]
    streamed = client.completions.create(model="tiny", prompt=QUESTIONS[1], stream=True)
    assert "".join(chunk.choices[0].text for chunk in streamed) == alone[1]


def test_labels_distilled_from_the_server_are_the_engines_own(target, engine, served, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    options = DistillOptions(labels="generate", engine="openai", base_url=f"{served[2]}/v1", cut_loops=False)
    asked = AnswerServer(target, options)
    prompts = [render_prompt(target.tokenizer, [{"role": "user", "content": question}]) for question in QUESTIONS]
    for prompt, answer in zip(prompts, in_order(asked, prompts, [32] * len(prompts))):
        alone = engine.generate(prompt, GenerationSettings(32))
        assert answer.tokens == alone.tokens and answer.finish == {"eos": "end", "length": "limit"}[alone.finish_reason]
    streamed = []
    extra = {"return_token_ids": True, "stop_token_ids": [alone.tokens[3]]}
    for chunk in chat(served[0], QUESTIONS[-1], stream=True, extra_body=extra):
        streamed += getattr(chunk.choices[0], "token_ids", None) or []
    assert streamed == alone.tokens[: 1 + alone.tokens.index(alone.tokens[3])]


def test_the_token_that_ends_an_answer_is_no_text(target, engine, client):
    tokens = engine.generate(QUESTIONS[3], GenerationSettings(32)).tokens
    end = next(place for place in range(3, 32) if tokens[place] not in tokens[:place])
    answer = chat(client, QUESTIONS[3], extra_body={"stop_token_ids": [tokens[end]], "return_token_ids": True})
    assert answer.choices[0].message.content == text_of(target, tokens[:end])
    assert answer.choices[0].token_ids == tokens[: end + 1] and answer.choices[0].finish_reason == "stop"


def test_special_tokens_inside_an_answer_are_shown_unless_they_are_to_be_skipped(tmp_path):
    target = Target.from_pretrained(save_target(tmp_path), device="cpu")
    special = {token for token, one in target.tokenizer.added_tokens_decoder.items() if one.special}
    ask, inside = {"temperature": 2.0, "seed": 1, "n": 16, "max_tokens": 48}, 0
    with serve(DecodingEngine(target, VanillaDrafter())) as (client, *_):
        for skip in (False, True, None):
            extra = {"return_token_ids": True} | ({} if skip is None else {"skip_special_tokens": skip})
            streamed = [""] * 16
            for chunk in chat(client, "Hi", stream=True, extra_body=extra, **ask):
                streamed[chunk.choices[0].index] += chunk.choices[0].delta.content
            for choice, pieces in zip(chat(client, "Hi", extra_body=extra, **ask).choices, streamed):
                read = choice.token_ids[: -1 if choice.finish_reason == "stop" else None]
                text = target.tokenizer.backend_tokenizer.decode(read, skip_special_tokens=bool(skip))
                assert choice.message.content == pieces == text
                inside += bool(special & set(read))
    assert inside > 6


def test_skipped_special_tokens_still_say_where_the_last_channel_begins(tmp_path):
    tokenizer = Target.from_pretrained(save_target(tmp_path), device="cpu").tokenizer
    start, end = tokenizer.convert_tokens_to_ids(["<|im_start|>", "<|im_end|>"])
    thought, shown, more = (tokenizer(word, add_special_tokens=False)["input_ids"] for word in ("hm", "a tea", "pot"))
    for skip, told in ((False, "a tea<|im_start|>pot"), (True, "a teapot")):
        text = AnswerText(tokenizer, (), form=AnswerForm((start, end)), skips_special=skip)
        tokens = [start, *thought, start, end, *shown, start, *more]
        assert "".join(map(text.add, tokens)) + text.end() == told
        unfinished = AnswerText(tokenizer, ("hm",), form=AnswerForm((start, end)), skips_special=skip)
        assert "".join(map(unfinished.add, [start, *thought])) + unfinished.end() == ("" if skip else "<|im_start|>")


@pytest.mark.parametrize(("ended", "told"), [("length", "length"), ("context", "length"), ("eos", "stop")])
def test_a_stop_text_in_an_unfinished_thought_has_ended_nothing(tmp_path, ended, told):
    """A thought is shown only once decoding has ended, so its words can stop no decoding."""
    tokenizer = Target.from_pretrained(save_target(tmp_path), device="cpu").tokenizer
    start, end = tokenizer.convert_tokens_to_ids(["<|im_start|>", "<|im_end|>"])
    thought = tokenizer("hm so", add_special_tokens=False)["input_ids"]

    def stream(prompt, settings, result):
        for token in (start, *thought):
            result.accept_lengths.append(1)
            yield [token]
        result.finish_reason = ended

    target = SimpleNamespace(tokenizer=tokenizer, answer_form=AnswerForm((start, end)))
    engine = SimpleNamespace(target=target, stream=stream)
    pieces = []
    job = Job([5], GenerationSettings(9), (" so",), pieces.append)
    Worker._answer(SimpleNamespace(engine=engine, metrics=ServerMetrics(4)), job)
    assert "".join(piece.text for piece in pieces) == "<|im_start|>hm" and pieces[-1].finish_reason == told


def test_models_health_and_metrics(target, served):
    client, worker, address, _ = served
    assert [model.id for model in client.models.list()] == ["tiny"] and client.models.retrieve("tiny").id == "tiny"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")
    assert httpx.get(f"{address}/health").json() == {"status": "ok"}
    before = metrics(address)
    answer = chat(client, QUESTIONS[3])
    after = metrics(address)
    alone = worker.engine  # idle: its drafter may be asked
    steps = alone.generate(QUESTIONS[3], GenerationSettings(32)).accept_lengths

    def gained(name):
        return after[name] - before.get(name, 0)

    assert gained("draft_heads_new_tokens_total") == answer.usage.completion_tokens == sum(steps)
    assert gained("draft_heads_target_steps_total") == len(steps)
    assert gained("draft_heads_accepted_tokens_count") == len(steps) - 1
    assert gained("draft_heads_accepted_tokens_sum") == sum(steps) - len(steps)
    assert after["draft_heads_beta"] == pytest.approx(
        after["draft_heads_new_tokens_total"] / after["draft_heads_target_steps_total"]
    )
    assert gained('draft_heads_requests_total{path="/v1/chat/completions",status="200"}') == 1


def test_the_beginning_of_a_stop_text_is_held_back(target):
    tokens = target.tokenizer("a tea, a teapot", add_special_tokens=False)["input_ids"]
    for stops, told in [(("teapot",), "a tea, a "), (("teapots",), "a tea, a teapot"), (("x", "tea"), "a ")]:
        text = AnswerText(target.tokenizer, stops)
        shown = ""
        for token in tokens:
            shown += text.add(token)
            assert told.startswith(shown)
            if text.stopped:
                break
        else:
            shown += text.end()
        assert shown == told
