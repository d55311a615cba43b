"""What the server writes has the API's form: validated strictly by the official client's types, key by key."""

import json

import httpx
import pytest
from openai.types import Completion, Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from pydantic import ValidationError
from tokenizers.processors import TemplateProcessing

from draft_heads.inference.drafters.registry import DrafterSpec, build_drafter
from draft_heads.inference.engine import DecodingEngine
from draft_heads.inference.serving.errors import APIError
from draft_heads.inference.serving.forms import event
from draft_heads.inference.serving.requests import ChatRequest, CompletionRequest
from draft_heads.inference.target.target import Target
from tests.data.text.test_row_keys import READS
from tests.inference.serving.served import KEY, QUESTIONS, metrics, serve
from tests.tiny_chat import byte_tokenizer, random_llama, template

HEAD = {"id", "object", "created", "model", "choices"}
USAGE = {"prompt_tokens", "completion_tokens", "total_tokens"}


def post(served, path, **body):
    asked = {"messages": [{"role": "user", "content": QUESTIONS[3]}]} if "chat" in path else {"prompt": QUESTIONS[3]}
    body = {"model": "tiny", "max_tokens": 24, **asked, **body}
    answer = httpx.post(f"{served[2]}/v1/{path}", json=body, headers={"Authorization": f"Bearer {KEY}"}, timeout=30)
    assert answer.status_code == 200, answer.text
    return answer


def events(answer):
    *data, done, _ = answer.text.split("\n\n")
    assert done == "data: [DONE]" and all(one.startswith("data: ") for one in data)
    return [json.loads(one.removeprefix("data: ")) for one in data]


def no_extra(model, allowed=()):
    """Nothing but the type's own fields, at any depth."""
    assert set(model.model_extra or ()) <= set(allowed), model.model_extra
    for value in vars(model).values():
        for one in value if isinstance(value, list) else [value]:
            if hasattr(one, "model_extra"):
                no_extra(one, allowed)


@pytest.mark.parametrize("ids", [False, True])
def test_whole_answers(served, ids):
    own = {"token_ids"} if ids else set()
    chat = post(served, "chat/completions", n=2, return_token_ids=ids).json()
    assert set(chat) == HEAD | {"usage"} and set(chat["usage"]) == USAGE
    for choice in chat["choices"]:
        assert set(choice) == {"index", "message", "logprobs", "finish_reason"} | own
        assert set(choice["message"]) == {"role", "content", "refusal"} and choice["message"]["refusal"] is None
    no_extra(ChatCompletion.model_validate(chat, strict=True), own)
    text = post(served, "completions", n=2, return_token_ids=ids).json()
    assert set(text) == HEAD | {"usage"}
    for choice in text["choices"]:
        assert set(choice) == {"index", "text", "logprobs", "finish_reason"} | own
    no_extra(Completion.model_validate(text, strict=True), own)


@pytest.mark.parametrize("usage", [False, True])
def test_events_of_a_stream(served, usage):
    """Every choice of every chunk says whether it is the last; usage is null until the last event has it."""
    options = {"stream": True, "n": 2, "stream_options": {"include_usage": usage}}
    found = events(post(served, "chat/completions", **options))
    texts = events(post(served, "completions", **options))
    for chunks, form in ((found, "delta"), (texts, "text")):
        assert all(set(chunk) == HEAD | ({"usage"} if usage else set()) for chunk in chunks)
        assert len({(chunk["id"], chunk["created"], chunk["object"]) for chunk in chunks}) == 1
        if usage:
            last = chunks.pop()
            assert last["choices"] == [] and set(last["usage"]) == USAGE and not any(one["usage"] for one in chunks)
        for chunk in chunks:
            (choice,) = chunk["choices"]
            assert set(choice) == {"index", form, "logprobs", "finish_reason"} and choice["logprobs"] is None
        for index in (0, 1):
            reasons = [one["choices"][0]["finish_reason"] for one in chunks if one["choices"][0]["index"] == index]
            assert reasons[-1] in ("stop", "length") and set(reasons[:-1]) == {None}
    for chunk in found:
        no_extra(ChatCompletionChunk.model_validate(chunk, strict=True))
    for index in (0, 1):
        first = next(one["choices"][0] for one in found if one["choices"][0]["index"] == index)
        assert first["delta"] == {"role": "assistant", "content": ""}
    for chunk in texts:
        if chunk["choices"][0]["finish_reason"]:
            no_extra(Completion.model_validate(chunk, strict=True))


@pytest.mark.parametrize("letter", ["\u2028", "\u2029", "\x85", "\n", "😀"])
def test_an_event_is_one_line_for_every_client(letter):
    line, *rest = event({"text": f"a{letter}b"}).splitlines()
    assert rest == [""] and json.loads(line.removeprefix("data: ")) == {"text": f"a{letter}b"}


def test_models_and_errors(served):
    key = {"Authorization": f"Bearer {KEY}"}
    listed = httpx.get(f"{served[2]}/v1/models", headers=key).json()
    assert set(listed) == {"object", "data"} and listed["object"] == "list"
    no_extra(Model.model_validate(listed["data"][0], strict=True))
    for path, method, header in (("nothing", "GET", key), ("completions", "GET", key), ("models", "GET", {})):
        told = httpx.request(method, f"{served[2]}/v1/{path}", headers=header).json()
        assert set(told) == {"error"} and set(told["error"]) == {"message", "type", "param", "code"}


def test_tokens_after_a_stop_text_count_nowhere(target):
    """A step of several tokens may go on after the stop text: usage and /metrics both end with the stop text's token.

    With the target as its own draft model nearly all steps do.
    """
    itself = build_drafter(DrafterSpec.parse("itself=draft_model:tests/tiny_target"), target)
    with serve(DecodingEngine(target, itself)) as served:
        whole = post(served, "completions").json()["choices"][0]["text"]
        for first in range(3, len(whole) - 3, 7):
            before = metrics(served[2])
            answer = post(served, "completions", stop=[whole[first : first + 3]]).json()
            gained = {name: value - before.get(name, 0) for name, value in metrics(served[2]).items()}
            tokens, steps = answer["usage"]["completion_tokens"], gained["draft_heads_target_steps_total"]
            assert gained["draft_heads_new_tokens_total"] == tokens < 24
            # the prefill gives one token, each later step its drafts and, unless the answer ends before it, its own
            assert tokens - steps <= gained["draft_heads_accepted_tokens_sum"] <= tokens - steps + 1


def test_settings_of_the_chat_template_reach_it():
    target = Target(random_llama(), byte_tokenizer(READS))
    asked = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}]}
    plain, thinking, quick = (
        target.tokenizer.decode(ChatRequest(**asked, chat_template_kwargs=given).prompts(target)[0])
        for given in (None, {"enable_thinking": True}, {"enable_thinking": False})
    )
    assert quick == plain + "<think></think>" and thinking == plain
    with pytest.raises(APIError, match="does not read 'mood'"):
        ChatRequest(**asked, chat_template_kwargs={"mood": "glad"}).prompts(target)
    with pytest.raises(ValidationError, match="settings that the chat template reads"):
        ChatRequest(**asked, chat_template_kwargs={"documents": [{"text": "a"}]})


def test_the_effort_of_reasoning_goes_to_the_chat_template():
    """As the field of its own that OpenAI's API has, and as a setting of the template."""
    effort = "{{ 'effort: ' + reasoning_effort if reasoning_effort is defined else '' }}"
    tokenizer = byte_tokenizer(effort + READS)
    target = Target(random_llama(len(tokenizer)), tokenizer)
    asked = {"model": "a", "messages": [{"role": "user", "content": "Why?"}]}
    own, among = {"reasoning_effort": "low"}, {"chat_template_kwargs": {"reasoning_effort": "low"}}
    plain, *others = (
        tokenizer.decode(ChatRequest(**asked, **given).prompts(target)[0]) for given in ({}, own, among, own | among)
    )
    assert others == ["effort: low" + plain] * 3
    with pytest.raises(APIError, match=r"^reasoning_effort must be .*chat_template_kwargs has another value"):
        ChatRequest(**asked, reasoning_effort="high", **among).prompts(target)
    other = Target(target.model, byte_tokenizer(READS))
    with pytest.raises(
        APIError,
        match=r"^reasoning_effort must be what the chat template reads .*; got {'reasoning_effort': 'low'}; leave",
    ):
        ChatRequest(**asked, **own).prompts(other)


@pytest.mark.parametrize("fields", [{"refusal": None}, {"refusal": None, "openai": {"citations": None}, "ids": []}])
def test_an_object_of_nulls_beside_a_message_or_in_a_part_says_nothing(fields):
    """As LiteLLM gives every answer, which agents send back as it came."""
    target = Target(random_llama(), byte_tokenizer(template("chatml")))
    more = {"provider_specific_fields": fields, "function_call": {"name": None, "arguments": None}}
    parts = [{"type": "text", "text": "Why?", "provider_specific_fields": fields}]
    said = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello", **more}]
    said.append({"role": "user", "content": parts})
    read = target.tokenizer.decode(ChatRequest(model="a", messages=said).prompts(target)[0])
    assert "<|im_start|>assistant\nHello<|im_end|>\n<|im_start|>user\nWhy?<|im_end|>\n" in read
    for holds in ({"refusal": "No."}, {"refusal": False}, {"refusal": 0}):
        with pytest.raises(ValueError, match="the key 'provider_specific_fields' is unknown"):
            ChatRequest(model="a", messages=[{**said[1], "provider_specific_fields": holds}])


@pytest.mark.parametrize("effort", ["none", "minimal", "low", "None"])
def test_no_effort_of_reasoning_is_asked_of_a_template_without_thoughts(effort):
    target = Target(random_llama(), byte_tokenizer(template("chatml")))
    asked = {"model": "a", "messages": [{"role": "user", "content": "Why?"}]}
    plain = "<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\n"
    for given in ({"reasoning_effort": effort}, {"chat_template_kwargs": {"reasoning_effort": effort}}):
        request = ChatRequest(**asked, **given)
        if effort == "none":
            assert target.tokenizer.decode(request.prompts(target)[0]) == plain
        else:
            with pytest.raises(APIError, match="does not read 'reasoning_effort'"):
                request.prompts(target)


def test_a_text_that_begins_as_the_tokenizer_begins_texts_is_not_begun_twice():
    """A prompt that the client rendered with the chat template."""
    tokenizer = byte_tokenizer(READS)
    bos = tokenizer.bos_token_id
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", bos)])
    target = Target(random_llama(len(tokenizer)), tokenizer)
    why = tokenizer("Why?", add_special_tokens=False)["input_ids"]
    for text in ("Why?", "<s>Why?"):
        assert tokenizer(text)["input_ids"] == [bos] * (1 + text.startswith("<s>")) + why
        asked = {"model": "a", "prompt": text}
        assert CompletionRequest(**asked).prompts(target) == [[bos, *why]]
        bare = CompletionRequest(**asked, add_special_tokens=False).prompts(target)
        assert bare == [[bos] * text.startswith("<s>") + why]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="$A", special_tokens=[])
    asked = {"model": "a", "prompt": "<s><s>Why?"}  # where the tokenizer writes none
    assert CompletionRequest(**asked).prompts(target) == [[bos, bos, *why]]
    assert CompletionRequest(model="a", prompt=[bos, bos, *why]).prompts(target) == [[bos, bos, *why]]


@pytest.mark.parametrize(
    ("written", "text", "ids"),
    [
        ("<s> <|im_start|> $A", "Why?", [1, 3, "Why?"]),  # as GLM-4's `[gMASK] <sop>`
        ("<s> <|im_start|> $A", "<s><|im_start|>Why?", [1, 3, "Why?"]),
        ("<s> <|im_start|> $A", "<s><s><|im_start|>Why?", [1, 3, 1, 1, 3, "Why?"]),  # another text
        ("<s> $A </s>", "<s>Why?</s>", [1, "Why?", 2, 2]),
        ("$A </s>", "<s>Why?", [1, "Why?", 2]),
    ],
)
def test_whatever_the_tokenizer_writes_before_texts_is_not_begun_twice(written, text, ids):
    tokenizer = byte_tokenizer(READS)
    tokenizer.bos_token = None
    special = [(token, tokenizer.convert_tokens_to_ids(token)) for token in ("<s>", "</s>", "<|im_start|>")]
    why = tokenizer("Why?", add_special_tokens=False)["input_ids"]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single=written, special_tokens=special)
    right = [token for one in ids for token in (why if one == "Why?" else [one])]
    asked = CompletionRequest(model="a", prompt=text)
    assert asked.prompts(Target(random_llama(len(tokenizer)), tokenizer)) == [right]
