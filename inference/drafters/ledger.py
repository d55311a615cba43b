"""What the steps of a hybrid were decided by, cost and brought: who is asked, and who goes on drafting at all.

Learning from a step takes much longer right behind it, when the target's weights have gone through the processor's
caches, than from many steps in a row. So where it is clear what to decide, steps are only written down.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from inference.drafters.account import CLEAR, LOOK, TRIAL, Choice
from inference.drafters.asking import Prospects
from inference.drafters.hybrid_part import HybridPart
from inference.drafters.learned import Learned
from inference.drafters.merged_tree import Merged
from inference.drafters.merging import calibration_of
from inference.drafters.running_costs import RunningCosts, Step, typical

BATCH = 32
"""Steps that are written down before they are learned from, and as often is the same decided without thinking."""
NOTED = 8
"""Of so many steps those that are written down where n-grams alone speak and that is clear; others are counted."""


@dataclass
class Decision:
    """Whom to ask in a step.

    situation  what n-grams say at its beginning, as a class
    fresh      whether it is the first behind a prompt
    weighed    whether it is decided by what asking brings
    size       nodes that its tree is given to learn what they cost; None: as many as pay
    trial      whether that, or that it is no usual step, says nothing of what asking brings
    asked      the parts
    choices    of every active part
    heads      those that are asked and draft with a model or a datastore
    left       those that are not asked and must be told so
    settled    whether the same would be decided again: nothing is being found out
    quiet      whether n-grams speak alone then
    uses       how often it has been
    counted    steps of which only their number is known, to be credited …
    accepted   … and drafts that were accepted in them
    """

    situation: Hashable = None
    fresh: bool = False
    weighed: bool = False
    size: int | None = None
    trial: bool = False
    asked: Sequence[HybridPart] = ()
    choices: Mapping[HybridPart, Choice] = field(default_factory=dict)
    heads: Sequence[HybridPart] = ()
    left: Sequence[HybridPart] = ()
    settled: bool = False
    quiet: bool = False
    uses: int = 0
    counted: int = 0
    accepted: int = 0


class Written(NamedTuple):
    """A step that is to be learned from.

    new       its new tokens
    merged    the tree, where drafts were merged
    likely    n-grams' word for its first token, where it was asked for: place of the part, token, entry
    drafting  seconds, by the place of a part: for its drafts, or for doing without them
    merging   seconds
    ready     seconds from when the step before was known until the tree was
    expected  drafts that would be accepted; None: nobody said
    counted   how often each situation was in steps since the one that was written down before
    """

    decision: Decision
    took: Step
    new: Sequence[int]
    merged: Merged | None
    likely: Sequence[tuple[int, int, Hashable]]
    drafting: Sequence[float]
    merging: float
    ready: float
    expected: float | None
    counted: Mapping[Hashable, int]


class Ledger:
    """Of the parts of one hybrid.

    active  those that have not been switched off
    only    the one that is left; None: there are more
    steps   target steps so far
    """

    def __init__(
        self,
        parts: Sequence[HybridPart],
        budget: int,
        fit: bool,
        clock: Callable[[], float],
    ) -> None:
        """budget: nodes of a tree at most; fit: whether nodes and parts that do not pay are left out."""
        self.parts, self.budget, self.fit, self._clock = parts, budget, fit, clock
        self.steps = 0
        self.calibration, self.costs, self.prospects = calibration_of(len(parts)), RunningCosts(), Prospects()
        self._overheads: deque[float] = deque(maxlen=TRIAL)  # seconds in which nobody drafted and nothing was merged
        self._clear: dict[Hashable, Decision] = {}  # by situation, what would be decided again
        self._written: list[Written] = []
        self._counted: dict[Hashable, int] = {}  # situations of steps since the last one that was written down
        self._looks = 0  # how often there was a look at the accounts since they were settled
        self.active: list[HybridPart] = []
        self.only: HybridPart | None = None
        self.renew_active()

    def renew_active(self) -> None:
        """Parts may have been switched off or on."""
        active = [part for part in self.parts if not part.off]
        if active != self.active:
            self.active, self.only = active, active[0] if len(active) == 1 else None
            self._clear.clear()

    def go_on(self, learned: Learned) -> None:
        """Take up what another process learned, as if there had been no end."""
        self.calibration = calibration_of(len(self.parts), learned.calibration)
        self.costs, self.prospects = learned.costs, learned.prospects
        self._clear.clear()
        for part, (account, pause) in zip(self.parts, learned.parts):
            part.go_on(account, pause, self.steps)
            if self.costs.seconds_per_token:
                account.renew(self.costs.seconds_per_token)

    @property
    def weighs(self) -> bool:
        """Whether it is known what time costs, and so whether parts are asked or left by what that brings."""
        return self.fit and self.costs.seconds_per_token > 0

    # ---- deciding ------------------------------------------------------------------------------------------

    def decide(self, situation: Hashable, fresh: bool, wait: bool) -> Decision:
        """Whom to ask: all where costs are not known, else those who pay. If only one part is left by now, nobody.

        wait: what need not be drafted with is not, for nothing is compiled for the length of a prompt.
        """
        known = None if fresh else self._clear.get(situation)
        if known is not None and known.uses < BATCH:
            known.uses += 1
            return known
        self.catch_up()
        decision = Decision(situation, fresh, self.weighs)
        if self.only is None:
            self._conclude(decision, bool(self._counted))
            decision.size = self.costs.trial(self.budget) if self.fit else None
            decision.trial = decision.size is not None or wait
            self._choose(decision, wait)
            if decision.settled:
                self._clear[situation] = decision
        return decision

    def _conclude(self, decision: Decision, apart: bool) -> None:
        """The step behind the one that was learned from last begins so, unless others were between them."""
        follows = decision.weighed and not decision.fresh and not apart
        prospect = self.prospects(decision.situation) if follows else None
        for part in self.active:
            part.account.conclude(prospect)

    def _choose(self, decision: Decision, wait: bool) -> None:
        situation, choices = decision.situation, {}
        for part in self.active:
            if wait and part.may_be_left:
                choices[part] = Choice(False, situation)
                continue
            choices[part] = part.account.choose(situation, decision.weighed and part.may_be_left)
            if choices[part].asked and part.may_be_left:
                situation = situation, part.place  # what the next one brings is less where this one speaks too
        asked = [part for part, choice in choices.items() if choice.asked]
        heads = [part for part in asked if not part.phrases]
        weighs = decision.weighed and not decision.trial
        if weighs and len(heads) == 1 < len(asked) and heads[0].may_be_left:
            choices[heads[0]] = heads[0].account.choose_company(choices[heads[0]])
            if not choices[heads[0]].company:
                asked = heads
        decision.asked, decision.choices = asked, choices
        decision.heads = heads
        decision.left = [part for part in self.active if part not in asked and not part.phrases]
        if weighs:
            settled = all(part.phrases or part.account.settled(choice) for part, choice in choices.items())
        else:
            settled = not self.fit  # all are asked, now and always
        decision.settled = settled and not decision.fresh
        decision.quiet = decision.settled and not heads and len(asked) == 1

    # ---- learning ------------------------------------------------------------------------------------------

    def notes(self, decision: Decision) -> bool:
        """Whether to write a step down that is decided so."""
        return not decision.quiet or self.steps % BATCH < NOTED

    def counted(self) -> Mapping[Hashable, int]:
        """How often each situation was since the last step was written down, which now another is."""
        self._credit_counted()
        counted, self._counted = self._counted, {}
        return counted

    def _credit_counted(self) -> None:
        for situation, decision in self._clear.items():
            if decision.counted:
                self._counted[situation] = self._counted.get(situation, 0) + decision.counted
                part = decision.asked[0]
                part.asked += decision.counted
                part.credit(decision.accepted, alone=decision.accepted)
                decision.counted = decision.accepted = 0

    def write(self, step: Written) -> None:
        """One more step, which is learned from at once where something is being found out."""
        self._written.append(step)
        if not step.decision.settled or len(self._written) >= BATCH:
            self.catch_up()

    def catch_up(self) -> None:
        """Learn from all steps that were written down."""
        self._credit_counted()
        written, self._written = self._written, []
        for step in written:
            start = self._clock()
            if step.decision.settled:  # others take longer, but there will be fewer of them
                self._overheads.append(step.ready - sum(step.drafting) - step.merging)
            brought = self._credited(step)
            spent = step.merging + (0.0 if step.merged is None else self._clock() - start)
            if self.fit and self.only is None:
                self._conclude(step.decision, bool(step.counted))
                for part in self.active:
                    part.account.pass_over(step.counted)
                self._learn(step, brought, spent)

    def _credited(self, step: Written) -> Mapping[str, int]:
        """Credit the accepted tokens; per part those that nobody else had."""
        for part in step.decision.asked:
            part.asked += 1
        if step.merged is None:
            part, accepted = step.decision.asked[0], len(step.new) - 1
            part.credit(accepted, alone=accepted)
            for place, token, entry in step.likely:
                self.calibration.count_alone(place, entry, token == step.new[0])
            return {part.name: accepted}
        brought: dict[str, int] = {}
        for source, alone in step.merged.learn(step.new):
            part = self.parts[source]
            part.credit(1, alone)
            brought[part.name] = brought.get(part.name, 0) + alone
        return brought

    def _learn(self, step: Written, brought: Mapping[str, int], merging: float) -> None:
        """What a step cost, and what each part made of it.

        merging: seconds, which are shared by those who need not be asked: with one fewer of two nothing would be merged
        """
        decision, took, costs, active = step.decision, step.took, self.costs, self.active
        for part in active:
            part.account.decide(decision.choices[part])
        renewed = not decision.fresh and costs.add(took)  # memory is cold behind a prompt
        if decision.trial:
            if decision.fresh:
                for part in active:
                    part.account.read(step.drafting[part.place])
            return
        price = costs.price(took.verify) if decision.weighed else None
        if price is not None:
            self.prospects.learn(decision.situation, costs.worth(took.tokens, took.seconds))
        others = max(1, len(decision.asked) - 1)
        for part in active:
            account = part.account
            merges = step.merged is not None and part in decision.asked and not part.phrases
            if part.may_be_left and price is not None:
                account.learn(took.tokens - 1, price, step.expected, merges)
            account.close_step(
                brought.get(part.name, 0),
                drafting=step.drafting[part.place],
                merging=merging / others if merges else 0.0,
                verifying=len(part.riders) * costs.seconds_per_node,
            )
            if renewed:
                account.renew(costs.seconds_per_token)
        if active[0].account.steps // LOOK > self._looks and costs.seconds_per_token:
            self.judge()
        self._looks = active[0].account.steps // LOOK

    def judge(self) -> None:
        """Switch off a part that costs more than it brings; clearly so, or after a trial (`Account.verdict`: two).

        First those that are only asked where it pays: were n-grams taken from them, they would be asked always. So
        n-grams stay until there is a verdict on each of those.
        """
        active, costs = self.active, self.costs
        over = active[0].account.steps >= TRIAL
        heads = [part for part in active if part.may_be_left]
        overhead = typical(self._overheads) if self._overheads and len(active) == 2 else 0.0  # one alone has none
        losing: list[tuple[bool, float, HybridPart]] = []
        for part in sorted(active, key=lambda part: not part.may_be_left):
            if not over and not part.drafter.reads_choices:
                continue  # it is asked in some steps only, or costs next to nothing
            if part.may_be_left:
                loss = part.account.verdict(costs.seconds_per_token)
            elif part.phrases and len(active) == 2 and heads:
                loss = part.account.verdict_beside(heads[0].account, costs.seconds_per_token, overhead)
            elif part.phrases and any(head.account.unsure for head in heads):
                continue
            else:
                balance, error = part.account.balance(costs.seconds_per_token)
                loss = -balance - (0.0 if over else CLEAR * error)
            if loss > 0:
                losing.append((part.may_be_left, loss, part))
            elif loss < 0:
                part.account.failed = False
        if losing:
            max(losing, key=lambda one: one[:2])[2].switch_off(self.steps, costs.seconds_per_step)
            self.renew_active()
        if losing or over:
            for part in active:
                part.account.settle()
