"""What a part of a hybrid cost and what it brought, and whether that pays."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Mapping
from math import inf, sqrt
from statistics import fmean, stdev
from typing import Any, NamedTuple

from inference.drafters.asking import Asking, Company
from inference.drafters.own_tree import OwnTree
from inference.drafters.running_costs import typical

TRIAL = 128
"""Target steps after which a part is judged, again and again."""
LOOK, CLEAR = 32, 2.0
"""Target steps after which one that loses by so many standard errors is not given the rest of its trial."""
VERDICTS = 8
"""Trials over which the verdict on a part that is asked now and then is averaged."""
FADE, DOUBT = 0.995, 8.0
"""Of the correction of expectations: what a further step leaves of a step's weight, and steps that speak for none."""


class Choice(NamedTuple):
    """About one part in one step.

    asked      for its drafts
    situation  what the step looks like to it
    company    whether n-grams speak beside it then; None: there was no choice
    """

    asked: bool = True
    situation: Hashable = None
    company: bool | None = None


class Account:
    """What a part cost and what it brought, and whether that pays."""

    def __init__(self) -> None:
        self.choice = Choice()  # in the step that is learned from
        self.asking, self.joining = Asking(), Company()  # it, and n-grams beside it
        self.own = OwnTree()
        self._worth: float | None = None  # of the step before, until it is known what follows it
        self._merged = False  # whether it was merged with others
        self._when_asked: deque[float] = deque(maxlen=TRIAL)  # drafting, of late
        self._when_left: deque[float] = deque(maxlen=TRIAL)
        self._when_merged: deque[float] = deque(maxlen=TRIAL)
        self._reading = 0.0  # seconds that text took, which it had to take in before it drafted, since it was judged
        self.spent = 0.0  # seconds that asking it cost above what it brought, since it was tried again or of late
        self.failed = False  # whether it was switched off and has not paid since
        self._to_ask = self._to_leave = 0.0  # typical seconds
        self._price = self._merge_price = 0.0  # of asking above leaving, and of merging; in tokens …
        self._seconds_per_token = 0.0  # … of so many seconds
        self._verdicts, self._lacks = 0, 0.0
        self._more = self._weight = 0.0  # accepted beyond what was expected, and of so many steps
        self._steps: list[tuple[bool, float, int]] = []  # asked, verifying, brought; since it was judged
        self._passed = 0  # other steps since then

    def state_dict(self) -> dict[str, Any]:
        """What outlives the process, as JSON can say it."""
        return {
            "asking": self.asking.state_dict(),
            "joining": self.joining.state_dict(),
            "own": self.own.state(),
            "when_asked": list(self._when_asked),
            "when_left": list(self._when_left),
            "when_merged": list(self._when_merged),
            "spent": self.spent,
            "failed": self.failed,
            "corrected": [self._more, self._weight],
            "verdicts": [self._verdicts, self._lacks],
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Account:
        """What `state_dict` said; `renew` it before it is asked."""
        made = cls()
        made.asking, made.joining = Asking.from_state(state["asking"]), Company.from_state(state["joining"])
        made.own = OwnTree([*map(float, state["own"])])
        made._when_asked.extend(map(float, state["when_asked"]))
        made._when_left.extend(map(float, state["when_left"]))
        made._when_merged.extend(map(float, state["when_merged"]))
        made.spent, made.failed = float(state["spent"]), bool(state["failed"])
        made._more, made._weight = map(float, state["corrected"])
        verdicts, made._lacks = map(float, state["verdicts"])
        made._verdicts = int(verdicts)
        return made

    def close_step(self, brought: int, drafting: float = 0.0, merging: float = 0.0, verifying: float = 0.0) -> None:
        """brought: accepted tokens that nobody else proposed.

        Seconds: for its drafts, or for doing without them; for making one tree of them and others'; for its rows in the
        target's forward.
        """
        (self._when_asked if self.choice.asked else self._when_left).append(drafting)
        if merging:
            self._when_merged.append(merging)
        self._steps.append((self.choice.asked, verifying, brought))

    def read(self, seconds: float) -> None:
        """It took so long to take in a prompt, or steps before the present one."""
        self._reading += seconds

    def begin_again(self) -> None:
        """It is given another trial: nothing is owed, and what was learned is doubted."""
        self.spent = 0.0
        self._verdicts = 0
        self.settle()
        self.asking.doubt()
        self.joining.doubt()

    def settle(self) -> None:
        """It has been judged: a new trial begins."""
        self._steps.clear()
        self._passed = 0
        self._reading = 0.0

    @property
    def steps(self) -> int:
        """Since it was judged."""
        return len(self._steps) + self._passed

    def pass_over(self, situations: Mapping[Hashable, int]) -> None:
        """There were so many steps of these situations more, of which nothing else is told."""
        for situation, times in situations.items():
            self._passed += times
            self.asking.pass_over(situation, times)

    def renew(self, seconds_per_token: float) -> None:
        """Reckon anew what asking it takes."""
        self._to_ask = typical(self._when_asked) if self._when_asked else 0.0
        self._to_leave = typical(self._when_left) if self._when_left else 0.0
        self._seconds_per_token = seconds_per_token
        self._price = (self._to_ask - self._to_leave) / seconds_per_token
        self._merge_price = typical(self._when_merged) / seconds_per_token if self._when_merged else 0.0

    def choose(self, situation: Hashable, may_be_left: bool) -> Choice:
        """Whether to ask it in such a step."""
        return Choice(not may_be_left or self.asking.pays(situation, self._price), situation)

    def choose_company(self, choice: Choice) -> Choice:
        """Whether n-grams shall speak in such a step too, of which else only this part is asked."""
        return choice._replace(company=self.joining.pays(choice.situation, self._merge_price))

    def settled(self, choice: Choice) -> bool:
        """Whether that is clear, and not being found out."""
        _, situation, company = choice
        return self.asking.clear(situation, self._price) and (
            company is None or self.joining.clear(situation, self._merge_price)
        )

    def decide(self, choice: Choice) -> None:
        """It was decided so about the step that is learned from."""
        self.choice = choice
        lost = self._price - self.asking.gain(choice.situation) if choice.asked else 0.0
        self.spent = max(0.0, self.spent + lost * self._seconds_per_token - self.spent / (VERDICTS * TRIAL))

    def learn(self, accepted: int, price: float, expected: float | None, merged: bool = False) -> None:
        """What the step's tree brought, and what it cost to verify, in tokens; merged: whether of its drafts too.

        It waits until what follows is known (`conclude`). What was expected of it varies less than what was accepted,
        so that is learned where it is known, corrected by how much more or less was accepted than expected of late.
        """
        worth = accepted - price
        if self.choice.asked and expected is not None:
            self._more = FADE * self._more + accepted - expected
            self._weight = FADE * self._weight + 1
            worth = expected + self._more / (self._weight + DOUBT) - price
        self._worth, self._merged = worth, merged

    def conclude(self, prospect: float | None) -> None:
        """What follows the step that was learned from is worth so much; None: nothing does, and it teaches nothing."""
        if self._worth is not None and prospect is not None:
            worth = self._worth + prospect
            asked, situation, company = self.choice
            if company is not None:
                self.joining.learn(situation, company, worth)
            self.asking.learn(situation, asked, worth - self._merge_price * self._merged)
        self._worth = None

    def verdict(self, seconds_per_token: float) -> float:
        """Tokens a step that it costs above what it brings, asked where that pays, on average of late.

        What a token costs goes up and down with the text: one stretch of it alone does not decide, and says 0.
        """
        seconds = self._to_leave + self._reading / max(self.steps, 1)
        return self._averaged(seconds / seconds_per_token - self.asking.profit(self._price))

    def verdict_beside(self, head: Account, seconds_per_token: float, overhead: float = 0.0) -> float:
        """The same of n-grams, without which the head would draft every step by itself.

        overhead: seconds of a step that would be saved then, besides their own.
        """
        brings = head.asking.profit_of_company(head.joining, head._price, head._merge_price)
        return self._averaged((self._to_ask + overhead) / seconds_per_token - brings)

    def _averaged(self, lacks: float) -> float:
        self._verdicts = min(self._verdicts + 1, VERDICTS)
        self._lacks += (lacks - self._lacks) / self._verdicts
        return 0.0 if self.unsure else self._lacks

    @property
    def unsure(self) -> bool:
        """Whether there is no verdict yet."""
        return self._verdicts < 2

    def balance(self, seconds_per_token: float) -> tuple[float, float]:
        """Tokens a step that it brought above its costs, and their standard error."""
        count = len(self._steps)
        asked = sum(asked for asked, _, _ in self._steps)
        seconds = asked * self._to_ask + (count - asked) * self._to_leave + sum(rows for _, rows, _ in self._steps)
        brought = [float(tokens) for _, _, tokens in self._steps]
        error = stdev(brought) / sqrt(count) if count > 1 else inf
        return fmean(brought) - seconds / count / seconds_per_token, error
