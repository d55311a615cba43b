"""What the steps of a hybrid cost and brought, and who goes on drafting in it.

Learning from a step takes much longer right behind it, when the target's weights have gone through the processor's
caches, than from many steps in a row. So steps are written down, and learned from by the batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from inference.drafters.hybrid_part import HybridPart
from inference.drafters.learned import Learned
from inference.drafters.merged_tree import Merged
from inference.drafters.merging import calibration_of
from inference.drafters.running_costs import RunningCosts, Step, typical

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
        # with one fewer of two there would be no tree to merge
        shared = typical([written[number].shared for number in usual]) if usual and len(self.active) == 2 else 0.0
        for part in self.active:
            seconds = sum(step.drafting[part.place] for step in written if step.fresh)
            if usual:
                drafting = typical([written[number].drafting[part.place] for number in usual])
                seconds += len(usual) * (drafting + shared)
            for number in usual:
                rows, own = written[number].took.rows, written[number].merged.needing(part.place) + len(part.riders)
                seconds += costs.seconds(rows) - costs.seconds(max(0, rows - own))
            part.account.add([brought[number][part.place] for number in usual], seconds)
        self._judge()

    def _judge(self) -> None:
        """Switch off the part that loses most, if one does clearly; the others' accounts begin anew without it."""
        losses = {part: part.account.loss(self.costs.seconds_per_step) for part in self.active}
        for part, loss in losses.items():
            if loss < 0:
                part.failed = False
        worst = max(losses, key=losses.__getitem__)
        if losses[worst] > 0 and self.only is None:
            worst.switch_off(self.steps, losses[worst] * worst.account.steps)
            self.begin_again()
