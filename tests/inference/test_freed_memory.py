"""What the engine holds and lets go: memory of caches, and the model's own weights."""

import gc
import weakref

import pytest
import torch

from draft_heads.inference.batch import BatchEngine
from draft_heads.inference.drafters.base import VanillaDrafter
from draft_heads.inference.engine import DecodingEngine
from draft_heads.inference.generation import GenerationSettings
from draft_heads.inference.target.target import Target
from tests.inference.models import load_target


def test_a_cache_is_freed_as_soon_as_nobody_holds_it():
    target = Target.from_pretrained("tests/tiny_target", device="cpu")
    engine = DecodingEngine(target, VanillaDrafter())
    batch = BatchEngine(target, VanillaDrafter(slots=2))
    gc.collect()
    gc.disable()
    try:
        engine.generate("Name a fruit.", GenerationSettings(8))
        cache, its_engine = weakref.ref(engine.steps.cache), weakref.ref(engine)
        engine.generate([5] * 400, GenerationSettings(8))
        assert cache() is None
        made, new = [], target.new_cache

        def new_cache(*arguments):
            made.append(weakref.ref(cache := new(*arguments)))
            return cache

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(target, "new_cache", new_cache)
            batch.generate([[5, 6], [7]], GenerationSettings(4))
        assert len(made) == 2 and not any(cache() for cache in made)
        del engine
        assert its_engine() is None
    finally:
        gc.enable()


def test_weights_stay_trainable_after_decoding():
    target = load_target("qwen3", torch.float64)
    DecodingEngine(target, VanillaDrafter()).generate([5, 6], GenerationSettings(4))
    assert target.fused is not None
    target.model.requires_grad_(True)
