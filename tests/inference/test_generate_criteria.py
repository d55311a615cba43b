"""Stopping criteria with `custom_generate`, of one text and of batches."""

import pytest
import torch
from transformers import (
    EosTokenCriteria,
    MaxLengthCriteria,
    MaxTimeCriteria,
    StoppingCriteria,
    StoppingCriteriaList,
    StopStringCriteria,
)

from draft_heads.inference.drafters.base import VanillaDrafter
from draft_heads.inference.drafters.text.ngram import NgramDrafter
from draft_heads.inference.generate import generate_fn
from draft_heads.inference.target.target import Target
from tests.inference.generating import PROMPT, refused, run
from tests.tiny_chat import random_llama, save_target


@pytest.fixture(scope="module")
def model():
    return random_llama(vocab_size=211).double()


def test_a_batch_without_end_tokens_goes_on_until_its_last_sequence_ends(tmp_path):
    """`generate` pads only where there are end tokens: the others get their own next tokens."""
    target = Target.from_pretrained(save_target(tmp_path), "float64", "cpu")
    prompts = [[5, 6, 7], [9, 8, 7], [20, 21, 22]]
    free = run(target.model, prompts=prompts)[:, 3:]
    first, second, third = ([target.tokenizer.decode([int(token)]) for token in row] for row in free)
    stop = next(text for text in third[3:] if text.isascii() and text.strip() and text not in "".join(first + second))
    criteria = StoppingCriteriaList([StopStringCriteria(target.tokenizer, [stop])])
    expected = run(target.model, prompts=prompts, stopping_criteria=criteria)
    assert (
        torch.equal(expected[:, 3:], free)
        and run(target.model, None, prompts[2:], stopping_criteria=criteria).shape[1] < 15
    )
    assert torch.equal(run(target.model, generate_fn(NgramDrafter()), prompts, stopping_criteria=criteria), expected)


@pytest.mark.parametrize("pad", [0, 9, None])
def test_a_batch_is_padded_as_generate_does(model, pad):
    prompts = [[5, 6, 7], [9, 8, 7], [20, 21, 22]]
    free = run(model, prompts=prompts)[:, 3:]
    ends = {"eos_token_id": [int(free[0, 2]), int(free[1, 6])], "pad_token_id": pad}
    expected = run(model, prompts=prompts, **ends)
    assert torch.equal(run(model, generate_fn(VanillaDrafter()), prompts, **ends), expected)


class Twice(StoppingCriteria):
    """Ends when some of the tokens were written twice."""

    def __init__(self, eos_token_id):
        self.eos_token_id = eos_token_id

    def __call__(self, input_ids, scores, **kwargs):
        ends = torch.as_tensor(self.eos_token_id).reshape(-1)
        return torch.isin(input_ids[:, len(PROMPT) :], ends).sum(1) >= 2


@pytest.mark.parametrize("form", [int, lambda token: [token], lambda token: torch.tensor([token])])
def test_a_criterion_of_ones_own_with_end_tokens_judges_as_it_says(model, form):
    free = run(model, max_new_tokens=60)[0, len(PROMPT) :].tolist()
    token = next(token for token in free[2:] if free.count(token) > 2)
    criteria = StoppingCriteriaList([Twice(form(token))])
    expected = run(model, max_new_tokens=60, stopping_criteria=criteria)
    assert expected[0, len(PROMPT) :].tolist().count(token) == 2 and expected.shape[1] < len(PROMPT) + 60
    assert torch.equal(
        run(model, generate_fn(VanillaDrafter()), max_new_tokens=60, stopping_criteria=criteria), expected
    )


class FirstOfAll(StoppingCriteria):
    """The common form that looks at the first sequence only."""

    def __call__(self, input_ids, scores, **kwargs):
        return bool(input_ids[0, -1] % 5 == 0)


def test_criteria_that_may_see_a_whole_batch_are_refused(model):
    prompts = [[5, 6, 7], [9, 8, 7]]
    for own, told in ((FirstOfAll(), "FirstOfAll"), (MaxTimeCriteria(1000.0), "MaxTimeCriteria")):
        criteria = StoppingCriteriaList([own])
        refused(
            model, f"one after another, which {told} may not notice; got 2", prompts=prompts, stopping_criteria=criteria
        )
    criteria = StoppingCriteriaList([FirstOfAll(), EosTokenCriteria(3)])
    expected = run(model, stopping_criteria=criteria)
    assert torch.equal(run(model, generate_fn(VanillaDrafter()), stopping_criteria=criteria), expected)


@pytest.mark.parametrize("lengths", [[30], [5], [30, 9], [0], [-2]])
@pytest.mark.parametrize("settings", [{}, {"max_new_tokens": 7}])
def test_a_limit_given_as_a_criterion_takes_the_place_of_the_settings(model, lengths, settings):
    criteria = StoppingCriteriaList([MaxLengthCriteria(len(PROMPT) + length) for length in lengths])
    expected = run(model, stopping_criteria=criteria, **settings)
    assert expected.shape[1] == len(PROMPT) + max(1, min(lengths))
    assert torch.equal(run(model, generate_fn(NgramDrafter()), stopping_criteria=criteria, **settings), expected)
