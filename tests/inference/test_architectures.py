"""Loading targets of other families: their own logits, what a tree gives, and what is refused."""

import itertools
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from draft_heads.heads.checkpoint import HEADS
from draft_heads.heads.config import target_sizes
from draft_heads.inference.engine import DecodingEngine
from draft_heads.inference.evaluation.hf_generate import hf_generate
from draft_heads.inference.generation import GenerationSettings
from draft_heads.inference.target import target as target_module
from draft_heads.inference.target.target import Target
from draft_heads.scripts.checks.architectures import check, check_all, make_model
from tests.inference.models import ForkedDrafter, make_head

_SIZES = {
    **{"vocab_size": 211, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "initializer_range": 0.3},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256},
    **{"bos_token_id": 0, "eos_token_id": None, "pad_token_id": 0},
}
_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
SERVED = {
    "granite": {"logits_scaling": 3.0},
    "cohere": {"logit_scale": 0.25},
    "gemma2": {"final_logit_softcapping": 2.0, "sliding_window": 16, "head_dim": 8},
    "gpt_oss": {**_EXPERTS, "sliding_window": 16, "head_dim": 8},
    "mixtral": _EXPERTS,
}


def _model(model_type, **settings):
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **{**_SIZES, **settings})
    return AutoModelForCausalLM.from_config(config).double().eval()


@pytest.mark.parametrize("model_type", SERVED)
def test_forked_trees_give_the_models_own_answer_and_logits(model_type):
    target = Target(_model(model_type, **SERVED[model_type]), name=model_type)
    prompt = [1 + 7 * i % 210 for i in range(30)]  # longer than the windows
    settings = GenerationSettings(max_new_tokens=24, eos_token_ids=())
    answer = hf_generate(target, prompt, settings, 24)
    generated = DecodingEngine(target, ForkedDrafter(answer, 4)).generate(prompt, settings)
    assert generated.tokens == answer and len(generated.accept_lengths) < 10
    ids = torch.tensor([prompt])
    hidden, _ = target.forward_rows(ids, torch.ones_like(ids), torch.arange(30)[None])
    own = target.model(input_ids=ids).logits
    torch.testing.assert_close(target.logits(hidden), own, rtol=1e-4, atol=1e-4)
    if target.rule.cap is None:
        torch.testing.assert_close(target.view().head_logits(hidden), own, rtol=1e-4, atol=1e-4)
    else:
        assert target.rule.cap == 2.0


def test_a_target_of_int8_weights_labels_trains_and_decodes_through_its_modules():
    quantization = pytest.importorskip("torchao.quantization")
    model = _model("llama").float()
    lm_head = model.get_output_embeddings()
    quantization.quantize_(
        model,
        quantization.Int8WeightOnlyConfig(),
        filter_fn=lambda module, name: isinstance(module, torch.nn.Linear) and module is not lm_head,
    )
    target = Target(model, name="int8")
    assert target.forward_kind == "modules"
    prompt = [1 + 7 * i % 210 for i in range(30)]
    settings = GenerationSettings(max_new_tokens=24, eos_token_ids=())
    answer = hf_generate(target, prompt, settings, 24)
    generated = DecodingEngine(target, ForkedDrafter(answer, 4)).generate(prompt, settings)
    assert generated.tokens == answer and len(generated.accept_lengths) < 10
    labelled = target.label([prompt + answer], keep_hidden=True)[0]
    assert labelled.greedy_ids[30:] == answer
    head = make_head(target)
    head.start_from(labelled.hidden[None], target.view())
    ids = torch.tensor([prompt + answer])
    loss = head(labelled.hidden[None], ids, torch.tensor([labelled.greedy_ids]), ids > 0, target.view()).total
    loss.backward()
    assert loss.isfinite() and head.frame_queries.grad.abs().sum() > 0


def _siblings_see_each_other(monkeypatch):
    own = target_module.visible_keys
    monkeypatch.setattr(target_module, "visible_keys", lambda sees, *rest: own(torch.ones_like(sees).tril(), *rest))


def _window_of_eight(monkeypatch):
    own = target_module.masks_by_layer_type

    def masks(visible, queries, keys, *rest):
        recent = keys[:, None] > queries[:, :, None] - 8
        return {layer_type: mask & recent for layer_type, mask in own(visible, queries, keys, *rest).items()}

    monkeypatch.setattr(target_module, "masks_by_layer_type", masks)


@pytest.mark.parametrize("model_type", ["llama", "qwen3", "glm4", *SERVED])
def test_in_half_precision_wrong_masks_are_refused_and_right_ones_served(model_type, monkeypatch):
    settings = SERVED.get(model_type, {})
    Target(_model(model_type, **settings).bfloat16(), name=model_type)
    for defect in (_siblings_see_each_other, _window_of_eight)[: 2 - ("sliding_window" in settings)]:
        with monkeypatch.context() as patched:
            defect(patched)
            with pytest.raises(ValueError, match="logits that differ"):
                Target(_model(model_type, **settings).bfloat16(), name=model_type)


def test_a_long_rope_text_ends_where_the_frequencies_change():
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [1.0, 2.0, 4.0, 8.0]}
    settings = {"rope_parameters": rope, "original_max_position_embeddings": 40}
    target = Target(_model("phi3", **settings), name="phi3")
    prompt = [1 + 7 * i % 210 for i in range(30)]
    answer = target.model.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=20)[0, 30:].tolist()
    generated = DecodingEngine(target, ForkedDrafter(answer, 4)).generate(prompt, GenerationSettings(20, ()))
    assert generated.tokens == answer[:10] and generated.finish_reason == "context"
    assert len(generated.accept_lengths) < 6  # drafts that hang over the end are accepted up to it


@pytest.mark.slow
def test_ten_architectures_loaded_from_folders_answer_as_generate():
    names = [
        "llama, 3.x rope, tied",
        "qwen3",
        "phi3",
        "olmo2",
        "gemma2",
        "gpt_oss",
        "qwen3_moe",
        "cohere2",
        "deepseek_v3",
    ]
    for name, kind in zip([*names, "gemma3"], itertools.cycle(HEADS)):
        ((row, holds),) = check_all([name], heads=[kind])
        assert holds and row.count("exact") == 2 and "1 heads" in row, row


@pytest.mark.parametrize(
    "name, kinds", [("gemma4_text", ["ctc", "eagle3"]), ("gemma4_text, per-layer inputs", ["ctc"])]
)
def test_layers_of_several_sizes_are_labelled_trained_on_and_drafted_for(name, kinds, tmp_path):
    make_model(name, tmp_path)
    found, _, holds = check(name, tmp_path, torch.float32, 1, kinds, new_tokens=12)
    assert holds and found == f"exact, {len(kinds)} heads", found


def test_a_head_has_the_sizes_of_the_last_full_layer_and_none_is_made_for_projected_states():
    layers = {1: {"head_dim": 16, "num_key_value_heads": 1}}
    config = AutoConfig.for_model("llama", **_SIZES, head_dim=8, layer_types=["sliding_attention", "full_attention"])
    assert {name: target_sizes(config)[name] for name in layers[1]} == {"head_dim": 8, "num_key_value_heads": 2}
    config.per_layer_config = layers
    assert {name: target_sizes(config)[name] for name in layers[1]} == layers[1]
    with pytest.raises(ValueError, match="opt's reads 16 values, its layers have 32; pick another target"):
        target_sizes(AutoConfig.for_model("opt", hidden_size=32, word_embed_proj_dim=16))


def test_where_only_the_cache_of_generate_has_a_window_texts_end_at_it():
    target = Target(_model("arcee", sliding_window=32), name="arcee")
    prompt = [1 + 7 * i % 210 for i in range(20)]
    answer = target.model.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=20)[0, 20:].tolist()
    generated = DecodingEngine(target, ForkedDrafter(answer, 4)).generate(prompt, GenerationSettings(20, ()))
    assert generated.tokens == answer[:12] and generated.finish_reason == "context"
    assert Target(_model("starcoder2", sliding_window=32), name="starcoder2").max_positions == 256


@pytest.mark.parametrize("types", [["full_attention"] * 2, ["full_attention", "sliding_attention"]])
@pytest.mark.parametrize("model_type", ["mistral", "mixtral", "phi3", "qwen2"])
def test_a_window_is_of_the_layers_that_the_models_code_says(model_type, types):
    more = {"mixtral": _EXPERTS, "qwen2": {"use_sliding_window": True, "max_window_layers": 0}}.get(model_type, {})
    target = Target(_model(model_type, sliding_window=16, layer_types=types, **more), name=model_type)
    ids = [1 + 7 * i % 210 for i in range(30)]  # longer than the window
    for _ in range(20):  # without a cache, so by the model's own masks
        ids.append(int(target.model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
    generated = DecodingEngine(target, ForkedDrafter(ids[30:], 4)).generate(ids[:30], GenerationSettings(20, ()))
    assert generated.tokens == ids[30:]
    assert target.layer_types == (types if model_type == "qwen2" else ["sliding_attention"] * 2)


@pytest.mark.parametrize("model_type", ["mistral", "mixtral", "phi3", "starcoder2", "qwen2"])
def test_a_window_that_a_config_calls_unused_is_used_where_the_models_code_does_not_ask(model_type, monkeypatch):
    more = _EXPERTS if model_type == "mixtral" else {}
    model = _model(model_type, sliding_window=16, use_sliding_window=False, **more)
    target, ids = Target(model, name=model_type), [1 + 7 * i % 210 for i in range(30)]
    for _ in range(20):
        ids.append(int(model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
    generated = DecodingEngine(target, ForkedDrafter(ids[30:], 4)).generate(ids[:30], GenerationSettings(20, ()))
    assert generated.tokens == ids[30:] and target.window == (None if model_type == "qwen2" else 16)
    if target.window:  # and where the code is not read, the trial forward tells
        monkeypatch.setattr("draft_heads.inference.target.architecture._code", lambda part: "use_sliding_window")
        longer = _model(model_type, sliding_window=40, use_sliding_window=False, **more)
        with pytest.raises(ValueError, match="logits that differ by"):
            Target(longer, name=model_type)


def test_a_class_of_a_notebook_slides_as_the_one_that_it_inherits_from():
    model = _model("mistral", sliding_window=16)
    model.model.__class__ = type("Own", (type(model.model),), {"__module__": "of_no_file"})
    target = Target(model, name="mistral")
    assert target.layer_types == ["sliding_attention"] * 2 and target.max_positions == 256


def test_types_of_layers_that_a_models_code_does_not_read_are_none():
    """A Llama's config with a window and sliding layers: its attention is full, and the cache of `generate` slides."""
    target = Target(_model("llama", sliding_window=32, layer_types=["sliding_attention"] * 2), name="llama")
    prompt = [1 + 7 * i % 210 for i in range(20)]
    answer = target.model.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=12)[0, 20:].tolist()
    generated = DecodingEngine(target, ForkedDrafter(answer, 4)).generate(prompt, GenerationSettings(20, ()))
    assert generated.tokens == answer and generated.finish_reason == "context"
    assert target.layer_types == ["full_attention"] * 2


def test_attention_that_depends_on_the_length_of_its_mask_is_refused():
    with pytest.raises(ValueError, match=r"drops some of one longer than keep_window_size, 40 of 256; pick another"):
        Target(_model("doge", keep_window_size=40), name="small")
    assert Target(_model("doge"), name="small").max_positions == 256


def test_windows_that_differ_from_layer_to_layer_are_refused():
    listed, layered = (_model(one) for one in ("llama", "mistral"))
    listed.config.sliding_window = [64, None]  # of a config that does not declare it, so that it is not checked
    layered.config.per_layer_config = {0: {"sliding_window": 64}, 1: {"sliding_window": None}}
    for model in (listed, layered):
        with pytest.raises(ValueError, match=r"must have one window, .*; small has sliding_window \[64, None\]; pick"):
            Target(model, name="small")


REFUSED = {
    "mpt": "takes no position ids",
    "qwen3_next": "layers of type linear_attention",
    **dict.fromkeys(("rwkv", "xlstm"), "keeps a recurrent state"),
    "falcon_mamba": "layers of type linear_attention",
    "openai-gpt": "takes no cached keys and values",
    "xlm": "takes no cached keys and values|failed a trial forward",  # what it calls `cache` is a dict of its own
}


@pytest.mark.parametrize("model_type, reason", REFUSED.items())
def test_what_cannot_follow_a_tree_is_refused_with_the_reason(model_type, reason):
    with pytest.raises(ValueError, match=reason):
        Target(_model(model_type), name=model_type)


def test_layers_with_a_window_of_their_own_over_places_in_the_cache_are_refused():
    """GPT-Neo's local layers; a probe's text is shorter than their window. Its global layers follow a tree."""
    local, model = (_model("gpt_neo", attention_types=[[kinds, 1]]) for kinds in (["global", "local"], ["global"] * 2))
    with pytest.raises(ValueError, match="gpt_neo has layers of type local; pick another target"):
        Target(local, name="gpt_neo")
    target = Target(model, name="gpt_neo")
    prompt = [1 + 7 * i % 210 for i in range(200)]
    answer = model.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=20)[0, 200:].tolist()
    generated = DecodingEngine(target, ForkedDrafter(answer, 4)).generate(prompt, GenerationSettings(20, ()))
    assert generated.tokens == answer


def test_of_a_model_class_with_a_state_a_checkpoint_whose_layers_all_attend_is_served():
    state = {"mamba_n_heads": 4, "mamba_d_head": 16, "num_local_experts": 0, "shared_intermediate_size": 64}
    model = _model("granitemoehybrid", **state, layer_types=["full_attention"] * 2, position_embedding_type="rope")
    assert model._is_stateful
    Target(model, name="granitemoehybrid")


def test_logits_by_a_rule_that_the_config_does_not_name_are_refused():
    model = _model("llama")
    model.register_forward_hook(lambda module, args, output: output.__setitem__("logits", output.logits.tanh()))
    with pytest.raises(ValueError, match="scaled or capped as its config says"):
        Target(model, name="tanh")


def test_sizes_that_a_config_gives_for_each_layer_or_type_of_layer():
    """The feed-forward width may be a list; a type of layer without a rotation has None for its settings."""
    config = SimpleNamespace(**_SIZES)  # of another family's class, which takes lists
    sliding = {"rope_type": "default", "rope_theta": 5e5}
    for ropes, theta in (
        ({"full_attention": None, "sliding_attention": sliding}, 5e5),
        ({"full_attention": {"rope_theta": 3e4}, "sliding_attention": sliding}, 3e4),
        ({"rope_type": "default", "rope_theta": 2e4}, 2e4),
        ({"full_attention": None, "sliding_attention": None}, 1e4),
        (None, 1e4),
    ):
        config.rope_parameters, config.intermediate_size = ropes, [64, 96]
        assert (target_sizes(config)["rope_theta"], target_sizes(config)["intermediate_size"]) == (theta, 96)


def test_layers_that_give_several_states_of_a_token_are_not_read():
    """Gemma 3n keeps four copies of each state between its layers, side by side in another dimension."""
    own = {"head_dim": 8, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 211, "laurel_rank": 4}
    target = Target(_model("gemma3n_text", **own, num_kv_shared_layers=0, sliding_window=16))
    assert len(target.label([[5, 6, 7], [8, 9]], True)) == 2
    with pytest.raises(
        ValueError, match=r"several states of a token; those of gemma3n_text have shape \[4, 2, 3, 32\]"
    ):
        target.label([[5, 6, 7], [8, 9]], True, [1])


@pytest.mark.parametrize(
    ("rope", "positions"),
    [
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}, 1024),  # as model cards say
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}, 256),  # the config's are more
        ({"rope_type": "yarn", "factor": None, "original_max_position_embeddings": 32}, 256),
        ({"rope_type": "linear", "factor": 4.0}, 256),
        ({"rope_type": "dynamic", "factor": 2.0}, 256),
        ({"rope_type": "default"}, 256),
    ],
)
def test_yarn_stretches_the_positions_of_a_config_that_has_the_original_ones(rope, positions, caplog):
    caplog.set_level("INFO")
    target = Target(_model("qwen2", rope_parameters={"rope_theta": 1e4, **rope}), name="stretched")
    assert target.max_positions == positions
    assert ("stretched has 256 positions: texts end there" in caplog.text) == (
        rope["rope_type"] in ("linear", "dynamic")
    )
