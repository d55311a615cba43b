"""How one decoding step runs: eagerly or as CUDA graphs, at once or ahead of the host.

`StepRunner` is the interface of all of them: `begin` a text, `prefill` its prompt, then `run` step after step.

    eager     `draft` and `verify` call the drafter and `verify_step` as they are
    captured  steps are replayed as CUDA graphs: whole steps if they run ahead, else their verification, and what parts
              of a hybrid draft on the device
    ahead     a step starts before the host has read the tokens of the one before, so nothing in it reads the host
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor

from draft_heads.configs.options import out_of_memory
from draft_heads.inference.drafters.base import Drafter
from draft_heads.inference.generation import Clock, GenerationSettings
from draft_heads.inference.processors import TextProcessors
from draft_heads.inference.step import VerifiedStep, choices, verify_step
from draft_heads.inference.target.cuda_graphs import CapturedSteps, Drafted, current
from draft_heads.inference.target.host_sync import no_host_sync
from draft_heads.inference.target.kv_cache import KVCache
from draft_heads.inference.target.target import Target
from draft_heads.inference.tree import DraftTree, padded_nodes
from draft_heads.inference.verify import Accept, accept_exact

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class TextState:
    """What all steps of one text share.

    cache       the target's keys and values of the committed text
    reserved    tokens that drafters allocate memory for
    end         [1] int64, the length at which the text must end
    settings    how the target chooses tokens
    processors  what changes its logits by the text, on the host; None for nothing
    clock       counts the time of the answer's parts
    """

    cache: KVCache
    reserved: int
    end: Tensor
    settings: GenerationSettings
    processors: TextProcessors | None = None
    clock: Clock = field(default_factory=Clock)

    @property
    def greedy(self) -> bool:
        """Whether tokens follow from the model's logits alone, as CUDA graphs need it."""
        return self.settings.sampling is None and self.processors is None


class StepRunner:
    """Runs the steps of one text at a time on a target with a drafter; keeps its cache's memory between texts.

    ahead     a step starts before the tokens of the one before are read; every tree is padded to one size
    captured  the CUDA graphs; None: steps are not captured
    cache     the newest text's; None: the next text allocates one
    reserved  positions of a cache whose address CUDA graphs hold; a longer text doubles it
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter,
        ahead: bool | None = None,
        captured: CapturedSteps | Literal[False] | None = None,
        accept: Accept = accept_exact,
    ) -> None:
        """See `DecodingEngine`."""
        on_gpu = target.device.type == "cuda"
        if captured is None and on_gpu and target.fused is not None:
            captured = CapturedSteps()
        if ahead and not drafter.on_device:
            raise ValueError(
                "steps start ahead of the host (ahead=True) where the drafter reads no tokens on it, as heads do; got "
                f"{drafter.kind or type(drafter).__name__}; leave ahead out"
            )
        self.target, self.drafter = target, drafter
        self.ahead = on_gpu and drafter.on_device if ahead is None else ahead
        self.captured = None if captured is False else captured
        self.cache: KVCache | None = None
        self.reserved = self._fits = 8192  # `_fits`: as of the last text for which there was memory
        self._accept = accept
        self._drafting = "draft" if drafter.max_nodes else "other"  # the plain loop drafts nothing
        self._end = torch.zeros(1, dtype=torch.long, device=target.device)

    # --- a step -----------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def begin(self, tokens: int, settings: GenerationSettings, processors: TextProcessors | None = None) -> TextState:
        """Make room for a text of at most `tokens`, prompt and answer, and capture what is missing.

        The memory is that of the text before, whose steps must not run any more. ValueError for sampling under a rule
        of acceptance, which decides by logits alone, and for two such rules.
        """
        if settings.typical is not None and self._accept is not accept_exact:
            raise ValueError(
                "a step has one rule of acceptance; got that of the engine (accept=…) and the settings' typical; leave "
                "one of them out"
            )
        if settings.sampling is not None and self._accept is not accept_exact:
            raise ValueError(
                "an engine with a rule of acceptance (accept=…) decodes greedily only; got temperature "
                f"{settings.temperature:g}; leave one of them out"
            )
        with self._room_or_none():
            reserved = self.reserved_length(tokens)
            cache = self._cleared_cache(reserved)
            if self.captured is not None and self.target.fused is not None:
                self._capture_lengths(self.captured, TextState(cache, reserved, self._end, settings))
            return TextState(cache, reserved, self._end.fill_(tokens), settings, processors)

    @torch.inference_mode()
    def prefill(self, ids: list[int], text: TextState) -> tuple[VerifiedStep, Tensor]:
        """Read the prompt: what it committed and the base token, and the tensor for `PendingReadback` (one row)."""
        with self._room_or_none():
            step = self._prefill(ids, text)
        self._fits = self.reserved
        if self.captured is not None and self.target.fused is not None:
            assert self.captured.valid_for(self._graph_key(text)), "memory of graphs has moved"
        return step, torch.cat([torch.ones_like(step.base), step.base, torch.full_like(step.base, -1)])

    def _prefill(self, ids: list[int], text: TextState) -> VerifiedStep:
        prompt = torch.tensor(ids, dtype=torch.long, device=self.target.device)
        with current(self.target.device):
            self.drafter.begin(0, prompt, text.reserved)
            text.clock.lap(self._drafting)
            hidden, logits, aux_hidden = self.target.prefill(prompt, text.cache, self.drafter.target_layers)
            following = logits[None] if text.processors is None else text.processors.after_prompt(logits[None])
            base = choices(following, prompt.new_tensor([prompt.numel()]), text.settings.sampling)
            text.clock.lap("verify")
        return VerifiedStep.of_prompt(prompt, hidden, base, aux_hidden)

    @torch.inference_mode()
    def run(self, step: VerifiedStep, text: TextState) -> tuple[VerifiedStep, Tensor]:
        """Draft → verify → accept → commit: what it committed, and the tensor for `PendingReadback`, on the device."""
        captured = self.captured if text.greedy and step.tree is not None and self.target.fused is not None else None
        # the accepted path must lie within the visible length; a graph is captured for one visible length
        rows = self.drafter.max_depth if captured is None else self._captured_rows
        visible = text.cache.set_visible_length(1 + rows)
        self.drafter.set_visible_length(visible)

        def whole(step: VerifiedStep) -> tuple[VerifiedStep, Tensor]:
            return self.verify(self.draft(step, text), text)

        with no_host_sync() if self.ahead else nullcontext(), current(self.target.device):
            if captured is None:
                result = whole(step)
            elif self.ahead:
                result = captured(visible, step, whole, chained=True)
            else:
                result = self._replay_verification(captured, visible, self.draft(step, text), text)
            text.clock.lap("accept")  # which follows the forward in `verify_step`
        return result

    def draft(self, step: VerifiedStep, text: TextState) -> Drafted:
        """The drafter observes the step and proposes a tree, padded to one size if steps run ahead."""
        self.drafter.graphs = None if self.ahead or self.target.fused is None else self.captured
        try:
            self.drafter.observe(step, 0 if step.tree is None else None)
            tree = self.drafter.propose()
        finally:
            self.drafter.graphs = None
        assert len(tree) <= self.drafter.max_nodes, "a proposal has more nodes than its drafter's max_nodes"
        if self.ahead:
            tree = tree.padded(padded_nodes(self.drafter.max_nodes))
        text.clock.lap(self._drafting)
        return Drafted(step.base, tree)

    def verify(self, drafted: Drafted, text: TextState) -> tuple[VerifiedStep, Tensor]:
        """The target verifies the tree, accepts a path and commits it."""
        text.cache.set_visible_length(1 + len(drafted.tree))
        settings = text.settings
        step = verify_step(
            self.target,
            text.cache,
            drafted.base,
            drafted.tree,
            self.drafter.max_depth,
            end=text.end,
            sampling=settings.sampling,
            accept=self._accept if settings.typical is None else settings.typical,
            target_layers=self.drafter.target_layers,
            processors=text.processors,
            clock=text.clock,
        )
        assert step.source is not None
        read = [step.count, step.next_tokens[0], step.source[0]]
        if self.drafter.reads_choices and step.choices is not None:
            read.append(step.choices[0])
        return step, torch.cat(read)

    # --- memory and graphs ------------------------------------------------------------------------------------------

    def reserved_length(self, text: int) -> int:
        """Tokens to allocate memory for; where CUDA graphs hold its address, it must not grow later."""
        if self.captured is None:
            return text
        self.reserved *= 1 << (-(-text // self.reserved) - 1).bit_length()
        return max(text, min(self.target.max_positions, self.reserved))

    @contextmanager
    def _room_or_none(self) -> Iterator[None]:
        """A text for which memory is missing leaves no demand for it behind: later ones may be shorter."""
        try:
            yield
        except Exception as error:
            if out_of_memory(error):
                self.cache, self.reserved = None, self._fits
            raise

    def _cleared_cache(self, text: int) -> KVCache:
        """An empty cache for a text and the rows that steps write after it; reused while it is large enough."""
        extra = 3 * (self.drafter.max_depth + 1) + padded_nodes(self.drafter.max_nodes) + 1
        if self.cache is None or self.cache.capacity < text + extra:
            limit = self.target.max_positions
            self.cache = None  # free its memory before asking for more
            self.cache = self.target.new_cache(max(text, min(limit, -(-text // 256) * 256)) + extra)
        self.cache.clear()
        return self.cache

    def _capture_lengths(self, captured: CapturedSteps, text: TextState) -> None:
        """Capture the step of every visible length and tree size before the first answer, or when memory has moved."""
        cache, device, start = text.cache, self.target.device, time.perf_counter()
        assert self.target.fused is not None
        cache.allocate(self.target.fused.like)
        self.drafter.reserve(text.reserved)
        if captured.valid_for(self._graph_key(text)):
            return
        free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 0
        with current(device):
            self._run_every_length(captured, replace(text, settings=GenerationSettings(typical=text.settings.typical)))
        cache.clear()
        used = free - torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 0
        logger.info(
            f"captured {len(captured)} CUDA graphs for texts of up to {cache.capacity} tokens: {used / 2**20:.0f} MiB, "
            f"{time.perf_counter() - start:.1f} s"
        )

    def _run_every_length(self, captured: CapturedSteps, text: TextState) -> None:
        """Steps of a dummy text that has ended, so that nothing is accepted."""
        cache = text.cache
        base = text.end.zero_().clone()
        if self.ahead:
            step = self._prefill([0], text)  # reserves the drafter's memory too
            step, _ = self.run(step, text)
        captured.begin_anew(self._graph_key(text))
        sizes = sorted({padded_nodes(nodes) for nodes in range(self.drafter.max_nodes + 1)})
        rows = 1 + self._captured_rows
        for end in range(cache.step, cache.capacity + 1, cache.step):
            cache.lengths.fill_(1)
            cache.set_bound(max(1, end - rows))
            if self.ahead:
                self.run(step, text)
                continue
            visible = cache.set_visible_length(rows)
            for size in sizes:  # skip the drafter, or it would count this dummy text
                drafted = Drafted(base, DraftTree.empty(base.device).padded(size))
                self._replay_verification(captured, visible, drafted, text)

    def _replay_verification(
        self, captured: CapturedSteps, visible: int, drafted: Drafted, text: TextState
    ) -> tuple[VerifiedStep, Tensor]:
        """A captured verification of a tree that the host drafted, padded to one of few sizes."""
        tree = drafted.tree
        padded = Drafted(drafted.base, tree.padded(padded_nodes(len(tree))))
        key = visible, len(padded.tree)
        step, packed = captured(key, padded, lambda drafted: self.verify(drafted, text), chained=False)
        assert step.choices is not None
        return replace(step, choices=step.choices[:, : 1 + len(tree)], tree=tree), packed

    @property
    def _captured_rows(self) -> int:
        """Rows after the base token that a captured step may write; a hybrid may be deeper than its trees are large."""
        return max(self.drafter.max_depth, padded_nodes(self.drafter.max_nodes))

    def _graph_key(self, text: TextState) -> tuple[Any, ...]:
        """Captured graphs stay valid while this is unchanged: the acceptance rule, sizes, weights and addresses."""
        addresses = (x.data_ptr() for x in (*text.cache.memory(), *self.drafter.memory()))
        return text.settings.typical, self.reserved, self.target.changes, *addresses
