"""What decoding relies on in transformers, DeepSpeed and torch beside their documented interfaces.

Any version may change it: a test fails where a name is gone or means something else, and its message names our code.
"""

import argparse
import ast
import inspect
from pathlib import Path

import pytest
import torch
import transformers
from deepspeed.runtime.zero import partition_parameters
from torch import nn
from transformers.cache_utils import Cache, CacheLayerMixin
from transformers.generation.streamers import BaseStreamer
from transformers.integrations import deepspeed as integration
from transformers.utils import chat_template_utils

from draft_heads.inference.target import sharded
from draft_heads.inference.target.kv_cache import KVCache, PreallocatedLayer
from tests.inference.models import load_target
from tests.internals import changed, parameters


@pytest.mark.parametrize(
    ("ours", "holder", "name"),
    [
        ("data/text/chat_template.py: template_variables", chat_template_utils, "_compile_jinja_template"),
        ("data/common/pretrained.py: model_class", transformers.AutoModelForCausalLM, "_model_mapping"),
        ("data/common/pretrained.py: model_class", transformers.AutoModelForImageTextToText, "_model_mapping"),
        ("inference/target/library_names.py: is_recurrent", transformers.PreTrainedModel, "_is_stateful"),
        ("inference/target/module_decoder.py", transformers.PreTrainedConfig(), "_attn_implementation"),
        ("inference/target/target.py", transformers.PreTrainedModel, "get_decoder"),
        ("inference/target/target.py", transformers.PreTrainedModel, "set_experts_implementation"),
        ("inference/target/kv_cache.py", torch._dynamo, "maybe_mark_dynamic"),
        ("configs/command_line.py", argparse.ArgumentParser(), "_actions"),
        ("configs/command_line.py", argparse.ArgumentParser(), "_option_string_actions"),
    ],
)
def test_names_that_are_read_without_documentation_are_there(ours, holder, name):
    assert hasattr(holder, name), changed(ours, name, "is gone")


# ----------------------------------------------------------------------------------------------------
# DeepSpeed


def test_from_pretrained_splits_weights_inside_of_loading_only_whatever_the_heads_own_stage():
    ours, theirs = "inference/target/sharded.py: loading", "transformers.integrations.deepspeed"
    own = integration.HfDeepSpeedConfig({"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 2}})
    reference = getattr(integration, "_hf_deepspeed_config_weak_ref", None)
    assert reference is not None and reference() is own, changed(ours, theirs, "keeps its configuration elsewhere")
    try:
        with sharded.loading(torch.bfloat16):
            assert integration.is_deepspeed_zero3_enabled(), changed(ours, theirs, "does not split weights by it")
            assert integration.deepspeed_config()["bf16"] == {"enabled": True}
        assert integration.deepspeed_config()["zero_optimization"] == {"stage": 2}
        with sharded.loading(None):
            assert integration.deepspeed_config() is None, changed(ours, theirs, "keeps its configuration elsewhere")
        assert integration.deepspeed_config()["zero_optimization"] == {"stage": 2}
    finally:
        integration.unset_hf_deepspeed_config()


def test_a_split_parameter_has_what_is_read_of_it():
    """DeepSpeed sets it on each parameter; runs on two processes are among the slow tests."""
    ours = "inference/target/sharded.py"
    tree = ast.parse(Path(partition_parameters.__file__).read_text(encoding="utf-8"))
    assigned = [target for node in ast.walk(tree) if isinstance(node, ast.Assign) for target in node.targets]
    missing = {"ds_id", "ds_numel", "ds_tensor", "ds_active_sub_modules", "all_gather"}
    missing -= {target.attr for target in assigned if isinstance(target, ast.Attribute)}
    assert not missing, changed(ours, f"{', '.join(missing)} of a parameter", "DeepSpeed does not set")
    taken = parameters(partition_parameters.GatheredParameters.__init__)
    assert taken[0] == "params", changed(f"{ours}: whole", "deepspeed.zero.GatheredParameters", f"takes {taken}")


# ----------------------------------------------------------------------------------------------------
# transformers' generation and caches


class Silent(BaseStreamer):
    def put(self, value):
        pass

    def end(self):
        pass


def test_generate_calls_a_callable_from_the_frame_that_has_its_streamer():
    """`generate_fn` finds the streamer there, the token to pad with in `_pad_token_tensor`."""
    ours, seen, streamer = "inference/generate.py: generate_fn", {}, Silent()

    def look(model, input_ids, logits_processor, stopping_criteria, generation_config, **kwargs):
        caller = inspect.currentframe().f_back
        seen.update(caller=caller.f_code.co_name, streamer=caller.f_locals.get("streamer"), config=generation_config)
        return input_ids

    model = load_target("llama", torch.float64).model
    settings = {"max_new_tokens": 2, "eos_token_id": [9, 4], "pad_token_id": None}
    model.generate(torch.tensor([[5, 6, 7]]), custom_generate=look, streamer=streamer, **settings)
    assert (seen["caller"], seen["streamer"]) == ("generate", streamer), changed(
        f"{ours}, _streamer_of_caller", "GenerationMixin.generate", f"calls it from {seen['caller']}"
    )
    pad, longest = getattr(seen["config"], "_pad_token_tensor", None), seen["config"].max_length
    assert pad is not None and int(pad) == 9, changed(ours, "_pad_token_tensor", f"is {pad}, not the first end token")
    assert longest == 5, changed(ours, "generation_config.max_length", f"is {longest} for 3 + 2 tokens")


def test_a_layer_of_our_cache_is_all_that_transformers_asks_for():
    missing = CacheLayerMixin.__abstractmethods__ - set(vars(PreallocatedLayer))
    assert not missing, changed("kv_cache.PreallocatedLayer", "CacheLayerMixin", f"wants {sorted(missing)} too")
    for name in CacheLayerMixin.__abstractmethods__:
        ours, theirs = parameters(getattr(PreallocatedLayer, name)), parameters(getattr(CacheLayerMixin, name))
        assert ours == theirs, changed(f"PreallocatedLayer.{name}", f"CacheLayerMixin.{name}", f"takes {theirs}")


def test_transformers_cache_reaches_our_memory_by_its_layers():
    cache, states = KVCache(2, 8), torch.arange(12.0, dtype=torch.float64).view(1, 1, 3, 4)
    cache.set_visible_length(3)
    keys, values = Cache.update(cache, states, -states, 1)
    told = changed("kv_cache.KVCache", "transformers.Cache", "goes another way to its layers")
    assert torch.equal(keys[:, :, :3], states) and torch.equal(values[:, :, :3], -states), told
    assert (cache.get_seq_length(), cache.get_mask_sizes(3, 0)) == (0, (3, 0)), told


# ----------------------------------------------------------------------------------------------------
# torch


def test_moving_a_module_calls_apply_of_each_part_which_drops_merged_weights():
    calls = []

    class Part(nn.Linear):
        def _apply(self, fn, recurse=True):
            calls.append(recurse)
            return super()._apply(fn, recurse)

    nn.Sequential(Part(2, 2)).double()
    assert calls == [True], changed("heads/block.py and target/linear.py: _apply", "nn.Module._apply", f"saw {calls}")
