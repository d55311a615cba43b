"""Draft trees: the worked example, pruning, and acceptance with known choices."""

import pytest
import torch

from draft_heads.inference.tree import DraftTree, ancestor_rows, depths
from draft_heads.inference.verify import accepted_rows, greedy_path
from tests.inference.trees import check_tree

X, Y, Z, W = 10, 11, 12, 13


def example():
    return DraftTree.build(torch.tensor([[X, Y, Z]]), torch.tensor([[-1, -1, 0]]))


def test_rows_see_themselves_and_their_ancestors():
    sees = ancestor_rows(example().parents, 2)
    assert sees[0].long().tolist() == [[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 1, 0, 1]]
    assert depths(sees).tolist() == [[0, 1, 1, 2]]


@pytest.mark.parametrize("length", [1, 2, 3, 7, 8, 9, 33])
def test_a_chain_of_any_length_is_causal(length):
    sees = ancestor_rows(torch.arange(length) - 1, length)
    assert torch.equal(sees, torch.ones(length + 1, length + 1).tril().bool())


@pytest.mark.parametrize(
    "choices,rows,base",
    [
        ([X, Z, 0, W], [0, 1, 3], W),
        ([Y, Z, W, 0], [0, 2], W),
        ([X, 5, 0, 0], [0, 1], 5),
        ([5, Z, 0, 0], [0], 5),  # z's parent was rejected: z may not be accepted
    ],
)
def test_the_longest_path_the_target_agrees_with_is_accepted(choices, rows, base):
    tree = example()
    on_path, next_base = greedy_path(tree, torch.tensor([choices]), ancestor_rows(tree.parents, 2))
    assert on_path[0].nonzero()[:, 0].tolist() == rows and int(next_base) == base


def test_rows_that_only_ride_along_are_never_accepted():
    tree = example()
    riding = DraftTree(tree.tokens, tree.parents, tree.log_probs, tree.source, torch.tensor([[False, True, True]]))
    on_path, _ = greedy_path(riding, torch.tensor([[X, Z, 0, W]]), ancestor_rows(tree.parents, 2))
    assert on_path.tolist() == [[True, False, False, False]]


def test_the_empty_tree_verifies_the_base_token_alone():
    sees = ancestor_rows(DraftTree.empty().parents, 0)
    on_path, base = greedy_path(DraftTree.empty(), torch.tensor([[4]]), sees)
    assert on_path.tolist() == [[True]] and int(base) == 4


def test_taking_nodes_renumbers_parents():
    tree = DraftTree.build(torch.tensor([[1, 2, 3, 4]]), torch.tensor([[-1, 0, -1, 2]]))
    kept = tree.take(torch.tensor([[2, 3]]))
    assert kept.tokens.tolist() == [[3, 4]] and kept.parents.tolist() == [[-1, 0]]


def test_nodes_too_deep_are_no_candidates():
    tree = DraftTree.build(torch.tensor([[1, 2, 3, 4]]), torch.tensor([[-1, 0, -1, 2]]))
    depth = depths(ancestor_rows(tree.parents, 2))[:, 1:]
    assert tree.limit_depth(torch.tensor(1), depth).candidate.tolist() == [[True, False, True, False]]


def test_padding_is_never_accepted():
    tree = example().padded(8)
    check_tree(tree)
    assert len(tree) == 8 and example().padded(2).tokens.tolist() == [[X, Y, Z]]
    sees = ancestor_rows(tree.parents, 2)
    on_path, base = greedy_path(tree, torch.tensor([[0] * 9]), sees)
    assert on_path.sum() == 1 and int(base) == 0


def test_an_accepted_path_comes_in_order_and_filled_up():
    tree = example()
    sees = ancestor_rows(tree.parents, 2)
    on_path, _ = greedy_path(tree, torch.tensor([[X, Z, 0, W]]), sees)
    rows, count = accepted_rows(on_path, depths(sees), 3)
    assert rows.tolist() == [[0, 1, 3, 3]] and int(count) == 3


def test_malformed_trees_are_named():
    with pytest.raises(ValueError, match="siblings must differ"):
        check_tree(DraftTree.build(torch.tensor([[1, 1]]), torch.tensor([[-1, -1]])))
    with pytest.raises(ValueError, match="come before"):
        check_tree(DraftTree.build(torch.tensor([[1, 1]]), torch.tensor([[1, -1]])))
