"""The loop rule, and its incremental form."""

import random
from functools import partial

import pytest

from draft_heads.data.labels.loops import IncrementalStop, LoopDetector, loop_start


@pytest.mark.parametrize(
    ("tokens", "start"),
    [
        ([], None),
        ([7] * 11, None),
        ([7] * 20, 12),  # a block of one token needs twelve copies
        ([9] + [1, 2, 3, 4] * 3 + [1], 13),
        ([1, 2, 3] * 3, None),  # nine tokens are too few
        ([1, 2, 3] * 4, 12),
        (list(range(40)) * 3, 120),
        (list(range(41)) * 5, None),  # longer than the longest period
        (list(range(30)) * 2 + [99] + list(range(30)) * 3, 151),
    ],
)
def test_loop_begins_where_the_last_needed_copy_ends(tokens, start):
    assert loop_start(tokens) == start


TABLE = [1, 2] * 8  # the line below the header of a table of eight columns, `| ---` each


@pytest.mark.parametrize(
    ("tokens", "start"),
    [
        ([9, *TABLE, 3, 4, 5], None),  # the table's rows follow
        ([9, *TABLE], 13),  # the longest answer
        ([9] + [1, 2] * 24 + [3], 13),  # 36 tokens after the sixth copy
        ([9, *[1, 2] * 23, 1, 3], None),
        ([*TABLE, 3] + [7] * 60, 17 + 12),
        ([*TABLE, 3] + [7] * 14, 17 + 12),
        ([], None),
    ],
)
def test_a_label_is_cut_where_the_loop_goes_on(tokens, start):
    assert loop_start(tokens, goes_on=36) == start
    stop = IncrementalStop(partial(LoopDetector, goes_on=36), 36)
    ends = [stop(tokens[:length]) for length in range(1, len(tokens) + 1)]
    long = start is not None and len(tokens) >= start + 36
    assert next((end for end in ends if end is not None), None) == (start if long else None)


def brute_force(tokens, max_period, copies, min_tokens):
    for end in range(1, len(tokens) + 1):
        for period in range(1, max_period + 1):
            for count in range(copies, end // period + 1):
                if count * period >= min_tokens:
                    block = tokens[end - period : end]
                    if tokens[end - count * period : end] == block * count:
                        return end
    return None


def test_detector_equals_the_definition_on_random_repetitive_text():
    generator = random.Random(0)
    found = 0
    for _ in range(300):
        block = [generator.randrange(3) for _ in range(generator.randrange(1, 6))]
        tokens = [generator.randrange(3) for _ in range(6)] + block * generator.randrange(1, 6)
        expected = brute_force(tokens, 5, 3, 6)
        found += expected is not None
        assert loop_start(tokens, 5, 3, 6) == expected
    assert 50 < found < 290


def test_detector_reports_every_token_of_a_loop_and_recovers():
    detector = LoopDetector(max_period=2, copies=2, min_tokens=4)
    assert [detector.push(token) for token in [5, 6, 5, 6, 5, 1, 1, 1, 1]] == [
        *[False, False, False, True, True],
        *[False, False, False, True],
    ]


class CountingDetector:
    """Ends at the third 7; counts what it is fed."""

    pushed = 0

    def __init__(self):
        self.sevens = 0

    def push(self, token):
        type(self).pushed += 1
        self.sevens += token == 7
        return self.sevens == 3


def test_incremental_stop_gives_the_first_end_and_pushes_each_token_once():
    CountingDetector.pushed = 0
    stop = IncrementalStop(CountingDetector)
    answer = [7, 1, 7, 2, 7, 3]
    assert [stop(answer[:length]) for length in range(1, 6)] == [None, None, None, None, 5]
    assert CountingDetector.pushed == 5
    assert stop(answer) == 5  # asked again, from the beginning
    assert stop([7]) is None
    assert stop([7, 7]) is None
    assert stop([8, 7]) is None  # another answer
    assert stop([8, 7, 7]) is None
    assert stop([8, 7, 7, 7]) == 4
