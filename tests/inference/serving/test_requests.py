"""Requests that the server cannot serve get sentences in the API's form."""

import io
import json
import re

import httpx
import openai
import pytest
from transformers import AutoTokenizer

from draft_heads.inference.drafters.base import VanillaDrafter
from draft_heads.inference.engine import DecodingEngine
from draft_heads.inference.serving.errors import APIError
from draft_heads.inference.serving.requests import ChatRequest, ServerLimits
from draft_heads.inference.target.target import Target
from draft_heads.scripts import chat as terminal
from tests.inference.serving.served import KEY, chat, serve
from tests.running import run_script
from tests.tiny_chat import save_target

ASKED = {"role": "user", "content": "4"}
LONG = "".join(f"{json.dumps({'role': role, 'content': 'a'})}, " for role in ("user", "assistant") * 20)
BAD = {
    "model": (openai.NotFoundError, {"model": "gpt-4"}, "must be 'tiny'; got 'gpt-4'"),
    "negative": (
        openai.BadRequestError,
        {"max_tokens": -1},
        "max_tokens must be a whole number of at least 1; got -1; leave it out",
    ),
    "too many": (openai.BadRequestError, {"max_tokens": 65}, "max_tokens must be at most 64, .* got 65"),
    "too many in all": (
        openai.BadRequestError,
        {"max_completion_tokens": 65},
        "max_completion_tokens must be at most 64, the server's limit; got 65",
    ),
    "two limits": (
        openai.BadRequestError,
        {"max_tokens": 65, "max_completion_tokens": 9},
        "max_tokens and max_completion_tokens must be the same limit; got 65 and 9; leave one of them out",
    ),
    "no prompt": (
        openai.BadRequestError,
        {"messages": []},
        r"messages must be .* at least one message; got \[\]; write",
    ),
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
    "type": (openai.BadRequestError, {"max_tokens": "many"}, "max_tokens must be a whole number .* got 'many'"),
    "temperature": (
        openai.BadRequestError,
        {"temperature": 3},
        "temperature must be a number from 0 to 2; got 3; leave it out",
    ),
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
        "stream_options.continuous_usage_stats is not supported; got True; leave it out",
    ),
    "options of no stream": (
        openai.BadRequestError,
        {"stream_options": {"include_usage": True}},
        "stream_options are of a stream, and stream is false; got {'include_usage': True}; leave it out",
    ),
    "unknown": (openai.BadRequestError, {"extra_body": {"beams": 3}}, "beams is not supported; got 3; leave it out"),
    "named as a type": (openai.BadRequestError, {"extra_body": {"str": 3}}, " - str is not supported; got 3"),
    "with brackets": (openai.BadRequestError, {"extra_body": {"a[b]": 3}}, r"a\[b\] is not supported; got 3"),
    "of a union": (
        openai.BadRequestError,
        {"extra_body": {"stop": ["a", 5]}},
        r" - stop must be a text or up to 16, .* got \['a', 5\]; leave it out",
    ),
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
        ({"prompt": 5}, "prompt must be a text, a list of texts, .* got 5; write one of them"),
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
        f'{{"model": "tiny", "messages": [{LONG}{{"role": "user", "content": "a \\ud800"}}]}}',
        '{"model": "tiny", "messages": [{"role": "user", "content": "a"}], "stop": ["\\ud800"]}',
        '{"model": "tiny", "prompt": ["a", "\\ud800"]}',
    ],
)
def test_half_a_character_is_a_bad_request(served, body):
    path = "completions" if "prompt" in body else "chat/completions"
    headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
    bad = httpx.post(f"{served[2]}/v1/{path}", content=body, headers=headers)
    assert bad.status_code == 400 and r"valid Unicode; got '\ud800'" in bad.json()["error"]["message"]


def test_a_key_with_half_a_character_is_a_bad_request(served):
    headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
    body = '{"model": "tiny", "prompt": "a", "\\ud800": 1}'
    bad = httpx.post(f"{served[2]}/v1/completions", content=body, headers=headers)
    assert bad.status_code == 400 and "keys must be valid Unicode" in bad.json()["error"]["message"]


def test_one_limit_under_both_names_is_accepted(client):
    assert chat(client, "Name a fruit.", max_tokens=3, max_completion_tokens=3).usage.completion_tokens == 3


def test_tokens_that_the_target_has_not_are_bad_requests_on_every_path(tmp_path, capsys, monkeypatch):
    """A tokenizer with a token beyond the embedding, in a chat, a text, a text of several, ids, and the terminal."""
    folder = save_target(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens(["<tool>"])
    tokenizer.save_pretrained(folder)
    target = Target.from_pretrained(folder, device="cpu")
    told = "token ids are 0 to 299.*got 300"
    with serve(DecodingEngine(target, VanillaDrafter())) as (client, *_):
        for role in ("system", "user", "assistant"):
            messages = [{"role": role, "content": "Call <tool> now."}, {"role": "user", "content": "Hi"}]
            with pytest.raises(openai.BadRequestError, match=told):
                client.chat.completions.create(model="tiny", messages=messages, max_tokens=4)
        for prompt in ("a <tool>", ["a", "a <tool>"], [5, 300], [[5], [6, 300]]):
            with pytest.raises(openai.BadRequestError, match=told) as caught:
                client.completions.create(model="tiny", prompt=prompt, max_tokens=4)
            assert caught.value.param == "prompt"
        assert chat(client, "Hi", max_tokens=4).choices[0].finish_reason
    monkeypatch.setattr("sys.argv", ["chat.py", "--target", folder, "--max_new_tokens", "4"])
    monkeypatch.setattr("sys.stdin", io.StringIO("Call <tool> now.\nHi\n"))
    terminal.run()
    printed = capsys.readouterr()
    assert re.search(told, printed.err) and printed.out.count("β") == 1


def test_control_tokens_in_a_message_are_bad_requests(tmp_path):
    """They would begin or end a turn. What the target itself has written comes back, and a text of /v1/completions is
    taken as it is."""
    target = Target.from_pretrained(save_target(tmp_path), device="cpu")
    with serve(DecodingEngine(target, VanillaDrafter())) as (client, *_):
        for role in ("system", "user"):
            for text in ("Hi<|im_end|>", "<|im_start|>user", [{"type": "text", "text": "a <|im_end|> b"}]):
                messages = [{"role": role, "content": text}, {"role": "user", "content": "Hi"}]
                for stream in (False, True):
                    with pytest.raises(openai.BadRequestError, match="a control token in someone's text"):
                        client.chat.completions.create(model="tiny", messages=messages, max_tokens=4, stream=stream)
        said = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "<|im_start|> Hi"}]
        messages = [*said, {"role": "user", "content": "Hi"}]
        assert client.chat.completions.create(model="tiny", messages=messages, max_tokens=4).choices
        assert client.completions.create(model="tiny", prompt="Hi<|im_end|>", max_tokens=4).choices


def test_what_contradicts_the_checkpoints_own_settings_is_not_neutral(tmp_path):
    target = Target.from_pretrained(save_target(tmp_path), device="cpu")
    target.model.generation_config.repetition_penalty, target.model.generation_config.min_new_tokens = 1.3, 2
    with serve(DecodingEngine(target, VanillaDrafter())) as (client, *_):
        own = chat(client, "Hi", max_tokens=8).choices
        same = {"repetition_penalty": 1.3, "repeat_penalty": 1.3, "min_tokens": 2, "min_new_tokens": 2}
        same |= {"repeat_last_n": -1, "penalize_nl": True}  # of the whole text, as it is here
        assert chat(client, "Hi", max_tokens=8, extra_body=same).choices == own
        for name, value in {"repetition_penalty": 1, "repeat_penalty": 1, "min_tokens": 0, "min_new_tokens": 0}.items():
            with pytest.raises(openai.BadRequestError, match=f"the checkpoint's own .* got {value}; leave {name} out"):
                chat(client, "Hi", extra_body={name: value})
        for name, value in (("repeat_last_n", 64), ("repeat_last_n", 0), ("penalize_nl", False)):
            with pytest.raises(
                openai.BadRequestError, match=f"penalty counts the whole text.*got {value}; leave {name}"
            ):
                chat(client, "Hi", extra_body={name: value})


@pytest.mark.parametrize(
    ("own", "asked"),
    [
        ({"encoder_repetition_penalty": 1.3}, {"repetition_penalty": 1}),
        ({"encoder_repetition_penalty": 1.3, "repetition_penalty": 1.1}, {"repeat_penalty": 1.1}),
        ({"min_length": 7}, {"min_tokens": 0}),
    ],
)
def test_no_value_says_what_two_settings_of_the_checkpoint_do(tmp_path, own, asked):
    target = Target.from_pretrained(save_target(tmp_path), device="cpu")
    target.model.generation_config.update(**own)
    ((name, value),) = asked.items()
    field, holds = next(iter(own.items()))
    request = ChatRequest(model="tiny", messages=[ASKED], **asked)
    with pytest.raises(APIError, match=f"the checkpoint's own {field} is {holds}; got {value}; leave {name} out"):
        request.settings(target, [5], ServerLimits())


def test_what_a_stream_does_not_have_is_refused(client):
    assert list(chat(client, "Hi", stream=True, stream_options={"include_usage": False, "include_obfuscation": False}))
    for name, told in (
        ("include_obfuscation", "include_obfuscation is not supported; got True; leave it out"),
        ("x", "x"),
    ):
        with pytest.raises(openai.BadRequestError, match=f"stream_options.*{told}"):
            chat(client, "Hi", stream=True, stream_options={name: True})


def test_other_errors_have_the_same_form(served):
    client, _, address, _ = served
    key = {"Authorization": f"Bearer {KEY}"}
    for body in (b'{"model": ', b"[1, 2]", b'"text"', b""):
        bad = httpx.post(f"{address}/v1/chat/completions", content=body, headers=key)
        assert bad.status_code == 400 and "the body must be" in bad.json()["error"]["message"]
    assert httpx.get(f"{address}/v1/nothing", headers=key).json()["error"]["message"] == "Not Found"
    wrong_method = httpx.get(f"{address}/v1/completions", headers=key)
    assert wrong_method.status_code == 405 and wrong_method.headers["allow"] == "POST"
    for wrong in ("another key", "a kéy", "a"):
        header = {"Authorization": f"Bearer {wrong}".encode()}
        refused = httpx.post(f"{address}/v1/chat/completions", json={}, headers=header)
        assert refused.headers["www-authenticate"] == "Bearer"
        assert refused.status_code == 401 and refused.json()["error"]["code"] == "invalid_api_key"
    for header, status in ((f"bearer {KEY}", 200), (f"BEARER  {KEY}", 200), (KEY, 401), (f"Basic {KEY}", 401)):
        assert httpx.get(f"{address}/v1/models", headers={"Authorization": header}).status_code == status
    for path, status in (("v1/models", 401), ("health", 200), ("metrics", 200), ("docs", 200)):
        assert httpx.get(f"{address}/{path}").status_code == status
    with pytest.raises(openai.AuthenticationError):
        chat(client.with_options(api_key="no"), "Name a fruit.")


NEUTRAL = {
    "openai": {
        **{"n": 1, "stop": [], "seed": None, "logprobs": None, "top_logprobs": None, "logit_bias": {}, "tools": []},
        **{"tool_choice": "none", "response_format": {"type": "text"}, "modalities": ["text"], "metadata": {"a": "b"}},
        **{"frequency_penalty": 0, "presence_penalty": 0.0, "stream_options": None, "reasoning_effort": None},
        **{"function_call": "none", "functions": [], "store": False, "service_tier": "auto", "verbosity": "medium"},
    },
    "vllm": {
        **{"min_p": 0.0, "top_k": -1, "min_tokens": 0, "ignore_eos": False, "skip_special_tokens": True, "best_of": 1},
        **{"spaces_between_special_tokens": True, "length_penalty": 1.0, "use_beam_search": False, "echo": False},
        **{"repetition_penalty": 1.0, "truncate_prompt_tokens": None, "prompt_logprobs": None, "stop_token_ids": []},
        **{"include_stop_str_in_output": False, "allowed_token_ids": None, "bad_words": [], "priority": 0},
        **{"guided_json": None, "logits_processors": [], "return_tokens_as_token_ids": False, "request_id": "one"},
    },
    "sglang": {
        **{"top_k": -1, "min_p": 0, "regex": None, "no_stop_trim": False, "min_new_tokens": 0, "rid": "one"},
        **{"separate_reasoning": True, "stream_reasoning": True, "lora_path": None, "return_hidden_states": False},
    },
    "tgi": {
        **{"typical_p": 1, "watermark": False, "return_full_text": False, "decoder_input_details": False},
        **{"top_n_tokens": 0, "adapter_id": None, "truncate": None, "best_of": 1, "repetition_penalty": 1},
    },
    "llama.cpp": {
        **{"top_k": 0, "typical_p": 1.0, "repeat_penalty": 1.0, "repeat_last_n": 64, "mirostat": 0, "n_probs": 0},
        **{"mirostat_tau": 5.0, "mirostat_eta": 0.1, "dry_multiplier": 0.0, "dry_base": 1.75, "xtc_probability": 0.0},
        **{"dynatemp_range": 0.0, "top_n_sigma": -1.0, "grammar": "", "cache_prompt": True, "id_slot": -1, "n_keep": 0},
        **{
            "penalize_nl": False,
            "tfs_z": 1.0,
            "min_keep": 0,
            "json_schema": None,
            "lora": [],
            "timings_per_token": False,
        },
    },
}


@pytest.mark.parametrize("path", ["chat/completions", "completions"])
@pytest.mark.parametrize("name", NEUTRAL)
def test_values_that_change_nothing_are_accepted(served, name, path):
    """What the clients of other servers send without being told to; each other value is refused by name."""
    asked = {"messages": [{"role": "user", "content": "Name a fruit."}]} if "chat" in path else {"prompt": "A cat"}
    asked |= {"model": "tiny", "max_tokens": 8}

    def post(**more):
        key = {"Authorization": f"Bearer {KEY}"}
        return httpx.post(f"{served[2]}/v1/{path}", json={**asked, **more}, headers=key)

    neutral = dict(NEUTRAL[name])
    if "chat" in path:
        neutral |= {"add_generation_prompt": True, "continue_final_message": False, "chat_template_kwargs": {}}
        neutral |= {"add_special_tokens": False}
    assert post(**neutral).json()["choices"] == post().json()["choices"]
    harmless = {"n", "stop", "seed", "top_k", "stop_token_ids", "stream_options", "metadata", "store", "service_tier"}
    harmless |= {
        "skip_special_tokens",
        "spaces_between_special_tokens",
        "request_id",
        "rid",
        "cache_prompt",
        "repeat_last_n",
        "penalize_nl",
        "mirostat_tau",
        "mirostat_eta",
        "dry_base",
    }
    for parameter, value in neutral.items():
        if parameter in harmless:
            continue
        other = {bool: not value, int: 7, float: 0.37, str: "x", list: ["x"], dict: {"x": 1}}.get(type(value), "x")
        told = post(**{parameter: other})
        assert told.status_code == 400 and parameter in told.json()["error"]["message"], (parameter, told.text)


def test_what_changes_nothing_beside_the_other_values_is_accepted(client):
    with pytest.raises(openai.BadRequestError, match="best_of is not supported; got 1"):
        chat(client, "Name a fruit.", n=2, extra_body={"best_of": 1})
    with pytest.raises(openai.BadRequestError, match="logit_bias is not supported"):
        chat(client, "Name a fruit.", logit_bias={"5": 0, "6": 1})
    prediction = {"type": "content", "content": "An apple."}
    two = chat(
        client, "Name a fruit.", n=2, extra_body={"best_of": 2, "logit_bias": {"5": 0}, "prediction": prediction}
    )
    assert two.choices == chat(client, "Name a fruit.", n=2).choices


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


def test_the_key_is_checked_before_the_body(served):
    """Whoever has no key learns nothing of what the server thinks of a body, and it is not parsed."""
    for path in ("chat/completions", "completions"):
        for body in (b'{"model": ', b"[" * 100_000, b"{}", b"", b'{"model": "tiny", "prompt": "a", "max_tokens": 0}'):
            for key in ({}, {"Authorization": "Bearer no"}):
                refused = httpx.post(f"{served[2]}/v1/{path}", content=body, headers=key)
                assert refused.status_code == 401 and refused.json()["error"]["code"] == "invalid_api_key"


def test_a_port_in_use_is_told_before_anything_is_loaded(served):
    port = served[2].rpartition(":")[2]
    status, told = run_script("scripts/serve.py", "--target", "tests/tiny_target", "--port", port)
    assert status == 1 and f"127.0.0.1 port {port}: Address already in use" in told and "Loading" not in told


def test_openapi_names_the_paths(served):
    paths = httpx.get(f"{served[2]}/openapi.json").json()["paths"]
    assert {"/v1/chat/completions", "/v1/completions", "/v1/models", "/health", "/metrics"} <= set(paths)
    assert json.dumps(paths)
