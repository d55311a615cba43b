"""A drafter among others: when it is asked, what it is told, what it cost and what it brought."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import replace
from math import sqrt
from statistics import fmean, stdev

import torch
from torch import Tensor

from inference.drafters.asking import Asking
from inference.drafters.base import Drafter, VerifiedStep
from inference.drafters.merged_tree import PhraseSource, Source, TreeSource
from inference.drafters.ngram import NgramDrafter
from inference.drafters.running_costs import typical
from inference.drafters.text import TextDrafter
from inference.program import program
from inference.target import Target
from inference.tree import DraftTree

TRIAL = 128
"""Target steps after which a part is judged, again and again."""
LOOK, CLEAR = 32, 2.0
"""Target steps after which one that loses by so many standard errors is not given the rest of its trial."""
FADE, DOUBT = 0.995, 8.0
"""Of the correction of expectations: what a further step leaves of a step's weight, and steps that speak for none."""
LEAST = 0.03
"""Share of the time that a part which is asked now and then must save: less is lost in what is not reckoned."""
PAUSE, SHARE = 8 * TRIAL, 0.005
"""Target steps for which a part that did not pay stays off at least; longer, if trials would else take more of the
time than this share."""


class HybridPart:
    """One part, its drafts of the present step and its account."""

    def __init__(self, place: int, name: str, drafter: Drafter, target: Target) -> None:
        """place: among the hybrid's parts."""
        self.place, self.name, self.drafter = place, name, drafter
        self._marks = not place or isinstance(drafter, TextDrafter)  # whether its trees name the place themselves
        if isinstance(drafter, TextDrafter):
            drafter.stand_at(place)
        self.phrases = isinstance(drafter, NgramDrafter)
        self.source: Source = PhraseSource(drafter.table) if isinstance(drafter, NgramDrafter) else TreeSource()
        self.tree = DraftTree.empty(target.device)
        self._observe: Callable[[VerifiedStep], None] = drafter.observe
        self._draft: Callable[[VerifiedStep], DraftTree] = self._drafted
        self._met = True  # what is compiled
        if drafter.on_device and drafter.max_nodes and target.compiled:
            self._met = False
            self._observe, self._draft = program(drafter.observe, target.device), program(self._drafted, target.device)
        self._untold: tuple[VerifiedStep, int] | None = None  # what it has not taken in yet, and how many tokens count
        self.accepted = self.alone = 0  # tokens since the beginning: credited to it, and those nobody else had
        self.asked = 0  # target steps since the beginning in which it drafted
        self.switched: list[dict[str, int | None]] = []  # target steps after which it went off and on again
        self._until = 0  # target steps after which it is tried again
        self.rows: list[int] | None = None  # of the forward, for each row of its own tree, where it asks for choices
        self.riders: list[int] = []  # nodes of its own tree that ride along and are never accepted
        self._remembers = True
        self.account = Account()

    # ---- on and off ----------------------------------------------------------------------------------------

    @property
    def off(self) -> bool:
        """Whether it has been switched off."""
        return bool(self.switched) and self.switched[-1]["on"] is None

    def switch_off(self, steps: int, seconds_per_step: float = 0.0) -> None:
        """It does not pay."""
        self.switched.append({"off": steps, "on": None})
        self.riders = []
        afford = self.account.spent / (SHARE * seconds_per_step) if seconds_per_step else 0.0
        self._until = steps + max(PAUSE, round(afford))

    def pause_over(self, steps: int) -> bool:
        """Whether it has been off long enough to be given another trial, which then begins."""
        over = steps >= self._until
        if over:
            self.switched[-1]["on"] = steps
            self.account.begin_again()
        return over

    # ---- drafts --------------------------------------------------------------------------------------------

    @property
    def may_be_left(self) -> bool:
        """Whether a step may go without its drafts; one that reads what the target says of its rows needs them all."""
        return not self.phrases and not self.drafter.reads_choices

    def begin(self, prompt: Tensor, capacity: int) -> None:
        """See `Drafter.begin`."""
        self._untold = None
        self.drafter.begin(prompt, capacity)
        self._remembers = bool(self.drafter.memory())  # if not, nothing that it is told outlives the next step

    def draft(self, step: VerifiedStep, count: int) -> DraftTree:
        """Take a step of `count` tokens in and draft behind it."""
        if step.tree is None:  # a prompt has a length of its own and is not compiled for
            self.tree = self._drafted(step)
        else:
            self._meet(step)
            self.tree = self._draft(self._with_untold(self._as_seen(step), count)[0])
        return self.tree

    def _meet(self, step: VerifiedStep) -> None:
        """Compile what takes waiting steps in before any waits, not in the middle of some later answer."""
        if not self._met and self._remembers:
            kept = [memory.clone() for memory in self.drafter.memory()]
            self._observe(step)
            for memory, value in zip(self.drafter.memory(), kept):
                memory.copy_(value)
        self._met = True

    def draft_alone(self, step: VerifiedStep, count: int) -> DraftTree:
        """Its own tree as the hybrid's: with its place among the sources."""
        self.asked += 1
        tree = self.drafter.propose() if self.phrases else self.draft(step, count)
        return tree if self._marks else replace(tree, source=tree.source + self.place)

    def credit_alone(self, accepted: int) -> None:
        """So many of its own tree's nodes were accepted."""
        self.accepted += accepted
        self.alone += accepted

    def speak(self) -> None:
        """Its drafts enter the merged tree."""
        assert isinstance(self.source, TreeSource)
        self.source.take(self.tree)
        if self.drafter.reads_choices:
            self.riders = [node for node, candidate in enumerate(self.tree.candidate.tolist()) if not candidate]

    def leave(self, step: VerifiedStep, count: int) -> None:
        """Do without its drafts. Its part of the work on a device waits until there is as much of it as of one step."""
        if step.tree is None or not self.drafter.on_device:
            self.drafter.observe(step)
        elif self._remembers:
            self._untold = self._with_untold(step, count)

    def _drafted(self, step: VerifiedStep) -> DraftTree:
        self.drafter.observe(step)
        return self.drafter.propose()

    def _with_untold(self, step: VerifiedStep, count: int) -> tuple[VerifiedStep, int]:
        """The step as one with what waits, if both fit its size; else what waits is taken in by itself."""
        waiting, self._untold = self._untold, None
        if waiting is None:
            return step, count
        before, many = waiting
        size = len(step.tokens)
        if many + count > size:
            self._observe(before)
            return step, count

        def joined(old: Tensor, new: Tensor) -> Tensor:
            return torch.cat([old[:many], new[: size - many]])

        whole = replace(
            step,
            tokens=joined(before.tokens, step.tokens),
            next_tokens=joined(before.next_tokens, step.next_tokens),
            hidden=joined(before.hidden, step.hidden),
            count=before.count + step.count,
        )
        return whole, many + count

    def _as_seen(self, step: VerifiedStep) -> VerifiedStep:
        """A step whose tree is the part's own; −1 is the choice at nodes of it that were not verified."""
        own, self.rows = self.rows, None
        if own is None or step.choices is None:
            return step
        rows = torch.tensor(own, device=step.choices.device)
        choices = torch.where(rows >= 0, step.choices[rows], -1)
        return replace(step, choices=choices, tree=self.tree)


class Account:
    """What a part cost and what it brought, and whether that pays."""

    def __init__(self) -> None:
        self.asked = True  # for its drafts, in the present step
        self.situation: Hashable = None  # what the present step looks like
        self.asking = Asking()
        self.drafting = 0.0  # seconds of the present step: for its drafts, or for doing without them
        self.verifying = 0.0  # and for its rows in the target's forward
        self._when_asked: deque[float] = deque(maxlen=TRIAL)  # the former, of late
        self._when_left: deque[float] = deque(maxlen=TRIAL)
        self._asked = 0  # steps in which it was, since it was tried again
        self._to_ask = self._to_leave = 0.0  # typical seconds
        self._price = 0.0  # of asking above leaving, in tokens
        self._more = self._weight = 0.0  # accepted beyond what was expected, and of so many steps
        self._steps: list[tuple[bool, float, int]] = []  # asked, verifying, brought; since it was judged

    def close_step(self, brought: int) -> None:
        """brought: accepted tokens that nobody else proposed."""
        (self._when_asked if self.asked else self._when_left).append(self.drafting)
        self._steps.append((self.asked, self.verifying, brought))
        self._asked += self.asked
        self.forget_step()

    def forget_step(self) -> None:
        """The present step is over."""
        self.drafting = self.verifying = 0.0

    @property
    def spent(self) -> float:
        """Seconds its drafts took since it was tried again."""
        return self._asked * self._to_ask

    def begin_again(self) -> None:
        """It is given another trial: nothing is owed, and what was learned is doubted."""
        self._asked = 0
        self.settle()
        self.asking.doubt()

    def settle(self) -> None:
        """It has been judged: a new trial begins."""
        self._steps.clear()

    @property
    def steps(self) -> int:
        """Since it was judged."""
        return len(self._steps)

    def renew(self, seconds_per_token: float) -> None:
        """Reckon anew what asking it takes."""
        self._to_ask = typical(self._when_asked) if self._when_asked else 0.0
        self._to_leave = typical(self._when_left) if self._when_left else 0.0
        self._price = (self._to_ask - self._to_leave) / seconds_per_token

    def choose(self, situation: Hashable, may_be_left: bool) -> bool:
        """Decide whether it is asked in this step."""
        self.situation = situation
        self.asked = not may_be_left or self.asking.pays(situation, self._price)
        return self.asked

    def learn(self, accepted: int, price: float, expected: float | None) -> None:
        """What the step's tree brought, and what it cost to verify, in tokens.

        What was expected of it varies less than what was accepted, so that is learned where it is known, corrected by
        how much more or less was accepted than expected of late.
        """
        if self.asked and expected is not None:
            self._more = FADE * self._more + accepted - expected
            self._weight = FADE * self._weight + 1
            self.asking.learn(self.situation, True, expected + self._more / (self._weight + DOUBT) - price)
        else:
            self.asking.learn(self.situation, self.asked, accepted - price)

    def profit(self, seconds_per_token: float) -> float:
        """Tokens a step that it is expected to bring above its costs, asked where that pays."""
        return self.asking.profit(self._price) - self._to_leave / seconds_per_token

    def balance(self, seconds_per_token: float) -> tuple[float, float]:
        """Tokens a step that it brought above its costs, and their standard error."""
        count = len(self._steps)
        asked = sum(asked for asked, _, _ in self._steps)
        seconds = asked * self._to_ask + (count - asked) * self._to_leave + sum(rows for _, rows, _ in self._steps)
        brought = [float(tokens) for _, _, tokens in self._steps]
        return fmean(brought) - seconds / count / seconds_per_token, stdev(brought) / sqrt(count)
