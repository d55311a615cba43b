"""Steps told later and at once are what they would have been one by one."""

import random

import pytest
import torch

from inference.drafters.base import VerifiedStep
from inference.drafters.text import committed
from inference.drafters.untold import HELD, Untold
from inference.tree import DraftTree


def steps_of(text, states, prompt, rng, rows=5):
    """A text as a prompt and steps of up to `rows` tokens; rows that do not count repeat the last one."""
    if prompt:
        yield VerifiedStep.of_prompt(text[:prompt], states[:prompt], text[prompt])
    start = prompt
    while start < len(text) - 1:
        count = min(rng.randint(1, rows), len(text) - 1 - start)
        at = torch.arange(start, start + rows).clamp(max=start + count - 1)
        yield VerifiedStep(text[at], text[at + 1], states[at], torch.tensor(count), tree=DraftTree.empty())
        start += count


@pytest.mark.parametrize("prompt", [0, 7])
@pytest.mark.parametrize("size", [9, 3 * HELD])
@pytest.mark.parametrize("spare", [None, 0, 4])
def test_all_that_was_kept_is_told_as_one_step(prompt, size, spare):
    text, states = torch.arange(100, 101 + size), torch.randn(size, 3)
    untold = Untold()
    for seed in range(2):  # what was told is forgotten
        for step in steps_of(text, states, prompt, random.Random(seed)):
            untold.add(step, committed(step))
        assert len(untold) == size and untold.behind == size - prompt
        told = untold.take(None if spare is None else size + spare)
        at = torch.arange(size + (spare or 0)).clamp(max=size - 1)
        assert torch.equal(told.tokens, text[at]) and torch.equal(told.next_tokens, text[at + 1])
        assert torch.equal(told.hidden, states[at]) and int(told.count) == size
        assert not untold and not untold.behind


def test_a_prompt_is_told_alone_too():
    untold = Untold()
    prompt, hidden = torch.tensor([4, 5, 6]), torch.randn(3, 2)
    step = VerifiedStep.of_prompt(prompt, hidden, torch.tensor(7))
    untold.add(step, committed(step))
    told = untold.take(5)
    assert told.tokens.tolist() == [4, 5, 6, 6, 6] and told.next_tokens.tolist() == [5, 6, 7, 7, 7]
    assert torch.equal(told.hidden, hidden[[0, 1, 2, 2, 2]])


def test_a_text_that_is_given_up_leaves_nothing():
    untold = Untold()
    for step in steps_of(torch.arange(60), torch.randn(59, 2), 4, random.Random(0)):
        untold.add(step, committed(step))
    untold.clear()
    assert not untold and not untold.behind
