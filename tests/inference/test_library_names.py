"""What transformers calls the cache of keys and values in the installed version, and what happens if it has no name."""

import inspect
from dataclasses import dataclass

import pytest
import torch
from transformers import Cache, GPT2LMHeadModel, LlamaForCausalLM, MixtralForCausalLM

from draft_heads.inference.target.library_names import CACHE, _first_field, takes_cache
from tests.inference.models import load_target


@pytest.mark.parametrize("model", [LlamaForCausalLM, GPT2LMHeadModel, MixtralForCausalLM])
def test_every_decoder_takes_its_cache_by_the_name_that_was_found(model):
    parameters = inspect.signature(model.forward).parameters.items()
    annotated = {name for name, parameter in parameters if "Cache" in str(parameter.annotation)}
    assert annotated == {CACHE}
    assert takes_cache(model)


def test_an_output_holds_the_cache_by_that_name_and_it_can_be_handed_in_again():
    model = load_target("llama", torch.float64).model
    ids = torch.tensor([[5, 6, 7, 8]])
    first = model(input_ids=ids[:, :3], use_cache=True)
    assert isinstance(first[CACHE], Cache) and first[CACHE].get_seq_length() == 3
    last = model(input_ids=ids[:, 3:], use_cache=True, **{CACHE: first[CACHE]})
    torch.testing.assert_close(last.logits[0, 0], model(input_ids=ids).logits[0, -1])


def test_a_library_that_renamed_it_once_more_is_named():
    @dataclass
    class Output:
        memory: int = 0

    with pytest.raises(ImportError, match=r"Output must have a field cache or past_key_values; it has memory; install"):
        _first_field(Output, "cache", "past_key_values")
