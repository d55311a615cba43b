"""What a part of a hybrid drafts by itself, as far as it pays."""

import pytest
import torch

from inference.drafters.own_tree import OwnTree
from inference.drafters.running_costs import Prices
from inference.tree import DraftTree


def tree_of(*nodes):
    """(parent, probability of its path) of each node; tokens count up from 10."""
    parents, probabilities = zip(*nodes)
    tokens = torch.arange(10, 10 + len(nodes))
    return DraftTree.build(tokens, torch.tensor(parents), torch.tensor(probabilities).log())


def rows(tree):
    return list(zip(tree.tokens.tolist(), tree.parents.tolist()))


LEVELS = tree_of((-1, 0.8), (-1, 0.15), (0, 0.5), (0, 0.1), (2, 0.4))


@pytest.mark.parametrize(
    "price, kept",
    [
        (0.01, [(10, -1), (11, -1), (12, 0), (13, 0), (14, 2)]),
        (0.12, [(10, -1), (11, -1), (12, 0), (14, 2)]),
        (0.3, [(10, -1), (12, 0), (14, 1)]),
        (0.45, [(10, -1), (12, 0)]),
        (0.9, []),
    ],
)
def test_nodes_less_likely_than_their_price_are_left_out(price, kept):
    cut = OwnTree().cut(LEVELS, Prices.of([price * nodes for nodes in range(6)]))
    assert rows(cut) == kept


def test_of_equally_likely_nodes_the_parent_stays():
    chain = tree_of((-1, 0.5), (0, 0.5), (1, 0.5))
    assert rows(OwnTree().cut(chain, Prices.of([0.0, 0.1, 0.2, 5.0]))) == [(10, -1), (11, 0)]


def test_a_part_that_promises_too_much_is_believed_less():
    own, prices = OwnTree(), Prices.of([0.3 * nodes for nodes in range(6)])
    for _ in range(200):
        assert rows(own.cut(LEVELS, prices))
        own.learn(0)
        if len(own.cut(LEVELS, prices)) < 3:
            break
    assert len(own.cut(LEVELS, prices)) == 2
    came, promised = own.state()
    assert came == 0 and promised > 8 * (0.4 / 0.3 - 1)
    assert len(OwnTree(own.state()).cut(LEVELS, prices)) == 2


def test_what_was_not_cut_teaches_nothing():
    own = OwnTree()
    own.learn(3)
    assert own.state() == [0, 0]
    own.cut(LEVELS, Prices.of([0.0] * 6))
    own.learn(2)
    own.learn(2)
    assert own.state() == pytest.approx([2, 0.8 + 0.15 + 0.5 + 0.1 + 0.4])
