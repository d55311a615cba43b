"""ANPD's proposals against a count over the whole text, done again for every token."""

from collections import Counter
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch

from draft_heads.inference.batch import BatchEngine
from draft_heads.inference.drafters.hybrid.merge import PhraseSource
from draft_heads.inference.drafters.text.ngram import LANE, NgramDrafter, NgramTable
from draft_heads.inference.engine import DecodingEngine
from draft_heads.inference.evaluation.lossless import Oracle
from draft_heads.inference.evaluation.replay import replay
from draft_heads.inference.generation import GenerationSettings
from tests.inference.models import load_target
from tests.inference.text_drafters import begin, go_on, proposal, texts

LANE_MASK = (1 << LANE) - 1


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


@pytest.mark.parametrize("way", ["engine", "batch", "replay"])
def test_kept_counts_have_every_token_of_an_answer(way):
    """Also those of its last step, which no draft follows."""
    target, prompts = load_target("llama", torch.float64), [list(range(3, 40)), [7, 8, 9] * 4]
    settings, drafter = GenerationSettings(30, ()), NgramDrafter(n=3, k=4, keep=1)
    answers = [Oracle(target, settings).answer(prompt) for prompt in prompts]
    for prompt, answer in zip(prompts, answers):
        if way == "engine":
            assert DecodingEngine(target, drafter).generate(prompt, settings).tokens == answer
        elif way == "batch":
            assert BatchEngine(target, drafter).generate([prompt], settings)[0].tokens == answer
        else:
            replay(drafter, prompt, answer)
    texts = [prompt + answer for prompt, answer in zip(prompts, answers)]
    counted = sum((Counter(pairwise(text)) for text in texts), Counter())
    counts = drafter.table._levels[0][2]
    assert {((gram >> LANE) - 1, (gram & LANE_MASK) - 1): seen for gram, seen in counts.items()} == counted


def test_what_a_conversation_repeats_at_each_turn_is_counted_once():
    """Each prompt begins with the one before; only what follows is new."""
    turns = [[1, 2, 9], [1, 2, 9, 4, 1, 3], [1, 2, 9, 4, 1, 3, 1, 3, 1], [7, 1, 2]]
    drafter = NgramDrafter(n=3, k=1, keep=1)
    for text in turns[:3]:
        drafter.start()  # of an answer of one token, before which nothing is drafted and nothing read
        begin(drafter, text)
    assert proposal(drafter) == [(3,)]  # 1 was followed once by 2 and twice by 3
    begin(drafter, turns[3])  # another conversation, in which 1 is followed by 2 once more
    once = Counter(pairwise(turns[2])) + Counter(pairwise(turns[3]))
    counts = drafter.table._levels[0][2]
    assert {(gram >> LANE, gram & LANE_MASK): seen for gram, seen in counts.items()} == {
        (first + 1, second + 1): seen for (first, second), seen in once.items()
    }
    assert drafter.table.code == (2 << LANE | 3)  # of the last two tokens, whatever was skipped


def test_n_grams_of_a_reading_that_was_interrupted_are_dropped_with_the_rare_ones(monkeypatch):
    monkeypatch.setattr("draft_heads.inference.drafters.text.ngram.MOST_KEPT", 20)
    drafter = NgramDrafter(n=2, k=1, keep=1)
    begin(drafter, [*range(1, 30)])
    drafter.table._levels[0][3].pop(5)
    begin(drafter, [1, 2])
    assert drafter.table.grams() < 20


def test_of_too_many_kept_n_grams_those_of_rare_contexts_go(monkeypatch):
    """What is left is counted as before, and one text more than `MOST_KEPT` n-grams is the most that is held."""
    monkeypatch.setattr("draft_heads.inference.drafters.text.ngram.MOST_KEPT", 600)
    drafter, corpora, sizes = NgramDrafter(n=4, k=5, keep=1), [[1, 2, 3, 4, 5] * 8, *texts(60, 40, 30, seed=7)], []
    for number, text in enumerate(corpora):
        before = drafter.table.grams()
        begin(drafter, text)
        sizes.append(drafter.table.grams())
        if all(size <= 600 for size in sizes[:-1]):
            assert sizes[-1] >= before and proposal(drafter) == brute_force(corpora[: number + 1], 4, 5)
    assert 600 < max(sizes) <= 600 + 3 * 40 and min(sizes[30:]) < 420
    for _, _, counts, tops in drafter.table._levels:
        assert {gram >> LANE for gram in counts} == set(tops)
        for context, (first, count, second, second_count, total) in tops.items():
            own = {gram & LANE_MASK: seen for gram, seen in counts.items() if gram >> LANE == context}
            assert sum(own.values()) == total and own[first + 1] == count == max(own.values())
            assert second < 0 or own[second + 1] == second_count
    begin(drafter, [9, 2, 3, 4])
    assert proposal(drafter)[:2] == [(5,), (5, 1)]  # of the first text, whose contexts were seen eight times


def blended(text, n, context):
    """Token → share, from counts over the whole text: of each level the two most frequent, ties to the most recent."""
    shares, left = {}, 1.0
    for size in range(min(n - 1, len(context)), 0, -1):
        ending = tuple(context[-size:])
        followers = [text[i + size] for i in range(len(text) - size) if tuple(text[i : i + size]) == ending]
        if not followers:
            continue
        latest = {token: place for place, token in enumerate(followers)}
        top = sorted(latest, key=lambda token: (-followers.count(token), -latest[token]))[:2]
        for token in top:
            shares[token] = shares.get(token, 0) + left * followers.count(token) / (len(followers) + 2)
        left *= 2 / (len(followers) + 2)
    return shares


def test_shares_of_all_levels_equal_a_count_over_the_whole_text():
    for text in texts(40, 60, seed=2):
        drafter = NgramDrafter(n=4, branches=8)
        begin(drafter, text)
        assert drafter.table.shares(drafter.table.code) == pytest.approx(blended(text, 4, text))


def test_shares_have_the_worked_examples_values():
    table = NgramTable(3)
    for text in ([9, 4], [9, 6], [7, 9, 6], [8, 9, 4]):
        table.start(keep=True)
        table.extend(text)
    # behind 8 9 stood 4 once; behind 9 stood 4 twice and 6 twice
    code = table.after(table.after(0, 8), 9)
    assert table.shares(code) == pytest.approx({4: 1 / 3 + 2 / 3 * 2 / 6, 6: 2 / 3 * 2 / 6})


@pytest.mark.parametrize("max_nodes", [1, 6, 32])
@pytest.mark.parametrize("branches", [2, 8])
def test_a_tree_holds_the_likeliest_paths_and_siblings_differ(max_nodes, branches):
    drafter = NgramDrafter(n=4, k=4, branches=branches, max_nodes=max_nodes)
    for text in texts(30, 50, seed=max_nodes):
        begin(drafter, text)
        paths = proposal(drafter)
        first = blended(text, 4, text)
        if first:
            assert first[paths[0][0]] == pytest.approx(max(first.values()))
        assert len(paths) == len(set(paths)) and all(path[:-1] in paths for path in paths if len(path) > 1)
        children = [sum(path[:-1] == other for path in paths) for other in [(), *paths]]
        assert max(children, default=0) <= branches


@pytest.mark.parametrize(
    "options,told",
    [({"n": 1}, "at least 2"), ({"k": 0}, "k must be"), ({"keep": 2}, "keep")],
)
def test_options_that_make_no_sense_are_refused(options, told):
    with pytest.raises(ValueError, match=told):
        NgramDrafter(**options)


def test_evidence_of_long_contexts_is_told_from_that_of_short_ones():
    """Acceptance is learned for each level, count and place behind a longer context apart, however long these are."""

    def entry(level, count, *longer):
        levels = [*longer, (level, (7, count, -1, 0, count))]
        return PhraseSource(SimpleNamespace(levels=lambda context: levels)).proposals(None, 0, ())[0][7][0]

    behind = (30, (9, 1, -1, 0, 1))  # which proposes another token
    found = {
        entry(level, count, *longer) for level in range(1, 25) for count in (1, 2, 3) for longer in ((), (behind,))
    }
    assert len(found) == 24 * 3 * 2
