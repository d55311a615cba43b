"""One server for the tests of a file, and an engine that answers the same alone."""

import pytest

from draft_heads.inference.drafters.registry import DrafterSpec, build_drafter, drafter_for
from draft_heads.inference.engine import DecodingEngine
from draft_heads.inference.target.target import Target
from tests.inference.models import make_head
from tests.inference.serving.served import serve


@pytest.fixture(scope="module")
def target():
    return Target.from_pretrained("tests/tiny_target", device="cpu")


@pytest.fixture(scope="module")
def engine(target):
    """Asked alone, for comparison."""
    return DecodingEngine(target, build_drafter(DrafterSpec.parse("vanilla"), target))


@pytest.fixture(scope="module")
def served(target):
    drafting = DecodingEngine(target, drafter_for(make_head(target), target, 8))
    with serve(drafting, max_body_bytes=100_000) as running:
        yield running


@pytest.fixture
def client(served):
    return served[0]
