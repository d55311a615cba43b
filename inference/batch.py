"""Batched decoding: the trees of several texts are drafted in one call and verified in one forward.

Every text has a slot of the drafter and a row of the cache, which the next prompt takes when it ends; the tokens are
those of decoding one by one.

Shapes: B slots, R rows of a forward (the largest tree's), A accepted rows at most, C tokens of the longest text.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import LogitsProcessorList

from draft_heads.data.labels.labeller import checked_ids
from draft_heads.data.labels.loops import IncrementalStop
from draft_heads.inference.drafters.base import Drafter, VanillaDrafter, check_vocabulary
from draft_heads.inference.generation import Clock, Generation, GenerationSettings, Prompt, Stopper, prompt_ids, room
from draft_heads.inference.processors import TextProcessors, processors_of
from draft_heads.inference.step import VerifiedStep, choices, verify_step
from draft_heads.inference.target.labels import Overflow, not_finite
from draft_heads.inference.target.target import Target
from draft_heads.inference.tree import DraftTree
from draft_heads.inference.verify import accept_exact


@dataclass
class _Slot:
    """A running text: its answer so far, its stop rules, how many of its tokens are in the cache.

    index       of the prompt
    prompt      its tokens
    text        the prompt, the answer so far and the base token
    processors  what changes the logits by the text, if anything does
    """

    index: int
    answer: Generation
    stopper: Stopper
    prompt: int
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
        ids = self._ids(prompts)
        fits = [1 <= len(prompt) < self.target.max_positions for prompt in ids]
        answers = iter(self.generate([prompt for prompt, fit in zip(ids, fits) if fit], settings))
        return [next(answers) if fit else None for fit in fits]

    @torch.inference_mode()
    def generate(self, prompts: Sequence[Prompt], settings: GenerationSettings | None = None) -> list[Generation]:
        """The answers in the prompts' order, the run's seconds shared by tokens; ContextError if one is too long,
        Overflow (a ValueError) if its states are, in float16."""
        settings = settings or GenerationSettings()
        ids = self._ids(prompts)
        limits = [room(self.target, len(prompt), settings.max_new_tokens) for prompt in ids]
        if not prompts:
            return []
        run = BatchRun(self.target, self.drafter, settings, max(map(sum, zip(map(len, ids), limits))))
        found = {ended.number: ended.answer for ended in run.answers(ids, limits)}
        answers = [found[index] for index in range(len(ids))]
        for prompt, answer in zip(ids, answers):
            if answer.finish_reason == "overflow":
                raise Overflow(self.target, prompt)
        tokens = max(1, sum(len(answer.tokens) for answer in answers))  # a stop rule may take back all
        for answer in answers:
            answer.seconds = run.clock.seconds(self.target.device, len(answer.tokens) / tokens)
        return answers

    def _ids(self, prompts: Sequence[Prompt]) -> list[list[int]]:
        if isinstance(prompts, str):
            raise ValueError(f"prompts is a list of prompts; got {prompts!r}; write [{prompts!r}]")
        return [prompt_ids(self.target, prompt) for prompt in prompts]

    @torch.inference_mode()
    def as_completed(
        self,
        prompts: Sequence[list[int]],
        limits: Sequence[int],
        settings: GenerationSettings,
        keep_states: bool = False,
        target_layers: Sequence[int] = (),
    ) -> Iterator[Ended]:
        """Answers, and the states of their texts if they are to be kept, in the order in which the answers end; one
        with the `finish_reason` "overflow" is none.

        limits         most new tokens of each answer; the target's context may end one earlier, ContextError if at once
        target_layers  whose outputs are kept, too; ValueError for others than those that the drafter reads
        """
        self.check_kept_layers(target_layers)
        if prompts:
            prompts = [checked_ids(self.target, prompt) for prompt in prompts]
            limits = [room(self.target, len(prompt), limit) for prompt, limit in zip(prompts, limits, strict=True)]
            longest = max(map(sum, zip(map(len, prompts), limits)))
            run = BatchRun(self.target, self.drafter, settings, longest, keep_states, target_layers, whole_texts=True)
            for ended in run.answers(prompts, limits, shrinks=True):
                yield ended if target_layers else ended._replace(aux_hidden=None)

    def check_kept_layers(self, target_layers: Sequence[int]) -> None:
        """ValueError for layers whose outputs are to be kept, if they are others than those that the drafter reads."""
        read = self.drafter.target_layers
        if read and target_layers and tuple(read) != tuple(target_layers):
            raise ValueError(
                f"the drafter reads layers {list(read)} and the states of layers {list(target_layers)} are to be kept; "
                "one forward gives those of one list; draft with ngram or another that reads none"
            )


class Ended(NamedTuple):
    """An answer that has ended, and the target's states at every token of prompt and answer."""

    number: int  # of its prompt
    answer: Generation
    hidden: Tensor | None = None  # [n, H], None where states are not kept
    aux_hidden: Tensor | None = None  # [n, k·H]


class _States:
    """The target's states at the tokens of every slot's text, `[B, C + A, …]` each, written as they are computed."""

    def __init__(self, slots: int, capacity: int) -> None:
        self._shape = slots, capacity
        self._stores: list[Tensor] = []

    def write(self, slots: Tensor, places: Tensor, *states: Tensor | None) -> None:
        """Put states `[b, n, …]` at `places [b, n]` of `slots [b]`."""
        given = [x for x in states if x is not None]
        if not self._stores:
            self._stores = [x.new_zeros(*self._shape, x.shape[-1]) for x in given]
        for store, new in zip(self._stores, given):
            store[slots[:, None], places] = new

    def of(self, slot: int, length: int) -> list[Tensor]:
        """[length, …] each, those of one text."""
        return [store[slot, :length].clone() for store in self._stores]

    def select(self, slots: Tensor) -> None:
        self._stores = [store[slots] for store in self._stores]


class BatchRun:
    """The memory of one call: the slots' texts and caches.

    end     [B] int64, the length at which each text must end; 0 for a slot without one
    base    [B] int64, the base token of each text
    states  of every text, where they are kept
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter,
        settings: GenerationSettings,
        longest: int,
        keeps_states: bool = False,
        target_layers: Sequence[int] = (),
        whole_texts: bool = False,
    ) -> None:
        """longest: tokens of the longest prompt and its answer; target_layers: whose outputs are wanted.

        whole_texts: whether all states of a prompt must be finite, as heads read them, or that of its last token
        """
        target.refresh()
        check_vocabulary(drafter, target)  # the weights may have changed since the engine was made
        self.target, self.drafter, self.settings, self.longest = target, drafter, settings, longest
        self._whole_texts = whole_texts
        self.clock = Clock()
        self.slots: list[_Slot | None] = [None] * drafter.slots
        rows = max(drafter.max_nodes, drafter.max_depth) + 1
        self._layers = target_layers or drafter.target_layers
        self._cache = target.new_cache(longest + rows, drafter.slots)
        self._single = target.new_cache(longest)
        self._states = _States(drafter.slots, longest + rows) if keeps_states else None
        self._end = torch.zeros(drafter.slots, dtype=torch.long, device=target.device)
        self._base = torch.zeros_like(self._end)
        self._overflowed = torch.zeros_like(self._end, dtype=torch.bool)  # what a token was chosen from, in float16
        self._drafting = "draft" if drafter.max_nodes else "other"
        self._changes = target.changes
        drafter.end_texts()  # a batch may have been left before its texts had ended
        self._owner = object()
        for member in drafter.members():
            member.drafts_for = self._owner

    def answers(self, prompts: Sequence[list[int]], limits: Sequence[int], shrinks: bool = False) -> Iterator[Ended]:
        """The answers to all prompts, as they end; shrinks: without drafts, slots that nobody waits for go."""
        waiting = list(range(len(prompts)))[::-1]
        while True:
            for slot in range(len(self.slots)):
                while self.slots[slot] is None and waiting:
                    index = waiting.pop()
                    own = self.settings
                    if isinstance(own.stop, IncrementalStop):
                        own = replace(own, stop=deepcopy(own.stop))
                    answer = self._begin(slot, index, prompts[index], Stopper(own, self.target, limits[index]))
                    if self.slots[slot] is None:
                        yield Ended(index, answer)
            if not any(self.slots):
                return
            if shrinks and not waiting:
                self._leave_out_free_slots()
            yield from self._step()

    def _begin(self, slot: int, index: int, ids: list[int], stopper: Stopper) -> Generation:
        """Prefill a prompt by itself and copy it to its slot, which stays free if one token is all that is wanted."""
        prompt, answer = torch.tensor(ids, device=self.target.device), Generation()
        self._single.clear()
        hidden, logits, aux_hidden = self.target.prefill(prompt, self._single, self._layers)
        processors = processors_of(self.target, stopper.settings, ids, stopper.limit)
        if processors is not None:
            logits = TextProcessors([processors], [ids], ()).after_prompt(logits[None])[0]
        base = choices(logits[None], prompt.new_tensor([len(ids)]), stopper.settings.sampling)
        first = int(base)
        if (overflowed := not_finite(self.target, hidden[None, 0 if self._whole_texts else -1 :])) is not None:
            self._overflowed[slot] = overflowed
            if overflowed:
                answer.finish_reason = "overflow"
                return answer
        stopper.extend(answer, [first], [-1])
        self.clock.lap("verify")
        if answer.finish_reason and self._states is None:
            return answer
        self._cache.copy_sequence(slot, self._single)
        self._end[slot], self._base[slot] = len(ids) + stopper.limit, first
        step = VerifiedStep.of_prompt(prompt, hidden, base, aux_hidden)
        if self._states is not None:
            places = torch.arange(len(ids), device=prompt.device)[None]
            self._states.write(prompt.new_tensor([slot]), places, step.hidden, step.aux_hidden)
        self.clock.lap("other")  # copying, which the plain loop does too
        self.drafter.begin(slot, prompt, self.longest)
        self.drafter.observe(self._as_drafted(step), slot)
        self.clock.lap(self._drafting)
        self.slots[slot] = _Slot(index, answer, stopper, len(ids), len(ids), [*ids, first], processors)
        return answer

    def _step(self) -> list[Ended]:
        """One draft and one target forward for all; slots whose texts end become None."""
        cache, drafter = self._cache, self.drafter
        if any(one.drafts_for is not self._owner for one in drafter.members()):
            raise RuntimeError(
                "a drafter drafts for one batch at a time; another engine or batch began with this one's before it had "
                "ended; take all answers first, or give each its own drafter"
            )
        if self._changes != self.target.changes:
            raise RuntimeError("the target's weights were changed before this batch had ended; begin it again")
        cache.bound = max(slot.committed for slot in self.slots if slot is not None)
        visible = cache.set_visible_length(1 + max(drafter.max_depth, drafter.max_nodes))
        drafter.set_visible_length(visible)
        tree = drafter.propose()
        self.clock.lap(self._drafting)
        places = cache.slots(drafter.max_depth + 1)
        step = self.verify(tree)
        if (overflowed := not_finite(self.target, step.hidden)) is not None:
            self._overflowed |= overflowed
        if self._states is not None:
            every = torch.arange(len(places), device=places.device)
            self._states.write(every, places, step.hidden, step.aux_hidden)
        assert step.source is not None
        counts, next_tokens, sources = step.count.tolist(), step.next_tokens.tolist(), step.source.tolist()
        self.clock.lap("accept")
        ended, new_tokens = [], []
        for index, slot in enumerate(self.slots):
            new = [] if slot is None else next_tokens[index][: counts[index]]
            told = 0 if slot is None else len(slot.answer.tokens)
            if slot is not None and self._has_ended(index, slot, new, sources[index]):
                drafter.end(index, slot.answer.tokens[told:])
                if self.target.dtype == torch.float16 and self._overflowed[index]:
                    slot.answer.finish_reason = "overflow"
                ended.append(self._free(index, slot))
                new = []
            new_tokens.append(new)
        self.clock.lap("other")
        if any(self.slots) or len(self.slots) > 1:  # a drafter of several slots must learn which have no text
            running = self._end > 0
            cache.lengths *= running
            self._base = step.base.clone()  # `begin` writes a new text's into it; the drafter keeps the step's
            drafter.observe(replace(self._as_drafted(step), count=step.count * running, new_tokens=new_tokens))
            self.clock.lap(self._drafting)
        return ended

    def _as_drafted(self, step: VerifiedStep) -> VerifiedStep:
        """The step without outputs of layers that are kept and that the drafter does not read."""
        return step if self.drafter.target_layers else replace(step, aux_hidden=None)

    def _has_ended(self, index: int, slot: _Slot, new: list[int], sources: list[int]) -> bool:
        """Add a step's tokens to a text. Where states are kept, one that ends goes on until its last token was read."""
        slot.committed += len(new)
        answer = slot.answer
        if not answer.finish_reason:
            slot.text += new
            slot.stopper.extend(answer, new, sources[: len(new)])
            if answer.finish_reason:
                self._end[index] = slot.committed + 1  # no draft is accepted any more
        all_read = self._states is None or slot.committed >= slot.prompt + len(answer.tokens)
        return bool(answer.finish_reason) and all_read

    def _free(self, index: int, slot: _Slot) -> Ended:
        self.slots[index] = None
        self._end[index] = 0
        states = [] if self._states is None else self._states.of(index, slot.prompt + len(slot.answer.tokens))
        return Ended(slot.index, slot.answer, *states)

    def _leave_out_free_slots(self) -> None:
        """Without drafts: once a quarter of the slots are free, and no prompt waits for them."""
        used = [index for index, slot in enumerate(self.slots) if slot is not None]
        if self.drafter.max_nodes or 4 * len(used) > 3 * len(self.slots):
            return
        slots = torch.tensor(used, device=self.target.device)
        self._cache.select_sequences(slots)
        self._end, self._base = self._end[slots], self._base[slots]
        self._overflowed = self._overflowed[slots]
        if self._states is not None:
            self._states.select(slots)
        self.slots = [self.slots[index] for index in used]
        self.drafter = VanillaDrafter(self.target.device, len(used))

    def verify(self, tree: DraftTree) -> VerifiedStep:
        """The target verifies the trees of all slots, accepts a path of each and commits it."""
        settings = self.settings
        return verify_step(
            self.target,
            self._cache,
            self._base,
            tree,
            self.drafter.max_depth,
            self._end,
            settings.sampling,
            accept_exact if settings.typical is None else settings.typical,
            self._layers,
            self._processors(),
            self.clock,
        )

    def _processors(self) -> TextProcessors | None:
        """Those of all slots; None if no slot has any."""
        lists = [None if slot is None else slot.processors for slot in self.slots]
        texts = [[] if slot is None else slot.text for slot in self.slots]
        return TextProcessors.of_slots(lists, texts, self.settings.ends(self.target))
