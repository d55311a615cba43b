"""Batched decoding: the trees of several texts are drafted in one call and verified in one forward.

Every text has a slot of the drafter and a row of the cache, which the next prompt takes when it ends; the tokens are
those of decoding one by one.

Shapes: B slots, R rows of a forward (the largest tree's), A accepted rows at most.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, replace

import torch
from transformers import LogitsProcessorList

from draft_heads.inference.drafters.base import Drafter, check_vocabulary
from draft_heads.inference.generation import Clock, Generation, GenerationSettings, Prompt, Stopper, prompt_ids, room
from draft_heads.inference.processors import TextProcessors, processors_of
from draft_heads.inference.step import VerifiedStep, choices, verify_step
from draft_heads.inference.target.target import Target
from draft_heads.inference.tree import DraftTree
from draft_heads.inference.verify import accept_exact


@dataclass
class _Slot:
    """A running text: its answer so far, its stop rules, how many of its tokens are in the cache.

    text        the prompt, the answer so far and the base token
    processors  what changes the logits by the text, if anything does
    """

    answer: Generation
    stopper: Stopper
    committed: int
    text: list[int]
    processors: LogitsProcessorList | None


class BatchEngine:
    """Decodes many prompts, up to `drafter.slots` at a time."""

    def __init__(self, target: Target, drafter: Drafter) -> None:
        """Raises ValueError for a drafter whose tokens the target does not know."""
        check_vocabulary(drafter, target)
        self.target, self.drafter = target, drafter

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
        run = _Run(self.target, self.drafter, settings, longest=max(len(i) + limit for i, limit in zip(ids, limits)))
        waiting = list(range(len(prompts)))[::-1]
        while True:
            for slot in range(self.drafter.slots):
                while run.slots[slot] is None and waiting:
                    index = waiting.pop()
                    own = replace(settings, stop=deepcopy(settings.stop))  # a stop rule may be stateful
                    run.begin(slot, ids[index], Stopper(own, self.target, limits[index]), answers[index])
            if not any(run.slots):
                break
            run.step()
        tokens = max(1, sum(len(answer.tokens) for answer in answers))  # a stop rule may take back all
        for answer in answers:
            answer.seconds = run.clock.seconds(len(answer.tokens) / tokens)
        return answers


class _Run:
    """The memory of one call: the slots' texts and caches.

    end   [B] int64, the length at which each text must end; 0 for a slot without one
    base  [B] int64, the base token of each text
    """

    def __init__(self, target: Target, drafter: Drafter, settings: GenerationSettings, longest: int) -> None:
        """longest: tokens of the longest prompt and its answer."""
        self.target, self.drafter, self.settings, self.longest = target, drafter, settings, longest
        self.clock = Clock()
        self.slots: list[_Slot | None] = [None] * drafter.slots
        rows = max(drafter.max_nodes, drafter.max_depth) + 1
        self._cache = target.new_cache(longest + rows, drafter.slots)
        self._single = target.new_cache(longest)
        self._end = torch.zeros(drafter.slots, dtype=torch.long, device=target.device)
        self._base = torch.zeros_like(self._end)
        self._drafting = "draft" if drafter.max_nodes else "other"
        for member in drafter.members():
            member.drafts_for = self

    def begin(self, slot: int, ids: list[int], stopper: Stopper, answer: Generation) -> None:
        """Prefill a prompt by itself and copy it to its slot, which stays free if the answer has one token only."""
        prompt = torch.tensor(ids, device=self.target.device)
        self._single.clear()
        hidden, logits, aux_hidden = self.target.prefill(prompt, self._single, self.drafter.target_layers)
        processors = processors_of(self.target, stopper.settings, ids, stopper.limit)
        if processors is not None:
            logits = TextProcessors([processors], [ids]).after_prompt(logits[None])[0]
        base = choices(logits[None], prompt.new_tensor([len(ids)]), stopper.settings.sampling)
        first = int(base)
        stopper.extend(answer, [first], [-1])
        self.clock.lap("verify")
        if answer.finish_reason:
            return
        self._cache.copy_sequence(slot, self._single)
        self._end[slot], self._base[slot] = len(ids) + stopper.limit, first
        self.drafter.begin(slot, prompt, self.longest)
        self.drafter.observe(VerifiedStep.of_prompt(prompt, hidden, base, aux_hidden), slot)
        self.clock.lap(self._drafting)
        self.slots[slot] = _Slot(answer, stopper, len(ids), [*ids, first], processors)

    def step(self) -> None:
        """One draft and one target forward for all; slots whose answers end become None."""
        cache, drafter = self._cache, self.drafter
        cache.bound = max(slot.committed for slot in self.slots if slot is not None)
        visible = cache.set_visible_length(1 + max(drafter.max_depth, drafter.max_nodes))
        drafter.set_visible_length(visible)
        tree = drafter.propose()
        self.clock.lap(self._drafting)
        step = self._verify(tree)
        self.clock.lap("verify")
        assert step.source is not None
        counts, next_tokens, sources = step.count.tolist(), step.next_tokens.tolist(), step.source.tolist()
        self.clock.lap("accept")
        new_tokens: list[list[int]] = []
        for index, slot in enumerate(self.slots):
            new = [] if slot is None else next_tokens[index][: counts[index]]
            if slot is not None:
                slot.committed += len(new)
                slot.text += new
                slot.stopper.extend(slot.answer, new, sources[index][: counts[index]])
                if slot.answer.finish_reason:
                    self.slots[index], new = None, []
                    self._end[index] = 0
            new_tokens.append(new)
        self.clock.lap("other")
        if any(self.slots):
            running = self._end > 0
            cache.lengths *= running
            self._base = step.base.clone()  # `begin` writes a new text's into it; the drafter keeps the step's
            drafter.observe(replace(step, count=step.count * running, new_tokens=new_tokens))
            self.clock.lap(self._drafting)

    def _verify(self, tree: DraftTree) -> VerifiedStep:
        settings, drafter = self.settings, self.drafter
        return verify_step(
            self.target,
            self._cache,
            self._base,
            tree,
            drafter.max_depth,
            self._end,
            settings.sampling,
            accept_exact if settings.typical is None else settings.typical,
            drafter.target_layers,
            _processors(self.slots),
        )


def _processors(slots: Sequence[_Slot | None]) -> TextProcessors | None:
    """Those of all slots; None if no slot has any."""
    lists = [None if slot is None else slot.processors for slot in slots]
    if not any(lists):
        return None
    return TextProcessors(lists, [[] if slot is None else slot.text for slot in slots])
