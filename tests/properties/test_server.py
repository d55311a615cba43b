"""Any request: a right answer or a sentence, never a 500 and never a hang; streamed and whole answers agree."""

import asyncio
import json

import httpx
import pytest
from hypothesis import event, given
from hypothesis import strategies as st

from draft_heads.inference.drafters.registry import DrafterSpec, build_drafter
from draft_heads.inference.engine import DecodingEngine
from draft_heads.inference.serving.app import create_app
from draft_heads.inference.serving.neutral import IGNORED, NEUTRAL
from draft_heads.inference.serving.prometheus import ServerMetrics
from draft_heads.inference.serving.requests import ChatRequest, CompletionRequest, ServerLimits
from draft_heads.inference.serving.worker import Worker
from draft_heads.inference.target.target import Target

SECONDS = 20
KEY = {"Authorization": "Bearer key"}
PATHS = {"/v1/chat/completions": ChatRequest, "/v1/completions": CompletionRequest}
NAMES = sorted({*ChatRequest.model_fields, *CompletionRequest.model_fields, *NEUTRAL, *IGNORED, "no_such_parameter"})

WORDS = ("Tell", "me", "a", "story", "about", "the", "cat", "3", "plus", "4", "é🙂", "fruit.")

text = st.text(max_size=12) | st.sampled_from(["a\ud800", "</s>", "<|im_end|>", "\x00", "é🙂", "[INST]", "{{ x }}"])
number = st.integers(-5, 70) | st.sampled_from(
    [2**63, -(2**63), 10**40, 1e308, -0.0, 0.5, 1.5, float("nan"), float("inf")]
)
leaf = st.none() | st.booleans() | number | text
value = st.recursive(leaf, lambda one: st.lists(one, max_size=3) | st.dictionaries(text, one, max_size=3), max_leaves=6)
message = st.fixed_dictionaries(
    {
        "role": st.sampled_from(["system", "developer", "user", "assistant", "tool", ""]) | value,
        "content": text | value,
    },
    optional={"name": text | value, "refusal": value, "tool_calls": value},
)
right = st.fixed_dictionaries(
    {"max_tokens": st.integers(1, 6)},
    optional={
        "stream": st.booleans(),
        "n": st.integers(1, 3),
        "stop": text | st.lists(text, max_size=3),
        "temperature": st.just(0) | st.floats(0.01, 2),
        "seed": st.integers(0, 2**63 - 1),
        "top_k": st.integers(-1, 2000),
        "top_p": st.floats(0, 1),
        "stop_token_ids": st.lists(st.integers(0, 1023), max_size=3),
        "return_token_ids": st.booleans(),
    },
)
"""Parameters that mostly make sense, so that the wrong ones beside them reach what comes after the first check."""

chat = st.fixed_dictionaries({"messages": st.lists(message, min_size=1, max_size=3)})
prompts = st.fixed_dictionaries({"prompt": text | st.lists(text, max_size=3) | st.lists(number | st.integers(0, 1030))})


@pytest.fixture(scope="module")
def ask():
    """(path, body, headers) → the response of a server in this process."""
    target = Target.from_pretrained("tests/tiny_target", device="cpu")
    engine = DecodingEngine(target, build_drafter(DrafterSpec.parse("ngram"), target))
    worker = Worker(engine, ServerMetrics(engine.drafter.max_depth))
    app = create_app(worker, "tiny", ServerLimits(max_new_tokens=24), "key", max_body_bytes=20_000)

    async def post(path, content, headers):
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
            return await client.post(path, content=content, headers=headers)

    def asked(path, content, headers=KEY):
        sent = {"Content-Type": "application/json", **headers}
        answer = asyncio.run(asyncio.wait_for(post(path, content, sent), SECONDS))
        assert worker.alive and not worker._waiting
        return answer

    yield asked
    worker.close()


def check(answer):
    """A response is an answer or an error in the API's form."""
    event(f"status {answer.status_code}")
    if answer.status_code == 200:
        return
    assert answer.status_code in (400, 401, 404, 405, 413), (answer.status_code, answer.text)
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"} and error["message"], error


@given(
    path=st.sampled_from(sorted(PATHS)),
    what=chat | prompts | st.just({"messages": [{"role": "user", "content": "Hi"}], "prompt": "Hi"}),
    parameters=right,
    wrong=st.dictionaries(st.sampled_from(NAMES), value, max_size=1),
)
def test_any_request_gets_an_answer_or_a_sentence(ask, path, what, parameters, wrong):
    drop = "prompt" if "chat" in path else "messages"
    asked = {"model": "tiny", **{name: one for name, one in what.items() if name != drop or len(what) == 1}}
    check(ask(path, json.dumps({**asked, **parameters, **wrong}).encode()))


@given(
    path=st.sampled_from([*PATHS, "/v1/models", "/v1/", "/health", "/metrics", "/openapi.json", "/v1/models/x"]),
    content=st.binary(max_size=40)
    | st.sampled_from([b"[" * 19_000, b"1" * 10_000, b'{"a":' * 3000, b"x" * 30_000, b""]),
    headers=st.sampled_from(
        [KEY, {}, {"Authorization": "Bearer"}, {"Authorization": "Basic key"}, {**KEY, "Content-Type": "text/x"}]
    ),
)
def test_any_bytes_get_a_sentence(ask, path, content, headers):
    check(ask(path, content, headers))


@given(
    path=st.sampled_from(sorted(PATHS)),
    parameters=right,
    words=st.lists(st.sampled_from(WORDS), min_size=1),
    data=st.data(),
)
def test_streamed_and_whole_answers_agree(ask, path, parameters, words, data):
    """Text, token ids, finish_reason and usage; stop texts that stand in the answer cut it there."""
    prompt = " ".join(words)
    asked = {"messages": [{"role": "user", "content": prompt}]} if "chat" in path else {"prompt": prompt}
    asked |= {"model": "tiny", **parameters, "seed": parameters.get("seed", 3), "return_token_ids": True}
    asked |= {"max_tokens": data.draw(st.integers(1, 24)), "top_p": parameters.get("top_p") or 1.0, "stop": []}
    asked.pop("stream", None)
    plain = ask(path, json.dumps(asked).encode())
    assert plain.status_code == 200, plain.text
    texts = [text_of(choice) for choice in plain.json()["choices"]]
    longest = max(texts, key=len)
    if len(longest) > 1 and data.draw(st.booleans()):
        start = data.draw(st.integers(0, len(longest) - 1))
        asked["stop"] = [longest[start : start + data.draw(st.integers(1, 4))]]
    whole = ask(path, json.dumps(asked).encode()).json()
    streamed = ask(path, json.dumps({**asked, "stream": True, "stream_options": {"include_usage": True}}).encode())
    *events, done, _ = streamed.text.split("\n\n")
    chunks = [json.loads(one.removeprefix("data: ")) for one in events]
    assert done == "data: [DONE]" and chunks[-1]["usage"] == whole["usage"]
    assert whole["usage"]["completion_tokens"] == sum(len(choice["token_ids"]) for choice in whole["choices"])
    for choice, before in zip(whole["choices"], texts):
        own = [chunk["choices"][0] for chunk in chunks[:-1] if chunk["choices"][0]["index"] == choice["index"]]
        assert "".join(map(text_of, own)) == text_of(choice)
        assert [token for one in own for token in one.get("token_ids", ())] == choice["token_ids"]
        assert [one["finish_reason"] for one in own if one["finish_reason"]] == [choice["finish_reason"]]
        cut = [before.find(stop) for stop in asked["stop"] if stop in before]
        assert text_of(choice) == (before[: min(cut)] if cut else before)
        assert choice["finish_reason"] == "stop" or not cut
        if choice["finish_reason"] == "length":
            assert len(choice["token_ids"]) == asked["max_tokens"]


def text_of(choice):
    return choice["text"] if "text" in choice else (choice.get("message") or choice["delta"]).get("content", "")
