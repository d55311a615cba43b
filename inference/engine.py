"""Decoding: prefill → (propose → verify → accept → commit)*. The tokens are the target's own, whatever is drafted.

One host synchronisation a step: the accepted tokens are read back, because the caller wants them. On a GPU that is
done one step late, while the next step runs. Drafters that ask more say so (`Drafter.on_device`).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor

from draft_heads.inference.drafters.base import Drafter, VerifiedStep
from draft_heads.inference.host_sync import asking_nothing
from draft_heads.inference.sampling import Sampling
from draft_heads.inference.target.compiled import program
from draft_heads.inference.target.cuda_graphs import CapturedSteps
from draft_heads.inference.target.kv_cache import KVCache
from draft_heads.inference.target.target import Target
from draft_heads.inference.tree import DraftTree, ancestor_rows, depths
from draft_heads.inference.verify import TypicalAcceptance, accepted_rows, greedy_path


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
    sources         who drafted each token, an index into the drafter's `sources`; −1: the target itself
    seconds         wall seconds by part: draft, verify, accept, other, and their sum total
    finish_reason   "eos", "length", "stop" or "context"
    """

    tokens: list[int] = field(default_factory=list)
    accept_lengths: list[int] = field(default_factory=list)
    sources: list[int] = field(default_factory=list)
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


class _Mail:
    """A step's tokens and their sources on the way to the host, through pinned memory where there is a GPU.

    `[count, token, …, source, …]`, of which `count` tokens and sources are meant.
    """

    def __init__(self, told: Tensor) -> None:
        self._arrived: torch.cuda.Event | None = None
        self._host = torch.empty(told.shape, dtype=told.dtype, pin_memory=told.is_cuda)
        self._host.copy_(told, non_blocking=True)
        if told.is_cuda:
            self._arrived = torch.cuda.Event()
            self._arrived.record()

    def read(self) -> tuple[list[int], list[int]]:
        """The tokens and their sources; waits for them."""
        if self._arrived is not None:
            self._arrived.synchronize()
        count, *told = self._host.tolist()
        half = len(told) // 2
        return told[:count], told[half : half + count]


class DecodingEngine:
    """Decodes one sequence at a time with one drafter; keeps its cache's memory between prompts.

    A step is the drafter's `observe` and `propose`, the target's forward over the tree, and what follows from it:
    which path is accepted, which rows the cache keeps. None of it reads a value back. The host reads each step's
    tokens, which are few and tell it where the answer ends; a step that was begun too much is thrown away.
    """

    def __init__(
        self, target: Target, drafter: Drafter, ahead: bool | None = None, captured: CapturedSteps | None = None
    ) -> None:
        """How steps are run; the defaults are the fastest on the target's device.

        What programs and graphs are made from (the target's attention, the head's tree temperature, the drafter's
        sizes) is fixed once an engine exists.

        ahead     begin a step before the tokens of the one before are read, sizes fixed beforehand
        captured  replay steps that run ahead as graphs
        """
        self.target = target
        self.drafter = drafter
        on_gpu = target.device.type == "cuda" and drafter.on_device
        self.ahead = on_gpu if ahead is None else ahead
        self._captured = CapturedSteps() if captured is None and on_gpu and self.ahead and target.fused else captured
        self._cache: KVCache | None = None
        self._end = torch.zeros((), dtype=torch.long, device=target.device)  # where the answer must end
        self._draft, self._verify = self._drafted, self._verified
        self._met = False  # trees of other sizes than the first
        if target.compiled:
            self._verify = program(self._verified, target.device)
            if drafter.on_device and drafter.max_nodes:
                self._draft = program(self._drafted, target.device)

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
        with torch.inference_mode():
            cache = self._reserve(self._room(len(prompt_ids) + limit))
            self._meet_sizes(cache)
            end = self._end.fill_(len(prompt_ids) + limit)
        step = self._prefill(prompt_ids, cache, limit, settings, clock)
        flying = deque([_Mail(torch.stack([torch.ones_like(step.base), step.base, torch.full_like(step.base, -1)]))])
        committed = len(prompt_ids) - 1  # the newest token is not yet in the cache
        while True:
            if self.ahead or not flying:
                step, told = self._step(step, cache, end, settings, clock)
                flying.append(_Mail(told))
            new, sources = flying.popleft().read()
            committed += len(new)
            cache.settle(committed + len(flying) * (self.drafter.max_depth + 1))
            clock.lap("accept")
            kept, reason = stopper.cut(result.tokens, new)
            result.tokens.extend(kept)
            result.sources.extend(sources[: len(kept)])
            result.accept_lengths.append(len(kept))
            result.seconds = clock.seconds()
            result.finish_reason = reason
            clock.lap("other")
            yield kept
            clock.lap("other")
            if reason:
                for mail in flying:  # a step begun too much is waited for here, not by whoever decodes next
                    mail.read()
                clock.lap("verify")
                result.seconds = clock.seconds()
                return

    def _room(self, text: int) -> int:
        """How many tokens to set memory aside for. Where it lies is part of programs and graphs: it shall not move."""
        if not self.target.compiled and self._captured is None:
            return text
        return max(text, min(self.target.max_positions, 8192))

    def _reserve(self, text: int) -> KVCache:
        """A cleared cache for a text and what steps write behind it; grown in steps, reused when it is large enough."""
        behind = 3 * (self.drafter.max_depth + 1) + padded_nodes(self.drafter.max_nodes) + 1
        if self._cache is None or self._cache.capacity < text + behind:
            most = self.target.max_positions
            self._cache = None  # its memory is given back before more is asked for
            self._cache = self.target.new_cache(max(text, min(most, -(-text // 256) * 256)) + behind)
        self._cache.clear()
        return self._cache

    def _meet_sizes(self, cache: KVCache) -> None:
        """Compile for trees of any size, and for none, before the first answer; a program is made of each by itself."""
        if not self.target.compiled or self.drafter.on_device or self._met:
            return
        self._met = True
        base = torch.zeros((), dtype=torch.long, device=self.target.device)
        chain = torch.zeros(3, dtype=torch.long, device=self.target.device)
        for tree in (DraftTree.empty(base.device), DraftTree.build(chain, torch.full_like(chain, -1))):
            self.target.prefill(base[None], cache)
            for tensor in tree.tensors() if len(tree) > 1 else ():
                torch._dynamo.maybe_mark_dynamic(tensor, 0)
            cache.set_visible_length(4 + self.drafter.max_depth)
            self._verify(base, tree, cache, self._end, None, None)
            cache.clear()

    @torch.inference_mode()
    def _prefill(
        self, prompt_ids: list[int], cache: KVCache, limit: int, settings: GenerationSettings, clock: _Clock
    ) -> VerifiedStep:
        prompt = torch.tensor(prompt_ids, dtype=torch.long, device=self.target.device)
        self.drafter.begin(prompt, self._room(prompt.numel() + limit))
        clock.lap("draft")
        hidden, logits = self.target.prefill(prompt, cache)
        base = choices(logits[None], prompt.new_tensor([prompt.numel()]), settings.sampling)[0]
        clock.lap("verify")
        return VerifiedStep.of_prompt(prompt, hidden, base)

    @torch.inference_mode()
    def _step(
        self, step: VerifiedStep, cache: KVCache, end: Tensor, settings: GenerationSettings, clock: _Clock
    ) -> tuple[VerifiedStep, Tensor]:
        """One target step: what it committed, and what the host is told of it (`_Mail`), all still on the device."""

        def body(step: VerifiedStep) -> tuple[VerifiedStep, Tensor]:
            first = step.tree is None  # a prompt has a length of its own: its step is not compiled
            tree = (self._drafted if first else self._draft)(step)
            clock.lap("draft")
            cache.set_visible_length(1 + len(tree))
            # noise is drawn by 64-bit integers that wrap around, which compiled code on a CPU may not
            verify = self._verify if settings.sampling is None else self._verified
            return verify(step.base, tree, cache, end, settings.sampling, settings.typical)

        captured = self._captured
        if step.tree is None or settings.sampling is not None:  # a seed would be part of a graph, and seeds are many
            captured = None
        # what is kept must fit, and what the drafter may look at follows from that: a graph is made for one length
        visible = cache.set_visible_length(
            1 + (self.drafter.max_depth if captured is None else padded_nodes(self.drafter.max_nodes))
        )
        self.drafter.set_visible_length(visible)
        with asking_nothing() if self.ahead else nullcontext():
            if captured is None:
                verified = body(step)
            else:
                places = tuple((x.data_ptr(), *x.shape) for x in (end, *cache.memory(), *self.drafter.memory()))
                verified = captured(places, (visible, settings.typical), step, body)
            clock.lap("verify")
        return verified

    def _drafted(self, step: VerifiedStep) -> DraftTree:
        """The drafter takes in what was committed and drafts what may come; of fixed size if steps run ahead."""
        self.drafter.observe(step)
        tree = self.drafter.propose()
        assert len(tree) <= self.drafter.max_nodes, "a proposal has more nodes than its drafter's max_nodes"
        if self.target.compiled and len(tree) == 1:
            return tree.padded(2)  # a program for one node would be one for one only
        return tree.padded(padded_nodes(self.drafter.max_nodes)) if self.ahead else tree

    def _verified(
        self,
        base: Tensor,
        tree: DraftTree,
        cache: KVCache,
        end: Tensor,
        sampling: Sampling | None,
        typical: TypicalAcceptance | None,
    ) -> tuple[VerifiedStep, Tensor]:
        """The target's forward over the tree, the accepted path, and the cache that keeps it; see `_step`."""
        sees = ancestor_rows(tree.parents, self.drafter.max_depth)
        rows, depth = torch.cat([base[None], tree.tokens]), depths(sees)
        tree = tree.no_deeper(end - cache.lengths - 1, depth[1:])  # no tokens beyond those that remain to be written
        hidden, logits = self.target.forward_tree(rows, depth, sees, cache)

        chosen = choices(logits, depth + cache.lengths + 1, sampling)
        path, count, next_base = self._accepted(tree, chosen, logits, sees, depth, typical)
        cache.commit(path[None], count[None])

        tokens = rows[path]
        behind = torch.arange(len(path), device=path.device) >= count - 1
        next_tokens = torch.where(behind, next_base, tokens.roll(-1))
        source = torch.cat([tree.source.new_full((1,), -1), tree.source])[path].roll(-1).masked_fill(behind, -1)
        verified = VerifiedStep(tokens, next_tokens, hidden[path], count, chosen, tree)
        return verified, torch.cat([count[None], next_tokens, source])

    def _accepted(
        self,
        tree: DraftTree,
        chosen: Tensor,
        logits: Tensor,
        sees: Tensor,
        depth: Tensor,
        typical: TypicalAcceptance | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Rows of the accepted path `[A]`, how many of them count, and the next base token."""
        if typical is None:
            on_path, next_base = greedy_path(tree, chosen, sees)
        else:
            on_path, next_base = typical.path(tree, logits, sees)
        return *accepted_rows(on_path, depth, self.drafter.max_depth), next_base


def choices(logits: Tensor, positions: Tensor, sampling: Sampling | None) -> Tensor:
    """[R] int64, the target's own token behind each of R rows, to stand at absolute `positions [R]`."""
    return logits.argmax(-1) if sampling is None else sampling.choices(logits, positions)


def padded_nodes(nodes: int) -> int:
    """The size trees of at most `nodes` nodes are padded to: 8, 16, 32, 64, then multiples of 64; 0 stays 0."""
    if nodes > 64:
        return -(-nodes // 64) * 64
    return nodes and max(8, 1 << (nodes - 1).bit_length())


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
