"""The progress bars of a distillation: conversations done, and answers written in the current shard."""

from __future__ import annotations

from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


class DistillProgress:
    """A context manager; with `show=False` every call does nothing."""

    def __init__(self, show: bool) -> None:
        columns = (
            TextColumn("{task.description:<14}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(elapsed_when_finished=True),
            TextColumn("{task.fields[note]}"),
        )
        self._bars = Progress(*columns, console=Console(stderr=True), disable=not show)
        self._rows = self._bars.add_task("conversations", total=None, note="")
        self._answers = self._bars.add_task("answers", total=None, visible=False, note="")

    def __enter__(self) -> DistillProgress:
        self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bars.stop()

    def start(self, done: int, total: int) -> None:
        self._bars.update(self._rows, completed=done, total=total)

    def add_rows(self, count: int) -> None:
        """`count` more conversations are labelled or skipped."""
        self._bars.advance(self._rows, count)

    def set_note(self, text: str) -> None:
        self._bars.update(self._rows, note=text)

    def start_turn(self, questions: int) -> None:
        """The next user turn of `questions` conversations begins."""
        self._bars.reset(self._answers, total=questions, visible=True)

    def add_answers(self, count: int) -> None:
        """`count` more answers of this turn are written."""
        self._bars.advance(self._answers, count)
