"""A small target and a file of conversations."""

import pytest

from tests.tiny_chat import save_target, write_sharegpt


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    """A target that ends some answers: token 138 is among its end tokens."""
    return save_target(tmp_path_factory.mktemp("target"), extra_end=138)


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return write_sharegpt(tmp_path_factory.mktemp("source") / "chat.json")
