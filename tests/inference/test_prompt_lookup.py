"""Prompt lookup against a search through the whole text."""

import pytest

from draft_heads.inference.drafters.text.prompt_lookup import PromptLookupDrafter
from tests.inference.text_drafters import begin, go_on, proposal, texts


def brute_force(text, n, k):
    """What stands behind the latest earlier place of the longest suffix that has one."""
    for size in range(min(n, len(text) - 1), 0, -1):
        for at in range(len(text) - size - 1, -1, -1):
            if text[at : at + size] == text[-size:]:
                drafts = list(text)
                for place in range(at + size, at + size + k):  # a copy that reaches its own beginning goes on with it
                    drafts.append(drafts[place])
                drafts = drafts[len(text) :]
                return [tuple(drafts[: i + 1]) for i in range(len(drafts))]
    return []


@pytest.mark.parametrize("n,k", [(1, 1), (3, 10), (4, 3)])
@pytest.mark.parametrize("alphabet", [2, 5, 20])
def test_proposals_equal_a_search_through_the_text(n, k, alphabet):
    drafter = PromptLookupDrafter(n=n, k=k)
    for text in texts(40, 40, alphabet, seed=n + alphabet):
        begin(drafter, text)
        assert proposal(drafter) == brute_force(text, n, k)


def test_tokens_of_later_steps_are_found_too():
    drafter = PromptLookupDrafter()
    for text in texts(30, 60, seed=3):
        cut = max(2, len(text) // 2)
        begin(drafter, text[:cut])
        for at in range(cut, len(text), 2):
            go_on(drafter, text[at - 1], text[at : at + 2])
        assert proposal(drafter) == brute_force(text, 3, 10)


def test_the_last_text_is_forgotten():
    drafter = PromptLookupDrafter()
    begin(drafter, [1, 2, 1, 2])
    begin(drafter, [5, 1])
    assert proposal(drafter) == []
