"""When to ask a part of a hybrid for drafts: in steps that look like those in which that paid.

Situation: what the cheap parts say beforehand, as a class. Worth: the accepted tokens of a step, or those expected,
above the price of its tree. In each situation the average worth with the part and without it is kept; the difference is
what asking it brings, and that is compared with what asking it costs.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from math import sqrt
from typing import Any, Self

FEW, MANY = 6, 16
"""Steps of a situation in which it is asked and others in which it is not, at least and at most, until it is clear …"""
CLEAR = 1.5
"""… by so many standard errors, which is better."""
HOPE = 0.5
"""Standard errors by which a gain is believed to be more where it is decided whether to ask: in doubt, more tokens."""
LUCK = 0.5
"""Standard errors by which a gain is believed to be less where it is decided whether the part pays at all."""
MEMORY = 128
"""Steps in which a way was gone, after which the older half of their weight is forgotten; four times as many of all
situations together, whose weight says how often each of them comes."""
FADE = 1 - 1 / 512
"""What a step of a situation leaves of the weight of those before it: what has not been tried for long is not clear
any more, all the sooner the less there is between the two ways."""


class _Mean:
    """A running average and how sure it is."""

    __slots__ = ("count", "squares", "total")

    def __init__(self, total: float = 0.0, squares: float = 0.0, count: float = 0.0) -> None:
        self.total, self.squares, self.count = total, squares, count

    def add(self, value: float) -> None:
        self.total += value
        self.squares += value * value
        self.count += 1
        if self.count >= MEMORY:
            self.fade(MEMORY / 2)

    def fade(self, most: float) -> None:
        """Count for no more than so many."""
        if self.count > most:
            share = most / self.count
            self.total, self.squares, self.count = self.total * share, self.squares * share, most

    def state(self) -> list[float]:
        """What it is made from."""
        return [self.total, self.squares, self.count]

    @property
    def value(self) -> float:
        return self.total / self.count

    @property
    def variance(self) -> float:
        """Of the average: its squared standard error."""
        return max(self.squares / self.count - self.value**2, 0.0) / self.count


class _Situation:
    """Steps that looked alike, those in which the part was asked and those in which it was left."""

    __slots__ = ("asked", "left", "weight")

    def __init__(self, asked: Sequence[float] = (), left: Sequence[float] = (), weight: float = 0.0) -> None:
        """weight: how often it was seen, of late."""
        self.asked, self.left, self.weight = _Mean(*asked), _Mean(*left), weight

    @property
    def known(self) -> bool:
        """Whether both ways have been tried, of late."""
        return min(self.left.count, self.asked.count) > FEW - 1

    @property
    def gain(self) -> float:
        """Tokens that asking brings."""
        return self.asked.value - self.left.value

    @property
    def doubt(self) -> float:
        """Standard error of the gain."""
        return sqrt(self.asked.variance + self.left.variance)

    def clear(self, price: float) -> bool:
        """Whether it has been tried often enough to say if asking pays."""
        if not self.known:
            return False
        return min(self.left.count, self.asked.count) >= MANY or abs(self.gain - price) > CLEAR * self.doubt


class Prospects:
    """By situation, tokens that come in a step which begins so, above those that come in its time on average.

    What a step is worth is not only what it accepts: where it ends decides what comes next. A head that runs ahead into
    a phrase takes from n-grams what they would have said for nothing.
    """

    def __init__(self) -> None:
        self._worths: dict[Hashable, _Mean] = {}

    def state_dict(self) -> dict[str, Any]:
        """What was learned, as JSON can say it."""
        return {"situations": [[key, worth.state()] for key, worth in self._worths.items()]}

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Prospects:
        """What `state_dict` said."""
        made = cls()
        made._worths = {_key(key): _Mean(*map(float, worth)) for key, worth in state["situations"]}
        return made

    def learn(self, situation: Hashable, worth: float) -> None:
        """One more step."""
        self._worths.setdefault(situation, _Mean()).add(worth)

    def __call__(self, situation: Hashable) -> float:
        """0 where nobody knows."""
        seen = self._worths.get(situation)
        return seen.value if seen is not None and seen.count >= FEW else 0.0


def _key(told: Any) -> Hashable:
    """A situation as it was before JSON made lists of its tuples."""
    return tuple(map(_key, told)) if isinstance(told, list) else told


class Asking:
    """What asking one part brought, by situation."""

    def __init__(self) -> None:
        self._situations: dict[Hashable, _Situation] = {}

    def state_dict(self) -> dict[str, Any]:
        """What was learned, as JSON can say it."""
        situations = self._situations.items()
        return {"situations": [[key, way.asked.state(), way.left.state(), way.weight] for key, way in situations]}

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Self:
        """What `state_dict` said."""
        made = cls()
        for key, asked, left, weight in state["situations"]:
            made._situations[_key(key)] = _Situation([*map(float, asked)], [*map(float, left)], float(weight))
        return made

    def pays(self, situation: Hashable, price: float) -> bool:
        """Whether to ask now; price: what asking costs, in tokens."""
        seen = self._situations.setdefault(situation, _Situation())
        if not seen.clear(price):
            return seen.asked.count <= seen.left.count
        return seen.gain + HOPE * seen.doubt > price

    def clear(self, situation: Hashable, price: float) -> bool:
        """Whether that is known, and not being found out."""
        seen = self._situations.get(situation)
        return seen is not None and seen.clear(price)

    def learn(self, situation: Hashable, asked: bool, worth: float) -> None:
        """What the tree of a step was worth, built with the part's drafts or without."""
        seen = self._situations[situation]
        for way in (seen.asked, seen.left):
            way.fade(FADE * way.count)
        (seen.asked if asked else seen.left).add(worth)
        self.pass_over(situation, 1)

    def pass_over(self, situation: Hashable, times: int) -> None:
        """A situation was seen so many times more."""
        self._situations.setdefault(situation, _Situation()).weight += times
        if self._weight >= 4 * MEMORY:
            for seen in self._situations.values():
                seen.weight /= 2

    @property
    def _weight(self) -> float:
        return sum(seen.weight for seen in self._situations.values())

    def gain(self, situation: Hashable) -> float:
        """Tokens that asking brings, 0 where nobody knows."""
        seen = self._situations.get(situation)
        return seen.gain if seen is not None and seen.known else 0.0

    def doubt(self) -> None:
        """What was learned is long ago: a few steps may change it."""
        for seen in self._situations.values():
            seen.asked.fade(FEW)
            seen.left.fade(FEW)

    def profit(self, price: float) -> float:
        """Tokens that a step gains on average, when the part is asked where that pays and nowhere else.

        Less a part of the standard error: of several situations those that seem to pay are those that were lucky.
        """
        return self._average({key: seen.gain - LUCK * seen.doubt - price for key, seen in self._known()})

    def profit_of_company(self, joining: Asking, price: float, merge_price: float) -> float:
        """Tokens that a step gains on average by what others have to say, above asking this part alone in every step.

        joining: what it brought to hear them beside the part; merge_price: what that costs. Those others cost next to
        nothing, so luck is not deducted.
        """
        gains: dict[Hashable, float] = {}
        for key, seen in self._known():
            beside = joining._situations.get(key)
            if beside is not None and beside.known:
                gains[key] = max(seen.left.value - beside.left.value + price, beside.gain - merge_price)
            else:  # it is hardly asked here, so either way will do
                gains[key] = price - seen.gain
        return self._average(gains)

    def _usual(self, price: float) -> bool:
        """Whether it pays on average of all situations of which something is known."""
        return sum(seen.weight * (seen.gain - price) for _, seen in self._known()) > 0

    def _known(self) -> list[tuple[Hashable, _Situation]]:
        return [(key, seen) for key, seen in self._situations.items() if seen.known]

    def _average(self, gains: Mapping[Hashable, float]) -> float:
        """Of all steps, those in which one situation is not known or nothing is gained counting for none."""
        brought = sum(self._situations[key].weight * max(0.0, gain) for key, gain in gains.items())
        return brought / max(self._weight, 1.0)


class Company(Asking):
    """What others bring beside a part that drafts anyway: much the same in most situations.

    So no more is tried of one than what makes it known, and where it is not clear by itself, what pays on average is
    done there too.
    """

    def pays(self, situation: Hashable, price: float) -> bool:
        """See `Asking.pays`."""
        seen = self._situations.setdefault(situation, _Situation())
        if not seen.known:
            return seen.asked.count <= seen.left.count
        clear = abs(seen.gain - price) > CLEAR * seen.doubt
        return seen.gain > price if clear else self._usual(price)

    def clear(self, situation: Hashable, price: float) -> bool:
        """See `Asking.clear`."""
        seen = self._situations.get(situation)
        return seen is not None and seen.known
