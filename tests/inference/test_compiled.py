"""Compiled programs give the answers of the plain loop, at every length."""

import pytest
import torch

from draft_heads.inference.drafters.base import VanillaDrafter
from draft_heads.inference.engine import DecodingEngine
from draft_heads.inference.evaluation.lossless import Oracle
from draft_heads.inference.generation import GenerationSettings
from draft_heads.inference.target.compiled import host_sync_allowed, no_host_sync
from draft_heads.inference.tree import padded_nodes
from tests.inference.models import (
    load_target,
)
from tests.inference.test_ahead import make_drafter


@pytest.mark.slow
def test_a_compiled_target_draws_the_tokens_that_generate_draws():
    target = load_target("llama", torch.float32)
    target.compile()
    engine = DecodingEngine(target, VanillaDrafter())
    for seed in range(3):
        rules = GenerationSettings(24, temperature=0.8, seed=seed)
        expected = Oracle(target, rules).answer(list(range(3, 40)))
        assert engine.generate(list(range(3, 40)), rules).tokens == expected


def test_attention_that_cannot_be_compiled_is_refused():
    target = load_target("llama", torch.float32)
    target.attend("flex")
    with pytest.raises(ValueError, match="compiled programs need attention masked; got flex"):
        target.compile()


def test_sizes_of_trees_are_few():
    assert [padded_nodes(nodes) for nodes in (0, 1, 8, 9, 32, 33, 64, 65)] == [0, 8, 8, 16, 32, 64, 64, 128]


def test_a_cpu_may_be_asked_unless_it_may_not():
    device = torch.device("cpu")
    assert host_sync_allowed(device) and not host_sync_allowed(torch.device("meta"))
    with no_host_sync():
        assert not host_sync_allowed(device)
    assert host_sync_allowed(device)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("medusa", {"layers": 1}),
        ("hydra", {"heads": 2, "prefix_attention": True}),
        ("chimera", {"heads": 2}),
        ("ctc", {}),
    ],
)
def test_compiled_programs_give_the_same_answers_at_every_length_without_compiling_again(kind, settings):
    target = load_target("qwen3", torch.float32)
    rules = GenerationSettings(24)
    prompts = [list(range(3, 40)), list(range(3, 13)), [7] * 90, [9] * 200]
    expected = [Oracle(target, rules).answer(prompt) for prompt in prompts]
    target.compile()
    engine = DecodingEngine(target, make_drafter(target, kind, settings, max_nodes=4))
    with torch._dynamo.config.patch(error_on_recompile=True):
        assert [engine.generate(prompt, rules).tokens for prompt in prompts] == expected
