"""What the steps of a hybrid cost and brought, and who goes on drafting in it.

Learning from a step takes much longer right behind it, when the target's weights have gone through the processor's
caches, than from many steps in a row. So steps are written down, and learned from by the batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from draft_heads.inference.drafters.hybrid.hybrid_part import HybridPart
from draft_heads.inference.drafters.hybrid.learned import Learned
from draft_heads.inference.drafters.hybrid.merged_tree import Merged
from draft_heads.inference.drafters.hybrid.merging import calibration_of
from draft_heads.inference.drafters.hybrid.running_costs import RunningCosts, Step, typical

BATCH = 32
"""Steps that are written down before they are learned from, once it is known what they cost."""


class Written(NamedTuple):
    """A step that is to be learned from.

    took      its rows, time and tokens
    new       the tokens
    merged    the tree
    drafting  seconds of each part, by its place
    shared    seconds that were spent because there are several parts
    fresh     whether it is the first behind a prompt
    trial     whether the tree's size was given, to learn what that costs
    """

    took: Step
    new: Sequence[int]
    merged: Merged
    drafting: Sequence[float]
    shared: float
    fresh: bool
    trial: bool


class Ledger:
    """Of the parts of one hybrid.

    active  those that have not been switched off
    only    the one that is left; None: there are more
    steps   target steps so far
    """

    def __init__(self, parts: Sequence[HybridPart], fit: bool) -> None:
        """fit: whether nodes and parts that do not pay are left out."""
        self.parts, self.fit = parts, fit
        self.steps = 0
        self.calibration, self.costs = calibration_of(len(parts)), RunningCosts()
        self._written: list[Written] = []
        self.renew_active()

    def renew_active(self) -> None:
        """Parts may have been switched off or on."""
        self.active = [part for part in self.parts if not part.off]
        self.only = self.active[0] if len(self.active) == 1 else None

    def begin_again(self) -> None:
        """Others draft together now than did before."""
        self.renew_active()
        for part in self.parts:
            part.account.begin_again()

    def go_on(self, learned: Learned) -> None:
        """Take up what another process learned, as if there had been no end."""
        self.catch_up()
        self.calibration, self.costs = calibration_of(len(self.parts), learned.calibration), learned.costs
        for part, (account, failed, pause) in zip(self.parts, learned.parts):
            part.go_on(account, failed, pause, self.steps)
        if any(part.pause == 0 for part in learned.parts):  # which is tried again now
            self.begin_again()
        self.renew_active()

    def write(self, step: Written) -> None:
        """One more step; at first each is learned from at once."""
        self.steps += 1
        self._written.append(step)
        if len(self._written) >= BATCH or (self.fit and not self.costs.seconds_per_token):
            self.catch_up()

    def catch_up(self) -> None:
        """Learn from all steps that were written down."""
        written, self._written = self._written, []
        brought = [self._credit(step) for step in written]
        if self.fit and written:
            self._charge(written, brought)

    def _credit(self, step: Written) -> list[int]:
        """Credit the accepted tokens; by a part's place, those that the tree would not have had without it."""
        brought = [0] * len(self.parts)
        for source, needs in step.merged.learn(step.new):
            self.parts[source].accepted += 1
            for place in range(len(brought)):
                brought[place] += needs >> place & 1
        for part in self.active:
            part.asked += 1
            part.needed += brought[part.place]
        return brought

    def _charge(self, written: Sequence[Written], brought: Sequence[Sequence[int]]) -> None:
        """What steps cost, and what each part made of them."""
        costs = self.costs
        for step in written:
            if not step.fresh:  # memory is cold behind a prompt
                costs.add(step.took)
        if not costs.seconds_per_token:
            return
        usual = [number for number, step in enumerate(written) if not (step.fresh or step.trial)]
        if usual:
            steps = [written[number] for number in usual]
            for part in self.active:
                fresh = sum(step.drafting[part.place] for step in written if step.fresh)
                cost = len(steps) * self._share(part, steps) + fresh / typical([step.took.seconds for step in steps])
                part.account.add([brought[number][part.place] for number in usual], cost)
            self._judge()

    def _share(self, part: HybridPart, steps: Sequence[Written]) -> float:
        """By how much steps in a row would have been shorter without a part, on average, as a share of them."""
        freed = 0.0
        for step in steps:
            own = step.merged.needing(part.place) + len(part.riders)
            freed += 1 - self.costs.seconds(max(0, step.took.rows - own)) / self.costs.seconds(step.took.rows)
        seconds = typical([step.took.verify for step in steps]) * freed / len(steps)
        seconds += typical([step.drafting[part.place] for step in steps])
        if len(self.active) == 2:  # with one fewer there would be no tree to merge
            seconds += typical([step.shared for step in steps])
        return seconds / typical([step.took.seconds for step in steps])

    def _judge(self) -> None:
        """Switch off the part that loses most, if one does clearly; the others' accounts begin anew without it."""
        losses = {part: part.account.loss() for part in self.active}
        for part, loss in losses.items():
            if loss < 0:
                part.failed = False
        worst = max(losses, key=losses.__getitem__)
        if losses[worst] > 0 and self.only is None:
            worst.switch_off(self.steps, losses[worst] * worst.account.steps)
            self.begin_again()
