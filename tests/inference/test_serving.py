"""The server through the official client: the engine's own answers, errors in the API's form, nothing left behind."""

import json
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from itertools import islice

import httpx
import openai
import pytest

from draft_heads.data.answer_server import AnswerServer
from draft_heads.data.rendering import render_prompt
from draft_heads.inference.drafters.registry import DrafterSpec, build_drafter, drafter_for
from draft_heads.inference.engine import DecodingEngine
from draft_heads.inference.generation import GenerationSettings
from draft_heads.inference.serving.app import Server, create_app
from draft_heads.inference.serving.metrics import ServerMetrics
from draft_heads.inference.serving.requests import ServerLimits
from draft_heads.inference.serving.worker import AnswerText, Worker
from draft_heads.inference.target.target import Target
from tests.inference.models import make_head
from tests.running import run_script

QUESTIONS = ["Name a fruit.", "Count to ten.", "What is 3 plus 4?", "Tell me a story about a cat.", "Who are you?"]
KEY = "a key"


@pytest.fixture(scope="module")
def target():
    return Target.from_pretrained("tests/tiny_target", device="cpu")


@pytest.fixture(scope="module")
def engine(target):
    """Asked alone, for comparison."""
    return DecodingEngine(target, build_drafter(DrafterSpec.parse("vanilla"), target))


@contextmanager
def serve(engine, **options):
    """(client, worker, address, server) of a running server."""
    max_waiting = options.pop("max_waiting", 64)
    limits = ServerLimits(max_new_tokens=options.pop("max_new_tokens", 64))
    worker = Worker(engine, ServerMetrics(engine.drafter.max_depth), max_waiting)
    seconds = options.pop("shutdown_seconds", 20)
    app = create_app(worker, "tiny", limits, KEY, **options)
    server = Server(app, worker, seconds, port=0, log_level="error")
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    address = f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    try:
        with openai.OpenAI(base_url=f"{address}/v1", api_key=KEY, max_retries=0) as client:
            yield client, worker, address, server
    finally:
        server.should_exit = True
        thread.join()
    assert not worker.alive and not worker._thread.is_alive()


@pytest.fixture(scope="module")
def served(target):
    drafting = DecodingEngine(target, drafter_for(make_head(target), target, 8))
    with serve(drafting, max_body_bytes=100_000) as running:
        yield running


@pytest.fixture
def client(served):
    return served[0]


def chat(client, content, **options):
    return client.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": content}], **{"max_tokens": 32, **options}
    )


def text_of(target, tokens):
    return target.tokenizer.decode(tokens, skip_special_tokens=True)


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
    ends = target.end_token_ids
    asked = AnswerServer(f"{served[2]}/v1", ends, target.vocab_size, None, 4, cut_loops=False)
    prompts = [render_prompt(target.tokenizer, [{"role": "user", "content": question}]) for question in QUESTIONS]
    for prompt, answer in zip(prompts, asked.answers(prompts, [32] * len(prompts))):
        alone = engine.generate(prompt, GenerationSettings(32))
        assert answer.tokens == alone.tokens and answer.finish == {"eos": "end", "length": "limit"}[alone.finish_reason]
    streamed = []
    extra = {"return_token_ids": True, "stop_token_ids": [alone.tokens[3]]}
    for chunk in chat(served[0], QUESTIONS[-1], stream=True, extra_body=extra):
        streamed += getattr(chunk.choices[0], "token_ids", None) or []
    assert streamed == alone.tokens[: 1 + alone.tokens.index(alone.tokens[3])]


BAD = {
    "model": (openai.NotFoundError, {"model": "gpt-4"}, "must be 'tiny'; got 'gpt-4'"),
    "negative": (openai.BadRequestError, {"max_tokens": -1}, "max_tokens: .* greater than or equal to 1"),
    "too many": (openai.BadRequestError, {"max_tokens": 65}, "max_tokens must be at most 64, .* got 65"),
    "too many in all": (
        openai.BadRequestError,
        {"max_completion_tokens": 65},
        "max_completion_tokens must be at most 64, the server's limit; got 65",
    ),
    "no prompt": (openai.BadRequestError, {"messages": []}, "messages: "),
    "role": (openai.BadRequestError, {"messages": [{"role": "tool", "content": "4"}]}, "'system', 'developer'"),
    "type": (openai.BadRequestError, {"max_tokens": "many"}, "max_tokens: .*integer"),
    "temperature": (openai.BadRequestError, {"temperature": 3}, "temperature: .* less than or equal to 2"),
    "stop": (openai.BadRequestError, {"stop": [""]}, "none of them empty"),
    "logprobs": (openai.BadRequestError, {"logprobs": True}, "logprobs is not supported; got True; leave it out"),
    "top logprobs": (openai.BadRequestError, {"top_logprobs": False}, "top_logprobs is not supported; got False"),
    "penalty": (openai.BadRequestError, {"presence_penalty": 0.5}, "presence_penalty is not supported"),
    "no such end": (
        openai.BadRequestError,
        {"extra_body": {"stop_token_ids": [5, -4]}},
        "stop_token_ids must lie in 0…1023; got -4",
    ),
    "stream options": (
        openai.BadRequestError,
        {"stream": True, "stream_options": {"continuous_usage_stats": True}},
        "stream_options.continuous_usage_stats: Extra inputs",
    ),
    "unknown": (openai.BadRequestError, {"extra_body": {"beams": 3}}, "beams: Extra inputs"),
    "context": (
        openai.BadRequestError,
        {"messages": [{"role": "user", "content": "a fruit " * 5000}]},
        "must fit the target's",
    ),
    "size": (openai.APIStatusError, {"messages": [{"role": "user", "content": "a" * 200_000}]}, "100000 bytes"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_requests_get_sentences(client, name):
    kind, wrong, told = BAD[name]
    messages = [{"role": "user", "content": "Name a fruit."}]
    with pytest.raises(kind, match=told) as caught:
        client.chat.completions.create(**{"model": "tiny", "messages": messages, **wrong})
    assert set(caught.value.body) == {"message", "type", "param", "code"}
    if name == "context":
        assert caught.value.code == "context_length_exceeded"
    if name.startswith("too many"):
        assert (caught.value.code, caught.value.param) == ("invalid_value", next(iter(wrong)))


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"logprobs": 0}, "logprobs is not supported; got 0; leave it out"),
        ({"prompt": ""}, "prompt must have at least one token; got ''; write a text"),
        ({"prompt": []}, r"prompt must have at least one token; got \[\]; write a text"),
        ({"prompt": [[5], []]}, r"prompt must have at least one token; got \[\]; write a text"),
        ({"prompt": 5}, "prompt: Input should be a valid string"),
    ],
)
def test_bad_completions_get_sentences(client, wrong, told):
    with pytest.raises(openai.BadRequestError, match=told) as caught:
        client.completions.create(**{"model": "tiny", "prompt": "a", **wrong})
    assert "logprobs" in wrong or caught.value.param == "prompt"


def test_the_token_that_ends_an_answer_is_no_text(target, engine, client):
    tokens = engine.generate(QUESTIONS[3], GenerationSettings(32)).tokens
    end = next(place for place in range(3, 32) if tokens[place] not in tokens[:place])
    answer = chat(client, QUESTIONS[3], extra_body={"stop_token_ids": [tokens[end]], "return_token_ids": True})
    assert answer.choices[0].message.content == text_of(target, tokens[:end])
    assert answer.choices[0].token_ids == tokens[: end + 1] and answer.choices[0].finish_reason == "stop"


def test_what_changes_nothing_is_accepted(client):
    alone = chat(client, "Name a fruit.").choices
    same = chat(
        client, "Name a fruit.", user="me", logprobs=False, presence_penalty=0, frequency_penalty=0.0, top_p=0.5
    )
    assert same.choices == alone


def test_null_parameters_are_those_left_out(client):
    answer = chat(client, "Name a fruit.")
    messages = [{"role": "user", "content": "Name a fruit."}, answer.choices[0].message.model_dump()]
    assert messages[1]["refusal"] is None and "tool_calls" in messages[1]
    messages.append({"role": "user", "content": "And another."})
    nulls = {"functions": None, "reasoning_effort": None, "max_tokens": None}
    assert client.chat.completions.create(model="tiny", messages=messages, max_completion_tokens=8, extra_body=nulls)


@pytest.mark.parametrize(
    "body",
    [
        '{"model": "tiny", "messages": [{"role": "user", "content": "a \\ud800"}]}',
        '{"model": "tiny", "messages": [{"role": "user", "content": "a"}], "stop": ["\\ud800"]}',
        '{"model": "tiny", "prompt": ["a", "\\ud800"]}',
    ],
)
def test_half_a_character_is_a_bad_request(served, body):
    path = "completions" if "prompt" in body else "chat/completions"
    headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
    bad = httpx.post(f"{served[2]}/v1/{path}", content=body, headers=headers)
    assert bad.status_code == 400 and r"valid Unicode; got '\ud800'" in bad.json()["error"]["message"]


def test_other_errors_have_the_same_form(served):
    client, _, address, _ = served
    key = {"Authorization": f"Bearer {KEY}"}
    for body in (b'{"model": ', b"[1, 2]", b'"text"', b""):
        bad = httpx.post(f"{address}/v1/chat/completions", content=body, headers=key)
        assert (bad.status_code == 400 and "must be" in bad.json()["error"]["message"]) or body == b""
    assert httpx.get(f"{address}/v1/nothing", headers=key).json()["error"]["message"] == "Not Found"
    assert httpx.get(f"{address}/v1/completions", headers=key).status_code == 405
    for wrong in ("another key", "a kéy", "a"):
        header = {"Authorization": f"Bearer {wrong}".encode()}
        refused = httpx.post(f"{address}/v1/chat/completions", json={}, headers=header)
        assert refused.status_code == 401 and refused.json()["error"]["code"] == "invalid_api_key"
    for header, status in ((f"bearer {KEY}", 200), (f"BEARER  {KEY}", 200), (KEY, 401), (f"Basic {KEY}", 401)):
        assert httpx.get(f"{address}/v1/models", headers={"Authorization": header}).status_code == status
    with pytest.raises(openai.AuthenticationError):
        chat(client.with_options(api_key="no"), "Name a fruit.")


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


def metrics(address):
    lines = httpx.get(f"{address}/metrics").text.splitlines()
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines if line[0] != "#")}


def test_eight_clients_get_what_each_would_get_alone(target, engine, served):
    client, _, address, _ = served
    generator = random.Random(0)
    asked = [(generator.choice(QUESTIONS), generator.randint(1, 32), generator.random() < 0.5) for _ in range(50)]

    def ask(request):
        question, tokens, stream = request
        answer = chat(client, question, max_tokens=tokens, stream=stream)
        if not stream:
            return answer.choices[0].message.content
        return "".join(chunk.choices[0].delta.content for chunk in answer)

    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(ask, asked))
    for (question, tokens, _), answer in zip(asked, answers):
        assert answer == text_of(target, engine.generate(question, GenerationSettings(tokens)).tokens)
    idle(address)


class SlowEngine(DecodingEngine):
    """Waits before each step."""

    def stream(self, *arguments):
        for step in super().stream(*arguments):
            time.sleep(0.02)
            yield step


@pytest.fixture
def slow(target):
    return SlowEngine(target, build_drafter(DrafterSpec.parse("vanilla"), target))


def idle(address, seconds=5):
    """Wait until nothing runs or waits; what the metrics then say."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        now = metrics(address)
        if not now["draft_heads_waiting"] and not now["draft_heads_running"]:
            return now
        time.sleep(0.02)
    raise AssertionError(now)


def test_clients_that_leave_at_any_moment_leave_nothing(target, engine, slow):
    generator = random.Random(1)
    with serve(slow, max_waiting=100) as (client, worker, address, _):
        key, before = {"Authorization": f"Bearer {KEY}"}, threading.active_count()

        def leave(_):
            body = {"model": "tiny", "messages": [{"role": "user", "content": QUESTIONS[3]}], "n": 2}
            body |= {"stream": generator.random() < 0.5}
            try:
                timeout = httpx.Timeout(generator.uniform(0.001, 0.4), connect=5)
                with httpx.stream(
                    "POST", f"{address}/v1/chat/completions", json=body, headers=key, timeout=timeout
                ) as r:
                    for _ in zip(r.iter_lines(), range(generator.randint(1, 4))):
                        pass
            except httpx.TimeoutException:
                pass

        with ThreadPoolExecutor(20) as pool:
            list(pool.map(leave, range(100)))
        now = idle(address)
        assert not worker._waiting and now["draft_heads_abandoned_total"] > 5
        assert threading.active_count() < before + 10  # the loop's own pool
        alone = text_of(target, engine.generate("Name a fruit.", GenerationSettings(32)).tokens)
        assert chat(client, "Name a fruit.").choices[0].message.content == alone


def test_more_requests_than_may_wait_are_refused(slow, monkeypatch):
    steps, go_on = slow.stream, threading.Event()

    def held(*arguments):
        for step in steps(*arguments):
            yield step
            go_on.wait(30)

    monkeypatch.setattr(slow, "stream", held)
    with serve(slow, max_waiting=2) as (client, _, _, _), ThreadPoolExecutor(5) as pool:
        running = chat(client, QUESTIONS[3], stream=True)  # a client that is dropped leaves
        next(running)  # one runs, and no step of it ends before `go_on`
        asked = [pool.submit(chat, client, QUESTIONS[3]) for _ in range(5)]
        refused = [one.exception() for one in islice(as_completed(asked), 3)]
        go_on.set()
        assert all(isinstance(one, openai.RateLimitError) for one in refused)
        assert sum(one.exception() is None for one in asked) == 2
        assert refused[0].code == "queue_full" and refused[0].response.headers["retry-after"] == "1"


def test_a_shutdown_lets_running_answers_end(target, engine, slow):
    alone = text_of(target, engine.generate(QUESTIONS[3], GenerationSettings(32)).tokens)
    with serve(slow) as (client, _, _, server):
        stream = chat(client, QUESTIONS[3], stream=True)
        text = next(stream).choices[0].delta.content
        server.should_exit = True
        text += "".join(chunk.choices[0].delta.content for chunk in stream)
        assert text == alone


def test_answers_that_outlast_the_shutdown_end_with_the_apis_error(slow, caplog):
    with serve(slow, shutdown_seconds=0.3) as (client, _, _, server), ThreadPoolExecutor(2) as pool:
        stream = chat(client, QUESTIONS[3], stream=True, max_tokens=64)
        next(stream)
        whole = pool.submit(chat, client, QUESTIONS[3])  # waits behind the stream
        time.sleep(0.1)
        server.should_exit = True
        with pytest.raises(openai.APIError, match="the server is shutting down"):
            list(stream)
        assert whole.exception().status_code == 503 and "shutting down" in str(whole.exception())
    assert not caplog.records


def test_a_failure_is_told_and_the_next_answer_is_right(target, engine):
    failing = DecodingEngine(target, build_drafter(DrafterSpec.parse("ngram"), target))
    with serve(failing) as (client, _, _, _):
        propose = failing.drafter.propose

        def fail():
            raise RuntimeError("out of luck")

        failing.drafter.propose = fail
        with pytest.raises(openai.InternalServerError, match="decoding failed: out of luck"):
            chat(client, "Name a fruit.")
        with pytest.raises(openai.APIError, match="decoding failed: out of luck"):
            list(chat(client, "Name a fruit.", stream=True))
        failing.drafter.propose = propose
        alone = text_of(target, engine.generate("Name a fruit.", GenerationSettings(32)).tokens)
        assert chat(client, "Name a fruit.").choices[0].message.content == alone


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


def test_the_programs_options_are_checked(monkeypatch):
    from draft_heads.scripts.serve import parse

    for wrong, told in [
        ("--port 70000", "--port must lie in 0…65535; got 70000"),
        ("--max_waiting 0", "--max_waiting must be at least 1"),
        ("--temperature -1", "--temperature must be 0"),
        ("", "--target"),
    ]:
        arguments = ["--target", "tests/tiny_target", *wrong.split()] if wrong else []
        with pytest.raises((ValueError, SystemExit), match=told if wrong else None):
            parse(arguments)


def test_a_port_in_use_is_told_before_anything_is_loaded(served):
    port = served[2].rpartition(":")[2]
    status, told = run_script("scripts/serve.py", "--target", "tests/tiny_target", "--port", port)
    assert status == 1 and f"127.0.0.1 port {port}: Address already in use" in told and "Loading" not in told


def test_openapi_names_the_paths(served):
    paths = httpx.get(f"{served[2]}/openapi.json").json()["paths"]
    assert {"/v1/chat/completions", "/v1/completions", "/v1/models", "/health", "/metrics"} <= set(paths)
    assert json.dumps(paths)
