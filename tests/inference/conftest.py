"""Targets that several files decode with; a file may have a `target` of its own."""

import pytest
import torch

from tests.inference.models import RANDOM_TARGETS, load_target, make_prompts


@pytest.fixture(scope="module", params=RANDOM_TARGETS)
def target(request):
    return load_target(request.param, torch.float64)


@pytest.fixture(scope="module")
def llama():
    return load_target("llama", torch.float64)


@pytest.fixture(scope="module")
def llama_prompts(llama):
    return make_prompts(llama, 4)
