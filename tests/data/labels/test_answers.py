"""The batched greedy answers against transformers' own generate."""

import pytest
import torch
from transformers import GenerationConfig, MistralConfig, MistralForCausalLM

from draft_heads.data.labels.loops import GOES_ON, loop_start
from draft_heads.inference.answers import answer_prompts
from draft_heads.inference.target.target import Target
from tests.tiny_chat import byte_tokenizer, random_llama, template

PROMPTS = [[5 + (7 * i + 3 * j) % 290 for j in range(4 + 5 * i)] for i in range(7)]


def target_of(model, ends):
    """A target whose answers end at `ends` and nowhere else."""
    target = Target(model.double(), byte_tokenizer(template("chatml")))
    target.end_token_ids = tuple(ends)
    return target


def generate(model, prompt, limit, ends):
    config = GenerationConfig(do_sample=False, max_new_tokens=limit, eos_token_id=ends, pad_token_id=0)
    return model.generate(torch.tensor([prompt]), generation_config=config)[0, len(prompt) :].tolist()


def sliding_mistral():
    torch.manual_seed(0)
    config = MistralConfig(
        vocab_size=300,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        sliding_window=8,
        initializer_range=0.3,
    )
    return MistralForCausalLM(config).eval()


@pytest.mark.parametrize("one_size", [True, False], ids=["one cache", "a cache per layer"])
@pytest.mark.parametrize("make", [random_llama, sliding_mistral])
def test_batched_answers_equal_generate_one_by_one(make, one_size):
    model = make()
    free = [generate(model.double(), prompt, 24, None) for prompt in PROMPTS]
    ends = sorted({free[0][3], free[2][8], free[5][15], 2})  # tokens the model does say, so that answers end
    target = target_of(model, ends)
    target.one_size, target.modules_only = one_size, not one_size
    answers = answer_prompts(target, PROMPTS, [24] * 7, batch_size=4)
    assert [answer.tokens for answer in answers] == [generate(model, prompt, 24, ends) for prompt in PROMPTS]
    assert [answer.finish for answer in answers] == [
        "end" if answer.tokens[-1] in ends else "limit" for answer in answers
    ]
    assert {"end"} < {answer.finish for answer in answers}


def test_each_answer_has_its_own_limit():
    target = target_of(random_llama(), [299])
    answers = answer_prompts(target, PROMPTS, [1, 2, 3, 4, 5, 6, 7], batch_size=7)
    assert [len(answer.tokens) for answer in answers] == [1, 2, 3, 4, 5, 6, 7]


def test_the_context_ends_an_answer_as_it_ends_generates():
    target = target_of(random_llama(max_position_embeddings=40), [299])
    room = [40 - len(prompt) for prompt in PROMPTS]
    whole, cut = (answer_prompts(target, PROMPTS, limits, batch_size=4) for limits in (room, [100] * 7))
    assert [answer.tokens for answer in cut] == [answer.tokens for answer in whole]
    assert [len(answer.tokens) for answer in cut] == room
    with pytest.raises(ValueError, match="must fit the target's 40 positions; the prompt has 40 tokens; shorten it"):
        answer_prompts(target, [*PROMPTS, [5] * 40], [1] * 8, batch_size=4)


@pytest.mark.parametrize("wrong", [0, -1, 2.5])
def test_the_limit_of_every_answer_is_checked(wrong):
    with pytest.raises(ValueError, match=f"max_new_tokens must be .* got {wrong}; write for example"):
        answer_prompts(target_of(random_llama(), [299]), PROMPTS[:2], [5, wrong], batch_size=2)


def test_looping_answer_is_cut_at_the_start_of_its_loop():
    model = random_llama(hidden_size=8, num_attention_heads=2, num_key_value_heads=1)
    target = target_of(model, [299])
    whole = answer_prompts(target, PROMPTS, [120] * 7, batch_size=7)
    cut = answer_prompts(target, PROMPTS, [120] * 7, batch_size=7, cut_loops=True)
    starts = [loop_start(answer.tokens, goes_on=GOES_ON) for answer in whole]
    assert any(starts)
    for answer, short, start in zip(whole, cut, starts):
        assert short.tokens == answer.tokens[:start]
        assert short.finish == ("limit" if start is None else "loop")


def test_an_answer_that_goes_on_after_a_repetition_is_whole():
    """As the line below the header of a wide table is a repetition; here no sixteen tokens may stand in it twice."""
    target = target_of(random_llama(hidden_size=8, num_attention_heads=2, num_key_value_heads=1), [299])
    target.model.generation_config.no_repeat_ngram_size = 16
    whole = answer_prompts(target, PROMPTS, [120] * 7, batch_size=7)
    cut = answer_prompts(target, PROMPTS, [120] * 7, batch_size=7, cut_loops=True)
    repeat = [loop_start(answer.tokens) is not None for answer in whole]
    endless = [loop_start(answer.tokens, goes_on=GOES_ON) is not None for answer in whole]
    goes_on = [one and not other for one, other in zip(repeat, endless)]
    assert sum(goes_on) > 1
    for answer, other, kept in zip(whole, cut, goes_on):
        assert answer == other or not kept
