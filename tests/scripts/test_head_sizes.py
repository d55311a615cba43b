"""Sizes of heads for a shape, without weights, and the memory that recipes name."""

import pytest
from transformers import AutoConfig, LlamaConfig

from draft_heads.configs.recipes import SHAPES, load_recipe
from draft_heads.data.common.model_sizes import count_parameters, weights_read_per_step
from draft_heads.heads.checkpoint import HEADS
from draft_heads.scripts.head_sizes import memory_table, sizes, table
from draft_heads.train.memory import make_head, training_memory


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


def test_a_split_target_leaves_embedding_head_and_two_layers_on_every_gpu():
    """Of Llama 3.1 8B in 16 bits: an eighth of 8.03e9 weights, 2 x 128,256 x 4,096 that heads read, and two of its 32
    layers, its embeddings counted with them."""
    shape = {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "vocab_size": 128256}
    config = LlamaConfig(**shape, num_attention_heads=32, num_key_value_heads=8, tie_word_embeddings=False)
    recipe = load_recipe("medusa", "8b")
    whole, split = (training_memory(config, "medusa", recipe, shared) for shared in (1, 8))
    held = 2 * (8.03e9 / 8 + 2 * 128256 * 4096 + 8.03e9 / 16) / 2**30
    for stage in range(4):
        assert whole[f"zero{stage}"] - split[f"zero{stage}"] == pytest.approx(2 * 8.03e9 / 2**30 - held, rel=1e-3)


def test_stages_share_the_head_between_gpus_and_never_the_target():
    recipe = load_recipe("medusa", "8b")
    memory = training_memory(LlamaConfig(**SHAPES["8b"]), "medusa", recipe)
    fixed = memory["target"] + memory["activations"]
    assert memory["zero0"] == pytest.approx(fixed + memory["head"])
    assert memory["zero3"] == pytest.approx(fixed + memory["head"] * 18 / 16 / 8)  # sums of gradients in float32
    assert memory["zero1"] == pytest.approx(fixed + memory["head"] * (4 + 12 / 8) / 16)


@pytest.mark.parametrize("kind, settings", [("chimera", {}), ("eagle3", {}), ("ctc", {"frames_from": "chain"})])
def test_the_projection_of_target_layers_is_read_once_a_draft(kind, settings):
    config = LlamaConfig(
        vocab_size=100, hidden_size=8, intermediate_size=16, num_hidden_layers=4, num_attention_heads=2
    )
    with_layers, without = (
        make_head(config, kind, {**settings, "target_layers": layers}) for layers in ([1, 2, 3], [])
    )
    assert with_layers.weights_read() - without.weights_read() == 3 * 8 * 8


@pytest.mark.parametrize("name", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "internvl", "gemma3", "llava"])
def test_sizes_and_memory_of_multimodal_targets(name):
    """Whose text configs may not say whether embeddings are tied."""
    config = AutoConfig.for_model(name)
    text = config.get_text_config(decoder=True)
    text.num_hidden_layers = 2
    tied = text.tie_word_embeddings if hasattr(text, "tie_word_embeddings") else config.tie_word_embeddings
    read, every = weights_read_per_step(config), count_parameters(config)
    assert every >= read + text.vocab_size * text.hidden_size * (not tied)
    assert table(config) and memory_table(config).count("\n") == len(HEADS) + 1


def test_a_step_reads_the_experts_of_one_token_and_no_embedding_table():
    shape = {
        "hidden_size": 8,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 4,
    }
    attention, norms = 4 * 8 * 8, 2 * 8
    dense = LlamaConfig(vocab_size=100, intermediate_size=16, **shape)
    layers = 2 * (attention + 3 * 8 * 16 + norms) + 8
    assert weights_read_per_step(dense) == layers + 800 and count_parameters(dense) == layers + 1600
    sparse = AutoConfig.for_model(
        "mixtral",
        **{**shape, "num_key_value_heads": 2, "head_dim": 4, "vocab_size": 100, "intermediate_size": 16},
        **{"num_local_experts": 4, "num_experts_per_tok": 1},
    )
    layers = 2 * (attention + 4 * 8 + 3 * 8 * 16 + norms) + 8  # the router, and one expert of four
    assert weights_read_per_step(sparse) == layers + 800
