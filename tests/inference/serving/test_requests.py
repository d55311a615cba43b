"""Requests that the server cannot serve get sentences in the API's form."""

import json

import httpx
import openai
import pytest

from tests.inference.serving.served import KEY, chat
from tests.running import run_script

ASKED = {"role": "user", "content": "4"}
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
    "role": (openai.BadRequestError, {"messages": [{"role": "critic", "content": "4"}]}, "'system', 'developer'"),
    "unread": (openai.BadRequestError, {"messages": [ASKED | {"name": "Bo"}]}, "does not read 'name'"),
    "mood": (
        openai.BadRequestError,
        {"messages": [ASKED | {"mood": "glad"}]},
        "the key 'mood' is unknown; leave it out",
    ),
    "weight": (openai.BadRequestError, {"messages": [ASKED | {"weight": 0}]}, "the key 'weight' is for training"),
    "part": (
        openai.BadRequestError,
        {"messages": [ASKED | {"content": [{"type": "image_url"}]}]},
        "received image_url",
    ),
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
