"""A checkpoint's own generation settings × any prompt × any drafter: the tokens of transformers' `generate`."""

from functools import cache

import torch
from hypothesis import given, reject
from hypothesis import strategies as st
from transformers import GenerationConfig

from draft_heads.inference.batch import BatchEngine
from draft_heads.inference.drafters.registry import DrafterSpec, build_drafter, drafter_for
from draft_heads.inference.engine import DecodingEngine
from draft_heads.inference.evaluation.hf_generate import sampling_processors
from draft_heads.inference.generation import GenerationSettings
from draft_heads.inference.sampling import Sampling
from tests.inference.models import ForkedDrafter, load_target, make_head

VOCABULARY, COUNT = 211, 16
TOKEN = st.integers(0, VOCABULARY - 1)
TOKENS = st.lists(TOKEN, min_size=1, max_size=4)
SETTINGS = {
    "repetition_penalty": st.floats(0.5, 3.0),
    "encoder_repetition_penalty": st.floats(0.5, 3.0),
    "no_repeat_ngram_size": st.integers(1, 4),
    "encoder_no_repeat_ngram_size": st.integers(1, 4),
    "bad_words_ids": st.lists(TOKENS, min_size=1, max_size=4, unique_by=tuple),
    "suppress_tokens": st.lists(TOKEN, max_size=60),
    "begin_suppress_tokens": st.lists(TOKEN, max_size=60),
    "sequence_bias": st.lists(
        st.tuples(  # transformers 5.17 takes no token 0 here
            st.lists(st.integers(1, VOCABULARY - 1), min_size=1, max_size=4), st.floats(-9.0, 9.0)
        ),
        min_size=1,
        max_size=4,
        unique_by=lambda pair: tuple(pair[0]),
    ).map(lambda pairs: [list(pair) for pair in pairs]),
    "min_length": st.integers(1, 30),
    "min_new_tokens": st.integers(1, COUNT),
    "exponential_decay_length_penalty": st.tuples(st.integers(0, COUNT), st.floats(1.0, 1.5)),
    "forced_eos_token_id": TOKEN,
    "forced_bos_token_id": TOKEN,
    "renormalize_logits": st.booleans(),
    "remove_invalid_values": st.booleans(),
    # those that are not applied change nothing of one answer with settings of our own
    "max_length": st.integers(1, 40),
    "temperature": st.floats(0.1, 2.0),
    "use_cache": st.booleans(),
}
OWN = st.fixed_dictionaries({}, optional=SETTINGS)
DRAFTERS = ("ngram,branches=2", "prompt_lookup", "lookahead,n=3,w=4", "hybrid=ngram+prompt_lookup", "ctc", "forked")


@cache
def random_target():
    return load_target("llama", torch.float64)


@cache
def drafter_named(name):
    if name == "ctc":
        return drafter_for(make_head(random_target()), random_target(), 8)
    return build_drafter(DrafterSpec.parse(name), random_target(), 8)


@given(
    OWN,
    st.lists(st.integers(0, 20), min_size=1, max_size=24),  # few tokens: they repeat
    st.lists(TOKEN, min_size=1, max_size=60, unique=True),
    st.sampled_from(DRAFTERS),
    st.sampled_from([0.0, 0.7, 1.5]),
)
def test_tokens_are_those_of_generate(own, prompt, ends, name, temperature):
    target = random_target()
    sampling = dict(temperature=temperature, top_k=30, seed=5) if temperature else {}
    try:
        target.model.generation_config = GenerationConfig(**own)
    except ValueError:  # a token both forced and suppressed: such a file is refused when the target is loaded
        reject()
    ids = torch.tensor([prompt])
    limit = {"max_new_tokens": COUNT, "eos_token_id": ends, "pad_token_id": 0}
    noise = sampling_processors(Sampling(**sampling) if sampling else None)
    with torch.no_grad():
        expected = target.model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, logits_processor=noise, **limit
        )[0, len(prompt) :].tolist()
    settings = GenerationSettings(COUNT, eos_token_ids=tuple(ends), **sampling)
    drafter = ForkedDrafter(expected + [3] * 20, 4) if name == "forked" else drafter_named(name)
    assert DecodingEngine(target, drafter).generate(prompt, settings).tokens == expected
    if name != "forked":
        found = BatchEngine(target, drafter).generate([prompt], settings)
        assert [answer.tokens for answer in found] == [expected]
