"""Cached hidden states as bytes."""

import pytest
import torch

from draft_heads.data.hidden_cache import hidden_bytes, hidden_from_bytes
from draft_heads.data.options import DTYPES


@pytest.mark.parametrize("name", DTYPES)
def test_hidden_states_of_every_type_survive_the_bytes(name):
    hidden = torch.randn(3, 4, generator=torch.Generator().manual_seed(0)).to(DTYPES[name])
    back = hidden_from_bytes(hidden_bytes(hidden), 3, DTYPES[name])
    assert back.dtype == DTYPES[name] and torch.equal(back, hidden)
