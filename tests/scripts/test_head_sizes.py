"""Sizes of heads for a shape, without weights."""

from transformers import LlamaConfig

from draft_heads.scripts.bench.head_sizes import sizes, table


def test_the_sizes_of_a_small_shape_by_hand():
    config = LlamaConfig(
        vocab_size=100, hidden_size=8, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
    )
    found = {name: (parameters, read) for name, parameters, read in sizes(config)}
    block = 4 * 8 * 8 + 3 * 8 * 16 + 2 * 8
    encoder = 3 * 8 * 8 + 8 * 8
    assert found["chimera, full"] == (encoder + block + 8 + 4 * 1600, 4 * (encoder + block + 8) + 4 * 1600)
    assert found["chimera, shared"][1] == 4 * (encoder + block + 8 + 800) + 4 * 128
    assert found["medusa"] == (4 * (64 + 8 + 800), 4 * (64 + 8 + 800))
    assert found["ctc"][1] == found["ctc"][0] + 800
    assert table(config).count("\n") == len(found) + 1
