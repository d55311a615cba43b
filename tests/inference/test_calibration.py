"""What a source's word is worth, and what a node costs: both learned while decoding."""

import math
import random

import pytest

from draft_heads.inference.drafters.hybrid.calibration import Calibration, confidence
from draft_heads.inference.drafters.hybrid.running_costs import EARLY, EVERY, KEPT, RunningCosts, Step

# ---- calibration -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("probability,expected", [(0.5, 0), (0.7311, 2), (0.2689, -2), (0.999, 8), (0.0, -8)])
def test_confidence_is_half_nats_of_odds(probability, expected):
    assert confidence(probability) == expected


def test_estimates_move_from_the_guess_to_what_was_seen():
    table = Calibration()
    assert table.estimate((3,), [(0, 0.8)]) == pytest.approx(0.8)
    for step in range(400):
        table.count((3,), step % 4 == 0)
    assert table.estimate((3,), [(0, 0.8)]) == pytest.approx(0.25, abs=0.01)
    assert table.estimate((5,), [(0, 0.8)]) == pytest.approx(0.8)  # other evidence has its own


def test_new_combinations_begin_with_what_their_parts_have_shown():
    table = Calibration()
    table.estimate((1, None), [(0, 0.5)])
    for _ in range(1000):
        table.count((1, None), True)
    assert (
        table.estimate((1, 7), [(0, 0.5), (1, 0.5)]) > 0.99
    )  # the first is always right: guesses do not matter any more


def test_old_observations_are_forgotten():
    table = Calibration()
    table.estimate((1,), [(0, 0.5)])
    for accepted in [True] * 20000 + [False] * 6000:
        table.count((1,), accepted)
    assert table.estimate((1,), [(0, 0.5)]) < 0.5


# ---- costs -----------------------------------------------------------------------------------------------


def measured(seconds, rows, tokens=4, steps=KEPT):
    """Costs after steps of so many rows each in turn, of which one in fifty was a compilation."""
    costs = RunningCosts()
    for step in range(steps):
        size = rows[step % len(rows)]
        late = 30.0 * (step % 50 == 0)
        costs.add(Step(size, seconds(size) + late, 0.020 + late, tokens))
    return costs


def test_the_price_of_a_tree_is_its_time_in_tokens():
    costs = measured(lambda rows: 0.010 + 0.0002 * rows, (0, 8, 16, 32))
    assert costs.seconds_per_token == pytest.approx(0.020 / 4, rel=0.05)
    prices = costs.prices(32)
    expected = [nodes * 0.0002 / costs.seconds_per_token for nodes in range(33)]
    assert prices.tokens == pytest.approx(expected, rel=0.1, abs=1e-3)
    assert costs.prices(8, riders=4).tokens == pytest.approx(expected[:9], rel=0.1, abs=1e-3)
    assert costs.node_price == pytest.approx(expected[1], rel=0.1)


def test_a_jump_between_sizes_is_a_price_of_its_own():
    costs = measured(lambda rows: 0.010 + 0.0002 * rows + 0.004 * (rows > 7), range(10))
    prices = costs.prices(9)
    nearly_sure = [math.log(0.9)] * 9
    assert prices.best(nearly_sure[:8]) == 8
    assert prices.best([math.log(0.2)] * 9) == 7
    assert prices.best([math.log(0.03)] * 9) == 0
    assert prices.bounds[7] > prices.bounds[8] > 0 - math.inf  # beyond the jump a node is cheap again
    assert prices.bounds[0] < math.log(0.2)


def test_times_that_fall_with_size_are_noise():
    costs = measured(lambda rows: 0.010 + (0.002, 0.001, 0.004)[rows // 4], (0, 4, 8))
    tokens = costs.prices(8).tokens
    assert tokens == sorted(tokens) and tokens[4] == pytest.approx(tokens[0], abs=0.05) and tokens[8] > tokens[4] + 0.3


def test_a_machine_that_slows_down_for_a_while_does_not_change_what_a_row_costs():
    generator = random.Random(2)
    costs = RunningCosts()
    for step in range(2 * KEPT):
        slow = step // 32 % 2  # in slow stretches trees are small
        rows = generator.randint(0, 4) if slow else generator.randint(4, 8)
        seconds = 0.010 + 0.010 * slow + 0.0005 * rows + generator.gauss(0, 1e-4)
        costs.add(Step(rows, seconds, seconds + 0.005, 2))
    assert costs.seconds_per_node == pytest.approx(0.0005, rel=0.2)
    assert costs.prices(8).tokens[8] * costs.seconds_per_token == pytest.approx(8 * 0.0005, rel=0.2)
    assert costs.seconds(8) - costs.seconds(0) == pytest.approx(8 * 0.0005, rel=0.2)


def test_sizes_that_were_not_seen_are_as_steep_as_the_others():
    costs = measured(lambda rows: 0.010 + 0.0002 * rows, (4, 5, 6))
    expected = [nodes * 0.0002 / costs.seconds_per_token for nodes in range(9)]
    assert costs.prices(8).tokens == pytest.approx(expected, rel=0.1, abs=1e-3)


def test_nothing_is_priced_before_it_was_measured():
    costs = RunningCosts()
    assert costs.prices(8) is None and costs.node_price == 0.0


def test_trial_steps_have_different_sizes():
    costs = RunningCosts()
    sizes = []
    for _ in range(40 * EVERY):
        sizes.append(costs.trial(32))
        costs.add(Step(sizes[-1] if sizes[-1] is not None else 16, 0.010, 0.020, 1))
    assert set(sizes[:EARLY]) == {0, 8, 16, 32}
    later = [size for size in sizes[EARLY + KEPT :] if size is not None]
    assert set(later) == {0, 8, 32} and len(later) in (26, 27)  # of 16 enough are seen without
