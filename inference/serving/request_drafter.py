"""One head drafts for the requests of another engine: chains, all requests in one call, a slot each by their names.

The engine says of every step which tokens of which request it read, and gives the target's states there. What does not
continue what was seen of a request (it was preempted and resumed, or its first tokens came from a cache of prefixes)
begins a new text in its slot, with the first states that come: for a while its drafts are worse, and the engine's
verification keeps its answer what it is.

Shapes: N tokens of a step, H hidden, S slots in use, A rows of a slot.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from draft_heads.inference.drafters.heads.base import HeadDrafter
from draft_heads.inference.step import VerifiedStep
from draft_heads.inference.target.kv_cache import STEPS

_PIECE = 1024  # tokens of a prompt that a head reads at once


@dataclass(frozen=True)
class ReadTokens:
    """What a step read of one request and kept: tokens of the prompt, or the base token and the accepted drafts.

    name    of the request
    start   position of the first of them in its text
    tokens  they, and the one after the last of them
    row     of the first of them in the step's states; the others follow
    drafts  whether drafts are wanted: the last of `tokens` is the target's own
    """

    name: str
    start: int
    tokens: list[int]
    row: int
    drafts: bool

    @property
    def count(self) -> int:
        """Tokens that were read."""
        return max(0, len(self.tokens) - 1)

    def last(self, count: int) -> ReadTokens:
        """The same without what was read before the last `count`."""
        left = max(0, self.count - count)
        return replace(self, start=self.start + left, tokens=self.tokens[left:], row=self.row + left)

    @property
    def end(self) -> int:
        """Position after the last one read."""
        return self.start + self.count


@dataclass
class _Text:
    """A request's slot, the position up to which its text was seen, and how many tokens of it the head has read."""

    slot: int
    seen: int
    length: int


class RequestDrafter:
    """Drafts for up to `drafter.slots` requests at once."""

    def __init__(self, drafter: HeadDrafter, context: int) -> None:
        """context: tokens of a text that the head reads, room for which is taken now; a longer one begins anew."""
        self._drafter, self._context = drafter, context
        self._slots, self._rows = drafter.slots, drafter.max_depth + 1
        self._step = STEPS.get(drafter.length.device.type, 256)
        self._texts: dict[str, _Text] = {}
        drafter.reserve(context)

    def __len__(self) -> int:
        """Requests that have a slot."""
        return len(self._texts)

    def __contains__(self, name: str) -> bool:
        """Whether a request has a slot."""
        return name in self._texts

    @property
    def depth(self) -> int:
        """Tokens of a draft."""
        return self._rows - 1

    @property
    def bytes(self) -> int:
        """Memory that the texts take."""
        return sum(buffer.nbytes for buffer in self._drafter.memory())

    def forget(self, alive: Container[str]) -> None:
        """Free the slots of the requests that are not alive any more."""
        for name in [name for name in self._texts if name not in alive]:
            del self._texts[name]

    @torch.inference_mode()
    def draft(self, requests: Sequence[ReadTokens], hidden: Tensor, aux_hidden: Tensor | None) -> list[list[int]]:
        """The drafts for each request, [] where none are wanted; hidden [N, H] and aux_hidden [N, k·H] of the step."""
        present = {request.name for request in requests}
        # of more tokens at once than there is room for, what fills half of it
        fitting = [one if one.count <= self._context else one.last(self._context // 2) for one in requests]
        followed = [request for request in fitting if request.count]
        if not followed:
            return [[] for _ in requests]
        for request in followed:
            self._follow(request, present)
        self._use_slots()
        self._show({request.name: request.count for request in followed})
        alone = [request for request in followed if request.count > self._rows]
        together = [request for request in followed if request.count <= self._rows]
        for request in alone:
            self._observe_alone(request, hidden, aux_hidden)
        if together:
            self._observe_together(together, hidden, aux_hidden)
        for request in followed:
            text = self._texts[request.name]
            text.seen, text.length = request.end, text.length + request.count
        if not any(request.drafts for request in followed):
            return [[] for _ in requests]
        tree = self._drafter.propose()
        tokens, candidate = tree.tokens.tolist(), tree.candidate.tolist()
        drafted = {request.name for request in followed if request.drafts}
        found = []
        for request in requests:
            chain: list[int] = []
            if request.name in drafted:
                slot = self._texts[request.name].slot
                end = next((i for i, real in enumerate(candidate[slot]) if not real), len(tokens[slot]))
                chain = tokens[slot][:end]
            found.append(chain)
        return found

    def _follow(self, request: ReadTokens, present: Container[str]) -> None:
        """Find or begin the request's text."""
        text = self._texts.pop(request.name, None)
        if text is None or text.seen != request.start or text.length + request.count > self._context:
            slot = self._free_slot(present) if text is None else text.slot
            self._use_slots(slot)
            self._drafter.begin(slot, self._drafter.length[:0], self._context)  # no head reads the tokens here
            text = _Text(slot, request.start, 0)
        self._texts[request.name] = text  # the last one: those before were seen longer ago

    def _free_slot(self, present: Container[str]) -> int:
        used = {text.slot for text in self._texts.values()}
        if len(used) == self._slots:  # of one that waits, the one that was seen longest ago
            oldest = next(name for name in self._texts if name not in present)
            used.discard(self._texts.pop(oldest).slot)
        return next(slot for slot in range(self._slots) if slot not in used)

    def _use_slots(self, least: int = 0) -> None:
        """Draft for a power of two of slots, of which the last in use is one."""
        last = max([least, *(text.slot for text in self._texts.values())])
        count = min(self._slots, 1 << last.bit_length())
        if count != self._drafter.slots:
            self._drafter.use_slots(count)

    def _show(self, new: Mapping[str, int]) -> None:
        """Make visible, in few sizes, the longest text with its new tokens (their number by request) and its drafts."""
        lengths = (text.length + max(self._rows, new.get(name, 0)) for name, text in self._texts.items())
        self._drafter.set_visible_length(-(-(max(lengths) + self._rows) // self._step) * self._step)

    def _observe_alone(self, request: ReadTokens, hidden: Tensor, aux_hidden: Tensor | None) -> None:
        """A prompt or a part of it, in pieces, whose masks take little memory."""
        tokens = torch.tensor([request.tokens], device=hidden.device)
        for start in range(0, request.count, _PIECE):
            count = min(_PIECE, request.count - start)
            rows = slice(request.row + start, request.row + start + count)
            states = hidden[None, rows], tokens.new_tensor([count])
            aux = None if aux_hidden is None else aux_hidden[None, rows]
            before, after = tokens[:, start : start + count], tokens[:, start + 1 : start + count + 1]
            self._drafter.observe(VerifiedStep(before, after, *states, aux_hidden=aux), self._texts[request.name].slot)

    def _observe_together(self, requests: Sequence[ReadTokens], hidden: Tensor, aux_hidden: Tensor | None) -> None:
        """One step of all slots; those without a request among these keep what they have."""
        most, slots = self._rows, self._drafter.slots
        tokens, rows, counts = [[0] * (most + 1)] * slots, [[0] * most] * slots, [0] * slots
        for request in requests:
            slot, count = self._texts[request.name].slot, request.count
            last = request.row + count - 1
            tokens[slot] = request.tokens[:-1] + request.tokens[-2:-1] * (most - count) + request.tokens[-1:]
            rows[slot] = [*range(request.row, last), *[last] * (most - count + 1)]
            counts[slot] = count
        both = torch.tensor(tokens, device=hidden.device)
        index, committed = (torch.tensor(x, device=hidden.device) for x in (rows, counts))
        from_last = torch.arange(most, device=hidden.device) >= committed[:, None] - 1
        next_tokens = torch.where(from_last, both[:, -1:], both[:, 1:])
        aux_hidden = None if aux_hidden is None else aux_hidden[index]
        before = self._drafter.state
        self._drafter.observe(VerifiedStep(both[:, :-1], next_tokens, hidden[index], committed, aux_hidden=aux_hidden))
        if before and not all(counts):
            after = self._drafter.state
            new = [(committed > 0).view(-1, *[1] * (state.dim() - 1)) for state in after]
            self._drafter.state = tuple(map(torch.where, new, after, before))
