"""Random trees and accepted paths: what the key/value cache holds is what a fresh prefill of the text gives."""

import functools

import torch
from hypothesis import given
from hypothesis import strategies as st

from draft_heads.inference.target.target import Target
from draft_heads.inference.tree import ancestor_rows, depths
from draft_heads.inference.verify import accepted_rows
from tests.inference.models import load_target

ROOM = 160
LAYERS = {"full": "llama", "sliding": "mistral", "both": "qwen3"}
tokens = st.integers(0, 210)


@functools.cache
@torch.inference_mode(False)
def target_of(layers: str, fused: bool) -> Target:
    target = load_target(LAYERS[layers], torch.float64)
    if not fused:
        target.modules_only = True
    return target


@st.composite
def trees(draw):
    """(tokens, parents, accepted nodes), parents before children."""
    size = draw(st.integers(0, 9))
    parents = [draw(st.integers(-1, node - 1)) for node in range(size)]
    node, path = draw(st.integers(-1, size - 1)), []
    while node >= 0:
        path.append(node)
        node = parents[node]
    return [draw(tokens) for _ in range(size)], parents, path[::-1]


steps_of_a_text = st.tuples(st.lists(tokens, min_size=1, max_size=40), st.lists(st.tuples(tokens, trees()), max_size=4))


def stored(cache, layer, sequence, length):
    """Keys and values [2, G, length, D] of a layer and a sequence."""
    if cache.store is not None:
        return cache.store[layer, sequence, :, :, :length]
    keys, values = cache.stores[layer]
    return torch.stack([keys[sequence, :length], values[sequence, :length]]).transpose(1, 2)


@given(st.sampled_from(sorted(LAYERS)), st.booleans(), st.booleans(), st.lists(steps_of_a_text, min_size=1, max_size=3))
@torch.inference_mode()
def test_the_cache_holds_what_a_fresh_prefill_gives(layers, fused, per_layer, texts):
    target = target_of(layers, fused)
    new_cache = target.per_layer_cache if per_layer and not fused else target.new_cache
    cache, committed = new_cache(ROOM, len(texts)), []
    for index, (prompt, _) in enumerate(texts):
        single = new_cache(ROOM)
        target.prefill(torch.tensor(prompt), single)
        cache.copy_sequence(index, single)
        committed.append(list(prompt))
    for step in range(min(len(steps) for _, steps in texts)):
        drawn = [steps[step] for _, steps in texts]
        size = max(len(parents) for _, (_, parents, _) in drawn)
        rows = torch.tensor([[base, *words, *[0] * (size - len(words))] for base, (words, _, _) in drawn])
        parents = torch.tensor([[*above, *[-1] * (size - len(above))] for _, (_, above, _) in drawn], dtype=torch.long)
        on_path = torch.zeros(len(texts), 1 + size, dtype=torch.bool)
        for index, (base, (words, _, path)) in enumerate(drawn):
            on_path[index, [0, *(node + 1 for node in path)]] = True
            committed[index] += [base, *(words[node] for node in path)]
        sees = ancestor_rows(parents.view(len(texts), size), max(size, 1))
        depth = depths(sees)
        cache.bound = int(cache.lengths.max())
        target.forward_tree(rows, depth, sees, cache)
        cache.commit(*accepted_rows(on_path, depth, max(size, 1)))
    assert cache.lengths.tolist() == list(map(len, committed))
    for index, text in enumerate(committed):
        fresh = new_cache(ROOM)
        expected = target.prefill(torch.tensor(text), fresh).logits
        for layer in range(len(target.layer_types)):
            assert torch.allclose(
                stored(cache, layer, index, len(text)), stored(fresh, layer, 0, len(text)), rtol=0, atol=1e-6
            )
        again = target.model(input_ids=torch.tensor([text]), use_cache=False).logits[0, -1]
        assert torch.allclose(expected, again, rtol=0, atol=1e-5)
    cache.bound = int(cache.lengths.max())
    one = torch.ones(len(texts), 1, 1, dtype=torch.bool)
    following = target.forward_tree(torch.full((len(texts), 1), 7), torch.zeros(len(texts), 1).long(), one, cache)
    for index, text in enumerate(committed):
        own = target.model(input_ids=torch.tensor([[*text, 7]]), use_cache=False).logits[0, -1]
        assert torch.allclose(following.logits[index, 0], own, rtol=0, atol=1e-5)
