"""What a field of a request may be, and what the error says for any other value."""

import re

import httpx
import pytest

from draft_heads.inference.serving.neutral import NEUTRAL
from draft_heads.inference.serving.requests import ChatRequest, CompletionRequest
from tests.inference.serving.served import KEY, chat

ASKED = {"role": "user", "content": "4"}


@pytest.fixture(scope="module")
def post(served):
    """(path, body) → the response."""
    with httpx.Client(base_url=f"{served[2]}/v1", headers={"Authorization": f"Bearer {KEY}"}) as client:
        yield lambda path, body: client.post(f"/{path}", json=body)


@pytest.mark.parametrize("path", ["chat/completions", "completions"])
def test_every_refused_parameter_is_named_with_its_rule_the_value_and_a_remedy(post, path):
    asked = {"model": "tiny", **({"messages": [ASKED]} if "chat" in path else {"prompt": "a"})}
    request = ChatRequest if "chat" in path else CompletionRequest
    for name in (*request.model_fields, *NEUTRAL, *request.neutral, "beams"):
        for value in ({"x": 5}, *([["a", [1]]] if name in request.model_fields else [])):
            bad = post(path, {**asked, name: value})
            error = bad.json()["error"]
            assert bad.status_code == 400 and error["param"].partition(".")[0] == name, (name, error)
            told = rf"{name}\S* (must be|is not supported).*; got .+; (leave|write) .+"
            assert re.fullmatch(told, error["message"]), error


@pytest.mark.parametrize(
    ("wrong", "param", "told"),
    [
        ({"messages": [{"content": "a"}]}, "messages.0.role", "messages.0.role must be given; got none; add it"),
        ({"messages": [5]}, "messages", "messages must be a list .*; got [5]; write ["),
        (
            {"messages": [{**ASKED, "content": 5}]},
            "messages.0.content",
            "messages.0.content must be a text, or .* got 5",
        ),
        ({"messages": [{**ASKED, "content": "a" * 9999}] * 2, "n": "1"}, "n", "n must be a whole number from 1 to 16"),
        ({"messages": [ASKED], "seed": 2**63}, "seed", "seed must be .* below 2^63, .* got 9223372036854775808; leave"),
        ({"messages": [ASKED], "seed": -2}, "seed", "seed must be a whole number of at least 0 .* got -2; leave"),
        (
            {"messages": [ASKED], "max_tokens": 10.5},
            "max_tokens",
            "max_tokens must be a whole number .* got 10.5; leave",
        ),
        ({"messages": [ASKED], "tools": ["a" * 9999]}, "tools", "tools is not supported; got ['aaa.*…; leave it out"),
        ({"messages": [{**ASKED, "content": "a fruit " * 5000}]}, "messages", "must fit the target's"),
    ],
)
def test_an_error_says_where_it_is(post, wrong, param, told):
    bad = post("chat/completions", {"model": "tiny", **wrong})
    error = bad.json()["error"]
    assert bad.status_code == 400 and error["param"] == param and len(error["message"]) < 400
    assert all(part in error["message"] for part in told.split(".*")), error


def test_one_number_has_one_meaning_however_json_writes_it(client):
    asked = {"temperature": 1.5, "seed": 5, "max_tokens": 10, "n": 2, "extra_body": {"top_k": 7, "stop_token_ids": [3]}}
    floats = {"temperature": 1.5, "seed": 5.0, "max_tokens": 10.0, "n": 2.0}
    floats["extra_body"] = {"top_k": 7.0, "stop_token_ids": [3.0]}
    assert chat(client, "Hi", **floats).choices == chat(client, "Hi", **asked).choices
    one, same = (client.completions.create(model="tiny", prompt=ids, max_tokens=4) for ids in ([5, 6], [5.0, 6.0]))
    assert one.choices == same.choices


def test_a_seed_is_one_of_its_own_or_none(client):
    def texts(**seed):
        choices = chat(client, "A story", temperature=2, max_tokens=6, **seed).choices
        return [choice.message.content for choice in choices]

    assert len({texts(seed=-1)[0] for _ in range(4)}) > 1  # as null
    assert texts(seed=5) == texts(seed=5) != texts(seed=2**62 + 5)
    assert texts(seed=2**63 - 1, n=2) == [*texts(seed=2**63 - 1), *texts(seed=0)]
