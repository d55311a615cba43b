"""Many clients, clients that leave, shutdowns and failures: nothing is left behind."""

import random
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from itertools import islice

import httpx
import openai
import pytest
import torch

from draft_heads.data.text.chat_text import ChatText
from draft_heads.inference.drafters.registry import DrafterSpec, build_drafter
from draft_heads.inference.engine import DecodingEngine
from draft_heads.inference.generation import GenerationSettings
from draft_heads.inference.serving import worker as worker_module
from draft_heads.inference.serving.requests import ChatRequest
from tests.inference.serving.served import KEY, QUESTIONS, chat, metrics, serve, text_of


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


def test_answers_that_leave_while_they_wait_are_counted(slow):
    with serve(slow) as (client, worker, address, _), ThreadPoolExecutor(1) as pool:
        running = pool.submit(chat, client, QUESTIONS[3], max_tokens=60)
        while worker._running is None:
            time.sleep(0.01)
        for _ in range(3):
            with pytest.raises(openai.APITimeoutError):
                chat(client.with_options(timeout=0.05), QUESTIONS[3], n=2)
        deadline = time.monotonic() + 5
        while metrics(address)["draft_heads_abandoned_total"] < 6 and time.monotonic() < deadline:
            time.sleep(0.02)
        assert metrics(address)["draft_heads_abandoned_total"] == 6 and worker._running
        assert running.result().usage.completion_tokens


HALF_OPEN = {
    "nothing": b"",
    "half a request line": b"POST /v1/comp",
    "half of its headers": b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthor",
    "half a body": b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer %s\r\n"
    b"Content-Type: application/json\r\nContent-Length: 60\r\n\r\n{" % KEY.encode(),
    "half a chunk": b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer %s\r\n"
    b"Content-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n5\r\n{" % KEY.encode(),
}


def test_requests_that_never_arrive_whole_are_ended(slow):
    """Also those that trickle in; an answer that takes longer than the limit is no such request."""
    with serve(slow, request_seconds=0.4) as (client, _, address, server):
        host, port = address.removeprefix("http://").split(":")
        sockets = {name: socket.create_connection((host, int(port)), timeout=10) for name in HALF_OPEN}
        for name, sent in HALF_OPEN.items():
            sockets[name].sendall(sent)
        again = sockets["half of a second request"] = socket.create_connection((host, int(port)), timeout=10)
        again.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        assert again.recv(65536).startswith(b"HTTP/1.1 200")
        again.sendall(b"GET /hea")
        trickle = socket.create_connection((host, int(port)), timeout=10)
        started, sent = time.monotonic(), 0
        while sent < 100:
            try:
                trickle.sendall(b"GET /health HTTP/1.1\r\n"[:1] if sent == 0 else b"E")
            except OSError:
                break
            sent += 1
            time.sleep(0.05)
        assert 5 <= sent < 100 and time.monotonic() - started < 4
        counted = {name: n for name, n in metrics(address).items() if "total" in name and 'status="4' in name}
        at = 'draft_heads_requests_total{path="%s",status="408"}'
        assert counted == {at % "/v1/completions": 2, at % "other": 5}  # the halves of a body, and the rest
        for name, one in sockets.items():
            received = b""
            while piece := one.recv(65536):
                received += piece
            assert b" 408 " in received and b"whole within 0.4 seconds" in received, (name, received)
            one.close()
        assert chat(client, QUESTIONS[3], max_tokens=60).usage.completion_tokens  # takes a second
        assert not [one for one in server.server_state.connections if one.cycle is None]


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
        assert "this request asks for 1 more, 2 wait already" in str(refused[0])
        assert running.response.headers["x-accel-buffering"] == "no"


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


def test_a_failure_is_told_and_counted_and_the_next_answer_is_right(target, engine):
    failing = DecodingEngine(target, build_drafter(DrafterSpec.parse("ngram"), target))
    with serve(failing) as (client, worker, address, _):
        propose = failing.drafter.propose

        def fail():
            raise RuntimeError("out of luck")

        def fail_with_jobs(_):
            raise RuntimeError("unforeseen")

        failing.drafter.propose = fail
        with pytest.raises(openai.InternalServerError, match="decoding failed: out of luck"):
            chat(client, "Name a fruit.")
        with pytest.raises(openai.APIError, match="decoding failed: out of luck"):
            list(chat(client, "Name a fruit.", stream=True))
        assert metrics(address)["draft_heads_failed_total"] == 2
        with pytest.raises(openai.InternalServerError, match="out of luck"):  # one fails, two others go with it
            chat(client, "Name a fruit.", n=3)
        assert metrics(address)["draft_heads_failed_total"] == 5
        assert metrics(address)["draft_heads_abandoned_total"] == 0
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(worker, "submit", fail_with_jobs)
            with pytest.raises(openai.InternalServerError, match="the server failed; its log has the reason"):
                chat(client, "Name a fruit.")
        at = 'draft_heads_requests_total{path="/v1/chat/completions",status="%d"}'
        now = metrics(address)  # the stream had begun when it failed
        assert (now[at % 500], now[at % 200], now["draft_heads_failed_total"]) == (3, 1, 5)
        failing.drafter.propose = propose
        alone = text_of(target, engine.generate("Name a fruit.", GenerationSettings(32)).tokens)
        assert chat(client, "Name a fruit.").choices[0].message.content == alone


@pytest.mark.parametrize(
    "error",
    [
        torch.AcceleratorError("CUDA error: an illegal memory access was encountered\nCompile with …"),
        torch.AcceleratorError("HIP error: unspecified launch failure\nCompile with …"),
        RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm(…)`"),
    ],
)
def test_a_server_whose_device_is_lost_says_so_and_takes_no_more_work(slow, monkeypatch, error):
    go_on = threading.Event()

    def lost(*arguments):
        go_on.wait(30)
        raise error
        yield

    monkeypatch.setattr(slow, "stream", lost)
    monkeypatch.setattr(worker_module, "takes_work", lambda device: False)
    with serve(slow) as (client, worker, address, _), ThreadPoolExecutor(3) as pool:
        running = pool.submit(chat, client, QUESTIONS[0])
        while worker._running is None:
            time.sleep(0.01)
        waiting = [pool.submit(chat, client, QUESTIONS[1]) for _ in range(2)]
        while len(worker._waiting) < 2:
            time.sleep(0.01)
        assert worker.alive and httpx.get(f"{address}/health").status_code == 200
        go_on.set()
        first = str(error).split("\n")[0]
        assert running.exception().status_code == 500 and f"decoding failed: {first}" in str(running.exception())
        with pytest.raises(openai.InternalServerError) as later:
            chat(client, QUESTIONS[2])
        for refused in (*(one.exception() for one in waiting), later.value):
            assert refused.status_code == 503 and "Compile with" not in str(refused)
            assert first in refused.body["message"] and refused.body["message"].endswith("; restart the server")
        health = httpx.get(f"{address}/health")
        assert (health.status_code, health.json(), worker.alive) == (503, {"status": "closed"}, False)
        now = idle(address)
        assert (now["draft_heads_failed_total"], now["draft_heads_abandoned_total"]) == (3, 0)


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory. Tried …"), ValueError("CUDA error: no")])
def test_a_device_that_may_go_on_is_not_lost(error, monkeypatch):
    """What the last of them says does not last where the device computes."""
    assert worker_module.takes_work("cpu") and not worker_module.takes_work("meta")
    assert worker_module.lost_device(error, ["cpu"]) == ""
    monkeypatch.setattr(worker_module, "takes_work", lambda device: device == "cuda:0")
    assert bool(worker_module.lost_device(error, ["cuda:0", "cuda:1"])) is str(error).startswith("CUDA error")


def test_times_begin_with_the_request(engine, monkeypatch):
    prompts = ChatRequest.prompts

    def slow(request, target):
        time.sleep(0.3)
        return prompts(request, target)

    monkeypatch.setattr(ChatRequest, "prompts", slow)
    with serve(engine) as (client, _, address, _):
        chat(client, QUESTIONS[0], max_tokens=2)
        counted = metrics(address)
    for name in ("first_token_seconds_sum", 'request_seconds_sum{path="/v1/chat/completions"}'):
        assert counted[f"draft_heads_{name}"] >= 0.3, name


def test_a_long_chat_that_does_not_fit_is_refused_before_its_turns_are_checked(engine, monkeypatch):
    text, rendered = ChatText.text, []

    def counted(renderer, *asked, **options):
        rendered.append(1)
        return text(renderer, *asked, **options)

    turns = [{"role": role, "content": "Say it once more, please."} for role in ("user", "assistant")] * 300
    with serve(engine) as (client, _, _, _):
        monkeypatch.setattr(ChatText, "text", counted)
        with pytest.raises(openai.BadRequestError, match="must fit the target's"):
            client.chat.completions.create(model="tiny", messages=[*turns, turns[0]])
    assert len(rendered) == 1


def test_calls_nested_too_deep_are_the_clients_error(engine):
    call = {"name": "f", "arguments": '{"a":' * 600 + "1" + "}" * 600}
    turns = [
        ("user", {}),
        ("assistant", {"tool_calls": [{"id": "1", "type": "function", "function": call}]}),
        ("user", {}),
    ]
    with serve(engine) as (client, _, _, _), pytest.raises(openai.BadRequestError):
        messages = [{"role": role, "content": "Go on.", **more} for role, more in turns]
        client.chat.completions.create(model="tiny", messages=messages)
