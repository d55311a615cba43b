"""What a source's word is worth, and what a node costs: both learned while decoding."""

import pytest

from inference.drafters.calibration import Calibration, confidence
from inference.drafters.running_costs import RunningCosts, Step

# ---- calibration -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("probability,expected", [(0.5, 0), (0.7311, 2), (0.2689, -2), (0.999, 8), (0.0, -8)])
def test_confidence_is_half_nats_of_odds(probability, expected):
    assert confidence(probability) == expected


def test_estimates_move_from_the_guess_to_what_was_seen():
    table = Calibration()
    assert table.estimate((3,), (0.8,)) == pytest.approx(0.8)
    for step in range(400):
        table.count((3,), step % 4 == 0)
    assert table.estimate((3,), (0.8,)) == pytest.approx(0.25, abs=0.01)
    assert table.estimate((5,), (0.8,)) == pytest.approx(0.8)  # other evidence has its own


def test_new_combinations_begin_with_what_their_parts_have_shown():
    table = Calibration()
    table.estimate((1, None), (0.5, 0.0))
    for _ in range(1000):
        table.count((1, None), True)
    assert table.estimate((1, 7), (0.5, 0.5)) > 0.99  # the first is always right: guesses do not matter any more


def test_old_observations_are_forgotten():
    table = Calibration()
    table.estimate((1,), (0.5,))
    for accepted in [True] * 20000 + [False] * 6000:
        table.count((1,), accepted)
    assert table.estimate((1,), (0.5,)) < 0.5


# ---- costs -----------------------------------------------------------------------------------------------


def test_the_least_acceptance_is_the_time_of_a_node_in_tokens():
    costs = RunningCosts()
    for step in range(200):
        nodes, _ = costs.plan(32)
        late = 30.0 * (step % 50 == 0)  # something was compiled
        costs.add(Step(nodes, 0.010 + 0.0002 * nodes + late, 0.020 + late, 4))
    assert costs.seconds_per_node == pytest.approx(0.0002, rel=1e-3)
    assert costs.least == pytest.approx(0.0002 / 0.005, rel=1e-3)


def test_trial_steps_have_different_sizes_and_no_least():
    costs = RunningCosts()
    plans = []
    for _ in range(400):
        plans.append(costs.plan(32))
        costs.add(Step(plans[-1][0], 0.010 + 0.001 * plans[-1][0], 0.020, 1))
    assert {nodes for nodes, least in plans[40:] if least == 0} == {8, 16, 32}
    assert sum(least > 0 for _, least in plans[40:]) == pytest.approx(360 * 15 / 16, abs=2)
