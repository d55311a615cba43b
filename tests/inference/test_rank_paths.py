"""Trees of independent distributions: chosen from a list, against the search level by level."""

import itertools

import pytest
import torch

from draft_heads.inference.drafters.heads.level_tree import grow_tree
from draft_heads.inference.drafters.heads.medusa import RankPaths
from tests.inference.trees import check_tree, only


@pytest.mark.parametrize(
    "levels,max_nodes,classes", [(1, 4, 9), (4, 1, 9), (3, 7, 2), (4, 8, 9), (4, 33, 9), (5, 64, 30)]
)
def test_it_is_the_best_tree_of_its_size(levels, max_nodes, classes):
    paths = RankPaths(min(levels, max_nodes), max_nodes, classes)
    vocabulary = torch.arange(classes) + 100
    for seed in range(6):
        torch.manual_seed(seed)
        log_probs = (3 * torch.randn(levels, classes)).log_softmax(-1)
        tree = only(paths.best_tree(log_probs[None, : paths.depth], vocabulary))
        grown = grow_tree(
            log_probs[:1],
            lambda level, tokens, parents, found=log_probs: found[level].expand(*tokens.shape, -1),
            max_nodes,
            levels,
            vocabulary,
        )
        check_tree(tree)
        assert len(tree) == len(grown)
        assert tree.log_probs.sort().values.tolist() == pytest.approx(grown.log_probs[0].sort().values.tolist())
        for node, (token, parent) in enumerate(zip(tree.tokens.tolist(), tree.parents.tolist())):
            level = depth_of(tree.parents.tolist(), node)
            before = float(tree.log_probs[parent]) if parent >= 0 else 0.0
            assert float(tree.log_probs[node]) == pytest.approx(before + float(log_probs[level, token - 100]), abs=1e-5)


def depth_of(parents, node):
    return sum(1 for _ in itertools.takewhile(lambda n: n >= 0, ancestors(parents, node)))


def ancestors(parents, node):
    while True:
        node = parents[node]
        yield node


def test_the_list_is_short_and_has_every_ancestor():
    paths = RankPaths(4, 8, 100)
    assert len(paths.parents) == 8 + 16 + 25 + 23  # products up to 8, 7, 6, 5
    for place, parent in enumerate(paths.parents.tolist()):
        assert parent < place
        level = int(paths.levels[place])
        if level:
            assert paths.ranks[parent, :level].tolist() == paths.ranks[place, :level].tolist()
        else:
            assert parent == -1


def test_certain_tokens_come_behind_their_parents():
    sure = torch.tensor([0.0, -50.0]).expand(3, -1)
    tree = only(RankPaths(3, 3, 2).best_tree(sure[None]))
    assert (tree.tokens.tolist(), tree.parents.tolist()) == ([0, 0, 0], [-1, 0, 1])
