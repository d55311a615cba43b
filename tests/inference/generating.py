"""`generate` of a small model, with and without `custom_generate`."""

import pytest
import torch

from draft_heads.inference.drafters.base import VanillaDrafter
from draft_heads.inference.generate import generate_fn

PROMPT = [5, 6, 7, 5, 6]


def run(model, custom=None, prompts=(PROMPT,), **settings):
    ids = torch.tensor(list(prompts))
    given = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    given |= {"eos_token_id": None, **settings}
    given |= {} if custom is None else {"custom_generate": custom}
    return model.generate(ids, **given)


def refused(model, told, **settings):
    with pytest.raises(ValueError, match=told):
        run(model, generate_fn(VanillaDrafter()), **settings)
