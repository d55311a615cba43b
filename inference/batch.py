"""Batched decoding: the trees of several sequences are verified in one forward.

Every sequence has its own drafter and row of the cache; the tokens are those of decoding one by one. Drafters run one
after another: this engine measures how γ depends on the batch size; it is not a server.

Shapes: B slots, R rows of a forward (the largest tree's), A accepted rows at most.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from transformers import LogitsProcessorList

from draft_heads.inference.drafters.base import Drafter, check_vocabulary
from draft_heads.inference.generation import Clock, Generation, GenerationSettings, Prompt, Stopper, prompt_ids, room
from draft_heads.inference.processors import TextProcessors, processors_of
from draft_heads.inference.step import VerifiedStep, choices, verify_step
from draft_heads.inference.target.kv_cache import KVCache
from draft_heads.inference.target.target import Target
from draft_heads.inference.tree import DraftTree
from draft_heads.inference.verify import accept_exact


@dataclass
class _Slot:
    """A running sequence: its drafter, its answer so far, its stop rules, how many of its tokens are in the cache.

    text        the prompt, the answer so far and the base token
    processors  what changes the logits by the text, if anything does
    """

    drafter: Drafter
    answer: Generation
    stopper: Stopper
    base: Tensor
    committed: int
    text: list[int]
    processors: LogitsProcessorList | None


class BatchEngine:
    """Decodes many prompts, up to `batch` at a time."""

    def __init__(self, target: Target, make_drafter: Callable[[], Drafter], batch: int) -> None:
        """Raises ValueError for a batch below one, and for drafters that are not new ones."""
        if batch < 1:
            raise ValueError(f"--batch_size must be at least 1; got {batch}")
        self.target = target
        self.drafters = [make_drafter() for _ in range(batch)]
        self.drafter = self.drafters[0]
        check_vocabulary(self.drafter, target)
        members = [id(member) for drafter in self.drafters for member in drafter.members()]
        if len(set(members)) < len(members):
            raise ValueError(
                f"each of the {batch} texts of a batch needs a drafter of its own; make_drafter returned one twice; "
                "make a new one in each call"
            )

    def generate_or_none(
        self, prompts: Sequence[Prompt], settings: GenerationSettings | None = None
    ) -> list[Generation | None]:
        """As `generate`; None for a prompt that does not fit the target's context."""
        ids = [prompt_ids(self.target, prompt) for prompt in prompts]
        fits = [1 <= len(prompt) < self.target.max_positions for prompt in ids]
        answers = iter(self.generate([prompt for prompt, fit in zip(ids, fits) if fit], settings))
        return [next(answers) if fit else None for fit in fits]

    @torch.inference_mode()
    def generate(self, prompts: Sequence[Prompt], settings: GenerationSettings | None = None) -> list[Generation]:
        """The answers in the prompts' order, the run's seconds shared by tokens; ContextError if one is too long."""
        self.target.refresh()
        settings = settings or GenerationSettings()
        ids = [prompt_ids(self.target, prompt) for prompt in prompts]
        limits = [room(self.target, len(prompt), settings.max_new_tokens) for prompt in ids]
        answers = [Generation() for _ in prompts]
        if not prompts:
            return answers
        clock = Clock()
        size = min(len(self.drafters), len(prompts))
        slots: list[_Slot | None] = [None] * size
        longest = max(len(prompt) + limit for prompt, limit in zip(ids, limits))
        cache = self.target.new_cache(longest + max(self.drafter.max_nodes, self.drafter.max_depth) + 1, size)
        single = self.target.new_cache(longest)
        end = torch.zeros(size, dtype=torch.long, device=self.target.device)
        waiting = list(range(len(prompts)))[::-1]
        while True:
            for slot in range(size):
                while slots[slot] is None and waiting:
                    index = waiting.pop()
                    own = replace(settings, stop=deepcopy(settings.stop))  # a stop rule may be stateful
                    stopper = Stopper(own, self.target, limits[index])
                    slots[slot] = self._begin(slot, ids[index], stopper, answers[index], single, cache, end, clock)
            if not any(slots):
                break
            self._step(slots, settings, cache, end, clock)
        tokens = max(1, sum(len(answer.tokens) for answer in answers))  # a stop rule may take back all
        for answer in answers:
            answer.seconds = clock.seconds(len(answer.tokens) / tokens)
        return answers

    def _begin(
        self,
        slot: int,
        prompt_ids: list[int],
        stopper: Stopper,
        answer: Generation,
        single: KVCache,
        cache: KVCache,
        end: Tensor,
        clock: Clock,
    ) -> _Slot | None:
        """Prefill a prompt in `single` and copy it to its slot; None if the answer has one token only."""
        drafter = self.drafters[slot]
        prompt = torch.tensor(prompt_ids, device=self.target.device)
        drafting = "draft" if drafter.max_nodes else "other"
        drafter.begin(prompt, len(prompt_ids) + stopper.limit)
        for member in drafter.members():
            member.drafts_for = answer
        clock.lap(drafting)
        single.clear()
        hidden, logits, aux_hidden = self.target.prefill(prompt, single, drafter.target_layers)
        processors = processors_of(self.target, stopper.settings, prompt_ids, stopper.limit)
        if processors is not None:
            logits = TextProcessors([processors], [prompt_ids]).after_prompt(logits[None])[0]
        base = choices(logits[None], prompt.new_tensor([len(prompt_ids)]), stopper.settings.sampling)[0]
        stopper.extend(answer, [int(base)], [-1])
        clock.lap("verify")
        if answer.finish_reason:
            return None
        cache.copy_sequence(slot, single)
        end[slot] = len(prompt_ids) + stopper.limit
        drafter.observe(VerifiedStep.of_prompt(prompt, hidden, base, aux_hidden))
        clock.lap(drafting)
        return _Slot(drafter, answer, stopper, base, len(prompt_ids), [*prompt_ids, int(base)], processors)

    def _step(
        self, slots: list[_Slot | None], settings: GenerationSettings, cache: KVCache, end: Tensor, clock: Clock
    ) -> None:
        """One target forward for all; slots whose answers end become None."""
        device = self.target.device
        trees = [DraftTree.empty(device) if slot is None else slot.drafter.propose() for slot in slots]
        base = torch.stack([end.new_zeros(()) if slot is None else slot.base for slot in slots])
        clock.lap("draft" if self.drafter.max_nodes else "other")
        cache.bound = max(slot.committed for slot in slots if slot is not None)
        cache.set_visible_length(1 + max(self.drafter.max_depth, *map(len, trees)))
        batch = self._verify(base, DraftTree.stack(trees), cache, end, settings, _processors(slots))
        clock.lap("verify")
        assert batch.source is not None
        counts, next_tokens, sources = batch.count.tolist(), batch.next_tokens.tolist(), batch.source.tolist()
        clock.lap("accept")
        for index, (slot, tree) in enumerate(zip(slots, trees)):
            if slot is None:
                cache.lengths[index] = 0
                continue
            accepted = counts[index]
            slot.committed += accepted
            slot.text += next_tokens[index][:accepted]
            slot.base = batch.base[index]
            slot.stopper.extend(slot.answer, next_tokens[index][:accepted], sources[index][:accepted])
            clock.lap("other")
            if slot.answer.finish_reason:
                slots[index] = None
                cache.lengths[index] = 0
                continue
            slot.drafter.observe(batch.sequence(index, tree))
            clock.lap("draft" if self.drafter.max_nodes else "other")

    def _verify(
        self,
        base: Tensor,
        tree: DraftTree,
        cache: KVCache,
        end: Tensor,
        settings: GenerationSettings,
        processors: TextProcessors | None,
    ) -> VerifiedStep:
        accept = accept_exact if settings.typical is None else settings.typical
        depth, layers = self.drafter.max_depth, self.drafter.target_layers
        return verify_step(self.target, cache, base, tree, depth, end, settings.sampling, accept, layers, processors)


def _processors(slots: Sequence[_Slot | None]) -> TextProcessors | None:
    """Those of all slots; None if no slot has any."""
    lists = [None if slot is None else slot.processors for slot in slots]
    if not any(lists):
        return None
    return TextProcessors(lists, [[] if slot is None else slot.text for slot in slots])
