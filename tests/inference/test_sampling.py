"""Sampling with fixed noise: the law of what comes out, the noise itself, and trees against the plain loop."""

import itertools
import math

import numpy as np
import pytest
import torch
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from draft_heads.inference import sampling
from draft_heads.inference.drafters.base import VanillaDrafter
from draft_heads.inference.engine import DecodingEngine
from draft_heads.inference.evaluation.lossless import Oracle
from draft_heads.inference.generation import GenerationSettings
from draft_heads.inference.sampling import Sampling, gumbel, uniform
from draft_heads.inference.tree import DraftTree, ancestor_rows, depths
from draft_heads.inference.verify import TypicalAcceptance, greedy_path
from tests.inference.models import ScriptedDrafter, ScriptedOnDevice, check_prompts, load_target, make_prompts


def all_trees(nodes, vocabulary, depth):
    """Every tree of this many nodes, as paths, up to the names of tokens: each node's children are 0, 1, …"""
    if nodes == 0:
        yield ()
        return
    for tree in all_trees(nodes - 1, vocabulary, depth):
        for parent in [(), *tree]:
            child = (*parent, sum(path[:-1] == parent for path in tree))
            if len(child) <= depth and child[-1] < vocabulary and tuple(sorted((*tree, child))) == (*tree, child):
                yield (*tree, child)


def as_tree(paths):
    parents = [paths.index(path[:-1]) if len(path) > 1 else -1 for path in paths]
    return DraftTree.build(torch.tensor([path[-1] for path in paths]), torch.tensor(parents))


@pytest.mark.parametrize("vocabulary,nodes", [(2, 5), (3, 4), (8, 3)])
def test_the_law_of_a_steps_tokens_is_the_targets_whatever_the_tree(vocabulary, nodes):
    """Exact: every outcome of the rows' draws, weighed by its probability, through the verification itself."""
    length = 4
    generator = torch.Generator().manual_seed(0)
    p = {
        prefix: torch.rand(vocabulary, generator=generator, dtype=torch.float64) + 0.05
        for size in range(length)
        for prefix in itertools.product(range(vocabulary), repeat=size)
    }
    p = {prefix: (values / values.sum()).tolist() for prefix, values in p.items()}

    def law_behind(prefix, weight, out):  # what the target says next, up to `length` tokens
        if len(prefix) == length:
            out[prefix] = out.get(prefix, 0.0) + weight
            return
        for token in range(vocabulary):
            law_behind((*prefix, token), weight * p[prefix][token], out)

    expected = {}
    law_behind((), 1.0, expected)
    trees = list(all_trees(nodes, vocabulary, 3))
    assert len(trees) > 4
    for paths in trees:
        tree, rows = as_tree(paths), [(), *paths]
        sees = ancestor_rows(tree.parents, 3)
        found = {}
        for drawn in itertools.product(range(vocabulary), repeat=len(rows)):
            weight = math.prod(p[row][token] for row, token in zip(rows, drawn))
            on_path, base = greedy_path(tree, torch.tensor(drawn), sees)
            last = rows[int(on_path.nonzero()[-1])]
            law_behind((*last, int(base)), weight, found)
        distance = sum(abs(expected[key] - found.get(key, 0.0)) for key in expected) / 2
        assert distance <= 1e-12, (paths, distance)


def g_statistic(counts, expected):
    """2 Σ O log(O/E), which has a χ² distribution; its normal approximation, in standard deviations."""
    counts, expected = counts.double(), expected.double()
    statistic = float(2 * (counts * (counts / expected).log())[counts > 0].sum())
    freedom = counts.numel() - 1
    return (statistic - freedom) / math.sqrt(2 * freedom)


def test_a_million_draws_have_the_law_and_do_not_remember():
    logits = torch.randn(8, generator=torch.Generator().manual_seed(3))
    sampling = Sampling(temperature=0.8, seed=11)
    draws = torch.cat(
        [
            sampling.choices(logits.expand(50_000, -1), torch.arange(start, start + 50_000))
            for start in range(0, 1_000_000, 50_000)
        ]
    )
    p = (logits.double() / 0.8).softmax(-1)
    assert abs(g_statistic(draws.bincount(minlength=8), 1e6 * p)) < 5
    pairs = (8 * draws[::2] + draws[1::2]).bincount(minlength=64)
    assert abs(g_statistic(pairs, 5e5 * torch.outer(p, p).flatten())) < 5
    other = Sampling(temperature=0.8, seed=12).choices(logits.expand(50_000, -1), torch.arange(50_000))
    seeds = (8 * draws[:50_000] + other).bincount(minlength=64)
    assert abs(g_statistic(seeds, 5e4 * torch.outer(p, p).flatten())) < 5


def test_noise_belongs_to_seed_position_and_token_alone():
    whole = gumbel(5, torch.arange(10), 300)
    assert torch.equal(gumbel(5, torch.tensor([7, 3]), 300), whole[[7, 3]])
    assert torch.equal(gumbel(5, torch.arange(10), 100), whole[:, :100])
    assert not torch.equal(gumbel(6, torch.arange(10), 300), whole)
    spread = uniform(1, torch.arange(200), 5000)
    assert spread.min() > 0 and spread.max() < 1
    assert abs(float(spread.mean()) - 0.5) < 1e-3 and abs(float(spread.var()) - 1 / 12) < 1e-3


def test_no_two_seeds_have_the_same_noise():
    """The noise by Python's whole numbers: every bit of a seed counts."""

    def mixed(x):
        x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        x = (x ^ x >> 27) * 0x94D049BB133111EB % 2**64
        return x ^ x >> 31

    golden, positions = 0x9E3779B97F4A7C15, range(3)
    for seed in (0, 5, 2**62, 2**62 + 5, 2**63 - 1):
        rows = [mixed((mixed((position * golden + seed) % 2**64) + golden) % 2**64) for position in positions]
        expected = [[((mixed((row + k * golden) % 2**64) >> 11) + 0.5) / 2**53 for k in (1, 2)] for row in rows]
        assert uniform(seed, torch.tensor(positions), 2).tolist() == expected
    for wrong in (-1, 2**63):
        with pytest.raises(
            ValueError, match=rf"seed must be at least 0 and below 2\^63; got {wrong}; write for example"
        ):
            GenerationSettings(seed=wrong)


@pytest.mark.parametrize("temperature,top_k,top_p", [(0.7, 0, 1.0), (1.3, 5, 1.0), (1.0, 0, 0.8), (0.9, 20, 0.6)])
def test_logits_are_warped_as_transformers_warps_them(temperature, top_k, top_p):
    logits = torch.randn(6, 50, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    expected = TemperatureLogitsWarper(temperature)(None, logits)
    expected = TopKLogitsWarper(top_k)(None, expected) if top_k else expected
    expected = TopPLogitsWarper(top_p)(None, expected) if top_p < 1 else expected
    assert torch.equal(Sampling(temperature, top_k, top_p).warped(logits), expected)


@pytest.mark.parametrize("name", ["llama", "qwen3"])
@pytest.mark.parametrize("sampling", [{"temperature": 0.7}, {"temperature": 1.0, "top_k": 20, "top_p": 0.9}])
def test_trees_draw_what_the_plain_loop_draws(name, sampling):
    target = load_target(name, torch.float64)
    settings = GenerationSettings(40, **sampling)
    prompts = make_prompts(target, 4)
    oracle = Oracle(target, settings)
    greedy = Oracle(target, GenerationSettings(40))
    for drafter in (VanillaDrafter(target.device), ScriptedDrafter(oracle.answer(prompts[0]), 5)):
        counts = check_prompts(target, drafter, prompts, settings, oracle)
        assert counts.as_dict()["identical_turns"] == 4, counts.differences
    assert any(oracle.answer(prompt) != greedy.answer(prompt) for prompt in prompts)
    drafted = DecodingEngine(target, ScriptedDrafter(oracle.answer(prompts[0]), 5)).generate(prompts[0], settings)
    assert drafted.target_steps < 20  # the script was accepted


@pytest.mark.parametrize("rule,value", [("temperature", 0.0), ("top_k", -1), ("top_p", 0.0), ("top_p", 2.0)])
def test_settings_that_draw_nothing_are_refused(rule, value):
    with pytest.raises(ValueError, match=f"{rule} must be .* got"):
        Sampling(**{rule: value})


@pytest.mark.parametrize(
    "given,told",
    [
        ({"max_new_tokens": 0}, "max_new_tokens must be at least 1; got 0"),
        ({"temperature": -1.0}, "temperature must be 0 .* got -1"),
        ({"temperature": float("nan")}, "temperature must be 0 .* and finite; got nan; leave it out"),
        ({"temperature": 1e-310}, "temperature must be above 1e-99 to sample; got 1e-310"),
        ({"top_p": 0.9}, "top_k and top_p need temperature above 0 .* got 0 and 0.9"),
        ({"temperature": 1, "top_k": -5}, "top_k must be 0 .* got -5"),
        ({"eos_token_ids": 2}, r"eos_token_ids is a tuple; got 2; write \(2,\)"),
        ({"stop_strings": "end"}, r"stop_strings is a tuple; got 'end'; write \('end',\)"),
    ],
)
def test_wrong_settings_are_refused_with_rule_value_and_remedy(given, told):
    with pytest.raises(ValueError, match=told):
        GenerationSettings(**given)


@pytest.mark.parametrize("made", [list, iter, torch.tensor, np.array, lambda ids: map(int, ids)])
def test_end_tokens_and_stop_strings_may_come_in_any_form(made):
    """An iterator is read once."""
    assert GenerationSettings(eos_token_ids=made([2, 3])).eos_token_ids == (2, 3)
    assert GenerationSettings(stop_strings=(text for text in ("a", "b"))).stop_strings == ("a", "b")
    assert (
        GenerationSettings(eos_token_ids=made([])).eos_token_ids == GenerationSettings(stop_strings=None).stop_strings
    )


def test_typical_acceptance_keeps_the_longest_most_probable_path():
    """Root row: tokens 1 and 2 are typical; behind 1 nothing is, behind 2 token 3 is."""
    tree = as_tree([(1,), (2,), (1, 5), (2, 3)])
    logits = torch.full((5, 6), -9.0)
    logits[0, 1], logits[0, 2] = 2.0, 1.5
    logits[1, 4] = 5.0  # sure of another token: 5 is refused
    logits[2, 3] = 5.0
    logits[4, 0] = 1.0
    sees = ancestor_rows(tree.parents, 2)

    def accepted() -> tuple[list[int], int]:
        rows, count, base = TypicalAcceptance()(tree, logits.argmax(-1), logits, sees, depths(sees), 2)
        return rows.tolist()[: int(count)], int(base)

    assert accepted() == ([0, 2, 4], 0)
    logits[0] = torch.tensor([-9.0, 5.0, 3.2, -9.0, -9.0, -9.0])  # p(2) = .14: above epsilon, below delta·e^−H = .20
    assert accepted() == ([0, 2, 4], 0)
    logits[0, 1:3] = torch.tensor([2.0, 1.5])
    greedy, base = greedy_path(tree, logits.argmax(-1), sees)
    assert greedy.nonzero()[:, 0].tolist() == [0, 1] and int(base) == 4
    with pytest.raises(ValueError, match="typical acceptance needs"):
        TypicalAcceptance(epsilon=2.0)
    with pytest.raises(ValueError, match="got temperature 1; leave it out"):
        GenerationSettings(temperature=1.0, typical=TypicalAcceptance())
    engine = DecodingEngine(load_target("llama", torch.float64), VanillaDrafter(), accept=TypicalAcceptance())
    with pytest.raises(ValueError, match=r"\(accept=…\) decodes greedily only; got temperature 0.8; leave one"):
        engine.generate([5, 6], GenerationSettings(4, temperature=0.8))
    with pytest.raises(ValueError, match="a step has one rule of acceptance"):
        engine.generate([5, 6], GenerationSettings(4, typical=TypicalAcceptance(epsilon=0.5)))


def test_typical_acceptance_weighs_paths_beside_a_token_that_processors_exclude():
    """After the base token 1 has .4 and 2 has .6; 3 is excluded. Both are typical, 2 is the more probable one."""
    tree = as_tree([(1,), (2,), (3,)])
    logits = torch.tensor([[0.0, 0.4, 0.6, 0.0, 0.0]] + [[0.0, 0.0, 0.0, 0.0, 1.0]] * 3).log()
    sees = ancestor_rows(tree.parents, 1)
    rows, count, base = TypicalAcceptance()(tree, logits.argmax(-1), logits, sees, depths(sees), 1)
    assert (rows.tolist(), int(count), int(base)) == ([0, 2], 2, 4)


@pytest.mark.parametrize("ahead", [True, False])
def test_an_engine_keeps_what_is_typical_and_goes_on_with_what_the_target_says_behind_it(ahead):
    target = load_target("llama", torch.float64)
    prompt, script = make_prompts(target, 1)[0], list(range(1, 31))
    settings = GenerationSettings(21, typical=TypicalAcceptance(epsilon=1e-30))  # whatever is possible at all
    result = DecodingEngine(target, ScriptedOnDevice(script, 4), ahead).generate(prompt, settings)
    assert result.accept_lengths == [1, 5, 5, 5, 5]
    for place in range(0, 20, 5):  # each step: the target's own token, then four of the script
        [base] = Oracle(target, GenerationSettings(1)).answer(prompt + result.tokens[:place])
        assert result.tokens[place : place + 5] == [base, *script[place + 1 : place + 5]]


def test_the_noise_of_the_largest_number_is_finite(monkeypatch):
    """One number in 2^53 is rounded to 1, whose noise would be infinite: its token would be drawn whatever it is."""
    largest = torch.full((1, 1), -1)  # all bits
    monkeypatch.setattr(sampling, "_splitmix64", lambda x: largest)
    assert uniform(0, torch.tensor([3]), 1).item() == 1 - 2.0**-53
    assert gumbel(0, torch.tensor([3]), 1).item() == pytest.approx(36.737, abs=1e-3)
