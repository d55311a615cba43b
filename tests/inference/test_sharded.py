"""What a target that is split among processes may lose beside one that is whole."""

import pytest
import torch
from transformers import AfmoeConfig, AfmoeModel, Ernie4_5_MoeConfig, Ernie4_5_MoeModel

from draft_heads.inference.target.sharded import kept_in_float32
from tests.tiny_chat import random_llama

SIZES = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 16,
    "moe_intermediate_size": 8,
    "num_hidden_layers": 2,
}
SIZES |= {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8}
ERNIE = Ernie4_5_MoeConfig(**SIZES, moe_num_experts=4, moe_k=2, moe_layer_start_index=0, moe_num_shared_experts=1)
AFMOE = AfmoeConfig(**SIZES, num_experts=4, num_experts_per_tok=2, num_dense_layers=0)


@pytest.mark.parametrize(
    ("model", "config", "names"),
    [
        (Ernie4_5_MoeModel, ERNIE, ("gate.weight", "e_score_correction_bias")),
        (AfmoeModel, AFMOE, ("expert_bias",)),
    ],
)
def test_what_chooses_experts_is_told_where_it_has_fewer_bits_than_in_the_whole_model(model, config, names):
    decoder = model(config)
    assert kept_in_float32(decoder, torch.bfloat16) == []  # in float32
    found = kept_in_float32(decoder.to(torch.bfloat16), torch.bfloat16)
    assert {name for name, _ in decoder.named_parameters() if name.endswith(names)} == set(found) != set()
    for name, weight in decoder.named_parameters():
        weight.data = weight.data.float() if name in found else weight.data
    assert kept_in_float32(decoder, torch.bfloat16) == []


def test_dense_models_keep_nothing_in_float32():
    assert kept_in_float32(random_llama().model.to(torch.bfloat16), torch.bfloat16) == []
