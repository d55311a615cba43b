"""Level-by-level trees against brute force, and the k-gram table."""

import itertools

import pytest
import torch

from draft_heads.inference.batch import BatchEngine
from draft_heads.inference.drafters.heads.chimera import KGramCache
from draft_heads.inference.drafters.heads.level_tree import best_indices, grow_tree
from draft_heads.inference.drafters.registry import drafter_for
from draft_heads.inference.engine import DecodingEngine
from draft_heads.inference.generation import GenerationSettings
from tests.inference.models import load_target, make_head
from tests.inference.trees import check_tree, only

V, K = 4, 3


def tables(seed):
    torch.manual_seed(seed)
    return {
        prefix: torch.randn(V).log_softmax(-1)
        for length in range(K)
        for prefix in itertools.product(range(V), repeat=length)
    }


def grow(table, max_nodes):
    paths = [()]

    def expand(level, tokens, parents):
        nonlocal paths
        paths = [(*paths[p], t) for p, t in zip(parents[0].tolist(), tokens[0].tolist())]
        assert all(len(path) == level for path in paths)
        return torch.stack([table[path] for path in paths])[None]

    return grow_tree(table[()][None], expand, max_nodes, K)


def test_a_chain_takes_the_most_probable_token_each_time():
    for seed in range(8):
        table, path = tables(seed), ()

        def expand(level, tokens, parents, table=table):
            nonlocal path
            path = (*path, int(tokens))
            return table[path][None, None]

        tree = only(grow_tree(table[()][None], expand, 8, K, chain=True))
        assert tree.tokens.tolist() == [*path, int(table[path].argmax())] and tree.parents.tolist() == [-1, 0, 1]
        assert all(int(table[path[:k]].argmax()) == path[k] for k in range(2))
        path = ()
        assert len(grow_tree(table[()][None], expand, 2, K, chain=True)) == 2


def paths_of(tree):
    out = []
    for token, parent in zip(tree.tokens.tolist(), tree.parents.tolist()):
        out.append((*(out[parent] if parent >= 0 else ()), token))
    return out


@pytest.mark.parametrize("max_nodes", [1, 2, 5, 13, 84, 200])
def test_it_is_the_best_tree_of_its_size(max_nodes):
    for seed in range(8):
        table = tables(seed)
        every = {}
        for length in range(1, K + 1):
            for path in itertools.product(range(V), repeat=length):
                every[path] = sum(float(table[path[:i]][path[i]]) for i in range(length))
        tree = only(grow(table, max_nodes))
        check_tree(tree)
        expected = sorted(every.values(), reverse=True)[:max_nodes]
        assert sorted(tree.log_probs.tolist(), reverse=True) == pytest.approx(expected, abs=1e-5)
        assert all(
            every[path] == pytest.approx(float(lp), abs=1e-5) for path, lp in zip(paths_of(tree), tree.log_probs)
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_highest_scores_are_those_of_a_stable_sort(dtype):
    torch.manual_seed(0)
    for size in (1, 2, 7, 40):
        for _ in range(20):
            scores = torch.randn(size, dtype=dtype).mul(2).round() / 2  # many are equal
            for value in (-0.0, -torch.inf, torch.inf):
                scores[torch.rand(size) < 0.1] = value
            for count in (1, 3, 50):
                expected = scores.argsort(descending=True, stable=True)[:count].sort().values
                assert torch.equal(best_indices(scores[None], count)[0], expected)


def test_certain_children_come_behind_their_parents():
    sure = torch.tensor([0.0, -50.0])
    tree = only(grow_tree(sure[None], lambda level, tokens, parents: sure.expand(*tokens.shape, -1), 3, 3))
    assert paths_of(tree) == [(0,), (0, 0), (0, 0, 0)]


def encode(grams):
    return grams.float().sum(-1, keepdim=True) * torch.ones(1, 2)


def test_the_cache_returns_encodings_and_counts_hits_reloads_and_misses():
    cache = KGramCache(2)
    seen = []

    def counted(grams):
        seen.extend(grams.tolist())
        return encode(grams)

    one, two, three = [1, 1], [2, 2], [3, 3]
    for grams in ([one, two, one], [one], [three], [two], [one]):
        grams = torch.tensor([grams])
        assert torch.equal(cache.lookup(grams, counted), encode(grams))
    # `two` is the least recently used when `three` comes, `one` when `two` comes back, `three` when `one` does
    assert (cache.misses, cache.hits, cache.reloads) == (3, 1, 2)
    assert seen == [one, two, three]


def test_more_k_grams_than_entries_in_one_lookup():
    cache = KGramCache(3)
    grams = torch.arange(20).view(2, 5, 2)
    for _ in range(2):
        assert torch.equal(cache.lookup(grams, encode), encode(grams))
    assert cache.misses == 10 and cache.hits + cache.reloads == 10 and len(cache.table) == 3


def test_of_the_text_only_its_own_k_grams_are_looked_up():
    """A step commits fewer tokens than it has rows: the others repeat the last token, and no k-gram has it twice."""
    target, prompt, looked = load_target("llama", torch.float64), [7, 9, 7, 9, 8], []
    drafter = drafter_for(make_head(target, "chimera"), target, 8, kgram_cache=500)
    order, read, lookup = drafter.head.config.order, drafter.read, drafter.cache.lookup

    def watched(step, texts):
        drafter.cache.lookup = lambda grams, encode: (looked.extend(grams[0].tolist()), lookup(grams, encode))[1]
        found = read(step, texts)
        drafter.cache.lookup = lookup
        return found

    drafter.read = watched
    answer = DecodingEngine(target, drafter).generate(prompt, GenerationSettings(20, ()))
    text = [-1] * (order - 1) + prompt + answer.tokens
    own = {tuple(text[start : start + order]) for start in range(len(text) - order + 1)}
    assert len(set(map(tuple, looked))) > 1 and set(map(tuple, looked)) <= own


def test_k_grams_of_slots_without_a_text_are_neither_looked_up_nor_counted():
    target, prompt = load_target("llama", torch.float64), [7, 9, 7, 9, 8]
    counts = []
    for slots in (1, 2, 3):
        drafter = drafter_for(make_head(target, "chimera"), target, 8, slots=slots, kgram_cache=500)
        BatchEngine(target, drafter).generate([prompt], GenerationSettings(20, ()))
        counts.append(drafter.findings())
    assert counts[0] == counts[1] == counts[2] and counts[0]["misses"] > 1


def test_the_slot_of_a_text_that_ended_counts_no_k_grams():
    target, prompts = load_target("llama", torch.float64), [[7, 9, 7], [30, 31, 32]]

    def answer(which, end=()):
        drafter = drafter_for(make_head(target, "chimera"), target, 8, slots=len(which), kgram_cache=5000)
        answers = BatchEngine(target, drafter).generate([prompts[i] for i in which], GenerationSettings(25, end))
        return [given.tokens for given in answers], set(drafter.cache.table), drafter.findings()["misses"]

    short, long = answer([0, 1])[0]
    end = (next(token for token in short[2:] if token not in long),)
    tokens, both, misses = answer([0, 1], end)
    assert len(tokens[0]) < 20 and len(tokens[1]) == 25
    assert both == answer([0], end)[1] | answer([1], end)[1] and misses == len(both)
