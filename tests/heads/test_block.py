"""Attention with fewer key heads than query heads."""

import pytest
import torch

from draft_heads.heads.block import folded_attention, grouped_attention


@pytest.mark.parametrize("heads, shared", [(4, 4), (4, 2), (6, 1)])
def test_folding_the_queries_of_a_key_head_into_rows_changes_nothing(heads, shared):
    torch.manual_seed(0)
    rows, slots, size = 3, 7, 8
    queries = torch.randn(2, heads, rows, size, dtype=torch.float64)
    keys, values = torch.randn(2, 2, shared, slots, size, dtype=torch.float64)
    mask = torch.rand(rows, slots) < 0.5
    mask[:, 0] = True
    assert torch.allclose(folded_attention(queries, keys, values, mask), grouped_attention(queries, keys, values, mask))
