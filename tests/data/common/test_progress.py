"""Progress in a log file: lines by the clock, not by the number of calls."""

import io

import pytest
from rich.console import Console

from draft_heads.data.common.progress import ProgressLines, duration, progress_bar


def lines_of(work, seconds_each, start=0):
    """What is written while parts `start` … `work` take `seconds_each` each."""
    written, now = [], 0.0
    show = ProgressLines(written.append, clock=lambda: now)
    for done in range(start, work + 1):
        show("answers", done, work)
        now += seconds_each
    return written


def test_ten_seconds_tell_how_long_it_takes_then_a_line_every_half_minute_then_the_end():
    lines = lines_of(work=1000, seconds_each=0.125)  # 125 s
    assert lines == [
        "answers: 80 of 1,000, 8.0 per second, about 1 min 55 s left",
        "answers: 320 of 1,000, 8.0 per second, about 1 min 25 s left",
        "answers: 560 of 1,000, 8.0 per second, about 55 s left",
        "answers: 800 of 1,000, 8.0 per second, about 25 s left",
        "answers: 1,000 of 1,000 in 2 min 5 s",
    ]


def test_short_work_writes_nothing_and_slow_parts_say_what_each_takes():
    assert lines_of(work=1000, seconds_each=0.02) == []
    assert lines_of(work=2, seconds_each=200)[0] == "answers: 1 of 2, 200.0 s each, about 3 min 20 s left"


def test_no_time_is_told_from_the_first_few_of_many_parts():
    lines = lines_of(work=10_000, seconds_each=16)
    assert lines[:3] == ["answers: 1 of 10,000", "answers: 3 of 10,000", "answers: 5 of 10,000"]
    assert lines[4] == "answers: 9 of 10,000, 16.0 s each, about 44 h 24 min left"


def test_resumed_work_is_timed_from_where_it_resumed():
    assert (
        lines_of(work=1000, seconds_each=1, start=900)[0]
        == "answers: 910 of 1,000, 1.0 per second, about 1 min 30 s left"
    )


def test_another_stage_starts_its_own_clock():
    written, now = [], 0.0
    show = ProgressLines(written.append, clock=lambda: now)
    for stage, of in (("decoding", 2), ("checking", 3)):
        for done in range(of + 1):
            show(stage, done, of)
            now += 100
    assert written[1:3] == ["decoding: 2 of 2 in 3 min 20 s", "checking: 1 of 3, 100.0 s each, about 3 min 20 s left"]


@pytest.mark.parametrize(("terminal", "written"), [(True, "stage"), (False, "stage: 1 of 100, ")])
def test_a_terminal_has_a_bar_and_a_file_has_lines(terminal, written, monkeypatch):
    monkeypatch.setattr("draft_heads.data.common.progress.SECONDS", 0.0)
    console = Console(file=io.StringIO(), force_terminal=terminal)
    with progress_bar(console) as show:
        show("stage", 0, 100)
        show("stage", 1, 100)
    text = console.file.getvalue()
    assert written in text and ("\x1b" in text) == terminal


def test_durations_are_read_at_a_glance():
    assert [duration(seconds) for seconds in (0.4, 59, 146, 11_100)] == ["0 s", "59 s", "2 min 26 s", "3 h 5 min"]
