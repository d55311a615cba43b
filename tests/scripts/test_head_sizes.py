"""Sizes of heads for a shape, without weights, and the memory that recipes name."""

import pytest
from transformers import LlamaConfig

from draft_heads.configs.recipes import SHAPES, load_recipe
from draft_heads.heads.checkpoint import HEADS
from draft_heads.scripts.head_sizes import memory_table, sizes, table
from draft_heads.train.memory import training_memory


def test_the_sizes_of_a_small_shape_by_hand():
    config = LlamaConfig(
        vocab_size=100, hidden_size=8, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
    )
    found = {name: (parameters, read) for name, parameters, read in sizes(config)}
    block = 4 * 8 * 8 + 3 * 8 * 16 + 2 * 8
    encoder = 3 * 8 * 8 + 8 * 8
    assert found["chimera"] == (encoder + block + 8 + 4 * 1600, 4 * (encoder + block + 8) + 4 * 1600)
    assert found["chimera_shared"][1] == 4 * (encoder + block + 8 + 800) + 4 * 128
    assert found["medusa"] == (4 * (64 + 8 + 800), 4 * (64 + 8 + 800))
    assert found["ctc"][1] == found["ctc"][0] + 800
    assert table(config).count("\n") == len(found) + 1
    assert memory_table(config).count("/tiny") == len(HEADS)


def test_a_vocabulary_smaller_than_the_recipes_draft_vocabulary_has_none():
    config = LlamaConfig(vocab_size=8000, hidden_size=2048, num_hidden_layers=4, num_attention_heads=16)
    assert memory_table(config).count("/1b") == len(HEADS)


def test_stages_share_the_head_between_gpus_and_never_the_target():
    recipe = load_recipe("medusa", "8b")
    memory = training_memory(LlamaConfig(**SHAPES["8b"]), "medusa", recipe)
    fixed = memory["target"] + memory["activations"]
    assert memory["zero0"] == pytest.approx(fixed + memory["head"])
    assert memory["zero3"] == pytest.approx(fixed + memory["head"] * 18 / 16 / 8)  # sums of gradients in float32
    assert memory["zero1"] == pytest.approx(fixed + memory["head"] * (4 + 12 / 8) / 16)
