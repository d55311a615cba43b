"""Progress of long work: a bar in a terminal, lines elsewhere (log files, pipes)."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Protocol, TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from draft_heads.data.common.console import plain_console

T = TypeVar("T")
SECONDS = 30.0  # between lines
FIRST = 10.0  # before the first line
SURE = 4  # after the time of so many lines a speed is shown even below 1 %: answers written together end late


class Update(Protocol):
    """Shows that `done` of `of` units are finished; `done` is 0, or smaller than before, where other work begins.

    stage: what is being done; rate: a speed to show instead of units per second
    """

    def __call__(self, stage: str, done: float, of: float, rate: str = "") -> None: ...


class ProgressLines:
    """Progress as lines: the first after ten seconds, then one every half minute, then the end.

        distilling: answers: 128 of 2,000, 12.8 per second, about 2 min 26 s left

    Speed and time left are shown once 1 % is done. Work of less than `every` seconds writes nothing.
    """

    def __init__(
        self, write: Callable[[str], None], every: float = 30.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._write, self._every, self._clock = write, every, clock
        self._done, self._of = 0.0, 0.0
        self._begin(0.0)

    def _begin(self, done: float) -> None:
        self._first, self._start = done, self._clock()
        self._last: float | None = None  # when the last line was written

    def __call__(self, stage: str, done: float, of: float, rate: str = "") -> None:
        """As `Update`."""
        if done == 0 or done < self._done or of != self._of:
            self._begin(done)
        self._done, self._of, now = done, of, self._clock()
        spent, made = now - self._start, done - self._first
        if made <= 0 or spent <= 0:
            return
        left = spent / made * (of - done)
        if done >= of:
            if self._last is not None:
                self._write(f"{stage}: {_number(done)} of {_number(of)} in {duration(spent)}")
            self._last = None
        elif self._last is None and (spent < min(FIRST, self._every) or spent + left < self._every):
            return
        elif self._last is None or now - self._last >= self._every:
            line = f"{stage}: {_number(done)} of {_number(of)}"
            if made >= of / 100 or spent >= SURE * self._every:
                rate = rate or (f"{made / spent:,.1f} per second" if made >= spent else f"{spent / made:,.1f} s each")
                line += f", {rate}, about {duration(left)} left"
            self._write(line)
            self._last = now


def _number(value: float) -> str:
    return f"{value:,.1f}".removesuffix(".0")


def duration(seconds: float) -> str:
    """`45 s`, `2 min 26 s`, `3 h 5 min`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    return f"{whole // 60} min {whole % 60} s" if whole < 3600 else f"{whole // 3600} h {whole % 3600 // 60} min"


@contextmanager
def progress_bar(console: Console | None = None, first: str = "warming up", show: bool = True) -> Iterator[Update]:
    """A function that shows progress on `console` (stderr); `first` is the stage shown before the first call."""
    console = console or plain_console(stderr=True)
    if not show:
        yield lambda stage, done, of, rate="": None
        return
    if not console.is_terminal:
        yield ProgressLines(lambda line: console.print(line, soft_wrap=True), SECONDS)
        return
    columns = TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, TimeRemainingColumn(), console=console) as bars:
        task = bars.add_task(first, total=None)

        def update(stage: str, done: float, of: float, rate: str = "") -> None:
            if done == 0:
                bars.reset(task)
            bars.update(task, description=f"{stage}, {rate}" if rate else stage, completed=done, total=of)

        yield update


def track(items: Iterable[T], stage: str, total: int | None = None) -> Iterator[T]:
    """The items one by one, with progress shown on stderr; `total`: how many, for items that have no length."""
    of = total if total is not None else len(items)  # type: ignore[arg-type]
    with progress_bar(first=stage) as show:
        for done, item in enumerate(items):
            show(stage, done, of)
            yield item
        show(stage, of, of)
