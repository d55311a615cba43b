"""Long answers: memory is set aside once, before the first token."""

import gc
import subprocess
import sys

import psutil
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from draft_heads.inference.drafters.registry import drafter_for
from draft_heads.inference.engine import DecodingEngine
from draft_heads.inference.generation import GenerationSettings
from draft_heads.inference.target.target import Target
from tests.inference.models import make_head

TOKENS = 10_000


def megabytes():
    """The memory that this process holds."""
    return psutil.Process().memory_info().rss / 2**20


@pytest.mark.slow
def test_memory_does_not_grow_over_ten_thousand_tokens():
    """In a process of its own: what other tests left in the heap decides how much of it a text can use again."""
    done = subprocess.run([sys.executable, "-m", __name__], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]


def decode_ten_thousand_tokens():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=TOKENS + 8,
    )  # fmt: skip
    target = Target(LlamaForCausalLM(config))
    head = make_head(target, "hydra", prefix_attention=True, layers=1).eval()
    engine = DecodingEngine(target, drafter_for(head, target, 8))
    count, held, stores = 0, {}, set()
    for new in engine.stream([1, 2, 3], GenerationSettings(TOKENS)):
        before, count = count, count + len(new)
        stores.add(engine.steps.cache.store.data_ptr())
        for mark in (TOKENS // 10, TOKENS - 10):
            if before < mark <= count:
                gc.collect()
                held[mark] = (megabytes(), sum(isinstance(x, torch.Tensor) for x in gc.get_objects()))
    assert count == TOKENS and len(stores) == 1
    (first, tensors), (last, tensors_later) = held.values()
    assert last - first < 16 and tensors_later - tensors < 2 * TOKENS / 64, held


if __name__ == "__main__":
    decode_ten_thousand_tokens()
