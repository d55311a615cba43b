"""Cached hidden states as bytes."""

import pytest
import torch

from draft_heads.configs.options import DTYPES
from draft_heads.data.labels.hidden_cache import cast_for_storage, hidden_bytes, hidden_from_bytes


@pytest.mark.parametrize("name", DTYPES)
def test_hidden_states_of_every_type_survive_the_bytes(name):
    hidden = torch.randn(3, 4, generator=torch.Generator().manual_seed(0)).to(DTYPES[name])
    back = hidden_from_bytes(hidden_bytes(hidden), 3, DTYPES[name])
    assert back.dtype == DTYPES[name] and torch.equal(back, hidden)


def test_states_that_a_type_cannot_hold_are_refused():
    large = torch.tensor([[1.0, 70_000.0]])
    assert cast_for_storage(large, torch.bfloat16, "a").isfinite().all()
    with pytest.raises(ValueError, match="float16 holds values up to 65,504; a state of row a has 70,000; name bfl"):
        cast_for_storage(large, torch.float16, "a")
    with pytest.raises(ValueError, match="some of row b are not in float32; name another dtype"):
        cast_for_storage(large / 0, torch.float32, "b")
