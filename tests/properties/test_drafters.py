"""Random options of every drafter, random prompts: the tokens of `generate`, or a sentence that refuses the options."""

import functools
from copy import deepcopy

import numpy as np
import torch
from hypothesis import given, reject
from hypothesis import strategies as st

from draft_heads.configs.options import option_names
from draft_heads.data.datastore import DEPTH, Datastore
from draft_heads.data.datastore_build import suffix_array
from draft_heads.heads.checkpoint import head_classes
from draft_heads.inference.batch import BatchEngine
from draft_heads.inference.drafters.base import SlotLoop
from draft_heads.inference.drafters.hybrid.hybrid import HybridDrafter
from draft_heads.inference.drafters.models.draft_model import DraftModelDrafter
from draft_heads.inference.drafters.models.ouroboros import OuroborosDrafter
from draft_heads.inference.drafters.registry import HEAD_DRAFTERS, drafter_for
from draft_heads.inference.drafters.text.lookahead import LookaheadDrafter
from draft_heads.inference.drafters.text.ngram import NgramDrafter
from draft_heads.inference.drafters.text.prompt_lookup import PromptLookupDrafter
from draft_heads.inference.drafters.text.rest import RESTDrafter
from draft_heads.inference.engine import DecodingEngine
from draft_heads.inference.evaluation.hf_generate import hf_generate
from draft_heads.inference.generation import GenerationSettings
from draft_heads.scripts.checks.lossless_matrix import HEADS
from tests.inference.models import load_target, make_head, small_model

NEW_TOKENS = 12
TARGETS = ("llama", "qwen3")  # full attention; sliding and full
count, nodes = st.sampled_from([1, 2, 3, 7, 40]), st.sampled_from([1, 2, 3, 8, 64])
on_off = st.sampled_from([0, 1])
texts_of_few = st.lists(st.integers(3, 5), min_size=1, max_size=30)  # everything occurs again
texts_of_all = st.lists(st.integers(0, 210), min_size=1, max_size=30)
prompts = st.lists(st.one_of(texts_of_few, texts_of_all), min_size=1, max_size=2)


@functools.cache
def target_of(name):
    return load_target(name, torch.float64)


@functools.cache
def expected(name, prompt):
    settings = GenerationSettings(NEW_TOKENS, ())
    return hf_generate(target_of(name), prompt, settings, NEW_TOKENS)


@functools.cache
def head_of(name, kind):
    """Of one row of the losslessness matrix; a draft vocabulary has the first tokens."""
    target, (kind, settings) = target_of(name), HEADS[kind]
    layers = [1] if "target_layers" in settings else head_classes(kind)[1].usual_layers(2)
    head = make_head(target, kind, **{**settings, "target_layers": layers})
    if size := head.config.draft_vocab_size:
        head.set_draft_vocab(torch.arange(size))
    return head


@functools.cache
def datastore():
    """Two hundred random tokens of a small alphabet, and some that the target has no row for."""
    words = np.random.default_rng(0).integers(3, 8, 200)
    tokens = np.concatenate([words[:120], [230], words[120:], [250]])  # 250 separates
    starts = np.concatenate([[0], np.cumsum(np.bincount(tokens, minlength=251))])
    return Datastore(tokens, suffix_array(tokens), starts, {"vocab_size": 250, "depth": DEPTH})


@functools.cache
def draft_model(rows):
    model = small_model(vocabulary=rows)
    model.draft_only_below(211)
    return model


@st.composite
def text_drafters(draw, name):
    kind = draw(st.sampled_from(["ngram", "prompt_lookup", "rest", "lookahead"]))
    if kind == "ngram":
        n, keep = draw(st.sampled_from([1, 2, 3, 9, 1024])), draw(on_off)
        return NgramDrafter(max_nodes=draw(nodes), n=n, k=draw(count), branches=draw(count), keep=keep)
    if kind == "prompt_lookup":
        return PromptLookupDrafter(max_nodes=draw(nodes), n=draw(st.sampled_from([1, 2, 5, 1024])), k=draw(count))
    if kind == "rest":
        options = {option: draw(count) for option in ("n", "k", "least", "levels", "places")}
        return RESTDrafter(datastore(), max_nodes=draw(nodes), vocabulary=211, **options)
    n, g = draw(st.sampled_from([1, 2, 3, 6])), draw(st.sampled_from([0, 1, 4]))
    return LookaheadDrafter(
        max_nodes=draw(st.sampled_from([0, 1, 4, 30])), n=n, w=draw(st.sampled_from([1, 2, 6])), g=g
    )


@st.composite
def head_drafters(draw, name, slots=1):
    kind = draw(st.sampled_from(sorted(HEADS)))
    head, options = head_of(name, kind), {}
    declared = option_names(HEAD_DRAFTERS[head.config.kind].options_type)
    if "tree" in declared:
        options["tree"] = draw(st.sampled_from(["best", "chain", "raw", "plain", "prefix"]))
    if "heads" in declared:
        options["heads"] = draw(st.sampled_from([0, 1, 2, 4, 5]))
    if "kgram_cache" in declared:
        options["kgram_cache"] = draw(st.sampled_from([0, 1, 50]))
    return drafter_for(head, target_of(name), draw(nodes), slots=slots, **options)


@st.composite
def model_drafters(draw, name):
    model = draft_model(draw(st.sampled_from([100, 211, 300])))
    if draw(st.booleans()):
        inner = draw(st.one_of(st.none(), text_drafters(name)))
        return DraftModelDrafter(model, inner, max_nodes=draw(nodes), k=draw(count))
    options = {option: draw(st.sampled_from([1, 2, 3, 6])) for option in ("gamma", "w", "p", "k", "beside")}
    switches = ("accelerate", "lengthen", "from_verification", "reuse_history", "from_text")
    options |= {switch: draw(on_off) for switch in switches}
    return OuroborosDrafter(model, max_nodes=draw(st.sampled_from([0, 1, 5])), **options)


@st.composite
def drafters(draw, name):
    single = st.one_of(text_drafters(name), head_drafters(name), model_drafters(name))
    if draw(st.integers(0, 3)):
        return draw(single)
    parts = [draw(single) for _ in range(draw(st.integers(1, 3)))]
    named = [(f"part{index}", part) for index, part in enumerate(parts)]
    return HybridDrafter(named, target_of(name), draw(nodes), depth=draw(st.sampled_from([0, 1, 3, 20])))


def in_a_sentence(error):
    """Rule, value received, remedy."""
    told = str(error)
    with_value = "\n" not in told and ("got " in told or "this one has" in told) and ";" in told
    return with_value or "is a number from 1" in told


@given(st.data(), st.sampled_from(TARGETS), prompts, st.booleans())
def test_every_drafter_decodes_the_tokens_of_generate(data, name, texts, ahead):
    target, settings = target_of(name), GenerationSettings(NEW_TOKENS, ())
    try:
        drafter = data.draw(drafters(name))
    except ValueError as error:
        assert in_a_sentence(error), error
        reject()  # fails where all options are refused
    engine = DecodingEngine(target, drafter, ahead and drafter.on_device)
    for text in texts:
        answer = engine.generate(text, settings)
        assert answer.tokens == expected(name, tuple(text))
        assert sum(answer.accept_lengths) == len(answer.tokens) == len(answer.sources)
        assert max(answer.accept_lengths[1:], default=1) <= 1 + drafter.max_depth


@given(st.data(), prompts)
def test_a_batch_decodes_the_tokens_of_generate(data, texts):
    slots = data.draw(st.integers(1, 3))
    try:
        drafter = data.draw(st.one_of(head_drafters("llama", slots), text_drafters("llama")))
    except ValueError as error:
        assert in_a_sentence(error), error
        reject()  # fails where all options are refused
    if drafter.slots != slots:
        views = {id(part): part for part in vars(drafter).values() if isinstance(part, memoryview)}  # of a datastore
        drafter = SlotLoop([drafter, *(deepcopy(drafter, dict(views)) for _ in range(1, slots))])
    answers = BatchEngine(target_of("llama"), drafter).generate(texts, GenerationSettings(NEW_TOKENS, ()))
    assert [answer.tokens for answer in answers] == [expected("llama", tuple(text)) for text in texts]
