"""Decoding: prefill → (propose → verify → accept → commit)*. The tokens are the target's own, whatever is drafted.

`DecodingEngine._decode` is the loop; `inference.steps` says how one of its steps runs, `inference.step.verify_step`
what a step does. A step has one host synchronisation, which copies the accepted tokens to the host; on a GPU one step
late, while the next step runs. Drafters that synchronise more often set `Drafter.on_device` to False.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterator
from dataclasses import replace
from typing import Literal

from draft_heads.inference.drafters.base import Drafter, check_vocabulary
from draft_heads.inference.generation import (
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
from draft_heads.inference.steps import StepRunner
from draft_heads.inference.target.cuda_graphs import CapturedSteps
from draft_heads.inference.target.labels import Overflow, not_finite
from draft_heads.inference.target.target import Target
from draft_heads.inference.verify import Accept, accept_exact

ONE_TEXT = "make an engine with a drafter of its own for each of them, on the same target"


class DecodingEngine:
    """Decodes one sequence at a time with one drafter; keeps its cache's memory between prompts.

    Texts of several engines may take turns; a second one in the same engine ends the first with a RuntimeError.
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter,
        ahead: bool | None = None,
        captured: CapturedSteps | Literal[False] | None = None,
        accept: Accept = accept_exact,
    ) -> None:
        """The defaults are the fastest on the target's device. Compiled programs and CUDA graphs contain the target's
        attention, the tree temperature and the drafter's sizes: do not change those once an engine exists.

        ahead     start a step before the tokens of the previous one are read; every tree is padded to one size
        captured  replay steps as CUDA graphs: whole ones that start ahead, else their verification; False: never
        accept    which drafts are accepted; every rule but the default is lossy
        """
        check_vocabulary(drafter, target)
        if drafter.slots != 1:
            raise ValueError(
                f"DecodingEngine decodes one text at a time; got a drafter of {drafter.slots} slots; use BatchEngine"
            )
        self.target = target
        self.drafter = drafter
        self.steps = StepRunner(target, drafter, ahead, captured, accept)
        self._changes = target.changes
        self._text = object()  # that the memory is of
        self._at_work: dict[str, Iterator[list[int]]] = {}  # the steps of the text that is within one, if one is

    def generate(self, prompt: Prompt, settings: GenerationSettings | None = None) -> Generation:
        """The whole answer to a text, to messages or to token ids (`Prompt`).

        Raises ContextError (before any work) if the prompt does not fit, ValueError for what is no prompt, and for a
        text that overflows in float16, at its first token or at its end.
        """
        result = Generation()
        for _ in self.stream(prompt, settings, result):
            pass
        return result

    def stream_text(self, prompt: Prompt, settings: GenerationSettings | None = None) -> Iterator[str]:
        """As `stream`, in pieces of text of whole characters, without the end token; see `TextPieces`."""
        pieces, result = TextPieces(self.target.tokenizer, form=self.target.answer_form), Generation()
        for tokens in self.stream(prompt, settings, result):
            if text := pieces.add(result.shown(tokens)):
                yield text
        if text := pieces.end():
            yield text

    def stream(
        self, prompt: Prompt, settings: GenerationSettings | None = None, result: Generation | None = None
    ) -> Generator[list[int], None, None]:
        """As `generate`, step by step: the new tokens of each target step as they are verified, added to `result`.

        RuntimeError where another text or thread works in this engine's or its drafter's memory.
        """
        result = Generation() if result is None else result
        steps = self._decode(prompt, settings or GenerationSettings(), result)
        text: object = None
        changes = 0
        while True:
            try:
                # in one piece, as is its end below: Ctrl-C, wherever it comes, leaves nobody at work
                if self._at_work.setdefault("steps", steps) is not steps:
                    raise RuntimeError(f"an engine decodes for one thread at a time; {ONE_TEXT}")
                if text is not None and not result.finish_reason:
                    self._check_begun(text, changes)
                tokens = next(steps, None)
                text, changes = self._text, changes if text else self._changes
            finally:
                if self._at_work == {"steps": steps}:
                    self._at_work.clear()
            if tokens is None:
                return
            yield tokens

    def _check_begun(self, text: object, changes: int) -> None:
        """RuntimeError unless the engine's, drafter's and target's memory is still that of this text, and the target
        has changed as often as when it was begun."""
        if self._text is not text:
            raise RuntimeError(f"another text was begun before this one had ended; {ONE_TEXT}")
        if any(one.drafts_for is not text for one in self.drafter.members()):
            raise RuntimeError(f"another engine began a text with this one's drafter; {ONE_TEXT}")
        if changes != self.target.changes:
            raise RuntimeError("the target's weights were changed before this text had ended; begin it again")

    def _follow_target(self) -> None:
        """Take in changes of the target's weights, whose layers and vocabulary may differ now."""
        self.target.refresh()
        if self._changes != self.target.changes:
            check_vocabulary(self.drafter, self.target)
            self._changes, self.steps.cache = self.target.changes, None

    def _decode(self, prompt: Prompt, settings: GenerationSettings, result: Generation) -> Iterator[list[int]]:
        """The loop; yields the new tokens of each target step."""
        target, drafter, steps = self.target, self.drafter, self.steps
        self._follow_target()
        ids = prompt_ids(target, prompt)
        limit = room(target, len(ids), settings.max_new_tokens)
        stopper = Stopper(settings, target, limit)
        answered = list(ids)  # grows with the answer; processors read it
        processors = TextProcessors.of_slots(
            [processors_of(target, settings, ids, limit)], [answered], settings.ends(target)
        )
        self._text = object()

        # 1. Prefill: the target reads the prompt and chooses the first base token.
        text = steps.begin(len(ids) + limit, settings, processors)
        for member in drafter.members():
            member.drafts_for = self._text
        step, packed = steps.prefill(ids, text)
        overflowed = not_finite(target, step.hidden[:, -1:])  # of what a token was chosen from, so far; on the device
        pending = deque([(PendingReadback(packed, 1), overflowed)])
        unread = list(ids)  # by a drafter that drafts on the host
        committed = len(ids) - 1  # the newest token is not in the cache yet

        while True:
            # 2. Propose a tree, verify it in one target forward, accept the longest path that the target agrees with,
            #    commit it: all on the device. Ahead of the host the next step starts before this one's tokens are read.
            if not pending or (steps.ahead and processors is None):  # processors read the newest tokens
                step, packed = steps.run(step, text)
                if overflowed is not None and (newest := not_finite(target, step.hidden)) is not None:
                    overflowed = overflowed | newest
                pending.append((PendingReadback(packed, 1 + drafter.max_depth), overflowed))

            # 3. The host synchronisation: read what the oldest step accepted, and its base token.
            readback, has_overflowed = pending.popleft()
            new, sources, chosen = readback.read()
            if not drafter.on_device:
                step = replace(step, new_tokens=[unread + new], read_choices=[chosen] if chosen else None)
                unread = []
            committed += len(new)
            answered += new
            text.cache.bound = committed + len(pending) * (drafter.max_depth + 1)
            text.clock.lap("accept")
            verification = text.clock.verification()
            if result.accept_lengths and step.tree is not None and not (steps.ahead and drafter.max_nodes):
                result.step_nodes.append(len(step.tree))  # ahead of the host, drafting and verifying are one
                result.step_seconds.append(verification)

            # 4. Add the tokens up to the end of the answer.
            is_first = not result.tokens
            added = stopper.extend(result, new, sources)
            if has_overflowed is not None and (is_first or result.finish_reason) and has_overflowed:
                raise Overflow(target, ids)
            result.seconds = text.clock.seconds(target.device)
            text.clock.lap("other")
            yield added
            text.clock.lap("other")
            if result.finish_reason:
                if not drafter.on_device and not is_first:
                    drafter.end(0, added)
                for surplus, _ in pending:  # wait for the surplus step before the next prompt starts
                    surplus.read()
                text.clock.lap("verify")
                result.seconds = text.clock.seconds(target.device)
                return
