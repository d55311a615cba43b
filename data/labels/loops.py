"""When greedy text starts to repeat itself endlessly: the one rule for labels and reports.

A text loops where it ends with `copies` consecutive copies of one block of 1…`max_period` tokens that together are
at least `min_tokens` long (short blocks therefore need more copies). Drafters predict looping text too well, so it can
be kept out of training (`cut_loops`) and of measurements (`stop_at_loops`).

Some texts repeat as much and go on with something else: the line below the header of a table of seven columns, a matrix
of zeros. So labels are cut only where the repetition goes on for `GOES_ON` tokens, or up to the longest answer; a
measurement ends at once, as tokens that are taken back would have taken their time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

GOES_ON = 36
"""Tokens for which a loop goes on before an answer is cut at its start."""


class LoopDetector:
    """Incremental form of `loop_start`: `push` a token and get whether the text now ends in a loop that has gone on for
    `goes_on` tokens."""

    def __init__(self, max_period: int = 40, copies: int = 3, min_tokens: int = 12, goes_on: int = 0) -> None:
        self._tokens: list[int] = []
        self._max_period = max_period
        # A text ends with c copies of a block of p tokens iff its last (c - 1)·p tokens equal those p earlier.
        # Example, copies=3, min_tokens=12: p=1 → 12 copies → 11 equal tokens; p=5 → 3 copies → 10 equal tokens.
        self._needed = [(max(copies, -(-min_tokens // period)) - 1) * period for period in range(1, max_period + 1)]
        self._runs, self._goes_on = [0] * max_period, goes_on

    def push(self, token: int) -> bool:
        """Append `token`; True when the tokens so far end in a loop."""
        tokens, runs = self._tokens, self._runs
        found = False
        for period in range(1, min(len(tokens), self._max_period) + 1):
            if tokens[-period] == token:
                runs[period - 1] += 1
                found = found or runs[period - 1] >= self._needed[period - 1] + self._goes_on
            else:
                runs[period - 1] = 0
        tokens.append(token)
        return found

    def open_end(self) -> int | None:
        """Where the loop that the text ends in has begun, however short it has gone on; None where it ends in none."""
        since = [run - needed for run, needed in zip(self._runs, self._needed) if run >= needed]
        return len(self._tokens) - max(since) if since else None


class IncrementalStop:
    """A loop detector as a `stop` rule; while an answer continues the previous one, only its new tokens are pushed.

    goes_on: of the detector, so many tokens are taken back
    """

    def __init__(self, new_detector: Callable[[], LoopDetector] = LoopDetector, goes_on: int = 0) -> None:
        self._new_detector, self._goes_on = new_detector, goes_on
        self._tokens: list[int] = []
        self._ended = True  # the first call makes a detector

    def __call__(self, tokens: list[int]) -> int | None:
        """The length at which the detector ends `tokens`, None if it does not."""
        if self._ended or tokens[: len(self._tokens)] != self._tokens:
            self._detector, self._tokens, self._ended = self._new_detector(), [], False
        for token in tokens[len(self._tokens) :]:
            self._tokens.append(token)
            if self._detector.push(token):
                self._ended = True
                return len(self._tokens) - self._goes_on
        return None


def loop_start(
    tokens: Sequence[int], max_period: int = 40, copies: int = 3, min_tokens: int = 12, goes_on: int = 0
) -> int | None:
    """The smallest end e such that `tokens[:e]` ends in a loop, None when there is none.

    goes_on: only a loop that goes on for so many tokens, or to the end of `tokens`, counts

    Example, max_period=40, copies=3, min_tokens=12: `[9, 1,2,3,4, 1,2,3,4, 1,2,3,4, 1]` → 13, three copies of four
    tokens; `[7] * 20 + [8]` → 12, since a block of one token needs twelve copies; with goes_on=36 → None.
    """
    detector = LoopDetector(max_period, copies, min_tokens, goes_on)
    ends = (end - goes_on for end, token in enumerate(tokens, start=1) if detector.push(token))
    return next(ends, None) or detector.open_end()
