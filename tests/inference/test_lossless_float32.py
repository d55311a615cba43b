"""Small cells of every target of `make lossless`, float32: a file of its own, so that workers share them."""

import pytest

from tests.inference.matrix_cells import TARGETS, check_cell


@pytest.mark.parametrize("name", TARGETS)
def test_decoding_is_lossless(name):
    check_cell(name, "float32")
