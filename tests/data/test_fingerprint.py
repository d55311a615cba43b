"""What two targets must share, and the error that names where they differ."""

import json

import pytest
import torch
from transformers import Gemma3TextConfig, LlamaConfig, MistralConfig, Qwen3Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from draft_heads.data.fingerprint import (
    check_fingerprint,
    compared,
    constants,
    target_fingerprint,
    weights_hashes,
)
from draft_heads.inference.target.target import Target
from tests.tiny_chat import byte_tokenizer, random_llama, template, word_tokenizer

CONFIG = random_llama().config


def fingerprint(style="chatml", weights="w", config=CONFIG):
    return target_fingerprint(config, byte_tokenizer(template(style)), weights and {"weights_hash": weights})


def test_using_the_tokenizer_keeps_the_fingerprint():
    tokenizer = byte_tokenizer(template("chatml"))
    before = target_fingerprint(CONFIG, tokenizer)
    tokenizer.pad_token = "</s>"
    tokenizer(["a", "longer text"], padding=True, truncation=True, max_length=3)
    assert (before["vocab_size"], before["hidden_size"]) == (300, 32)
    check_fingerprint(before, target_fingerprint(CONFIG, byte_tokenizer(template("chatml"))), "--dataset D")


def test_every_difference_is_named():
    ours = target_fingerprint(CONFIG, byte_tokenizer(template("chatml")))
    other = target_fingerprint(random_llama(hidden_size=16).config, word_tokenizer(template("vicuna"), "a b"))
    with pytest.raises(
        ValueError, match=r"^--dataset D belongs to another target: hidden_size 16 against .*32"
    ) as error:
        check_fingerprint(other, ours, "--dataset D")
    assert all(name in str(error.value) for name in ("hidden_size", "tokenizer_hash", "chat_template_hash"))
    assert "vocab_size" not in str(error.value)


def test_an_architecture_of_the_same_sizes_and_tokenizer_is_another_target():
    qwen = Qwen3Config(**{name: value for name, value in CONFIG.to_dict().items() if name != "model_type"})
    for fine_tune in (False, True):
        with pytest.raises(ValueError, match=r"belongs to another target: architecture 'qwen3' against .*'llama'"):
            check_fingerprint(fingerprint(config=qwen, weights="q"), fingerprint(), "--dataset D", fine_tune)


@pytest.mark.parametrize("fine_tune", [False, True], ids=["labels", "head"])
def test_another_template_alone_is_named_as_the_cause_with_the_remedy(fine_tune):
    with pytest.raises(ValueError, match=r"for this target with another chat template .* pass the chat template"):
        check_fingerprint(fingerprint("vicuna"), fingerprint(), "--dataset D", fine_tune)


def test_other_weights_refuse_labels_and_are_told_of_a_head(caplog):
    for made_for in (fingerprint(weights="base"), fingerprint("vicuna", weights="base")):
        check_fingerprint(made_for, fingerprint(), "head H", fine_tune=True)
    told = [record.getMessage() for record in caplog.records]
    assert all(line.startswith("head H was trained for another model of the same architecture") for line in told)
    assert ["(other weights):" in told[0], "(other weights, another chat template):" in told[1]] == [True, True]
    with pytest.raises(ValueError, match="D was made with other weights of the same architecture"):
        check_fingerprint(fingerprint(weights="base"), fingerprint(), "--dataset D")


def test_what_an_older_version_did_not_write_is_not_compared_and_told(caplog):
    older = {name: fingerprint()[name] for name in ("vocab_size", "hidden_size", "tokenizer_hash")}
    check_fingerprint(older, fingerprint(), "head H", fine_tune=True)
    assert "head H does not say what it was made for in architecture" in caplog.text
    caplog.clear()
    check_fingerprint(fingerprint(), fingerprint(weights=None), "head H")  # a target whose weights nobody has seen
    assert not caplog.text


def test_weights_are_recognised_in_every_type_and_changed_ones_are_not():
    ours = weights_hashes(random_llama())
    assert all(weights_hashes(random_llama().bfloat16().to(dtype)) == ours for dtype in (torch.bfloat16, torch.float32))
    assert weights_hashes(random_llama().bfloat16().half()) == ours
    tuned = random_llama()
    with torch.no_grad():
        tuned.model.layers[1].self_attn.v_proj.weight.add_(0.05 * torch.randn(16, 32))
    assert weights_hashes(tuned) != ours
    assert Target(random_llama(), byte_tokenizer(template("chatml"))).fingerprint()["weights_hash"]


@pytest.mark.parametrize("factor", [2.0, -1.0, 1.05, 0.0])
@pytest.mark.parametrize("name", ["model.norm.weight", "model.layers.0.mlp.up_proj.weight", "lm_head.weight"])
def test_another_scale_of_one_tensor_is_another_model_but_not_to_an_older_fingerprint(factor, name, caplog):
    def of(model):
        return target_fingerprint(CONFIG, byte_tokenizer(template("chatml")), weights_hashes(model))

    scaled = random_llama()
    scaled.get_parameter(name).data.mul_(factor)
    with pytest.raises(ValueError, match="D was made with other weights of the same architecture"):
        check_fingerprint(of(random_llama()), of(scaled), "--dataset D")
    before = {key: value for key, value in of(random_llama()).items() if key != "scales_hash"}
    check_fingerprint(before, of(random_llama()), "--dataset D")
    if factor == 2:
        check_fingerprint(before, of(scaled), "--dataset D")  # which knows no scales
    assert not caplog.messages


ROPE = {"rope_type": "default", "rope_theta": 10000.0}


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"rope_parameters": {**ROPE, "rope_theta": 500000.0}}, "rope_parameters"),
        ({"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}}, "rope_parameters"),
        ({"rope_parameters": {**ROPE, "partial_rotary_factor": 0.5}}, "rope_parameters"),
        ({"rms_norm_eps": 1e-3}, "rms_norm_eps"),
        ({"sliding_window": 8}, "sliding_window"),
        ({"sliding_window": None}, "sliding_window"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"output_gate_type": "sigmoid"}, "output_gate_type"),
    ],
)
def test_the_same_weights_under_other_constants_are_another_model_but_not_to_an_older_fingerprint(
    changed, named, caplog
):
    """They answer otherwise: labels of one are not those of the other, though no weight, size or token differs."""

    def of(**values):
        config = MistralConfig(
            **CONFIG.to_dict() | {"rope_parameters": ROPE, "sliding_window": 64, "output_gate_type": "swish"} | values
        )
        return target_fingerprint(config, byte_tokenizer(template("chatml")), {"weights_hash": "w"})

    ours = of()
    check_fingerprint(json.loads(json.dumps(ours)), of(), "--dataset D")
    for one, other in ((of(**changed), ours), (ours, of(**changed))):
        with pytest.raises(ValueError, match=rf"D was made with other weights .* \(constants.{named} "):
            check_fingerprint(one, other, "--dataset D")
    check_fingerprint(
        {name: value for name, value in ours.items() if name != "constants"}, of(**changed), "--dataset D"
    )
    assert not caplog.messages
    check_fingerprint(of(**changed), ours, "head H", fine_tune=True)
    assert (
        f"head H was trained for another model of the same architecture and tokenizer (constants.{named}" in caplog.text
    )


@pytest.mark.parametrize(
    ("rotary", "counts"),
    [
        ({"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}, True),
        ({"rope_type": "yarn", "factor": 4.0}, False),
        ({"rope_type": "linear", "factor": 4.0}, False),
    ],
)
def test_the_longest_text_counts_where_attention_is_scaled_by_it(rotary, counts):
    """As transformers' own rotations say, of heads of 8."""

    def config(longest):
        rope = {"rope_theta": 1e4, "original_max_position_embeddings": 64, **rotary}
        sizes = {"hidden_size": 32, "num_attention_heads": 4, "head_dim": 8}
        return LlamaConfig(rope_parameters=rope, max_position_embeddings=longest, **sizes)

    both = config(256), config(2048)
    scales = {ROPE_INIT_FUNCTIONS[rotary["rope_type"]](one, torch.device("cpu"), seq_len=128)[1] for one in both}
    assert (len(scales) == 2) == counts
    found = [{"constants": constants(one)} for one in both]
    assert [name for name, *_ in compared(*found)] == ["constants.max_position_embeddings"] * counts


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"bits": 8}, ["bits"]),
        ({"group_size": 32}, ["group_size"]),
        ({"sym": False}, ["sym"]),
        ({"desc_act": True}, ["desc_act"]),
        ({"use_exllama": False, "bnb_4bit_compute_dtype": "float32", "modules_to_not_convert": ["a"]}, []),
    ],
)
def test_weights_that_are_quantized_otherwise_are_others(changed, named):
    base = {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True, "desc_act": False, "use_exllama": True}

    def of(**values):
        config = MistralConfig(**CONFIG.to_dict(), quantization_config={**base, **values})
        return target_fingerprint(config, byte_tokenizer(template("chatml")), {"weights_hash": "w"})

    assert [name for name, *_ in compared(of(), of(**changed))] == [f"constants.quantization_config.{x}" for x in named]
    plain = target_fingerprint(CONFIG, byte_tokenizer(template("chatml")), {"weights_hash": "w"})
    assert "quantization" in [name for name, *_ in compared(of(), plain)]


def test_what_computes_nothing_and_what_another_version_does_not_write_are_no_difference():
    def of(**values):
        return target_fingerprint(MistralConfig(**CONFIG.to_dict() | values), byte_tokenizer(template("chatml")))

    ours = of()
    other = of(
        use_cache=False, attention_dropout=0.5, max_position_embeddings=4096, bos_token_id=7, initializer_range=1.0
    )
    assert ours["constants"] == other["constants"]
    newer = {**ours, "constants": {**ours["constants"], "a_field_of_tomorrow": 3}}
    for one, another in ((ours, newer), (newer, ours)):
        check_fingerprint(one, another, "--dataset D")


def test_a_model_saved_anew_is_the_same_model(tmp_path):
    """transformers saves the rotations of Gemma 3's types of layers in another order than it reads them in."""
    older = {"rope_theta": 1e6, "rope_local_base_freq": 1e4, "num_hidden_layers": 2, "hidden_size": 32, "head_dim": 8}
    config = Gemma3TextConfig.from_dict(older)
    config.save_pretrained(tmp_path)
    tokenizer = byte_tokenizer(template("chatml"))
    before, after = (target_fingerprint(one, tokenizer) for one in (config, Gemma3TextConfig.from_pretrained(tmp_path)))
    assert before == after and before["constants"]["rope_parameters"]["sliding_attention"]["rope_theta"] == 1e4
