"""One answer: when it stops, where it is cut, how long it took. Shared by all engines."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any

import torch
from transformers import LogitsProcessorList

from draft_heads.configs.options import check_number, check_whole
from draft_heads.data.labels.labeller import checked_ids
from draft_heads.data.text.row_keys import prompt_messages
from draft_heads.data.text.token_spans import MOST_OF_SOME, PLAIN, AnswerForm, begun, scaffold_end
from draft_heads.inference.sampling import Sampling, check_seed
from draft_heads.inference.target.target import Target
from draft_heads.inference.verify import TypicalAcceptance


class ContextError(ValueError):
    """A prompt that leaves no room for a single new token in the target's context."""


@dataclass(frozen=True)
class GenerationSettings:
    """When to stop. The answer ends with the first token for which any of the rules holds; EOS is part of it.

    max_new_tokens  exact upper bound; the target's context may end an answer earlier
    eos_token_ids   tokens that end an answer; None: the target's own
    stop_strings    texts that end an answer once the decoded answer contains one
    stop            function of the new tokens so far, asked after each: the length at which to cut them, or None. A
                    larger length than theirs ends the answer later, whatever is returned until then but a smaller one;
                    a smaller length than theirs takes back what `stream` has given. A batch asks it about several texts
                    in turn: its result must depend on the tokens alone. Only an IncrementalStop, which keeps the text
                    that it has seen, is copied for each of them
    temperature     above 0: lossless sampling; 0: greedy
    top_k, top_p    sample among the most probable tokens only: so many (0: all), or of this total probability (1: all)
    seed            of sampling, from 0 to 2^63 − 1
    processors      transformers' logits processors, which must depend on the text alone; None: the checkpoint's own
    typical         lossy acceptance of drafts that are typical of the target; None: exact verification
    """

    max_new_tokens: int = 128
    eos_token_ids: tuple[int, ...] | None = None
    stop_strings: tuple[str, ...] = ()
    stop: Callable[[list[int]], int | None] | None = None
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    processors: LogitsProcessorList | None = None
    typical: TypicalAcceptance | None = None

    def __post_init__(self) -> None:
        check_whole("max_new_tokens", self.max_new_tokens, least=1)
        for name in ("eos_token_ids", "stop_strings"):
            if isinstance(one := getattr(self, name), (int, float, str)):
                raise ValueError(f"{name} is a tuple; got {one!r}; write ({one!r},)")
            if one is not None or name == "stop_strings":  # kept: an iterator would be used up by the checks below
                object.__setattr__(self, name, tuple(one.tolist() if hasattr(one, "tolist") else one or ()))
        for token in self.eos_token_ids or ():
            check_whole("a token of eos_token_ids", token, least=0, remedy="write () for no end tokens")
        if wrong := [text for text in self.stop_strings if not isinstance(text, str) or not text]:
            raise ValueError(f"stop_strings are texts of at least one character; got {wrong[0]!r}; leave it out")
        if self.stop is not None and not callable(self.stop):
            raise ValueError(f"stop is a function of the new tokens; got {self.stop!r}; write lambda tokens: …")
        check_number("temperature", self.temperature)
        check_whole("top_k", self.top_k)
        check_number("top_p", self.top_p)
        check_seed("seed", self.seed)
        if self.typical is not None and not isinstance(self.typical, TypicalAcceptance):
            raise ValueError(f"typical is a TypicalAcceptance or None; got {self.typical!r}; leave it out")
        if self.processors is not None and not isinstance(self.processors, LogitsProcessorList):
            raise ValueError(
                f"processors is a LogitsProcessorList or None; got {self.processors!r}; write LogitsProcessorList([…])"
            )
        if not 0 <= self.temperature < float("inf"):
            raise ValueError(
                f"temperature must be 0 (greedy) or more, and finite; got {self.temperature:g}; leave it out for "
                "greedy decoding"
            )
        if self.temperature == 0 and (self.top_k, self.top_p) != (0, 1.0):
            raise ValueError(
                f"top_k and top_p need temperature above 0 (greedy decoding does not sample); got {self.top_k} "
                f"and {self.top_p:g}; set it or leave them out"
            )
        if self.sampling is not None and self.typical is not None:
            raise ValueError(
                "typical acceptance works with greedy decoding only; got temperature "
                f"{self.temperature:g}; leave it out"
            )

    @cached_property
    def sampling(self) -> Sampling | None:
        """How tokens are sampled; None: greedy."""
        return Sampling(self.temperature, self.top_k, self.top_p, self.seed) if self.temperature else None

    def ends(self, target: Target) -> tuple[int, ...]:
        """The tokens that end an answer of `target`."""
        return target.end_token_ids if self.eos_token_ids is None else self.eos_token_ids


@dataclass
class Generation:
    """One answer, its steps and its time.

    tokens          new tokens, EOS included
    accept_lengths  new tokens of each target step (base token included); the prefill's single token comes first
    sources         which drafter proposed each token, an index into the drafter's `sources`; −1: the target itself
    seconds         wall seconds by part: draft, verify, accept, other, and their sum total; on a GPU total alone
    finish_reason   "eos", "length", "stop" or "context"; in a batch "overflow", where states are no numbers
    step_nodes      nodes of the tree of each step after the prefill; empty where its verification is not timed alone
    step_seconds    seconds of each of these verifications, until the host has the step's tokens
    """

    tokens: list[int] = field(default_factory=list)
    accept_lengths: list[int] = field(default_factory=list)
    sources: list[int] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)
    finish_reason: str = ""
    step_nodes: list[int] = field(default_factory=list)
    step_seconds: list[float] = field(default_factory=list)

    @property
    def target_steps(self) -> int:
        """Target forwards, the prefill included."""
        return len(self.accept_lengths)

    @property
    def accepted(self) -> list[int]:
        """Drafted tokens of each step after the prefill; all of a step's where the answer ends with a draft."""
        if len(self.sources) != len(self.tokens):  # not recorded: all but the base token
            return [max(length - 1, 0) for length in self.accept_lengths[1:]]
        ends = accumulate(self.accept_lengths)
        return [sum(source >= 0 for source in self.sources[a:b]) for a, b in pairwise(ends)]

    def drop(self, tokens: int) -> None:
        """Take back the last `tokens` of the newest step: they come after the end of what was asked for."""
        end = len(self.tokens) - tokens
        del self.tokens[end:], self.sources[end:]
        self.accept_lengths[-1] -= tokens

    def shown(self, step: list[int]) -> list[int]:
        """Of the newest step's tokens those that are text: not the one that ended the answer."""
        return step[:-1] if self.finish_reason == "eos" else step


class Clock:
    """Splits the host's time into named parts."""

    def __init__(self) -> None:
        self.parts = {"draft": 0.0, "verify": 0.0, "accept": 0.0, "other": 0.0}
        self._last = time.perf_counter()
        self._verified = 0.0

    def lap(self, part: str) -> None:
        """Count the time since the last lap as `part`."""
        now = time.perf_counter()
        self.parts[part] += now - self._last
        self._last = now

    def verification(self) -> float:
        """Seconds of `verify` and `accept` since the last call."""
        before, self._verified = self._verified, self.parts["verify"] + self.parts["accept"]
        return self._verified - before

    def seconds(self, device: torch.device, share: float = 1.0) -> dict[str, float]:
        """A share of every part, and their sum as `total`; of a device that computes beside the host the sum alone: the
        host starts the parts of a step and waits for all of them in `accept`."""
        parts = self.parts if device.type == "cpu" else {}
        return {part: share * spent for part, spent in {**parts, "total": sum(self.parts.values())}.items()}


Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]]
"""A user's message or a conversation (`[{"role": "user", "content": …}, …]`, see `data.text.row_keys`), which the
target's chat template renders; or token ids, which are taken as they are."""


def prompt_ids(target: Target, prompt: Prompt) -> list[int]:
    """The token ids of a prompt, all of which the target has; ValueError for anything else, and for a text without a
    tokenizer or chat template."""
    messages: Any = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
    if not isinstance(prompt, bytes | bytearray) and all(type(item) is int for item in messages):
        return checked_ids(target, messages)
    if not all(isinstance(item, dict) for item in messages):
        of = " and ".join(sorted({type(item).__name__ for item in messages}))
        raise ValueError(
            "a prompt is a text, a list of messages or a list of token ids (for one sequence); got "
            f"{type(prompt).__name__} of {of}; pass one of them, for example its `input_ids` as a list"
        )
    if target.tokenizer is None:
        raise ValueError("a text needs the target's tokenizer; it has none; pass token ids or load one")
    return checked_ids(target, target.renderer.prompt(prompt_messages(messages)))


def room(target: Target, prompt_tokens: int, max_new_tokens: int) -> int:
    """How many of `max_new_tokens` fit after the prompt; raises ContextError if none does."""
    check_whole("max_new_tokens", max_new_tokens, least=1)
    left = target.max_positions - prompt_tokens
    if prompt_tokens < 1:
        raise ContextError("a prompt must have at least one token; got none; render the chat template first")
    if left < 1:
        raise ContextError(
            f"the prompt and one new token must fit the target's {target.max_positions} positions; the "
            f"prompt has {prompt_tokens} tokens; shorten it or pick another target"
        )
    return min(left, max_new_tokens)


class Stopper:
    """Finds the end of an answer within the tokens of a step."""

    def __init__(self, settings: GenerationSettings, target: Target, limit: int) -> None:
        if settings.stop_strings and target.tokenizer is None:
            raise ValueError("stop_strings need a tokenizer to decode the answer; the target has none; load one")
        self.settings = settings
        self.ends = settings.ends(target)
        self.tokenizer = target.tokenizer
        self.limit = limit
        self._cut = sys.maxsize  # the smallest length that `stop` returned

    def extend(self, answer: Generation, new: list[int], sources: list[int]) -> list[int]:
        """Add one target step's tokens to the answer up to its end; returns the added ones.

        Tokens that a `stop` rule takes back leave the steps that gave them, the newest first.
        """
        before = len(answer.tokens)
        length, answer.finish_reason = self._end(answer.tokens, new)
        added = new[: max(0, length - before)]
        answer.tokens[:] = (answer.tokens + added)[:length]
        answer.sources[:] = (answer.sources + sources[: len(added)])[:length]
        answer.accept_lengths.append(len(added))
        surplus = before + len(added) - length
        for step in reversed(range(len(answer.accept_lengths))):
            taken = min(surplus, answer.accept_lengths[step])
            answer.accept_lengths[step] -= taken
            surplus -= taken
        return added

    def _end(self, before: list[int], new: list[int]) -> tuple[int, str]:
        """The length of the answer with `new`, judged token by token, and why it ends there ("" if it goes on).

        Where several rules hold at one token, the shortest answer counts; of equal ones EOS, then stops, then limits.
        """
        settings = self.settings
        for count, token in enumerate(new, start=1):
            total = len(before) + count
            cut = self._cut_by_rule(before + new[:count])
            if cut < total:
                return cut, "stop"
            if token in self.ends:
                return total, "eos"
            if cut == total or self._has_stop_string(before + new[:count]):
                return total, "stop"
            if total == self.limit:
                return total, "length" if self.limit == settings.max_new_tokens else "context"
        return len(before) + len(new), ""

    def _cut_by_rule(self, tokens: list[int]) -> int:
        """The length at which `stop` cuts the tokens; more than theirs where it does not yet."""
        cut = None if self.settings.stop is None else self.settings.stop(tokens)
        if cut is not None:
            check_whole("what stop returns", cut, least=0, remedy="return a length, as len(tokens), or None to go on")
            self._cut = min(self._cut, int(cut))
        return self._cut

    def _has_stop_string(self, tokens: list[int]) -> bool:
        stops = self.settings.stop_strings
        whole = {"skip_special_tokens": False, "clean_up_tokenization_spaces": False}  # the text that an answer has
        text = self.tokenizer.decode(tokens, **whole) if stops else ""
        return any(stop in text for stop in stops)


class TextPieces:
    """The text of an answer as it grows; a character whose bytes are not all there is held back.

    Example: of the tokens "a", and two that are two bytes of "🙂" each, the pieces are "a", "" and "🙂". Together
    they are the text of `answer_tokens`: of an answer in several channels (gpt-oss) the last one, or all of it where
    that one is missing. A tokenizer that spells a run of characters in bytes (Llama 2) may decode all of a run that
    ends within one as U+FFFD; what had been whole stays so here.
    """

    def __init__(
        self, tokenizer: Any, before: Sequence[int] = (), form: AnswerForm = PLAIN, skips_special: bool = False
    ) -> None:
        """before: tokens of the text that the answer goes on with, whose first space would else be dropped by some
        tokenizers; form: the tokens that the chat template puts around an answer (`Target.answer_form`);
        skips_special: whether special tokens are no part of the text. ValueError without a fast tokenizer."""
        if not getattr(tokenizer, "is_fast", False):
            raise ValueError("streamed text needs a fast tokenizer; the target has none; use `stream` for tokens")
        self._tokenizer = tokenizer.backend_tokenizer
        # the last piece's tokens, on which the text after them may depend, and those that are held back
        # a window that begins within a character, of 4 bytes at most, would seem to end within one
        windows = (list(before[-size:]) for size in range(8, 12))
        self._tokens = next((one for one in windows if not self._tokenizer.decode(one).endswith("\ufffd")), [])
        self._shown = len(self._tokens)  # how many of them are the last piece's
        self._scaffold, self._closing, self._skips_special = list(form.scaffold), list(form.closing), skips_special
        self._channels: list[int] | None = [] if form.scaffold else None  # the tokens so far, while it may come
        self._behind: list[int] = []  # the first tokens of the closing, which no other token has followed yet

    def add(self, tokens: Sequence[int]) -> str:
        """The text that these tokens complete."""
        return "".join(map(self._add, tokens))

    def _add(self, token: int) -> str:
        if self._channels is not None:
            self._channels.append(token)
            if self._channels[0] == self._scaffold[0]:
                window = self._channels[-len(self._scaffold) - MOST_OF_SOME :]
                if token == self._scaffold[-1] and scaffold_end(window, self._scaffold):
                    self._channels = None
                return ""
            self._channels = None
        if self._closing:
            self._behind.append(token)
            free = len(self._behind) - begun(self._behind, self._closing)
            tokens, self._behind = self._behind[:free], self._behind[free:]
            return "".join(map(self._show, tokens))
        return self._show(token)

    def _show(self, token: int) -> str:
        self._tokens.append(token)
        piece = self._piece()
        if not piece or piece.endswith("\ufffd"):
            return ""
        self._tokens, self._shown = self._tokens[self._shown :], len(self._tokens) - self._shown
        return piece

    def end(self) -> str:
        """What is held back, a broken character as U+FFFD."""
        if self._channels:
            shown = len(self._channels) - begun(self._channels, self._closing)
            self._tokens, self._channels = self._tokens + self._channels[:shown], None
        return self._piece()

    def _piece(self) -> str:
        """The text of the tokens after the last piece."""
        shown, text = (
            self._tokenizer.decode(tokens, skip_special_tokens=self._skips_special)
            for tokens in (self._tokens[: self._shown], self._tokens)
        )
        return str(text[len(shown) :])
