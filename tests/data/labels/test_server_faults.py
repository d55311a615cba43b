"""Requests to an answer server that fail, wait in its queue or are interrupted."""

import http.client
import io
import json
import signal
import subprocess
import sys
import threading
import time
import urllib.error
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from draft_heads.data.labels import answer_server
from draft_heads.data.labels.answers import in_order
from tests.data.labels.test_answer_server import serving, stub_server

GOOD = json.dumps({"choices": [{"token_ids": [5, 2], "finish_reason": "stop"}]}).encode()


@pytest.mark.parametrize(
    "fault",
    [(429, GOOD, 0), (500, b"", 0), (503, b"busy", 0), (200, GOOD[:30], 40), None]
    + [(200, body, 0) for body in (b"[]", b'{"error": {"code": 503}}', b'{"choices": [null]}', b'{"choices": {}}')],
    ids=str,
)
def test_a_request_that_fails_is_repeated(monkeypatch, fault):
    """fault: (status, body, bytes that are announced and missing), or None for a server that hangs."""
    monkeypatch.setattr(answer_server, "_PAUSES", (0.0, 0.0))
    monkeypatch.setattr(answer_server, "_TIMEOUT", 0.5)
    monkeypatch.setattr(answer_server, "_PER_TOKEN", 0.0)
    asked, hang = [], threading.Event()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            self.rfile.read(int(self.headers["Content-Length"]))
            asked.append(1)
            status, body, missing = (200, GOOD, 0) if len(asked) > 2 else fault or (0, b"", 0)
            if not status:
                hang.wait(5)
                return
            self.send_response(status)
            self.send_header("Content-Length", str(len(body) + missing))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever).start()
    try:
        url = f"http://127.0.0.1:{server.server_port}/v1"
        (answer,) = in_order(stub_server(url, model_name="stub"), [[1]], [8])
    finally:
        hang.set()
        server.shutdown()
        server.server_close()
    assert answer.tokens == [5, 2] and len(asked) == 3


INTERRUPTED = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in the background of a script
from draft_heads.configs.command_line import exit_status
from draft_heads.data.labels.answers import in_order
from tests.data.labels.test_answer_server import stub_server
server = stub_server(sys.argv[1], model_name="stub")
sys.exit(exit_status(lambda: in_order(server, [[1]] * 5, [8] * 5)))
"""


def test_an_interrupt_ends_at_once_though_the_server_hangs():
    hang, asked = threading.Event(), threading.Event()

    def complete(request):
        asked.set()
        hang.wait(60)
        return {}

    with serving(complete) as url:
        process = subprocess.Popen([sys.executable, "-c", INTERRUPTED, url], stderr=subprocess.PIPE)
        try:
            assert asked.wait(60)
            start = time.monotonic()
            process.send_signal(signal.SIGINT)
            assert process.wait(20) == 130 and time.monotonic() - start < 10
        finally:
            process.kill()
            process.communicate()
            hang.set()


def test_one_refusal_ends_the_other_requests(monkeypatch):
    hang = threading.Event()

    def complete(request):
        if request["prompt"] == [1]:
            hang.wait(30)
        return {"text": "Hello"}

    with serving(complete) as url:
        start = time.monotonic()
        with pytest.raises(ValueError, match="returns text but no token ids"):
            in_order(stub_server(url), [[1], [2], [3]], [8] * 3)
        assert time.monotonic() - start < 10
        hang.set()


def test_a_full_server_is_asked_again_while_it_answers_others(monkeypatch):
    """It takes one request at a time and refuses the rest, more often than a request that fails is repeated."""
    monkeypatch.setattr(answer_server, "_PAUSES", (0.01,))
    free, refused = threading.Semaphore(1), []

    def one_at_a_time(request):
        if not free.acquire(blocking=False):
            refused.append(1)
            raise BlockingIOError
        time.sleep(0.2)
        free.release()
        return {"token_ids": [5, 2], "finish_reason": "stop"}

    with serving(one_at_a_time) as url:
        server = stub_server(url, concurrency=4)
        assert len(in_order(server, [[1]] * 6, [8] * 6)) == 6
        assert len(refused) > 12
        free.acquire()
        monkeypatch.setattr(answer_server, "_TIMEOUT", 0.3)
        monkeypatch.setattr(answer_server, "_PER_TOKEN", 0.0)
        with pytest.raises(ValueError, match="status 429"):
            in_order(server, [[1]], [8])


def test_refusals_of_a_full_queue_and_waiting_in_it_are_no_failures(monkeypatch):
    """Eight refusals, one wait of all the time there is, one failure of a proxy; two failures would be repeated."""
    monkeypatch.setattr(answer_server, "_PAUSES", (0.0, 0.0))
    refused = [urllib.error.HTTPError("u", code, "no", {}, io.BytesIO(b"")) for code in (*[429] * 8, 502)]
    told = iter([*refused[:8], TimeoutError("timed out"), refused[8], io.BytesIO(b'{"a": 1}')])

    def urlopen(request, timeout):
        found = next(told)
        if isinstance(found, Exception):
            raise found
        return found

    server = stub_server("http://127.0.0.1:9/v1", model_name="stub")
    monkeypatch.setattr(answer_server.urllib.request, "urlopen", urlopen)
    server._answered = time.monotonic()
    assert server._call("/x", {}, dict) == {"a": 1}


def test_a_server_that_answers_no_json_is_named(monkeypatch):
    monkeypatch.setattr(answer_server, "_PAUSES", (0.0,))
    with serving(lambda request: {}) as url, pytest.raises(ValueError, match="cannot be used"):
        stub_server(url, model_name="stub")._call("/garbage", None, dict)


def test_server_that_is_not_there_is_named(monkeypatch, caplog):
    monkeypatch.setattr(answer_server, "_PAUSES", (0.0, 0.0))
    with pytest.raises(ValueError, match=r"^base_url http://127.0.0.1:9/v1/models cannot be used"):
        stub_server("http://127.0.0.1:9/v1/")
    (told,) = caplog.messages
    assert "/models failed (URLError: " in told and "a request that fails is repeated 2 times" in told
    monkeypatch.setattr(answer_server.time, "sleep", lambda seconds: pytest.fail("what can never work is tried again"))
    for address in ("http://127.0.0.1:abc", "http://exa mple/v1", "http://[::1"):
        with pytest.raises(ValueError, match=r"^base_url .*(cannot be used \(InvalidURL|must be an address as)"):
            stub_server(address)
    with pytest.raises(ValueError, match="is no http"):
        stub_server("127.0.0.1:8000")


def test_an_error_whose_text_breaks_off_is_repeated_as_any_other(monkeypatch):
    monkeypatch.setattr(answer_server, "_PAUSES", (0.0,))

    def cut_off():
        raise http.client.IncompleteRead(b"Bad Gat", 20)

    broken = urllib.error.HTTPError("u", 502, "Bad Gateway", {}, io.BytesIO(b""))
    broken.read = cut_off

    def urlopen(request, timeout):
        raise broken

    server = stub_server("http://127.0.0.1:9/v1", model_name="stub")
    monkeypatch.setattr(answer_server.urllib.request, "urlopen", urlopen)
    with pytest.raises(ValueError, match=r"cannot be used \(status 502: Bad Gateway \(IncompleteRead\)\); is the"):
        server._call("/x", {}, dict)


def test_a_long_answer_has_the_time_that_it_takes(monkeypatch):
    """32,768 tokens at 30 a second take 18 minutes, in which no byte comes."""
    monkeypatch.setattr(answer_server, "_PAUSES", ())
    allowed = []

    def urlopen(request, timeout):
        allowed.append(timeout)
        raise TimeoutError("timed out")

    server = stub_server("http://127.0.0.1:9/v1", model_name="stub")
    monkeypatch.setattr(answer_server.urllib.request, "urlopen", urlopen)
    server._answered = time.monotonic() - 1e6
    for limit, seconds in ((128, 964), (32768, 17284)):
        with pytest.raises(ValueError, match=rf"takes more than {seconds} s, lower --concurrency, or, with another"):
            server._answer([1], limit)
    assert allowed == [964, 17284]
