"""The requests of the OpenAI API as this server reads them: what it cannot do is refused, never ignored."""

from __future__ import annotations

import secrets
from abc import abstractmethod
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from draft_heads.data.generation_config import processor_settings
from draft_heads.data.labels.labeller import checked_ids
from draft_heads.data.text.errors import ConversationError
from draft_heads.data.text.rendering import check_unicode
from draft_heads.data.text.row_keys import further_of_row, prompt_messages, without_none
from draft_heads.inference.generation import GenerationSettings, prompt_ids, room
from draft_heads.inference.sampling import SEEDS, seed_of
from draft_heads.inference.serving.errors import APIError
from draft_heads.inference.serving.fields import Limit, Number, Switch, Text, Whole, must_be, shown
from draft_heads.inference.serving.neutral import CHECKPOINTS, IGNORED, LEFT_OUT, WHOLE_TEXT, is_neutral, neutral_in
from draft_heads.inference.target.target import Target

_LONG_CHAT = 32  # messages


def unusable(parameter: str, message: str) -> APIError:
    """The error for a value of a parameter that cannot be used."""
    return APIError(400, message, "invalid_value", parameter)


class StreamOptions(BaseModel):
    """`include_usage`: a last event with the tokens counted."""

    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _drop_what_is_off(cls, given: Any) -> Any:
        return {name: on for name, on in given.items() if on} if isinstance(given, dict) else given

    include_usage: Switch = False


class DecodingRequest(BaseModel):
    """What both endpoints read.

    temperature  0 is greedy; the server's default when left out
    top_p        and top_k are read only when the temperature is above 0
    seed         the same seed gives the same answers; left out, each request has its own
    n            answers to each prompt; answer i takes seed + i, as `seed_of` does

    `stop_token_ids`, `return_token_ids` and `skip_special_tokens` are vLLM's: tokens that end an answer beside the
    target's own, choices with their `token_ids`, and texts without special tokens. Those of `neutral.CHECKPOINTS` and
    `neutral.WHOLE_TEXT` may say what the checkpoint's own settings say.
    """

    model_config = ConfigDict(extra="forbid", strict=True)
    continues: ClassVar[bool] = False
    """Whether an answer goes on with the text of its prompt."""
    neutral: ClassVar[dict[str, tuple[Any, ...]]] = {}
    """What `neutral.NEUTRAL` has for all endpoints, for this one."""
    source: ClassVar[str]
    """The parameter with what is to be answered."""

    model: Annotated[str, must_be("a text", "write the name that /v1/models lists")]
    max_tokens: Limit = None
    temperature: Annotated[Annotated[float, Field(ge=0, le=2)] | None, must_be("a number from 0 to 2")] = None
    top_p: Annotated[Annotated[float, Field(gt=0, le=1)] | None, must_be("a number above 0 and at most 1")] = None
    top_k: Annotated[
        Annotated[Whole, Field(ge=1)] | None, must_be("a whole number of at least 1, or 0 or -1 for all tokens")
    ] = None
    seed: Annotated[
        Annotated[Whole, Field(ge=0, lt=SEEDS)] | None,
        must_be("a whole number of at least 0 and below 2^63, or -1 for none"),
    ] = None
    stop: Annotated[
        Text | Annotated[list[Text], Field(max_length=16)] | None, must_be("a text or up to 16, none of them empty")
    ] = None
    n: Annotated[Annotated[Whole, Field(ge=1, le=16)] | None, must_be("a whole number from 1 to 16")] = None
    stop_token_ids: Annotated[list[Whole] | None, must_be("a list of token ids")] = None
    return_token_ids: Switch = False
    skip_special_tokens: Switch = False
    repetition_penalty: Number = None
    repeat_penalty: Number = None
    repeat_last_n: Annotated[Whole | None, must_be("a whole number")] = None
    penalize_nl: Switch = None
    min_tokens: Number = None
    min_new_tokens: Number = None
    stream: Switch = False
    stream_options: Annotated[StreamOptions | None, must_be('an object as {"include_usage": true}')] = None

    @model_validator(mode="before")
    @classmethod
    def _refuse_what_would_be_ignored(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        neutral = neutral_in(given) | cls.neutral
        for name in neutral.keys() & given.keys():
            if not is_neutral(given[name], neutral[name]):
                raise unusable(name, f"{name} is not supported; got {shown(given[name])}; leave it out")
        read = {name: value for name, value in given.items() if name not in neutral and name not in IGNORED}
        read = {name: None if is_neutral(value, LEFT_OUT.get(name, ())) else value for name, value in read.items()}
        # clients send null for what they do not use, known here or not
        return {name: value for name, value in read.items() if value is not None or name in cls.model_fields}

    @model_validator(mode="after")
    def _refuse_options_of_no_stream(self) -> DecodingRequest:
        if self.stream_options is not None and self.stream_options.include_usage and not self.stream:
            given = f"got {self.stream_options.model_dump(exclude_none=True)}"
            message = f"stream_options are of a stream, and stream is false; {given}; leave it out or ask for a stream"
            raise unusable("stream_options", message)
        return self

    @field_validator("stop")
    @classmethod
    def _stops_are_unicode(cls, stop: str | list[str] | None) -> str | list[str] | None:
        for text in [stop] if isinstance(stop, str) else stop or []:
            check_unicode(text)
        return stop

    @property
    def stops(self) -> tuple[str, ...]:
        """The texts that end an answer."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    def settings(self, target: Target, prompt: list[int], server: ServerLimits) -> list[GenerationSettings]:
        """How each of the `n` answers to a prompt is decoded; ContextError if it does not fit."""
        room(target, len(prompt), 1)
        name, tokens = self.limit(server)
        if tokens > server.max_new_tokens:
            most = f"at most {server.max_new_tokens}, the server's limit"
            raise unusable(name, f"{name} must be {most}; got {tokens}; ask for fewer")
        if unknown := [token for token in self.stop_token_ids or () if not 0 <= token < target.vocab_size]:
            message = f"stop_token_ids must lie in 0…{target.vocab_size - 1}; got {unknown[0]}; leave it out"
            raise unusable("stop_token_ids", message)
        self._check_checkpoints_own(target)
        temperature = server.temperature if self.temperature is None else self.temperature
        ends = tuple({*target.end_token_ids, *(self.stop_token_ids or ())})
        if not temperature:
            return [GenerationSettings(tokens, ends)] * (self.n or 1)
        seed = secrets.randbelow(SEEDS) if self.seed is None else self.seed
        top_k, top_p = self.top_k or 0, self.top_p or 1.0
        try:
            first = GenerationSettings(tokens, ends, temperature=temperature, top_k=top_k, top_p=top_p, seed=seed)
        except ValueError as error:
            raise unusable("temperature", str(error)) from None
        return [replace(first, seed=seed_of(seed, index)) for index in range(self.n or 1)]

    def _check_checkpoints_own(self, target: Target) -> None:
        own = processor_settings(getattr(target.model, "generation_config", None))
        for name, (field, unset, others) in CHECKPOINTS.items():
            asked = getattr(self, name)
            decide = [one for one in (field, *others) if one in own and (one != field or own[one] != asked)]
            if asked is not None and (decide or asked != own.get(field, unset)):
                whys = [f"the checkpoint's own {one} is {own[one]:g}" for one in decide]
                why = whys[0] if whys else f"{name} is not supported"
                raise unusable(name, f"{why}; got {asked:g}; leave {name} out")
        for name, whole in WHOLE_TEXT.items() if "repetition_penalty" in own else ():
            if (given := getattr(self, name)) not in (None, whole):
                why = f"the checkpoint's own repetition_penalty counts the whole text, as {name} {whole} says"
                raise unusable(name, f"{why}; got {given}; leave {name} out")

    def limit(self, server: ServerLimits) -> tuple[str, int]:
        """The parameter that says how long an answer may be, and the longest one that is asked for."""
        return "max_tokens", self.max_tokens or server.max_new_tokens

    @abstractmethod
    def prompts(self, target: Target) -> list[list[int]]:
        """The token ids of each prompt; ValueError or ConversationError for what cannot be rendered."""


class Message(BaseModel):
    """One message of a conversation, with further keys that chat templates read: those of `data.text.row_keys`."""

    model_config = ConfigDict(extra="allow", strict=True)

    role: Annotated[
        Literal["system", "developer", "user", "assistant", "tool"],
        must_be("'system', 'developer', 'user', 'assistant' or 'tool'", "write one of them"),
    ]
    content: Annotated[
        str | list[dict[str, Any]], must_be('a text, or a list of parts as {"type": "text", "text": "…"}', "write one")
    ] = ""

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, given: Any) -> Any:
        return without_none(given) if isinstance(given, dict) else given

    @model_validator(mode="after")
    def _refuse_what_would_be_ignored(self) -> Message:
        self.plain()
        return self

    def plain(self) -> dict[str, Any]:
        """As chat templates read it; ValueError for a key that is unknown and for a part that is no text."""
        return prompt_messages([self.model_dump(exclude_unset=True)])[0]


class ChatRequest(DecodingRequest):
    """`POST /v1/chat/completions`."""

    source: ClassVar[str] = "messages"
    neutral: ClassVar[dict[str, tuple[Any, ...]]] = {
        "add_generation_prompt": (True,),
        "add_special_tokens": (False,),  # the chat template writes them
        "continue_final_message": (False,),
    }

    messages: Annotated[
        list[Message],
        Field(min_length=1),
        must_be("a list of at least one message", 'write [{"role": "user", "content": "…"}]'),
    ]
    max_completion_tokens: Limit = None
    reasoning_effort: Annotated[Text | None, must_be("a word that the chat template reads")] = None
    chat_template_kwargs: Annotated[
        dict[str, bool | int | float | str | None] | None,
        must_be("settings that the chat template reads", 'write for example {"enable_thinking": false}'),
    ] = None

    def limit(self, server: ServerLimits) -> tuple[str, int]:
        if self.max_completion_tokens:
            if self.max_tokens not in (None, self.max_completion_tokens):
                given = f"got {self.max_tokens} and {self.max_completion_tokens}; leave one of them out"
                raise unusable("max_tokens", f"max_tokens and max_completion_tokens must be the same limit; {given}")
            return "max_completion_tokens", self.max_completion_tokens
        return super().limit(server)

    def prompts(self, target: Target) -> list[list[int]]:
        messages, extra = [message.plain() for message in self.messages], self._extra(target)
        if len(messages) > _LONG_CHAT and target.tokenizer is not None:  # the checks below render it once for each turn
            text = target.renderer.text(messages, True, extra)
            check_unicode(text)
            room(target, len(target.tokenizer(text, add_special_tokens=False)["input_ids"]), 1)
        if not extra:
            return [prompt_ids(target, messages)]
        return [checked_ids(target, target.renderer.prompt(prompt_messages(messages), extra))]

    def _extra(self, target: Target) -> dict[str, Any]:
        """What the chat template reads beside the messages."""
        extra: dict[str, Any] = {}
        effort = {} if self.reasoning_effort is None else {"reasoning_effort": self.reasoning_effort}
        for name, given in (("chat_template_kwargs", self.chat_template_kwargs or {}), ("reasoning_effort", effort)):
            try:
                found = further_of_row({"chat_template_kwargs": given}, (), ()).extra
                if found:
                    target.renderer.check_read([], found)
                if any(extra.get(key, value) != value for key, value in found.items()):
                    raise ConversationError("chat_template_kwargs has another value")
            except ConversationError as error:
                rule = f"{name} must be what the chat template reads ({error})"
                raise unusable(name, f"{rule}; got {shown(given)}; leave out what it does not read") from None
            extra |= found
        return extra


def tokens_begun_twice(bare: list[int], ids: list[int]) -> int:
    """How many tokens the tokenizer writes before a text that begins with them itself, 0 for another text.

    bare, ids: the text's ids without and with what the tokenizer writes before and after it

    Example: of `<s>Hi</s>`, [1, 7, 2] without and [1, 1, 7, 2, 2] with it, 1: ids[1:] begins once.
    """
    for before in range(len(ids) - len(bare), 0, -1):
        if ids[before : before + len(bare)] == bare and ids[:before] == bare[:before]:
            return before
    return 0


class CompletionRequest(DecodingRequest):
    """`POST /v1/completions`: up to 16 texts, or texts already split into token ids.

    A text that begins with the tokens that the tokenizer writes before texts, as one that the client rendered with the
    chat template, gets them once; with `add_special_tokens` false the tokenizer writes none at all.
    """

    source: ClassVar[str] = "prompt"
    continues: ClassVar[bool] = True

    prompt: Annotated[
        str | list[str] | list[Whole] | list[list[Whole]],
        must_be("a text, a list of texts, a list of token ids, or a list of such lists", "write one of them"),
    ]

    add_special_tokens: Switch = None

    def limit(self, server: ServerLimits) -> tuple[str, int]:
        return "max_tokens", self.max_tokens or min(16, server.max_new_tokens)  # the API's default

    def prompts(self, target: Target) -> list[list[int]]:
        given: list[Any] = self.prompt if isinstance(self.prompt, list) else [self.prompt]
        if not given or isinstance(given[0], int):
            given = [given]
        if len(given) > 16:
            raise ValueError(f"prompt takes up to 16 texts; got {len(given)}; send several requests")
        prompts = []
        for one in given:
            prompt = self._tokens(target, one) if isinstance(one, str) else one
            if not prompt:
                raise ValueError(f"prompt must have at least one token; got {one!r}; write a text")
            prompts.append(checked_ids(target, prompt, "prompt"))
        return prompts

    def _tokens(self, target: Target, text: str) -> list[int]:
        check_unicode(text)
        tokenizer = target.tokenizer
        bare: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
        if self.add_special_tokens is False:
            return bare
        ids: list[int] = tokenizer(text)["input_ids"]
        return ids[tokens_begun_twice(bare, ids) :]


class ServerLimits(BaseModel):
    """What the server's options decide."""

    max_new_tokens: int = 2048
    temperature: float = 0.0
