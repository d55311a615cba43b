"""How often what sources propose is accepted, learned while decoding."""

import pytest

from draft_heads.inference.drafters.hybrid.calibration import Calibration, confidence


@pytest.mark.parametrize("probability,expected", [(0.5, 0), (0.7311, 2), (0.2689, -2), (0.999, 8), (0.0, -8)])
def test_confidence_is_half_nats_of_odds(probability, expected):
    assert confidence(probability) == expected


def test_estimates_move_from_the_prior_to_what_was_seen():
    table = Calibration()
    assert table.estimate((3,), (0.8,)) == pytest.approx(0.8)
    for step in range(400):
        table.count((3,), (0.8,), step % 4 == 0)
    assert table.estimate((3,), (0.8,)) == pytest.approx(0.25, abs=0.01)
    assert table.estimate((5,), (0.8,)) == pytest.approx(0.8)  # other evidence has counts of its own


def test_new_combinations_begin_with_what_their_entries_have_shown():
    table = Calibration()
    for _ in range(1000):
        table.count((1, None), (0.5, None), True)
    assert table.estimate((1, 7), (0.5, 0.5)) > 0.99  # the first is always right: its prior does not matter any more


def test_old_observations_are_forgotten():
    table = Calibration()
    for accepted in [True] * 20000 + [False] * 6000:
        table.count((1,), (0.5,), accepted)
    assert table.estimate((1,), (0.5,)) < 0.5
