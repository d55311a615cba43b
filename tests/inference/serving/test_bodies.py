"""Bodies of requests whose JSON a parser would take in silence, or fail on."""

import gzip
import json
import socket
import time

import httpx
import pytest

from tests.inference.serving.served import KEY, metrics

ASKED = {"role": "user", "content": "4"}
HEADERS = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-16-le"])
@pytest.mark.parametrize("path", ["completions", "chat/completions"])
def test_a_key_that_a_body_has_twice_is_refused_by_name(served, path, encoding):
    """In every encoding in which one without is answered."""
    asked = '"prompt": "4"' if path == "completions" else f'"messages": [{json.dumps(ASKED)}]'
    body = f'{{"model": "tiny", {asked}, "max_tokens": 3, "max_tokens": 5}}'
    once = body.replace('"max_tokens": 3, ', "")
    bad, good = (
        httpx.post(f"{served[2]}/v1/{path}", content=text.encode(encoding), headers=HEADERS) for text in (body, once)
    )
    told = "the body's JSON: an object has a key twice: 'max_tokens'; keep one of them"
    assert (bad.status_code, bad.json()["error"]["message"], good.status_code) == (400, told, 200)


@pytest.mark.parametrize("body", ["[" * 50000, '{"a":' * 5000 + "1" + "}" * 5000])
def test_a_body_that_is_nested_too_deeply_is_the_clients_error(served, body):
    bad = httpx.post(f"{served[2]}/v1/completions", content=body, headers=HEADERS)
    assert (bad.status_code, bad.json()["error"]["type"]) == (400, "invalid_request_error")


@pytest.mark.parametrize(
    ("body", "told"),
    [
        (
            '{"prompt": "é"}'.encode("latin-1"),
            "must be text in UTF-8, not compressed; invalid continuation byte at byte",
        ),
        (
            gzip.compress(b'{"prompt": "a"}', mtime=0),
            "must be text in UTF-8, not compressed; invalid start byte at byte 2; send",
        ),
        (b'{"seed": ' + b"1" * 5000 + b"}", "the body's JSON cannot be read: Exceeds the limit (4300 digits)"),
    ],
    ids=["latin-1", "compressed", "digits"],
)
def test_what_a_body_is_other_than_json_is_told(served, body, told):
    bad = httpx.post(f"{served[2]}/v1/completions", content=body, headers=HEADERS)
    assert bad.status_code == 400 and told in bad.json()["error"]["message"]


def test_a_load_balancer_may_ask_for_the_head_of_health(served):
    assert httpx.head(f"{served[2]}/health").status_code == 200


def test_a_client_that_leaves_before_its_body_has_come_is_no_failure_of_the_server(served):
    address = httpx.URL(served[2])
    before = metrics(served[2])
    with socket.create_connection((address.host, address.port)) as connection:
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\nContent-Length: 500\r\n\r\n"
        connection.sendall(head.encode() + b'{"model"')
        time.sleep(0.3)
    deadline = time.monotonic() + 20
    while (gained := gains(before, metrics(served[2]))) == {} and time.monotonic() < deadline:
        time.sleep(0.1)
    assert gained == {'draft_heads_requests_total{path="/v1/completions",status="499"}': 1.0}


def gains(before, after):
    """By how much the counters of answered completions have risen, by status."""
    of_completions = 'requests_total{path="/v1/completions"'
    return {n: v - before.get(n, 0) for n, v in after.items() if of_completions in n and v > before.get(n, 0)}
