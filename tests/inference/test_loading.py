"""What a checkpoint and an adapter must have: weights that are missing, and weights that several layers share."""

import json

import pytest
import torch
from peft import LNTuningConfig, LoHaConfig, LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
)

from draft_heads.data.fingerprint import check_fingerprint
from draft_heads.inference.evaluation.hf_assisted import hf_engine
from draft_heads.inference.target.loading import _merge_adapter, load_model
from draft_heads.inference.target.sizes import parameters
from draft_heads.inference.target.target import Target
from tests.internals import changed

IDS = torch.arange(1, 25)[None]


def save_base(folder, tied):
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(
        vocab_size=1024,
        num_hidden_layers=3,
        tie_word_embeddings=tied,
        initializer_range=0.2,
        eos_token_id=None,
        **sizes,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    AutoTokenizer.from_pretrained("tests/tiny_target").save_pretrained(folder)
    return str(folder)


def save_adapter(folder, base, **settings):
    """A LoRA adapter of random weights, all of which matter."""
    adapted = get_peft_model(AutoModelForCausalLM.from_pretrained(base), LoraConfig(r=4, **settings))
    for name, parameter in adapted.named_parameters():
        if "lora_" in name:
            parameter.data += 0.3 * torch.randn_like(parameter)
    adapted.save_pretrained(folder)
    return str(folder)


SHARED = {
    "embedding": {"target_modules": ["q_proj", "embed_tokens"]},
    "LM head": {"target_modules": ["q_proj", "lm_head"]},
    "both": {"target_modules": ["embed_tokens", "lm_head"]},
    "both, tied themselves": {"target_modules": ["q_proj", "lm_head"], "ensure_weight_tying": True},
    "repeated layers": {"target_modules": ["q_proj", "up_proj"], "layer_replication": [[0, 2], [1, 3]]},
}


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("case", SHARED)
@torch.no_grad()
def test_an_adapter_changes_its_own_layers_alone_where_others_share_their_weights(tmp_path, case):
    """As PEFT has it unmerged: the LM head of tied embeddings keeps its weights, and so does a layer's copy."""
    base = save_base(tmp_path / "base", tied=True)
    adapter = save_adapter(tmp_path / "adapter", base, **SHARED[case])
    own = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), adapter).eval()(input_ids=IDS).logits[0]
    plain = AutoModelForCausalLM.from_pretrained(base)(input_ids=IDS).logits[0]
    assert float((own - plain).std() / plain.std()) > 0.1
    target = Target.from_pretrained(base, torch.float32, "cpu", adapter=adapter)
    found = target.prefill(IDS[0], target.new_cache(IDS.shape[1]))
    torch.testing.assert_close(target.logits(found.hidden), own, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(target.model(input_ids=IDS).logits[0], own, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("quantized", [False, True])
def test_an_adapter_that_is_rounded_into_quantized_weights_is_told(tmp_path, caplog, quantized):
    base = save_base(tmp_path / "base", tied=False)
    adapter, model = save_adapter(tmp_path / "adapter", base), AutoModelForCausalLM.from_pretrained(base)
    if quantized:
        model.hf_quantizer = object()  # as transformers leaves it there
    _merge_adapter(model, adapter)
    assert ("is rounded into the target's quantized weights" in caplog.text) is quantized


@torch.no_grad()
def test_an_adapter_that_is_scaled_otherwise_makes_another_target(tmp_path):
    """The same weights, of which twice as much is added: labels of the one are not those of the other."""
    base, found = save_base(tmp_path / "base", tied=True), []
    for alpha in (4, 8, 4):
        torch.manual_seed(1)
        folder = tmp_path / f"adapter {len(found)}"
        save_adapter(folder, base, target_modules=["q_proj", "up_proj"], lora_alpha=alpha)
        found.append(Target.from_pretrained(base, torch.float32, "cpu", adapter=str(folder)).fingerprint())
    assert found[0]["weights_hash"] == found[1]["weights_hash"] == found[2]["weights_hash"]
    check_fingerprint(found[0], found[2], "--dataset D")
    with pytest.raises(ValueError, match=r"D was made with other weights .* \(adapter_scaling '"):
        check_fingerprint(found[0], found[1], "--dataset D")


@pytest.mark.parametrize("kept", [lambda name: "layers.1." in name, lambda name: False])
def test_an_adapter_of_another_model_is_refused(tmp_path, kept):
    """Layers under other names: PEFT warns and leaves them as they were, so that the adapter has no effect there."""
    base = save_base(tmp_path / "base", tied=False)
    adapter = save_adapter(tmp_path / "adapter", base, target_modules=["q_proj"])
    path = tmp_path / "adapter" / "adapter_model.safetensors"
    tensors = load_file(path)
    save_file({name if kept(name) else name.replace("layers", "blocks"): one for name, one in tensors.items()}, path)
    first = (
        r"has no base_model\.model\.model\.layers\.0\.self_attn\.q_proj\.lora_A\.default\.weight, .* and \d more; give"
    )
    told = changed("inference/target/loading.py: _merge_adapter", "PeftModel.from_pretrained", "words its warning anew")
    with pytest.raises(ValueError, match=rf"weights for every layer .*; --target_adapter \S+ {first}"):
        pytest.fail(told) if Target.from_pretrained(base, device="cpu", adapter=adapter) else None


def of_a_fourth_layer(name):
    return name.replace("layers.2", "layers.3") if "layers.2" in name else None


def bias_of_keys(name):
    return name.replace("q_proj.lora_A.weight", "k_proj.bias") if "layers.0" in name and "lora_A" in name else None


MORE = {
    "LoRA": (LoraConfig(r=4, target_modules=["q_proj"]), of_a_fourth_layer, r"layers\.3\S*lora_A\.weight, \S+"),
    "LoHa": (LoHaConfig(r=4, target_modules=["q_proj"]), of_a_fourth_layer, r"layers\.3\S*hada_w1_a, .*"),
    "norms": (LNTuningConfig(target_modules=["input_layernorm"]), of_a_fourth_layer, r"layers\.3\.input_layernorm\S*"),
    "a bias": (LoraConfig(r=4, target_modules=["q_proj"]), bias_of_keys, r"layers\.0\.self_attn\.k_proj\.bias"),
}


@pytest.mark.parametrize("case", MORE)
def test_an_adapter_with_more_layers_than_the_target_is_refused(tmp_path, case):
    """Those of its fourth layer, or biases of layers without one, would be dropped, whatever kind of adapter it is."""
    config, added, told = MORE[case]
    base = save_base(tmp_path / "base", tied=False)
    get_peft_model(AutoModelForCausalLM.from_pretrained(base), config).save_pretrained(tmp_path / "adapter")
    path = tmp_path / "adapter" / "adapter_model.safetensors"
    tensors = load_file(path)
    more = {name: one.clone() for old, one in tensors.items() if (name := added(old)) is not None}
    save_file(tensors | more, path)
    with pytest.raises(ValueError, match=rf"has base_model\.\S*{told} beside them; give"):
        Target.from_pretrained(base, device="cpu", adapter=str(tmp_path / "adapter"))


@torch.no_grad()
def test_an_adapter_from_before_its_layers_were_renamed_is_merged(tmp_path):
    """Mixtral's router and experts were parts of `block_sparse_moe` up to transformers 4; PEFT finds their places."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = MixtralConfig(
        **sizes, vocab_size=1024, num_hidden_layers=2, num_local_experts=4, eos_token_id=None, initializer_range=0.2
    )
    MixtralForCausalLM(config).save_pretrained(tmp_path / "base")
    AutoTokenizer.from_pretrained("tests/tiny_target").save_pretrained(tmp_path / "base")
    base = str(tmp_path / "base")
    adapter = save_adapter(tmp_path / "adapter", base, target_modules=["gate"], lora_alpha=8)
    path = tmp_path / "adapter" / "adapter_model.safetensors"
    renamed = {name.replace("mlp.gate", "block_sparse_moe.gate"): one for name, one in load_file(path).items()}
    save_file(renamed, path)
    merged = Target.from_pretrained(base, torch.float32, "cpu", adapter=adapter).model.state_dict()
    before = AutoModelForCausalLM.from_pretrained(base).state_dict()
    for layer in range(2):
        a, b = (renamed[f"base_model.model.model.layers.{layer}.block_sparse_moe.gate.lora_{x}.weight"] for x in "AB")
        name = f"model.layers.{layer}.mlp.gate.weight"
        torch.testing.assert_close(merged[name], before[name] + 2 * b @ a)  # alpha 8 over rank 4


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("settings", [{"modules_to_save": ["embed_tokens"]}, {"trainable_token_indices": [3, 5]}])
def test_an_adapter_whose_file_has_its_embedding_twice_is_merged(tmp_path, settings):
    base = save_base(tmp_path / "base", tied=True)
    adapted = get_peft_model(
        AutoModelForCausalLM.from_pretrained(base), LoraConfig(r=4, target_modules=["q_proj"], **settings)
    )
    adapted.save_pretrained(tmp_path / "adapter", save_embedding_layers=True)
    assert parameters(Target.from_pretrained(base, device="cpu", adapter=str(tmp_path / "adapter"))) > 0


BROKEN = {
    "no LM head": (lambda tensors: tensors.pop("lm_head.weight"), {}, r"has no lm_head\.weight; copy it again, or"),
    "a layer too few": (None, {"num_hidden_layers": 4}, r"has no model\.layers\.3\.\S+, .*, and 6 more; copy it again"),
    "another shape": (
        None,
        {"intermediate_size": 60},
        r"has model\.layers\.0\.mlp\.down_proj\.weight of shape \[32, 64\]",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_checkpoint_that_lacks_weights_is_refused(tmp_path, case):
    """transformers makes random ones in their place: a reward model would be a target with an LM head of noise."""
    change, settings, told = BROKEN[case]
    base = save_base(tmp_path, tied=False)
    if change is not None:
        tensors = load_file(tmp_path / "model.safetensors")
        change(tensors)
        save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | settings))
    for lend_to in (None, torch.device("cpu")):
        with pytest.raises(ValueError, match=rf"a model has all weights that its config\.json asks for; {base} {told}"):
            Target.from_pretrained(base, device="cpu", lend_to=lend_to)


@pytest.mark.parametrize("lost", ["w1", "w2", "w3"])
def test_a_mixture_without_one_experts_matrix_is_refused(tmp_path, lost):
    """transformers joins the experts of a layer while it reads: it gives random weights for those or stops there."""
    base, sizes = save_base(tmp_path, tied=False), {"hidden_size": 32, "intermediate_size": 64, "vocab_size": 1024}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = MixtralConfig(num_hidden_layers=2, num_local_experts=4, eos_token_id=None, **sizes, **heads)
    MixtralForCausalLM(config).save_pretrained(base)
    assert parameters(Target.from_pretrained(base, device="cpu")) > 0
    tensors = load_file(tmp_path / "model.safetensors")
    tensors.pop(next(name for name in tensors if f"experts.2.{lost}." in name))
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=rf"{base} (has|named above do not).*; copy it again"):
        Target.from_pretrained(base, device="cpu")
    with pytest.raises(ValueError, match=rf"{base} (has|named above do not).*; copy it again"):
        hf_engine(save_target(tmp_path / "target"), {"assistant": base})


def save_target(folder):
    return Target.from_pretrained(save_base(folder, tied=False), device="cpu")


def test_an_assistant_that_is_cut_short_or_no_model_is_refused(tmp_path):
    target, base = save_target(tmp_path / "target"), save_base(tmp_path / "base", tied=False)
    weights = tmp_path / "base" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    for load in (lambda: hf_engine(target, {"assistant": base}), lambda: Target.from_pretrained(base, device="cpu")):
        with pytest.raises(ValueError, match=rf"{base} has weights that cannot be read .* cut short, .* copy it again"):
            load()
    weights.unlink()
    for written in (b"", b"PK\x03\x04 and no more", b"version https://git-lfs.github.com/spec/v1\noid sha256:ab\n"):
        (tmp_path / "base" / "pytorch_model.bin").write_bytes(written)
        for load in (lambda: hf_engine(target, {"assistant": base}), lambda: Target.from_pretrained(base)):
            with pytest.raises(
                ValueError, match=rf"{base} has weights that cannot be read \([^.]+\); .* copy it again"
            ):
                load()
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"assistant \S+/empty is no model's folder"):
        hf_engine(target, {"assistant": str(tmp_path / "empty")})
    with pytest.raises(ValueError, match=r"assistant \S+/nowhere does not exist"):
        hf_engine(target, {"assistant": str(tmp_path / "nowhere")})


def test_an_assistant_of_transformers_own_that_lacks_weights_is_refused(tmp_path):
    """Its drafts would be noise, and the baseline's speed another model's."""
    target = Target.from_pretrained(save_base(tmp_path / "base", tied=False), device="cpu")
    config = json.loads((tmp_path / "base" / "config.json").read_text())
    (tmp_path / "base" / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 4}))
    with pytest.raises(ValueError, match=r"asks for; \S+/base has no model\.layers\.3\.\S+, .*, and 6 more"):
        hf_engine(target, {"assistant": str(tmp_path / "base")})


@pytest.mark.parametrize("wrong", [{"hidden_act": "sweeglu"}, {"head_dim": 0}, {"pad_token_id": 9999}])
def test_a_config_of_which_no_model_can_be_made_is_refused_in_a_sentence(tmp_path, wrong):
    """Its class takes the values, and building the model raises whatever it comes to first."""
    base = tmp_path / "base"
    save_base(base, tied=False)
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps(config | wrong))
    with pytest.raises(
        ValueError, match=r"no model can be made from the config.json of \S+/base \(\w+: .*; copy it again"
    ):
        Target.from_pretrained(str(base), device="cpu")


@pytest.mark.parametrize(
    ("settings", "weights"),
    [
        *[
            (settings, None)
            for settings in ({"r": None}, {"lora_alpha": "x"}, {"target_modules": 5}, {"peft_type": "ABC"})
        ],
        ({"peft_type": "PREFIX_TUNING"}, None),
        *[
            ({}, weights)
            for weights in (b"", b"version https://git-lfs.github.com/spec/v1\nsize 12", b"PK\3\4 cut short")
        ],
    ],
)
def test_an_adapter_that_cannot_be_used_is_refused_in_a_sentence(tmp_path, settings, weights):
    base = save_base(tmp_path / "base", tied=False)
    folder = tmp_path / "adapter"
    save_adapter(folder, base, target_modules=["q_proj"])
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps(config | settings))
    if weights is not None:
        (folder / "adapter_model.safetensors").unlink()
        (folder / "adapter_model.bin").write_bytes(weights)
    with pytest.raises(
        ValueError, match=r"--target_adapter \S+ cannot be loaded and merged \(.+\); give a PEFT adapter"
    ):
        Target.from_pretrained(base, device="cpu", adapter=str(folder))


@pytest.mark.parametrize(
    ("over", "taken"),
    [
        ("model.layers.1.self_attn.q_proj.weight_scale", False),
        ("model.layers.2.mlp.up_proj.bias", False),
        ("lm_head.bias", False),
        ("model.layers.1.self_attn.rotary_emb.inv_freq", True),  # as Llamas of 2023 have
        ("vision_tower.patches.weight", True),
    ],
)
def test_a_checkpoint_with_more_weights_of_a_layer_is_refused(tmp_path, over, taken):
    """Scales or a bias that nothing adds: the model would answer, losslessly, with another model's text."""
    base = save_base(tmp_path, tied=False)
    tensors = load_file(tmp_path / "model.safetensors")
    save_file({**tensors, over: torch.ones(32)}, tmp_path / "model.safetensors", {"format": "pt"})
    if taken:
        assert parameters(Target.from_pretrained(base, device="cpu")) > 0
        return
    with pytest.raises(
        ValueError, match=rf"a layer takes all weights .* {base} do not take {over}: config\.json is of an"
    ):
        Target.from_pretrained(base, device="cpu")
    with pytest.raises(ValueError, match=f"do not take {over}"):
        hf_engine(Target.from_pretrained("tests/tiny_target", device="cpu"), {"assistant": base})


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        (
            {"quant_method": "modelopt", "quant_algo": "FP8"},
            "is quantised by modelopt, which this transformers does not",
        ),
        ({"quant_method": "awq", "bits": 4}, "cannot be loaded without a further package: .*pip install"),
    ],
)
def test_a_quantisation_that_cannot_be_read_is_refused(tmp_path, settings, reason):
    """transformers loads weights of an unknown one as they are, without their scales, and warns."""
    base = save_base(tmp_path, tied=False)
    tensors = load_file(tmp_path / "model.safetensors")
    name = "model.layers.1.self_attn.q_proj.weight"
    scaled = {name: (tensors[name] * 8).to(torch.float8_e4m3fn), f"{name}_scale": torch.tensor(1 / 8)}
    save_file({**tensors, **scaled}, tmp_path / "model.safetensors", {"format": "pt"})
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": settings}))
    with pytest.raises(ValueError, match=reason):
        Target.from_pretrained(base, device="cpu")


def test_scores_are_capped_whatever_this_transformers_would_do(monkeypatch):
    """transformers 5.17 runs Gemma 2 with an attention that has no cap, and says nothing."""
    asked = []

    class Loaded:
        @staticmethod
        def from_pretrained(path, attn_implementation, **options):
            asked.append(attn_implementation)
            raise KeyboardInterrupt  # enough

    monkeypatch.setattr("draft_heads.inference.target.loading.model_class", lambda config: Loaded)
    for name in ("gemma2", "gemma3_text", "llama"):
        with pytest.raises(KeyboardInterrupt):
            load_model("there", AutoConfig.for_model(name), None, torch.device("cpu"))
    assert asked == ["eager", "sdpa", "sdpa"]
