"""REST's search and trees against a search through the whole corpus."""

import math
from collections import Counter

import numpy as np
import pytest
import torch

from draft_heads.inference.drafters.base import VanillaDrafter
from draft_heads.inference.drafters.registry import DrafterSpec, build_drafter
from draft_heads.inference.drafters.text.rest import RESTDrafter, blend_prefixes, frequent_prefixes
from draft_heads.inference.engine import DecodingEngine
from draft_heads.inference.generation import GenerationSettings
from tests.inference.datastores import StubTokenizer, target, write_datastore
from tests.inference.models import RANDOM_TARGETS, load_target, make_prompts
from tests.inference.text_drafters import begin, proposal, texts

CORPUS = texts(12, 60, alphabet=4, seed=8)


@pytest.fixture(scope="module")
def datastore(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        yield write_datastore(tmp_path_factory.mktemp("rest") / "store", CORPUS, 6, patch)


def continuations(phrase, k):
    """What stands behind `phrase` in each conversation, up to k tokens and never beyond its end."""
    size = len(phrase)
    return [
        tuple(text[at + size : at + size + k])
        for text in CORPUS
        for at in range(len(text) - size + 1)
        if text[at : at + size] == phrase
    ]


def longest(text, n):
    return next((size for size in range(min(n, len(text)), 0, -1) if continuations(text[-size:], 1)), 0)


def brute_force(text, n, k):
    """Counts of every beginning of what stands behind the longest suffix of the text, and of how many places."""
    size = longest(text, n)
    if not size:
        return Counter(), 0
    found = continuations(text[-size:], k)
    return Counter(rest[: i + 1] for rest in found for i in range(len(rest))), len(found)


@pytest.mark.parametrize("n", [1, 3, 16])
def test_the_longest_suffix_and_all_its_places_are_found(datastore, n):
    drafter = RESTDrafter(datastore, n=n)
    for text in [*texts(60, 30, alphabet=5, seed=n), [5, 5], *CORPUS]:
        begin(drafter, [0, *text])
        size = drafter.longest_match()
        assert size == longest([0, *text], n)
        if size:
            first, last = drafter.matches(drafter._newest[-size:])
            assert last - first == len(continuations(text[-size:] if size <= len(text) else [0, *text], 1))


@pytest.mark.parametrize("max_nodes,k", [(1, 4), (5, 3), (64, 4)])
def test_the_tree_holds_the_most_frequent_continuations(datastore, max_nodes, k):
    drafter = RESTDrafter(datastore, max_nodes=max_nodes, k=k, levels=1, places=10_000)
    for text in texts(60, 30, alphabet=4, seed=k):
        begin(drafter, text)
        counts, places = brute_force(text, 16, min(k, max_nodes))
        paths = proposal(drafter)
        assert len(paths) == len(set(paths)) == min(len(counts), max_nodes)
        kept = [counts[path] for path in paths]
        assert kept == sorted(counts.values(), reverse=True)[:max_nodes]
        shares = [count / places for count in kept]
        assert drafter.propose().log_probs[0].tolist() == pytest.approx([math.log(share) for share in shares])


def test_shorter_suffixes_fill_the_tree(datastore):
    text = max(CORPUS, key=len)[:20]
    paths = {}
    for levels in (1, 3):
        drafter = RESTDrafter(datastore, levels=levels, k=4, max_nodes=12)
        begin(drafter, text)
        paths[levels] = proposal(drafter)
    assert len(paths[1]) < len(paths[3]) == 12
    assert paths[3][0] == paths[1][0]


def test_where_every_place_ends_its_conversation_nothing_is_drafted(tmp_path, monkeypatch):
    drafter = RESTDrafter(write_datastore(tmp_path / "ends", [[1, 2], [3, 2]], 4, monkeypatch))
    begin(drafter, [1, 2])
    assert proposal(drafter) == []


def test_many_places_are_sampled_evenly(datastore):
    drafter = RESTDrafter(datastore, n=1, k=1, levels=1, places=20)
    begin(drafter, [0, 1])
    counts, places = brute_force([0, 1], 1, 1)
    assert places > 40
    shares = dict(zip(proposal(drafter), drafter.propose().log_probs[0].exp().tolist()))
    for path, share in shares.items():
        assert share == pytest.approx(counts[path] / places, abs=0.06)


def test_beginnings_of_the_worked_example():
    rows = np.array([[1, 2], [1, 3], [1, 3], [4, 9]])
    assert frequent_prefixes(rows, 9, 10) == ([1, 3, 4, 2], [-1, 0, -1, 0], [0.75, 0.5, 0.25, 0.25])
    assert frequent_prefixes(rows, 9, 2) == ([1, 3], [-1, 0], [0.75, 0.5])
    assert frequent_prefixes(np.array([[9, 1]]), 9, 2) == ([], [], [])


def test_shares_of_several_suffixes_of_the_worked_example():
    known = [(1, ([5], [-1], [1.0])), (3, ([5, 6], [-1, -1], [2 / 3, 1 / 3]))]
    tokens, parents, shares = blend_prefixes(known, 8)
    assert (tokens, parents) == ([5, 6], [-1, -1])
    assert shares == pytest.approx([3 / 4, 1 / 8])


def test_tokens_beyond_its_vocabulary_are_nowhere(datastore):
    drafter = RESTDrafter(datastore)
    begin(drafter, [0, 1, 77])
    assert proposal(drafter) == []
    begin(drafter, [0, 6])  # the separator's own value
    assert proposal(drafter) == []


def test_the_engine_decodes_the_same_with_it_in_fewer_steps(tmp_path, monkeypatch):
    target = load_target(next(iter(RANDOM_TARGETS)), torch.float64)
    prompts, settings = make_prompts(target, 4), GenerationSettings(40)
    plain = [DecodingEngine(target, VanillaDrafter()).generate(prompt, settings).tokens for prompt in prompts]
    known = [prompt + answer for prompt, answer in zip(prompts, plain)]
    datastore = write_datastore(tmp_path / "own", known[:2], target.vocab_size, monkeypatch)
    engine = DecodingEngine(target, RESTDrafter(datastore))
    decoded = [engine.generate(prompt, settings) for prompt in prompts]
    assert [generation.tokens for generation in decoded] == plain
    assert all(generation.target_steps < 12 for generation in decoded[:2])


@pytest.mark.parametrize(
    "options,told",
    [
        ({"n": 30}, "n=30 and k=10; lower"),
        ({"least": 9, "n": 4}, "least=9 and n=4"),
        ({"levels": 0}, "levels must be at least 1"),
    ],
)
def test_options_that_make_no_sense_are_refused(datastore, options, told):
    with pytest.raises(ValueError, match=told):
        RESTDrafter(datastore, **options)


def test_it_is_built_from_the_words_of_a_command_line(tmp_path, monkeypatch):
    write_datastore(tmp_path / "store", CORPUS, 6, monkeypatch)
    stub = target(StubTokenizer(6), 6)
    for words in (f"rest={tmp_path}/store,levels=1", f"mine=rest:{tmp_path}/store/datastore.json,levels=1"):
        drafter = build_drafter(DrafterSpec.parse(words), stub, 8)
        assert isinstance(drafter, RESTDrafter) and (drafter.options.levels, drafter.max_nodes) == (1, 8)
    with pytest.raises(ValueError, match=r"share the tokenizer; .* hash stub, the target other; build it again"):
        build_drafter(DrafterSpec.parse(f"rest={tmp_path}/store"), target(StubTokenizer(6, "other"), 6))
    with pytest.raises(ValueError, match="6 tokens in its vocabulary, the target 5"):
        build_drafter(DrafterSpec.parse(f"rest={tmp_path}/store"), target(None, 5))
    assert build_drafter(DrafterSpec.parse(f"rest={tmp_path}/store"), target(None, 6)).max_nodes == 32
