"""Loading a target, and the target as a labeller."""

import json
import os
import subprocess
import sys
from importlib.metadata import version
from types import SimpleNamespace

import pytest
import torch
from packaging.version import Version
from torch import nn
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from draft_heads.data.common import model_sizes
from draft_heads.inference.target import sharded
from draft_heads.inference.target.sizes import bytes_in_memory, parameters, weights_per_token
from draft_heads.inference.target.target import Target
from tests.tiny_chat import byte_tokenizer, random_llama, save_target, template

ROWS = [[5 + (7 * i + 3 * j) % 290 for j in range(4 + 5 * i)] for i in range(7)]


def test_labels_are_the_models_choice_one_position_earlier():
    model = random_llama().double()
    labelled = Target(model, byte_tokenizer(template("chatml"))).label(ROWS, keep_hidden=True)
    for row, (greedy, hidden, _) in zip(ROWS, labelled):
        out = model(torch.tensor([row]), output_hidden_states=True)
        assert greedy == [-100] + out.logits[0, :-1].argmax(-1).tolist()
        assert hidden.shape == (len(row), 32)
        torch.testing.assert_close(hidden, out.hidden_states[-1][0])


def test_labelled_hidden_states_are_those_that_training_computes():
    target = Target(random_llama().double(), byte_tokenizer(template("chatml")))
    for row, (_, hidden, _) in zip(ROWS, target.label(ROWS, keep_hidden=True)):
        ids = torch.tensor([row])
        recomputed, _ = target.forward_rows(ids, torch.ones_like(ids), torch.arange(len(row))[None])
        torch.testing.assert_close(hidden, recomputed[0])


def test_target_loads_with_every_end_token_and_frozen(tmp_path):
    target = Target.from_pretrained(save_target(tmp_path, extra_end=7))
    assert target.end_token_ids == (2, 4, 7)  # eos, the template's <|im_end|>, the generation config's
    assert (target.max_positions, target.model.dtype) == (256, torch.float32)
    assert not any(weight.requires_grad for weight in target.model.parameters())


def test_without_a_generation_config_the_models_config_names_the_end_tokens():
    model = random_llama()
    model.generation_config.eos_token_id, model.config.eos_token_id = None, [2, 9]
    assert Target(model).end_token_ids == (2, 9)


def test_rows_are_labelled_where_the_pad_token_has_no_row_in_the_embedding():
    tokenizer = byte_tokenizer(template("chatml"))
    tokenizer.add_special_tokens({"pad_token": "<pad, added later>"})
    target = Target(random_llama(), tokenizer)
    assert tokenizer.pad_token_id >= len(target.embedding.weight)
    short, long = target.label([[1, 2, 3], [1, 2, 3, 4, 5]], keep_hidden=False)
    assert short.greedy_ids == long.greedy_ids[:3] == target.label([[1, 2, 3]], keep_hidden=False)[0].greedy_ids


def test_unknown_precision_lists_the_valid_ones(tmp_path):
    with pytest.raises(ValueError, match="--dtype half is unknown; pass one of float32, float16, bfloat16"):
        Target.from_pretrained(str(tmp_path), dtype="half")


def test_a_model_that_is_no_causal_lm_is_named(tmp_path):
    folder = save_target(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text()) | {"model_type": "clip"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"\(clip\) is no causal LM"):
        Target.from_pretrained(folder)


def test_a_split_target_keeps_the_type_that_was_asked_for(tmp_path):
    """DeepSpeed's process group outlives a test, so another process loads the target."""
    code = f"""
import torch.distributed as dist
from draft_heads.inference.target import sharded
from draft_heads.inference.target.target import Target
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
sharded.check_run = lambda *_: None
target = Target.from_pretrained({save_target(tmp_path)!r}, "bfloat16", "cpu", split=True)
print({{p.dtype for p in target.model.parameters()}}, {{p.ds_tensor.dtype for p in target.decoder.parameters()}})
"""
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "LOCAL_RANK": "0"}, capture_output=True, text=True, check=False
    )
    refused = "needs rotary frequencies in float32" in done.stderr and Version(version("transformers")) < Version(
        "5.24"
    )
    assert refused or "{torch.bfloat16} {torch.bfloat16}" in done.stdout, done.stdout + done.stderr


@pytest.mark.parametrize("own", [torch.bfloat16, None])
def test_a_split_target_on_a_gpu_has_the_type_of_its_config(tmp_path, monkeypatch, own):
    folder = save_target(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["dtype"] = own and "bfloat16"
    (tmp_path / "config.json").write_text(json.dumps(config))
    asked = []

    def loading(dtype):
        asked.append(dtype)
        raise ZeroDivisionError

    monkeypatch.setattr(sharded, "check_run", lambda *_: None)
    monkeypatch.setattr(sharded, "loading", loading)
    with pytest.raises(ZeroDivisionError):
        Target.from_pretrained(folder, device="cuda", split=True)
    assert asked == [own or torch.float32]


@pytest.mark.parametrize("step", ["to", "__call__"])
def test_a_target_too_large_for_the_memory_names_the_options_that_lower_it(tmp_path, monkeypatch, step):
    """step: the weights do not fit, or they leave too little for the probe's forward."""

    def full(*args, **options):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    folder = save_target(tmp_path)
    monkeypatch.setattr(LlamaForCausalLM, step, full)
    with pytest.raises(ValueError, match=r"loading the target ran out of memory; .*--dtype.*--device auto"):
        Target.from_pretrained(folder)


@pytest.mark.parametrize(
    ("device", "adapter", "placed"),
    [("cuda:1", None, {"": torch.device("cuda:1")}), ("cuda:1", "folder", None), ("cpu", None, None)],
)
def test_weights_go_to_a_gpu_one_by_one(tmp_path, monkeypatch, device, adapter, placed):
    asked = []

    def load(*args, **options):
        asked.append(options.get("device_map"))
        raise ZeroDivisionError

    folder = save_target(tmp_path)
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", load)
    with pytest.raises(ZeroDivisionError):
        Target.from_pretrained(folder, device=device, adapter=adapter)
    assert asked == [placed]


def test_a_target_that_is_not_run_is_not_spread_over_devices(tmp_path, monkeypatch):
    asked, load = [], AutoModelForCausalLM.from_pretrained

    def noted(*args, **options):
        asked.append(options.get("device_map"))
        return load(*args, **options)

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", noted)
    Target.from_pretrained(save_target(tmp_path), device="auto", lend_to=torch.device("cpu"))
    assert asked == [None]


@pytest.mark.parametrize(("dtype", "lent"), [(None, torch.float32), ("bfloat16", torch.bfloat16)])
def test_of_a_target_that_is_not_run_only_what_heads_read_is_converted(tmp_path, monkeypatch, dtype, lent):
    """The rest stays as it lies in its files, which memory is mapped to; no forward takes it through memory."""
    folder = save_target(tmp_path)
    random_llama().bfloat16().save_pretrained(folder)
    whole = Target.from_pretrained(folder, device="cpu").fingerprint()
    monkeypatch.setattr(LlamaForCausalLM, "forward", None)
    target = Target.from_pretrained(folder, dtype, lend_to=torch.device("cpu"))
    assert {weight.dtype for weight in target.decoder.layers.parameters()} == {torch.bfloat16}
    view = target.view()
    assert {view.embedding.weight.dtype, view.lm_head_weight.dtype, target.dtype} == {lent}
    assert target.fingerprint() == whole
    assert bytes_in_memory(target) == 2 * 300 * 32 * lent.itemsize


def test_a_split_target_holds_its_share_what_heads_read_and_two_layers(monkeypatch):
    """Of two processes: half of the decoder's 10 x 4 embedding and of its two 4 x 4 layers, a whole embedding and LM
    head, and two layers, a decoder's mean with its embedding."""
    decoder = nn.ModuleList([nn.Embedding(10, 4), *(nn.Linear(4, 4, bias=False) for _ in range(2))])
    for weight in decoder.parameters():
        weight.ds_id, weight.ds_numel = 0, weight.numel()
        weight.data = torch.empty(0)  # as DeepSpeed leaves it
    embedding, lm_head = nn.Embedding(10, 4), nn.Linear(4, 10, bias=False)
    model = nn.ModuleList([decoder, lm_head])
    target = SimpleNamespace(
        **{"model": model, "decoder": decoder, "embedding": embedding, "lm_head": lm_head, "runs": True, "split": True},
        **{"layer_types": ["full_attention"] * 2, "dtype": torch.float32},
    )
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    assert bytes_in_memory(target) == 4 * ((20 + 8 + 8) + (40 + 40) + (40 + 16 + 16))


@pytest.mark.parametrize("packed", [False, True])
def test_a_target_whose_decoder_cannot_be_made_of_its_config_has_the_size_of_its_weights(monkeypatch, packed):
    """As of PaddleOCR-VL, whose text config transformers maps to no decoder."""
    target = Target(random_llama(), byte_tokenizer(template("chatml")))
    if packed:
        target.model.config.quantization_config = {"quant_method": "awq"}
    monkeypatch.setattr(model_sizes.AutoModel, "from_config", lambda _: {}["of no model"])
    expected = sum(weight.numel() for weight in target.model.parameters())
    assert parameters(target) == weights_per_token(target) == expected
