"""A server on a free port, its official client, and what they say."""

import threading
import time
from contextlib import contextmanager

import httpx
import openai

from draft_heads.inference.serving.app import create_app
from draft_heads.inference.serving.connections import Server
from draft_heads.inference.serving.prometheus import ServerMetrics
from draft_heads.inference.serving.requests import ServerLimits
from draft_heads.inference.serving.worker import Worker

QUESTIONS = ["Name a fruit.", "Count to ten.", "What is 3 plus 4?", "Tell me a story about a cat.", "Who are you?"]


KEY = "a key"


@contextmanager
def serve(engine, **options):
    """(client, worker, address, server) of a running server."""
    max_waiting = options.pop("max_waiting", 64)
    limits = ServerLimits(max_new_tokens=options.pop("max_new_tokens", 64))
    worker = Worker(engine, ServerMetrics(engine.drafter.max_depth), max_waiting)
    seconds = options.pop("shutdown_seconds", 20)
    request_seconds = options.pop("request_seconds", 60)
    app = create_app(worker, "tiny", limits, KEY, **options)
    server = Server(app, worker, seconds, request_seconds, port=0, log_level="error")
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


def chat(client, content, **options):
    return client.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": content}], **{"max_tokens": 32, **options}
    )


def text_of(target, tokens):
    return target.tokenizer.decode(tokens, skip_special_tokens=True)


def metrics(address):
    lines = httpx.get(f"{address}/metrics").text.splitlines()
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines if line[0] != "#")}
