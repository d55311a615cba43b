"""A text that overflows, as some do in float16, leaves nothing that a later text reads: no mask hides a NaN."""

import pytest
import torch

from draft_heads.inference.answers import TargetAnswerer
from draft_heads.inference.batch import BatchEngine
from draft_heads.inference.drafters.base import VanillaDrafter
from draft_heads.inference.drafters.registry import DrafterBuilder, DrafterSpec, drafter_for
from draft_heads.inference.engine import DecodingEngine
from draft_heads.inference.evaluation.lossless import Oracle
from draft_heads.inference.generation import GenerationSettings
from draft_heads.inference.steps import StepRunner
from draft_heads.inference.target.kv_cache import KVCache, PerLayerKVCache
from draft_heads.inference.target.labels import Overflow
from draft_heads.inference.target.target import Target
from tests.inference.models import load_target, make_head, make_prompts
from tests.tiny_chat import random_llama

SETTINGS = GenerationSettings(12, ())


@pytest.fixture(autouse=True)
def overflowing(monkeypatch):
    """Every row that a text has written is NaN when the next one begins there."""
    clear, copy_sequence = KVCache.clear, KVCache.copy_sequence

    def cleared(cache):
        if cache.store is not None:
            cache.store[..., : cache._written, :] = torch.nan
        clear(cache)

    def copied(cache, index, single):
        if cache.store is not None:
            cache.store[:, index, :, :, : cache._written] = torch.nan
        copy_sequence(cache, index, single)

    monkeypatch.setattr(KVCache, "clear", cleared)
    monkeypatch.setattr(KVCache, "copy_sequence", copied)


def test_an_answer_does_not_depend_on_what_the_one_before_it_has_left():
    target = load_target("llama", torch.float64)
    long, short = sorted(make_prompts(target, 2), key=len, reverse=True)
    drafter = drafter_for(make_head(target, "eagle3", target_layers=[1, 2]), target, 8)
    engine = DecodingEngine(target, drafter)
    expected = engine.generate(short, SETTINGS)
    engine.generate(long, SETTINGS)
    with torch.inference_mode():
        for cache in drafter._caches:
            cache._store.fill_(torch.nan)
    drafter.begin(0, torch.tensor(short), 64)  # outside of inference mode, in which the memory was made
    again = engine.generate(short, SETTINGS)
    assert again.tokens == expected.tokens == Oracle(target, SETTINGS).answer(short)
    assert again.accept_lengths == expected.accept_lengths


def test_nor_does_that_of_a_batch_on_the_text_that_was_in_its_slot():
    target = load_target("llama", torch.float64)
    prompts = sorted(make_prompts(target, 5), key=len, reverse=True)  # later ones are shorter
    answers = BatchEngine(target, VanillaDrafter(slots=2)).generate(prompts, SETTINGS)
    assert [answer.tokens for answer in answers] == [Oracle(target, SETTINGS).answer(prompt) for prompt in prompts]


def test_a_text_for_which_there_is_no_memory_leaves_no_demand_for_it(monkeypatch):
    """As a prompt of 33,000 tokens on a card that has room for 20,000: shorter ones are answered after it."""
    target = Target(random_llama(max_position_embeddings=4096))
    engine, allocate, reserved = DecodingEngine(target, VanillaDrafter()), KVCache.allocate, []

    def scarce(cache, like):
        reserved.append(cache.capacity)
        if cache.capacity > 512:
            raise torch.OutOfMemoryError("CUDA out of memory")
        allocate(cache, like)

    monkeypatch.setattr(KVCache, "allocate", scarce)
    short, long = [5, 6, 7], list(range(3, 200)) * 4
    for prompt in (short, long, short, long, short):
        if prompt is long:
            with pytest.raises(torch.OutOfMemoryError):
                engine.generate(long, SETTINGS)
        else:
            assert engine.generate(short, SETTINGS).tokens == Oracle(target, SETTINGS).answer(short)
    assert engine.steps.reserved == 8192 and reserved[-1] <= 512


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory"), KeyboardInterrupt()])
@pytest.mark.parametrize("modules_only", [False, True])
@pytest.mark.parametrize("words", ["draft_model:x,k=3", "draft_model:x,k=3,via=ngram", "ouroboros:x"])
def test_a_draft_model_that_has_no_memory_for_a_text_drafts_for_the_next(monkeypatch, words, modules_only, error):
    target = Target(random_llama(max_position_embeddings=4096).double())
    other = Target(random_llama(max_position_embeddings=4096, num_hidden_layers=3).double())
    other.modules_only = modules_only
    builder, allocate, tried = DrafterBuilder(target, 8), KVCache.allocate, [0]
    monkeypatch.setattr(builder, "draft_model", lambda *_: other)
    engine = DecodingEngine(target, builder.build(DrafterSpec.parse(f"d={words}")))

    def scarce(cache, like):
        if len(cache.layers) == 3:
            tried.append(cache.capacity)
            if cache.capacity > 512 and (isinstance(error, Exception) or max(tried[:-1]) <= 512):
                raise error
        allocate(cache, like)

    monkeypatch.setattr(KVCache, "allocate", scarce)
    short, long = [5, 6, 7], list(range(3, 200)) * 4
    for prompt in (short, long, short, short):
        if prompt is long:
            with pytest.raises(type(error)):
                engine.generate(long, SETTINGS)
        else:
            assert engine.generate(short, SETTINGS).tokens == Oracle(target, SETTINGS).answer(short)
    if not isinstance(error, Exception):
        assert engine.generate(long, SETTINGS).tokens == Oracle(target, SETTINGS).answer(long)


def test_labels_of_states_that_are_no_numbers_are_refused(monkeypatch):
    target = load_target("llama", torch.float64)
    whole = target.forward_rows

    def overflowed(ids, *rest):
        hidden, aux = whole(ids, *rest)
        hidden[1, 2] = torch.inf
        return hidden, aux

    monkeypatch.setattr(target, "forward_rows", overflowed)
    with (
        torch.inference_mode(),
        pytest.raises(ValueError, match=r"finite; in float64 some of .* \[7, 8, 9\] are not; take") as raised,
    ):
        target.label([[5, 6], [7, 8, 9]], False)
    assert raised.value.row == 1
    with torch.inference_mode():
        target.label([[5, 6, 7], [7, 8]], False)  # what padding is does not matter


def half(lasts):
    """A float16 target of which a state is infinite at token 7, as sums above 65,504 are, and, if that lasts, all later
    ones are no numbers: else it is that of the last layer, which no other position reads."""
    model = random_llama().half()
    layers = model.model.layers
    with torch.no_grad():
        if lasts:
            model.model.embed_tokens.weight[7] = torch.inf
            return Target(model)
        model.model.embed_tokens.weight[:, 0] = 0  # a channel that token 7 alone has, and nothing writes
        model.model.embed_tokens.weight[7, 0] = 100
        for layer in layers:
            layer.self_attn.o_proj.weight[0] = layer.mlp.down_proj.weight[0] = 0
        layers[-1].mlp.gate_proj.weight[:, 0] = layers[-1].mlp.up_proj.weight[:, 0] = 1000
    return Target(model)


@pytest.mark.parametrize("lasts", [True, False])
@pytest.mark.parametrize("settings", [SETTINGS, GenerationSettings(1, ())])
def test_a_text_that_overflows_is_not_answered_with_token_0(lasts, settings):
    target, said = (
        half(lasts),
        r"in float16 some of the text that begins with the tokens \[5, 7\] are not; take --dtype",
    )
    for ahead in (False, True):
        engine = DecodingEngine(target, VanillaDrafter(), ahead=ahead)
        assert engine.generate([5, 6], settings).tokens == Oracle(target, settings).answer([5, 6])
        with pytest.raises(Overflow, match=said):
            engine.generate([5, 7], settings)
        if not lasts:  # no token is chosen from that state
            assert engine.generate([7, 6], settings).tokens == Oracle(target, settings).answer([7, 6])
    batch = BatchEngine(target, VanillaDrafter(slots=2))
    with pytest.raises(Overflow, match=said):
        batch.generate([[5, 6], [5, 7]], settings)
    answers = dict(TargetAnswerer(target, 2)([[5, 6], [7, 6]], [12, 12]))  # a row is made of all states of a prompt
    assert answers[0].finish in ("end", "limit") and answers[1].finish == "overflow"
    ended = list(batch.as_completed([[5, 6], [5, 7], [6, 5]], [12] * 3, settings))
    assert [one.number for one in ended if one.answer.finish_reason == "overflow"] == [1] and len(ended) == 3


@pytest.mark.parametrize("lasts", [True, False])
def test_an_answer_that_overflows_is_refused_at_its_end(lasts, monkeypatch):
    """Its prompt does not: the token comes later, here by another choice of the first step."""
    target, prefill = half(lasts), StepRunner.prefill

    def seven(steps, ids, text):
        step, packed = prefill(steps, ids, text)
        with torch.inference_mode():
            packed[1] = step.next_tokens[0, -1] = 7
        return step, packed

    monkeypatch.setattr(StepRunner, "prefill", seven)
    monkeypatch.setattr("draft_heads.inference.batch.choices", lambda logits, *rest: torch.tensor([7]))
    for ahead in (False, True):
        with pytest.raises(Overflow, match="must be finite; in float16"):
            DecodingEngine(target, VanillaDrafter(), ahead=ahead).generate([5, 6], SETTINGS)
    with pytest.raises(Overflow, match="must be finite; in float16"):
        BatchEngine(target, VanillaDrafter()).generate([[5, 6]], SETTINGS)


def test_a_target_that_overflows_on_every_text_is_told_to_take_another_type():
    model = random_llama().half()
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight.fill_(torch.inf)
    with pytest.raises(ValueError, match=r"logits must be numbers; .* are not, in float16; take --dtype bfloat16 or"):
        Target(model)


def test_layers_on_several_devices_have_memory_of_their_own():
    cache, single = (PerLayerKVCache([torch.device("cpu")], 64, batch, torch.device("cpu")) for batch in (2, 1))
    states = torch.ones(1, 1, 5, 2)
    for one, batch in ((cache, 2), (single, 1)):
        one.set_visible_length(5)
        one.write(0, one.slots(5), states.expand(batch, -1, -1, -1), states.expand(batch, -1, -1, -1))
        for store in one._tensors:
            store[:, :5] = torch.nan
    single.clear()
    single.set_visible_length(2)
    single.write(0, single.slots(2), states[:, :, :2], states[:, :, :2])
    single.keep_first(2)
    cache.copy_sequence(1, single)
    for store in cache._tensors:
        assert store[1].sum() == 2 * 2 and store[0, :5].isnan().all()
    for store in single._tensors:
        assert store.sum() == 2 * 2
