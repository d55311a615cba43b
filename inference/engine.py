"""Decoding: prefill → (propose → verify → accept → commit)*. The tokens are the target's own, whatever is drafted.

One host synchronisation a step: the accepted tokens are read back, because the caller wants them and the next step's
sizes depend on their number. Drafters that need another say so where they do it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from inference.drafters.base import Drafter, VerifiedStep
from inference.kv_cache import KVCache
from inference.sampling import Sampling
from inference.target import Target
from inference.tree import DraftTree, ancestor_rows, depths
from inference.verify import TypicalAcceptance, greedy_path


class ContextError(ValueError):
    """A prompt that leaves no room for a single new token in the target's context."""


@dataclass(frozen=True)
class GenerationSettings:
    """When to stop. The answer is cut behind the first token that meets any of the rules, EOS included in it.

    max_new_tokens  exact upper bound; the target's context may end an answer earlier
    eos_token_ids   tokens that end an answer
    stop_strings    texts that end an answer once the decoded answer contains one
    stop            given the new tokens so far, the length at which to cut them, or None
    sampling        draws tokens, losslessly; None: greedy
    typical         lossy: accepts what is typical of the target instead of what it says; None: exact verification
    """

    max_new_tokens: int = 128
    eos_token_ids: tuple[int, ...] = ()
    stop_strings: tuple[str, ...] = ()
    stop: Callable[[list[int]], int | None] | None = None
    sampling: Sampling | None = None
    typical: TypicalAcceptance | None = None

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise ValueError(f"--max_new_tokens must be at least 1; got {self.max_new_tokens}")
        if self.sampling is not None and self.typical is not None:
            raise ValueError("typical acceptance has a rule of its own for what is kept; leave --temperature out")


@dataclass
class Generation:
    """One answer and what it cost.

    tokens          new tokens, EOS included
    accept_lengths  new tokens of each target step (base token included); the prefill's single token comes first
    seconds         wall seconds by part: draft, verify, accept, other, and their sum total
    finish_reason   "eos", "length", "stop" or "context"
    """

    tokens: list[int] = field(default_factory=list)
    accept_lengths: list[int] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)
    finish_reason: str = ""

    @property
    def target_steps(self) -> int:
        """Target forwards, the prefill included."""
        return len(self.accept_lengths)


class _Clock:
    """Splits wall time into named parts; on a GPU the parts are those of the host, which waits in `accept`."""

    def __init__(self) -> None:
        self.parts = {"draft": 0.0, "verify": 0.0, "accept": 0.0, "other": 0.0}
        self._last = self._start = time.perf_counter()

    def lap(self, part: str) -> None:
        now = time.perf_counter()
        self.parts[part] += now - self._last
        self._last = now

    def seconds(self) -> dict[str, float]:
        return {**self.parts, "total": sum(self.parts.values())}


class DecodingEngine:
    """Decodes one sequence at a time with one drafter; keeps its cache's memory between prompts."""

    def __init__(self, target: Target, drafter: Drafter) -> None:
        self.target = target
        self.drafter = drafter
        self._cache: KVCache | None = None

    def generate(self, prompt_ids: list[int], settings: GenerationSettings | None = None) -> Generation:
        """The whole answer. Raises ContextError (before any work) if the prompt does not fit."""
        result = Generation()
        for _ in self._run(prompt_ids, settings or GenerationSettings(), result):
            pass
        return result

    def stream(self, prompt_ids: list[int], settings: GenerationSettings | None = None) -> Iterator[list[int]]:
        """The answer step by step: the new tokens of each target step as they are verified."""
        yield from self._run(prompt_ids, settings or GenerationSettings(), Generation())

    def _run(self, prompt_ids: list[int], settings: GenerationSettings, result: Generation) -> Iterator[list[int]]:
        limit = room(self.target, len(prompt_ids), settings.max_new_tokens)
        stopper = Stopper(settings, self.target.tokenizer, limit)
        clock = _Clock()
        cache = self._reserve(len(prompt_ids) + limit + self.drafter.max_nodes + 1)
        base = self._prefill(prompt_ids, cache, limit, settings, clock)
        new = [int(base)]
        while True:
            kept, reason = stopper.cut(result.tokens, new)
            result.tokens.extend(kept)
            result.accept_lengths.append(len(kept))
            result.seconds = clock.seconds()
            result.finish_reason = reason
            clock.lap("other")
            yield kept
            clock.lap("other")
            if reason:
                result.seconds = clock.seconds()
                return
            base, new = self._step(base, cache, limit - len(result.tokens), settings, clock)

    def _reserve(self, capacity: int) -> KVCache:
        """A cleared cache with room for `capacity` rows; grown in steps, reused when it is large enough."""
        if self._cache is None or self._cache.capacity < capacity:
            most = self.target.max_positions + self.drafter.max_nodes + 1
            self._cache = self.target.new_cache(max(capacity, min(most, -(-capacity // 256) * 256)))
        self._cache.clear()
        return self._cache

    @torch.inference_mode()
    def _prefill(
        self, prompt_ids: list[int], cache: KVCache, limit: int, settings: GenerationSettings, clock: _Clock
    ) -> Tensor:
        prompt = torch.tensor(prompt_ids, dtype=torch.long, device=self.target.device)
        self.drafter.begin(prompt, prompt.numel() + limit)
        clock.lap("draft")
        hidden, logits = self.target.prefill(prompt, cache)
        base = choices(logits[None], prompt.new_tensor([prompt.numel()]), settings)[0]
        clock.lap("verify")
        self.drafter.observe(VerifiedStep(prompt, hidden, base))
        clock.lap("draft")
        return base

    @torch.inference_mode()
    def _step(
        self, base: Tensor, cache: KVCache, remaining: int, settings: GenerationSettings, clock: _Clock
    ) -> tuple[Tensor, list[int]]:
        """One target step: the next base token (on the device) and the new tokens, drafts accepted and base."""
        tree = propose(self.drafter, remaining)
        clock.lap("draft")

        sees = ancestor_rows(tree.parents, self.drafter.max_depth)
        rows = torch.cat([base[None], tree.tokens])
        depth = depths(sees)
        hidden, logits = self.target.forward_tree(rows, depth, sees, cache)
        clock.lap("verify")

        chosen = choices(logits, depth + cache.length + 1, settings)
        if settings.typical is None:
            on_path, next_base = greedy_path(tree, chosen, sees)
        else:
            on_path, next_base = settings.typical.path(tree, logits, sees)
        packed = torch.cat([on_path.long(), rows, next_base[None]]).tolist()  # the step's one synchronisation
        path = [row for row in range(len(rows)) if packed[row]]
        new = [packed[len(rows) + row] for row in path[1:]] + [packed[-1]]
        kept = torch.tensor(path, device=rows.device)
        if path[-1] == len(path) - 1:
            cache.keep_first(len(path))
        else:
            cache.keep(kept)
        clock.lap("accept")

        self.drafter.observe(VerifiedStep(rows[kept], hidden[kept], next_base, chosen, tree))
        clock.lap("draft")
        return next_base, new


def choices(logits: Tensor, positions: Tensor, settings: GenerationSettings) -> Tensor:
    """[R] int64, the target's own token behind each of R rows, to stand at absolute `positions [R]`."""
    return logits.argmax(-1) if settings.sampling is None else settings.sampling.choices(logits, positions)


def propose(drafter: Drafter, remaining: int) -> DraftTree:
    """What the drafter drafts; in the last few steps no node beyond the tokens that remain to be written."""
    tree = drafter.propose()
    return within_depth(tree, remaining, drafter.max_depth) if remaining < drafter.max_depth else tree


def within_depth(tree: DraftTree, most: int, levels: int) -> DraftTree:
    """The nodes of depth at most `most`; `levels` bounds the tree's depth. How many remain is read by the host."""
    return tree.select(depths(ancestor_rows(tree.parents, levels))[1:] <= most)


def room(target: Target, prompt_tokens: int, max_new_tokens: int) -> int:
    """How many of `max_new_tokens` fit behind the prompt; raises ContextError if none does."""
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
    """Finds where an answer ends inside the tokens of a step."""

    def __init__(self, settings: GenerationSettings, tokenizer: object, limit: int) -> None:
        if settings.stop_strings and tokenizer is None:
            raise ValueError("stop_strings need a tokenizer to decode the answer; the target has none; load one")
        self.settings = settings
        self.tokenizer = tokenizer
        self.limit = limit

    def cut(self, before: list[int], new: list[int]) -> tuple[list[int], str]:
        """The part of `new` that belongs to the answer, and why it ends there ("" if it goes on).

        Tokens are judged in order, so EOS or a stop rule in the middle of an accepted path ends the answer there.
        """
        settings = self.settings
        for count, token in enumerate(new, start=1):
            total = len(before) + count
            if token in settings.eos_token_ids:
                return new[:count], "eos"
            if settings.stop_strings and self._has_stop_string(before + new[:count]):
                return new[:count], "stop"
            if settings.stop is not None and settings.stop(before + new[:count]) is not None:
                return new[:count], "stop"
            if total == self.limit:
                return new[:count], "length" if self.limit == settings.max_new_tokens else "context"
        return new, ""

    def _has_stop_string(self, tokens: list[int]) -> bool:
        text = self.tokenizer.decode(tokens, skip_special_tokens=False)  # type: ignore[attr-defined]
        return any(stop in text for stop in self.settings.stop_strings)
