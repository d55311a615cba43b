"""Decoding: prefill → (propose → verify → accept → commit)*. The tokens are the target's own, whatever is drafted.

A step has one host synchronisation, which copies the accepted tokens to the host; on a GPU one step late, while the
next step runs. Drafters that synchronise more often set `Drafter.on_device` to False.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Generator, Iterator
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from draft_heads.inference.drafters.base import Drafter, check_vocabulary
from draft_heads.inference.generation import (
    Clock,
    Generation,
    GenerationSettings,
    Prompt,
    Stopper,
    TextPieces,
    prompt_ids,
    room,
)
from draft_heads.inference.processors import TextProcessors, processors_of
from draft_heads.inference.readback import PendingReadback
from draft_heads.inference.sampling import Sampling
from draft_heads.inference.step import VerifiedStep, choices, verify_step
from draft_heads.inference.target.compiled import no_host_sync, program
from draft_heads.inference.target.cuda_graphs import CapturedSteps, Drafted, current
from draft_heads.inference.target.kv_cache import KVCache
from draft_heads.inference.target.target import Target
from draft_heads.inference.tree import DraftTree, padded_nodes
from draft_heads.inference.verify import Accept, TypicalAcceptance, accept_exact

logger = logging.getLogger(__name__)
ONE_TEXT = "make an engine with a drafter of its own for each of them, on the same target"


class DecodingEngine:
    """Decodes one sequence at a time with one drafter; keeps its cache's memory between prompts.

    Texts of several engines may take turns; a second one in the same engine ends the first with a RuntimeError.
    """

    reserved = 8192
    """Positions of a cache whose address compiled programs or CUDA graphs hold; a longer text doubles it."""

    def __init__(
        self, target: Target, drafter: Drafter, ahead: bool | None = None, captured: CapturedSteps | None = None
    ) -> None:
        """The defaults are the fastest on the target's device. Compiled programs and CUDA graphs contain the target's
        attention, the tree temperature and the drafter's sizes: do not change those once an engine exists.

        ahead     start a step before the tokens of the previous one are read; every tree is padded to one size
        captured  replay steps as CUDA graphs: whole ones that start ahead, else their verification
        """
        check_vocabulary(drafter, target)
        self.target = target
        self.drafter = drafter
        on_gpu = target.device.type == "cuda" and drafter.on_device
        self.ahead = on_gpu if ahead is None else ahead
        captures = target.device.type == "cuda" and target.fused is not None
        self._captured = CapturedSteps() if captured is None and captures else captured
        self._accept: Accept = accept_exact
        self._drafting = "draft" if drafter.max_nodes else "other"  # the plain loop drafts nothing
        self._cache: KVCache | None = None
        self._changes = target.changes
        self._busy, self._text = threading.Lock(), object()  # held within a step; the text that the memory is of
        self._end = torch.zeros((), dtype=torch.long, device=target.device)  # length at which the text must end
        self._warmed_up = False
        self._draft = self._verify = None  # compiled programs, or none: methods of its own would keep an engine alive
        if target.compiled:
            self._verify = program(self._verify_step, target.device)
            if drafter.on_device and drafter.max_nodes:
                self._draft = program(self._draft_step, target.device)

    def generate(self, prompt: Prompt, settings: GenerationSettings | None = None) -> Generation:
        """The whole answer to a text, to messages or to token ids (`Prompt`).

        Raises ContextError (before any work) if the prompt does not fit, ValueError for what is no prompt.
        """
        result = Generation()
        for _ in self._run(prompt, settings or GenerationSettings(), result):
            pass
        return result

    def stream(
        self, prompt: Prompt, settings: GenerationSettings | None = None, result: Generation | None = None
    ) -> Generator[list[int], None, None]:
        """As `generate`, step by step: the new tokens of each target step as they are verified, added to `result`."""
        yield from self._run(prompt, settings or GenerationSettings(), result or Generation())

    def stream_text(self, prompt: Prompt, settings: GenerationSettings | None = None) -> Iterator[str]:
        """As `stream`, in pieces of text of whole characters, without the end token; see `TextPieces`."""
        pieces, result = TextPieces(self.target.tokenizer, scaffold=self.target.scaffold), Generation()
        for tokens in self.stream(prompt, settings, result):
            if text := pieces.add(result.shown(tokens)):
                yield text
        if text := pieces.end():
            yield text

    def _run(self, prompt: Prompt, settings: GenerationSettings, result: Generation) -> Iterator[list[int]]:
        """`_steps`; RuntimeError where another text or thread works in this engine's or its drafter's memory."""
        steps, text = self._steps(prompt, settings, result), None
        while True:
            if not self._busy.acquire(blocking=False):
                raise RuntimeError(f"an engine decodes for one thread at a time; {ONE_TEXT}")
            try:
                if text is not None and not result.finish_reason:
                    self._check_begun(text)
                tokens = next(steps, None)
                text = self._text
            finally:
                self._busy.release()
            if tokens is None:
                return
            yield tokens

    def _check_begun(self, text: object) -> None:
        """RuntimeError unless the engine's, drafter's and target's memory is still that of this text."""
        if self._text is not text:
            raise RuntimeError(f"another text was begun before this one had ended; {ONE_TEXT}")
        if any(one.drafts_for is not text for one in self.drafter.members()):
            raise RuntimeError(f"another engine began a text with this one's drafter; {ONE_TEXT}")
        if self._changes != self.target.changes:
            raise RuntimeError("the target's weights were changed before this text had ended; begin it again")

    def _steps(self, prompt: Prompt, settings: GenerationSettings, result: Generation) -> Iterator[list[int]]:
        self.target.refresh()
        if self._changes != self.target.changes:
            check_vocabulary(self.drafter, self.target)
            self._changes, self._cache = self.target.changes, None  # its layers may differ now
        ids = prompt_ids(self.target, prompt)
        limit = room(self.target, len(ids), settings.max_new_tokens)
        stopper = Stopper(settings, self.target, limit)
        self._text = object()
        text = list(ids)
        processors = TextProcessors.of_one(processors_of(self.target, settings, ids, limit), text)
        with torch.inference_mode():
            reserved = self._reserved_length(len(ids) + limit)
            cache = self._cleared_cache(reserved)
            self._warm_up_shapes(cache)
            self._capture_lengths(cache, reserved, settings)
            end = self._end.fill_(len(ids) + limit)
        clock = Clock()
        step = self._prefill(ids, cache, reserved, settings, clock, processors)
        for drafter in self.drafter.members():
            drafter.drafts_for = self._text
        if self._captured is not None and self.target.fused is not None:
            assert self._captured.holds(self._circumstances(cache, settings)), "memory of graphs has moved"
        first = torch.stack([torch.ones_like(step.base), step.base, torch.full_like(step.base, -1)])
        pending = deque([PendingReadback(first, 1)])
        told = list(ids)  # what the host has read since the last step, for drafters that draft there
        committed = len(ids) - 1  # the newest token is not in the cache yet
        while True:
            if not pending or (self.ahead and processors is None):  # processors read the newest tokens
                step, packed = self._step(step, cache, end, settings, clock, processors)
                pending.append(PendingReadback(packed, 1 + self.drafter.max_depth))
            new, sources, chosen = pending.popleft().read()
            if not self.drafter.on_device:
                step = replace(step, new_tokens=told + new, read_choices=chosen or None)
                told = []
            committed += len(new)
            text += new
            cache.bound = committed + len(pending) * (self.drafter.max_depth + 1)
            clock.lap("accept")
            kept = stopper.extend(result, new, sources)
            result.seconds = clock.seconds()
            clock.lap("other")
            yield kept
            clock.lap("other")
            if result.finish_reason:
                for surplus in pending:  # wait for the surplus step before the next prompt starts
                    surplus.read()
                clock.lap("verify")
                result.seconds = clock.seconds()
                return

    # --- memory -----------------------------------------------------------------------------------------------------

    def _reserved_length(self, text: int) -> int:
        """Tokens to allocate memory for; where programs or CUDA graphs hold its address, it must not grow later."""
        if not self.target.compiled and self._captured is None:
            return text
        self.reserved *= 1 << (-(-text // self.reserved) - 1).bit_length()
        return max(text, min(self.target.max_positions, self.reserved))

    def _cleared_cache(self, text: int) -> KVCache:
        """An empty cache for a text and the rows that steps write after it; reused while it is large enough."""
        extra = 3 * (self.drafter.max_depth + 1) + padded_nodes(self.drafter.max_nodes) + 1
        if self._cache is None or self._cache.capacity < text + extra:
            limit = self.target.max_positions
            self._cache = None  # free its memory before asking for more
            self._cache = self.target.new_cache(max(text, min(limit, -(-text // 256) * 256)) + extra)
        self._cache.clear()
        return self._cache

    def _warm_up_shapes(self, cache: KVCache) -> None:
        """Compile for an empty tree and for trees of any size before the first answer, where tree sizes vary."""
        if not self.target.compiled or self.drafter.on_device or self._warmed_up:
            return
        self._warmed_up = True
        base = torch.zeros((), dtype=torch.long, device=self.target.device)
        chain = torch.zeros(3, dtype=torch.long, device=self.target.device)
        for tree in (DraftTree.empty(base.device), DraftTree.build(chain, torch.full_like(chain, -1))):
            self.target.prefill(base[None], cache)
            for tensor in tree.tensors() if len(tree) > 1 else ():
                torch._dynamo.maybe_mark_dynamic(tensor, 0)
            cache.set_visible_length(4 + self.drafter.max_depth)
            (self._verify or self._verify_step)(base, tree, cache, self._end, None, None)
            cache.clear()

    def _capture_lengths(self, cache: KVCache, reserved: int, settings: GenerationSettings) -> None:
        """Capture the step of every visible length and tree size before the first answer, or when memory has moved."""
        captured, decoder, device, start = self._captured, self.target.fused, self.target.device, time.perf_counter()
        if captured is None or decoder is None:
            return
        cache.allocate(decoder.like)
        if captured.holds(self._circumstances(cache, settings)):
            return
        free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 0
        greedy, clock = GenerationSettings(typical=settings.typical), Clock()
        with current(device):
            base = self._end.zero_().clone()  # nothing is accepted
            if self.ahead:
                step = self._prefill([0], cache, reserved, greedy, clock)  # reserves the drafter's memory too
                step, _ = self._step(step, cache, self._end, greedy, clock)
            captured.begin_anew(self._circumstances(cache, settings))
            sizes = sorted({padded_nodes(nodes) for nodes in range(self.drafter.max_nodes + 1)})
            rows = 1 + self._captured_rows
            for end in range(cache.step, cache.capacity + 1, cache.step):
                cache.lengths.fill_(1)
                cache.set_bound(max(1, end - rows))
                if self.ahead:
                    self._step(step, cache, self._end, greedy, clock)
                    continue
                visible = cache.set_visible_length(rows)
                for size in sizes:  # the drafter is not asked: it would learn from a text that nobody wrote
                    drafted = Drafted(base, DraftTree.empty(device).padded(size))
                    self._replay(captured, visible, drafted, cache, self._end, greedy)
        cache.clear()
        used = free - torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 0
        logger.info(
            f"captured {len(captured)} CUDA graphs for texts of up to {cache.capacity} tokens: {used / 2**20:.0f} MiB, "
            f"{time.perf_counter() - start:.1f} s"
        )

    @property
    def _captured_rows(self) -> int:
        """How far behind the base token a captured step may write; a hybrid may be deeper than its trees are large."""
        return max(self.drafter.max_depth, padded_nodes(self.drafter.max_nodes))

    def _circumstances(self, cache: KVCache, settings: GenerationSettings) -> tuple[Any, ...]:
        """What graphs are captured for: the rule of acceptance, room, and where the memory lies that they write to."""
        drafting = self.drafter.memory() if self.ahead else ()  # else the verification alone is captured
        addresses = (x.data_ptr() for x in (*cache.memory(), *drafting))
        return settings.typical, self.reserved, self.target.changes, *addresses

    # --- steps ------------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def _prefill(
        self,
        ids: list[int],
        cache: KVCache,
        reserved: int,
        settings: GenerationSettings,
        clock: Clock,
        processors: TextProcessors | None = None,
    ) -> VerifiedStep:
        prompt = torch.tensor(ids, dtype=torch.long, device=self.target.device)
        with current(self.target.device):
            self.drafter.begin(prompt, reserved)
            clock.lap(self._drafting)
            hidden, logits, aux_hidden = self.target.prefill(prompt, cache, self.drafter.target_layers)
            following = logits[None] if processors is None else processors.after_prompt(logits[None])
            base = choices(following, prompt.new_tensor([prompt.numel()]), settings.sampling)[0]
            clock.lap("verify")
        return VerifiedStep.of_prompt(prompt, hidden, base, aux_hidden)

    @torch.inference_mode()
    def _step(
        self,
        step: VerifiedStep,
        cache: KVCache,
        end: Tensor,
        settings: GenerationSettings,
        clock: Clock,
        processors: TextProcessors | None = None,
    ) -> tuple[VerifiedStep, Tensor]:
        """One target step: what it committed, and the tensor for `PendingReadback`, both on the device."""
        captured = self._captured
        fused = self.target.fused is not None
        if not fused or step.tree is None or settings.sampling is not None or processors is not None:
            captured = None  # a graph would contain the seed, and processors work on the host
        # the accepted path must lie within the visible length; a graph is captured for one visible length
        rows = self.drafter.max_depth if captured is None else self._captured_rows
        visible = cache.set_visible_length(1 + rows)
        self.drafter.set_visible_length(visible)

        def draft(step: VerifiedStep) -> Drafted:
            after_prompt = step.tree is None  # prompts differ in length: their step is not compiled
            tree = (self._draft_step if after_prompt or self._draft is None else self._draft)(step)
            clock.lap(self._drafting)
            return Drafted(step.base, tree)

        def whole(step: VerifiedStep) -> tuple[VerifiedStep, Tensor]:
            return self._verify_drafted(draft(step), cache, end, settings, processors)

        with no_host_sync() if self.ahead else nullcontext(), current(self.target.device):
            if captured is None:
                verified = whole(step)
            elif self.ahead:
                verified = captured(visible, step, whole, chained=True)
            else:
                verified = self._replay(captured, visible, draft(step), cache, end, settings)
            clock.lap("verify")
        return verified

    def _verify_drafted(
        self,
        drafted: Drafted,
        cache: KVCache,
        end: Tensor,
        settings: GenerationSettings,
        processors: TextProcessors | None = None,
    ) -> tuple[VerifiedStep, Tensor]:
        cache.set_visible_length(1 + len(drafted.tree))
        # sampling needs wrapping 64-bit integers, which compiled CPU code does not guarantee
        eager = settings.sampling is not None or processors is not None
        verify = self._verify_step if eager or self._verify is None else self._verify
        return verify(drafted.base, drafted.tree, cache, end, settings.sampling, settings.typical, processors)

    def _replay(
        self,
        captured: CapturedSteps,
        visible: int,
        drafted: Drafted,
        cache: KVCache,
        end: Tensor,
        settings: GenerationSettings,
    ) -> tuple[VerifiedStep, Tensor]:
        """A captured verification of a tree that the host drafted, padded to one of few sizes."""
        tree = drafted.tree
        padded = Drafted(drafted.base, tree.padded(padded_nodes(len(tree))))
        key = visible, len(padded.tree)
        step, packed = captured(
            key, padded, lambda drafted: self._verify_drafted(drafted, cache, end, settings), chained=False
        )
        assert step.choices is not None
        return replace(step, choices=step.choices[: 1 + len(tree)], tree=tree), packed

    def _draft_step(self, step: VerifiedStep) -> DraftTree:
        """The drafter's tree after it observed the step, padded to one size if steps run ahead."""
        self.drafter.observe(step)
        tree = self.drafter.propose()
        assert len(tree) <= self.drafter.max_nodes, "a proposal has more nodes than its drafter's max_nodes"
        if self.target.compiled and len(tree) == 1:
            return tree.padded(2)  # a program compiled for one node specialises to that size
        return tree.padded(padded_nodes(self.drafter.max_nodes)) if self.ahead else tree

    def _verify_step(
        self,
        base: Tensor,
        tree: DraftTree,
        cache: KVCache,
        end: Tensor,
        sampling: Sampling | None,
        typical: TypicalAcceptance | None,
        processors: TextProcessors | None = None,
    ) -> tuple[VerifiedStep, Tensor]:
        """`verify_step` for one sequence, and the tensor for `PendingReadback`."""
        accept = self._accept if typical is None else typical
        depth, layers = self.drafter.max_depth, self.drafter.target_layers
        one = base[None], tree.map(lambda x: x[None]), depth, end[None]
        step = verify_step(self.target, cache, *one, sampling, accept, layers, processors).map(lambda x: x[0])
        assert step.source is not None
        read = [step.count[None], step.next_tokens, step.source]
        if self.drafter.reads_choices and step.choices is not None:
            read.append(step.choices)
        return step, torch.cat(read)
