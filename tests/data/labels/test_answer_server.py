"""Answers from a /v1/completions server: a stub on 127.0.0.1 that serves a tiny target, and stubs that misbehave."""

import json
import os
import random
import socket
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import pytest

from draft_heads.data.labels import answer_server
from draft_heads.data.labels.answer_server import AnswerServer
from draft_heads.data.labels.answers import in_order
from draft_heads.data.labels.distill import distill
from draft_heads.data.labels.distill_options import DistillOptions
from draft_heads.data.labels.shards import load_distilled
from draft_heads.inference.answers import TargetAnswerer, answer_prompts
from draft_heads.inference.target.target import Target
from tests.running import free_port
from tests.tiny_chat import save_target, write_sharegpt


def stub_server(url, **options):
    """The client of a server whose target has the end token 2 of 300 tokens and no generation settings."""
    target = SimpleNamespace(end_token_ids=(2,), vocab_size=300, model=SimpleNamespace(generation_config=None))
    options = {"concurrency": 2, "cut_loops": False} | options
    return AnswerServer(target, DistillOptions(labels="generate", engine="openai", base_url=url, **options))


MODELS = {"data": [{"id": "stub"}]}
ADAPTED = {"data": [{"id": "base"}, {"id": "stub"}]}


@contextmanager
def serving(complete, models=MODELS):
    """The base URL of a server that answers completions with `complete(request) -> choice`; BlockingIOError: a 429."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self.reply(models, cut=self.path.endswith("garbage"))

        def do_POST(self):
            request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            assert (self.path, request["model"]) == ("/v1/completions", "stub")
            try:
                self.reply({"choices": [complete(request)]})
            except BlockingIOError:
                self.reply({}, status=429)

        def reply(self, body, cut=False, status=200):
            payload = json.dumps(body).encode()[: -1 if cut else None]
            self.send_response(status)
            self.send_header("Content-Length", str(len(payload)))
            self.end_headers()
            self.wfile.write(payload)

        def log_message(self, *args):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_target(tmp_path_factory.mktemp("target"), extra_end=138)


def test_served_answers_give_the_same_rows_as_local_ones(folder, tmp_path):
    target, lock = Target.from_pretrained(folder), threading.Lock()

    def complete(request):
        assert (request["temperature"], request["return_token_ids"]) == (0, True)
        assert request["stop_token_ids"] == list(target.end_token_ids)
        penalties = [request[f"{kind}_penalty"] for kind in ("repetition", "presence", "frequency")]
        assert penalties == [1, 0, 0]  # a server may have others from the generation config
        with lock:
            (answer,) = answer_prompts(target, [request["prompt"]], [request["max_tokens"]], 1)
        return {
            "text": "",
            "token_ids": answer.tokens,
            "finish_reason": "stop" if answer.finish == "end" else "length",
        }

    source = write_sharegpt(tmp_path / "chat.json", conversations=4)
    common = {"labels": "generate", "max_new_tokens": 40, "cut_loops": True}
    options = DistillOptions(**common)
    answerer = TargetAnswerer.from_options(target, options)
    local = distill(target, source, str(tmp_path / "local"), options, show_progress=False, answerer=answerer)
    with serving(complete) as url:
        options = DistillOptions(**common, engine="openai", base_url=url)
        served = distill(target, source, str(tmp_path / "served"), options, show_progress=False)
    rows = [load_distilled(str(tmp_path / name)).dataset.to_list() for name in ("local", "served")]
    assert rows[0] == rows[1]
    assert served["counts"] == local["counts"]
    assert served["settings"]["engine"] == "openai"


def test_loop_in_a_served_answer_is_cut():
    with serving(lambda request: {"token_ids": [9] + [7] * 30, "finish_reason": "length"}) as url:
        plain = in_order(stub_server(url), [[1]], [31])
        cut = in_order(stub_server(url, cut_loops=True), [[1]], [31])
    assert (plain[0].finish, len(plain[0].tokens)) == ("limit", 31)
    assert (cut[0].finish, cut[0].tokens) == ("loop", [9] + [7] * 12)


@pytest.mark.parametrize(
    ("choice", "reason"),
    [
        ({"text": "Hello", "finish_reason": "stop"}, "returns text but no token ids"),
        ({"token_ids": [5, 400], "finish_reason": "length"}, "tokens that the target has not"),
        ({}, "returns text but no token ids"),
        ({"token_ids": [5, 6], "finish_reason": "stop"}, r"none of the end-of-turn tokens \[2\]"),
        ({"token_ids": [5, 6], "finish_reason": "length"}, "after 2 tokens as too long; 8 were asked for"),
    ],
)
def test_server_that_would_change_the_tokens_is_refused(choice, reason):
    with serving(lambda request: choice) as url, pytest.raises(ValueError, match=reason):
        in_order(stub_server(url), [[1]], [8])


@pytest.mark.parametrize("reason", ["length", "stop"])
@pytest.mark.parametrize(
    ("tokens", "kept"), [([5, 6, 7, 8, 2], ([5, 6, 7], "limit")), ([5, 6, 2, 8], ([5, 6, 2], "end"))]
)
def test_an_answer_is_no_longer_than_was_asked_for(reason, tokens, kept):
    with serving(lambda request: {"token_ids": tokens, "finish_reason": reason}) as url:
        (answer,) = in_order(stub_server(url), [[1]], [3])
    assert (answer.tokens, answer.finish) == kept


@pytest.mark.parametrize("reply", [{"data": ["a"]}, {"data": [{"name": "a"}]}, {"data": {"id": "a"}}, []])
def test_models_of_another_form_end_in_a_sentence(monkeypatch, reply):
    monkeypatch.setattr(answer_server, "_PAUSES", ())
    with serving(lambda request: {}, reply) as url, pytest.raises(ValueError, match="a list of models has 'data'"):
        stub_server(url)
    for none in ({"data": []}, {"data": None}, {}):
        with serving(lambda request: {}, none) as url, pytest.raises(ValueError, match="serves no model"):
            stub_server(url)


def test_of_several_models_the_targets_must_be_named(folder, tmp_path):
    """vLLM lists a base model before its adapters."""
    answering = {"token_ids": [5, 6, 2], "finish_reason": "stop"}
    with serving(lambda request: answering, ADAPTED) as url:
        with pytest.raises(ValueError, match=r"serves 2 models \(base, stub\); pass model_name"):
            stub_server(url)
        options = DistillOptions(labels="generate", max_new_tokens=4, engine="openai", base_url=url, model_name="stub")
        source = write_sharegpt(tmp_path / "chat.json")
        found = distill(Target.from_pretrained(folder), source, str(tmp_path / "out"), options, show_progress=False)
    assert [program["model"] for program in found["programs"]] == ["stub"]


def test_a_server_of_another_model_is_told(folder, tmp_path, caplog):
    source = write_sharegpt(tmp_path / "chat.json")
    draw = random.Random(0)
    with serving(lambda request: {"token_ids": draw.choices(range(5, 60), k=7) + [2], "finish_reason": "stop"}) as url:
        options = DistillOptions(labels="generate", max_new_tokens=8, engine="openai", base_url=url)
        distill(Target.from_pretrained(folder), source, str(tmp_path / "out"), options, show_progress=False)
    assert "% of the tokens that the server wrote are what the target would write" in caplog.text


def test_a_loop_that_ends_with_the_last_token_is_one_of_a_served_answer_too():
    told = [
        {"token_ids": [9, *[7] * 12], "finish_reason": "length"},
        {"token_ids": [*range(10, 22), 2], "finish_reason": "stop"},
    ]
    with serving(lambda request: told.pop(0)) as url:
        looped, ended = in_order(stub_server(url, cut_loops=True, concurrency=1), [[1], [1]], [13, 13])
    assert (looped.finish, looped.tokens) == ("loop", [9, *[7] * 12])
    assert (ended.finish, ended.tokens) == ("end", [*range(10, 22), 2])


@pytest.mark.slow
def test_transformers_serve_which_returns_no_token_ids_is_refused(folder):
    port, transformers = free_port(), str(Path(sys.executable).parent / "transformers")
    command = [transformers, "serve", folder, "--device", "cpu", "--host", "127.0.0.1", "--port", port]
    with subprocess.Popen(command, env=os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}) as server:
        try:
            for _ in range(600):
                assert server.poll() is None
                with socket.socket() as asked:
                    if asked.connect_ex(("127.0.0.1", int(port))) == 0:
                        break
                time.sleep(0.2)
            served = stub_server(f"http://127.0.0.1:{port}/v1", model_name=folder)
            with pytest.raises(ValueError, match=r"cannot be used \(status 422: .*return_token_ids"):
                in_order(served, [[1, 5], [1, 6]], [8, 8])
        finally:
            server.kill()


@pytest.mark.parametrize(
    ("own", "asked"), [({}, 1.0), ({"repetition_penalty": 1.3}, 1.3), ({"renormalize_logits": True}, 1.0)]
)
def test_a_server_is_asked_for_the_checkpoints_own_penalty(folder, tmp_path, own, asked):
    target, seen = Target.from_pretrained(folder), []
    target.model.generation_config.update(**own)

    def complete(request):
        seen.append(request["repetition_penalty"])
        return {"token_ids": [target.end_token_ids[0]], "finish_reason": "stop"}

    source = write_sharegpt(tmp_path / "chat.json", conversations=1)
    with serving(complete) as url:
        options = DistillOptions(labels="generate", engine="openai", base_url=url)
        distill(target, source, str(tmp_path / "o"), options, show_progress=False)
        assert set(seen) == {asked}
        target.model.generation_config.no_repeat_ngram_size = 3  # of which no server can be told
        with pytest.raises(ValueError, match=r"has no_repeat_ngram_size=3 in its gen.*; use engine local"):
            distill(target, source, str(tmp_path / "p"), options, show_progress=False)


def test_what_a_server_writes_behind_an_end_token_that_it_does_not_know_is_left_out():
    with serving(lambda request: {"token_ids": [9, 2, 7, 8], "finish_reason": "length"}) as url:
        (answer,) = in_order(stub_server(url, cut_loops=True), [[1]], [4])
    assert (answer.tokens, answer.finish) == ([9, 2], "end")
