"""ANPD's proposals against a count over the whole text, done again for every token."""

import pytest

from inference.drafters.ngram import NgramDrafter
from tests.inference.text_drafters import begin, go_on, proposal, texts


def seen_behind(corpora, context):
    """[(token, place)] of what stood behind `context`, in order of the texts."""
    size = len(context)
    return [
        (text[at + size], (number, at))
        for number, text in enumerate(corpora)
        for at in range(len(text) - size)
        if text[at : at + size] == context
    ]


def brute_force(corpora, n, k):
    """Step by step: the largest level that matches, its most frequent continuation, the most recent of equals."""
    text, drafts = list(corpora[-1]), []
    while len(drafts) < k:
        found = None
        for size in range(n - 1, 0, -1):
            whole = text + drafts
            if size <= len(whole) and (seen := seen_behind(corpora, whole[-size:])):
                found = max(
                    {token for token, _ in seen},
                    key=lambda token: (
                        sum(other == token for other, _ in seen),
                        max(place for other, place in seen if other == token),
                    ),
                )
                break
        if found is None:
            break
        drafts.append(found)
    return [tuple(drafts[: i + 1]) for i in range(len(drafts))]


@pytest.mark.parametrize("n,k", [(2, 1), (3, 4), (5, 7)])
@pytest.mark.parametrize("alphabet", [2, 4, 9])
def test_proposals_equal_a_count_over_the_text(n, k, alphabet):
    drafter = NgramDrafter(n=n, k=k)
    for text in texts(40, 40, alphabet, seed=n + alphabet):
        begin(drafter, text)
        assert proposal(drafter) == brute_force([text], n, k)


def test_tokens_of_later_steps_count_too():
    drafter = NgramDrafter(n=4, k=5)
    for text in texts(30, 60, seed=3):
        cut = max(2, len(text) // 2)
        begin(drafter, text[:cut])
        for at in range(cut, len(text), 3):
            go_on(drafter, text[at - 1], text[at : at + 3])
        assert proposal(drafter) == brute_force([text], 4, 5)


def test_a_prompt_shorter_than_the_ngrams_is_looked_up_as_far_as_it_goes():
    drafter = NgramDrafter(n=5, k=3)
    begin(drafter, [7, 7])
    assert proposal(drafter) == [(7,), (7, 7), (7, 7, 7)]
    begin(drafter, [7, 8])
    assert proposal(drafter) == []


def test_equal_counts_go_to_the_most_recent():
    drafter = NgramDrafter(n=2, k=1)
    begin(drafter, [1, 2, 1, 3, 1])
    assert proposal(drafter) == [(3,)]
    begin(drafter, [1, 2, 1, 3, 1, 2, 1])
    assert proposal(drafter) == [(2,)]


def test_kept_counts_go_on_counting_and_no_ngram_spans_two_texts():
    drafter = NgramDrafter(n=4, k=5, keep=1)
    corpora = texts(8, 20, seed=5)
    for number, text in enumerate(corpora):
        begin(drafter, text)
        assert proposal(drafter) == brute_force(corpora[: number + 1], 4, 5)


def test_counts_are_forgotten_unless_kept():
    drafter = NgramDrafter(n=3, k=2)
    begin(drafter, [1, 2, 1, 2])
    begin(drafter, [5, 1])
    assert proposal(drafter) == []


@pytest.mark.parametrize("max_nodes", [1, 6, 32])
def test_a_tree_holds_the_chain_when_it_is_large_enough_and_siblings_differ(max_nodes):
    drafter = NgramDrafter(n=4, k=4, branches=2, max_nodes=max_nodes)
    for text in texts(30, 50, seed=max_nodes):
        begin(drafter, text)
        paths = proposal(drafter)
        chain = brute_force([text], 4, 1)
        assert set(chain) <= set(paths)
        assert len(paths) == len(set(paths)) and all(path[:-1] in paths for path in paths if len(path) > 1)


@pytest.mark.parametrize(
    "options,told", [({"n": 1}, "at least 2"), ({"k": 0}, "k must be"), ({"branches": 3}, "branc")]
)
def test_options_that_make_no_sense_are_refused(options, told):
    with pytest.raises(ValueError, match=told):
        NgramDrafter(**options)
