"""Who sees whom behind cached text: the worked examples, and windows measured along a path of the tree."""

import torch

from draft_heads.inference.target.tree_attention import masks_by_layer_type, visible_keys
from draft_heads.inference.tree import ancestor_rows, depths


def test_rows_see_the_text_their_ancestors_and_nothing_behind_them():
    positions = torch.tensor([[2, 3], [0, 1]])
    sees = torch.ones(2, 2).tril().bool().expand(2, -1, -1)
    visible, keys = visible_keys(sees, positions, torch.tensor([2, 0]), 5)
    assert visible.long().tolist() == [
        [[1, 1, 1, 0, 0], [1, 1, 1, 1, 0]],
        [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0]],
    ]
    assert keys[:, :2].tolist() == [[0, 1], [0, 1]] and keys[0, 2:4].tolist() == [2, 3]


def test_a_window_counts_positions_of_the_path_not_rows_of_the_tree():
    """Two committed rows, then a base token with two drafts, the second with a child and a grandchild."""
    sees = ancestor_rows(torch.tensor([-1, -1, 1, 2]), 3)
    positions = 2 + depths(sees)[None]
    visible, keys = visible_keys(sees[None], positions, torch.tensor([2]), 8)
    masks = masks_by_layer_type(visible, positions, keys, 2, {"full_attention", "sliding_attention"})
    assert masks["full_attention"][0, 4].long().tolist() == [1, 1, 1, 0, 1, 1, 1, 0]
    assert masks["sliding_attention"][0].long().tolist() == [
        [0, 1, 1, 0, 0, 0, 0, 0],
        [0, 0, 1, 1, 0, 0, 0, 0],
        [0, 0, 1, 0, 1, 0, 0, 0],
        [0, 0, 0, 0, 1, 1, 0, 0],
        [0, 0, 0, 0, 0, 1, 1, 0],
    ]
    assert list(masks_by_layer_type(visible, positions, keys, None, {"full_attention"})) == ["full_attention"]
