"""Several drafters in one tree: merging, calibration, what does not pay, and that decoding stays exact."""

import itertools
import math

import pytest
import torch

from draft_heads.inference.drafters.heads.rank_paths import RankPaths
from draft_heads.inference.drafters.hybrid.calibration import Calibration, confidence
from draft_heads.inference.drafters.hybrid.hybrid import HybridDrafter
from draft_heads.inference.drafters.hybrid.merged_tree import (
    LevelSource,
    MergedTree,
    PhraseSource,
    SilentSource,
    TreeSource,
)
from draft_heads.inference.drafters.models.draft_model import DraftModelDrafter
from draft_heads.inference.drafters.models.ouroboros import OuroborosDrafter
from draft_heads.inference.drafters.registry import DrafterSpec, build_drafter, drafter_for
from draft_heads.inference.drafters.text.lookahead import LookaheadDrafter
from draft_heads.inference.drafters.text.ngram import NgramDrafter
from draft_heads.inference.drafters.text.ngram_table import NgramTable
from draft_heads.inference.drafters.text.prompt_lookup import PromptLookupDrafter
from draft_heads.inference.engine import DecodingEngine
from draft_heads.inference.generation import GenerationSettings
from draft_heads.inference.sampling import Sampling
from draft_heads.inference.tree import DraftTree, ancestor_rows, check_tree, depths
from tests.inference.models import ScriptedDrafter, load_target, make_head, make_prompts, vanilla_tokens


def proposal(tokens, parents, probabilities):
    source = TreeSource()
    logs = torch.tensor(probabilities, dtype=torch.float64).log()
    source.take(DraftTree.build(torch.tensor(tokens), torch.tensor(parents), logs))
    return source


def merged(*sources, table=None, max_nodes=16, max_depth=8, least=0.0, calibration=None):
    table = table or NgramTable(3)
    bounds = [math.log(least)] * max_nodes if least else None
    return MergedTree(sources, calibration or Calibration(), max_nodes, max_depth, bounds)


def as_tree(tree):
    return DraftTree.build(torch.tensor(tree.tokens), torch.tensor(tree.parents))


def in_order(tree):
    for node in range(len(tree.tokens)):
        path, at = (), node
        while at >= 0:
            path, at = (tree.tokens[at], *path), tree.parents[at]
        yield path


def paths(tree):
    return set(in_order(tree))


# ---- merging ---------------------------------------------------------------------------------------------


def test_equal_prefixes_are_merged_and_credited_to_the_first_who_has_them():
    first = proposal([5, 6], [-1, 0], [0.6, 0.5])  # 5, 5 6
    second = proposal([5, 7, 9], [-1, 0, -1], [0.7, 0.4, 0.2])  # 5, 5 7, 9
    tree = merged(first, second)
    assert paths(tree) == {(5,), (5, 6), (5, 7), (9,)}
    by_path = {tree.tokens[i]: (tree.source[i], tree.needs[i]) for i in range(4)}
    assert by_path == {5: (0, 0), 6: (0, 1), 7: (1, 2), 9: (1, 2)}
    check_tree(as_tree(tree))


def test_agreement_raises_the_estimate_above_either_part():
    alone = merged(proposal([5], [-1], [0.5])).scores[0]
    both = merged(proposal([5], [-1], [0.5]), proposal([5], [-1], [0.5])).scores[0]
    assert torch.tensor([alone, both]).exp().tolist() == pytest.approx([0.5, 0.75])


def test_leaves_are_lengthened_by_what_followed_them_in_the_text():
    table = NgramTable(3)
    table.extend([1, 2, 3, 4, 9, 1])
    tree = merged(proposal([2], [-1], [0.9]), PhraseSource(table), table=table)
    assert {(2,), (2, 3), (2, 3, 4), (2, 3, 4, 9)} <= paths(tree)
    assert tree.source[tree.tokens.index(3)] == 1


def test_the_budget_goes_to_the_nodes_most_probably_accepted():
    wide = proposal([1, 2, 3, 4], [-1, -1, -1, -1], [0.4, 0.3, 0.2, 0.1])
    deep = proposal([8, 9], [-1, 0], [0.5, 0.45])
    assert set(merged(wide, deep, max_nodes=3).tokens) == {8, 9, 1}


def test_nodes_below_the_least_acceptance_are_left_out():
    source = proposal([1, 2, 3], [-1, -1, 0], [0.6, 0.2, 0.09])
    assert merged(source, least=0.15).tokens == [1, 2]
    assert merged(source, least=0.7).tokens == []


def test_impossible_nodes_are_no_stumbling_block():
    scores = torch.tensor([-1.0, -torch.inf, -torch.inf, -2000.0])
    source = TreeSource()
    source.take(DraftTree.build(torch.tensor([1, 2, 3, 4]), torch.tensor([-1, -1, 1, 0]), scores))
    assert merged(source, max_nodes=4).tokens[0] == 1


def test_no_path_is_deeper_than_asked():
    table = NgramTable(2)
    table.extend([1, 1, 1])
    assert len(merged(SilentSource(), PhraseSource(table), table=table, max_depth=4).tokens) == 4


def test_random_merges_are_trees_whose_siblings_differ():
    generator = torch.Generator().manual_seed(0)
    for _ in range(50):
        sources = []
        for _ in range(3):
            parents, children = [], set()
            tokens = []
            while len(tokens) < 12:
                parent = int(torch.randint(-1, len(tokens) or 1, (), generator=generator)) if tokens else -1
                token = int(torch.randint(0, 4, (), generator=generator))
                if (parent, token) not in children:
                    children.add((parent, token))
                    tokens.append(token)
                    parents.append(parent)
            scores = [0.9 ** (1 + len(paths_of(parents, node))) for node in range(12)]
            sources.append(proposal(tokens, parents, scores))
        tree = merged(*sources, max_nodes=20)
        check_tree(as_tree(tree))
        assert len(tree.tokens) == 20 == len(paths(tree))


def paths_of(parents, node):
    return list(itertools.takewhile(lambda n: n >= 0, iterate(parents, node)))


def iterate(parents, node):
    while True:
        yield node
        node = parents[node] if node >= 0 else -1


def test_who_is_needed_for_a_node_is_needed_for_those_behind_it():
    table = NgramTable(3)
    table.extend([9, 5, 1, 2, 3, 1])
    first = proposal([2, 7], [-1, 0], [0.6, 0.5])
    tree = merged(first, PhraseSource(table), proposal([9], [-1], [0.5]), table=table)
    needs = {path: tree.needs[node] for node, path in enumerate(in_order(tree))}
    assert needs[2,] == 0 and needs[2, 7] == 0b001 and needs[2, 3] == 0b010 and needs[2, 3, 1] == 0b010
    assert needs[9,] == 0b100 and needs[9, 5] == 0b110
    assert [tree.needing(source) for source in range(3)] == [
        sum(needed >> source & 1 for needed in tree.needs) for source in range(3)
    ]
    assert tree.learn([2, 3, 1]) == [(0, 0), (1, 0b010), (1, 0b010)]
    tree.cut(1)
    assert len(tree.needs) == 1 and sum(map(tree.needing, range(3))) == tree.needs[0].bit_count()


def test_learning_judges_every_child_considered_behind_the_accepted_path_and_none_elsewhere():
    calibration = Calibration()
    tree = merged(proposal([5, 6, 7], [-1, -1, 0], [0.7, 0.3, 0.35]), calibration=calibration)
    assert tree.learn([5, 8]) == [(0, 1)]  # 5 was accepted, then 8 came instead of 7
    right, wrong, behind = confidence(0.7), confidence(0.3), confidence(0.5)
    estimate = {entry: calibration.estimate((entry,), (0.0,)) for entry in (right, wrong, behind)}
    assert estimate[right] == pytest.approx((4 * 0.7 + 1) / 5)
    assert estimate[wrong] == pytest.approx(4 * 0.3 / 5)
    assert estimate[behind] == pytest.approx(4 * 0.5 / 5)


class AsTold(Calibration):
    """Believes every source's own probability."""

    def estimate(self, evidence, guesses):
        return 1 - math.prod(1 - guess for _, guess in guesses)


def levels(*rows, least=0.02):
    """A source of depths, each {token: probability}."""
    source = LevelSource(least)
    most = max(map(len, rows))
    padded = [sorted(row.items(), key=lambda one: -one[1]) + [(0, 1e-9)] * (most - len(row)) for row in rows]
    told = torch.tensor(padded, dtype=torch.float64)
    source.take(torch.stack([told[..., 0], told[..., 1].log()]))
    return source


def test_what_depends_on_depth_alone_is_said_behind_every_node():
    table = NgramTable(3)
    table.extend([1, 2, 3, 1])
    tree = merged(
        levels({7: 0.9}, {8: 0.8, 9: 0.1}), PhraseSource(table), table=table, calibration=AsTold(), max_nodes=30
    )
    assert {(7,), (7, 8), (7, 9), (2,), (2, 8), (2, 9), (2, 3), (2, 3, 1)} <= paths(tree)
    assert not any(len(path) > 2 and path[-1] in (7, 8, 9) for path in paths(tree))


def test_a_tree_of_levels_alone_is_the_best_one():
    generator = torch.Generator().manual_seed(5)
    for nodes in (1, 4, 9, 24):
        log_probs = (torch.randn(3, 12, generator=generator, dtype=torch.float64) * 2).log_softmax(-1)
        best = RankPaths(3, nodes, 12).best_tree(log_probs)
        top = log_probs.topk(min(nodes, 12))
        source = LevelSource(least=0.0)
        source.take(torch.stack([top.indices.double(), top.values]))
        tree = merged(source, SilentSource(), calibration=AsTold(), max_nodes=nodes)
        assert sorted(tree.scores) == pytest.approx(sorted(best.log_probs.tolist()))


def test_of_a_depth_the_unlikely_are_not_told_but_for_its_first():
    source = levels({7: 0.9, 8: 0.019}, {5: 0.01, 6: 0.009})
    assert [list(source.opinion(place, 0)[0]) for place in (-1, 0)] == [[7], [5]]


# ---- in the engine ---------------------------------------------------------------------------------------


def hybrids(llama, **options):
    head = make_head(llama)
    yield "ctc+ngram", [("ctc", drafter_for(head, llama, 12)), ("ngram", NgramDrafter())]
    lookup = ("prompt_lookup", PromptLookupDrafter())
    yield (
        "medusa+ngram+lookup",
        [
            ("medusa", drafter_for(make_head(llama, "medusa"), llama, 12)),
            ("ngram", NgramDrafter(keep=1)),
            lookup,
        ],
    )
    yield "chimera+hydra", [(kind, drafter_for(make_head(llama, kind), llama, 12)) for kind in ("chimera", "hydra")]
    yield "ngram+lookahead", [("ngram", NgramDrafter()), ("lookahead", LookaheadDrafter(n=3, w=4))]
    yield (
        "ctc+ouroboros+ngram",
        [
            ("ctc", drafter_for(head, llama, 12)),
            ("ouroboros", OuroborosDrafter(llama, gamma=2, w=3, p=3)),
            ("ngram", NgramDrafter()),
        ],
    )


@pytest.mark.parametrize(
    "name", ["ctc+ngram", "medusa+ngram+lookup", "chimera+hydra", "ngram+lookahead", "ctc+ouroboros+ngram"]
)
@pytest.mark.parametrize("sampling", [None, Sampling(temperature=0.8, seed=3)])
@pytest.mark.parametrize("fit", [0, 1])
def test_decoding_is_exact(llama, llama_prompts, name, sampling, fit):
    from draft_heads.inference.drafters.vanilla import VanillaDrafter

    settings = GenerationSettings(60, sampling=sampling)
    parts = dict(hybrids(llama))[name]
    hybrid = DecodingEngine(llama, HybridDrafter(parts, llama, 10, fit=fit))
    vanilla = DecodingEngine(llama, VanillaDrafter())
    for prompt in llama_prompts:
        result = hybrid.generate(prompt, settings)
        assert result.tokens == vanilla.generate(prompt, settings).tokens
        drafted = sum(source >= 0 for source in result.sources)
        assert drafted - (len(result.tokens) - result.target_steps) in (0, 1)  # the answer may end on a draft


def test_every_accepted_token_has_its_source(llama, llama_prompts):
    answer = DecodingEngine(llama, build_drafter(DrafterSpec.parse("vanilla"), llama)).generate(
        llama_prompts[0], GenerationSettings(40)
    )
    right, wrong = ScriptedDrafter(answer.tokens, 3), ScriptedDrafter([7] * 40, 3)
    hybrid = HybridDrafter([("wrong", wrong), ("right", right)], llama, 8, fit=0)
    result = DecodingEngine(llama, hybrid).generate(llama_prompts[0], GenerationSettings(40))
    assert result.tokens == answer.tokens and result.target_steps < 15
    assert len(result.sources) == 40
    taken = [hybrid.sources[source] for source in result.sources if source >= 0]
    assert len(taken) - (40 - result.target_steps) in (0, 1)  # the answer may end on a draft
    assert set(taken) - {"wrong"} == {"right"} and taken.count("right") > 20
    assert hybrid.findings()["parts"]["right"]["accepted"] >= taken.count("right") - 3  # the last step is not observed


class Asking(ScriptedDrafter):
    """Remembers what it is told about its own tree."""

    reads_choices = True

    def begin(self, prompt, capacity):
        super().begin(prompt, capacity)
        self.seen, self.proposed = [], None

    def observe(self, step):
        super().observe(step)
        if step.tree is not None:
            self.seen.append((step.tree.tokens.tolist(), self.proposed.tokens.tolist(), step.choices.tolist()))

    def propose(self):
        self.proposed = super().propose()
        return self.proposed


def test_a_part_is_told_what_the_target_said_about_its_own_tree(llama, llama_prompts):
    answer = DecodingEngine(llama, build_drafter(DrafterSpec.parse("vanilla"), llama)).generate(
        llama_prompts[0], GenerationSettings(40)
    )
    tokens = answer.tokens
    asking = Asking(tokens, 3)
    wide = ScriptedDrafter([9] * 100, 4)
    engine = DecodingEngine(llama, HybridDrafter([("wide", wide), ("asking", asking)], llama, 4, fit=0))
    assert engine.generate(llama_prompts[0], GenerationSettings(30)).tokens == tokens[:30]
    assert len(asking.seen) > 4
    for own, proposed, choices in asking.seen:
        assert own == proposed and len(choices) == 1 + len(own)
        said = [choice for choice in choices if choice >= 0]
        start = next(i for i in range(40) if tokens[i + 1 : i + 1 + len(own)] == own)
        assert said and said == tokens[start + 1 : start + 1 + len(said)]  # −1 where the budget left nodes out


def test_a_window_rides_along_behind_the_merged_nodes(llama, llama_prompts):
    def pools(drafter, lookahead):
        DecodingEngine(llama, drafter).generate(llama_prompts[0], GenerationSettings(40))
        return len(lookahead.pool), len(lookahead._rows)

    alone, part = LookaheadDrafter(n=4, w=5), LookaheadDrafter(n=4, w=5)
    hybrid = HybridDrafter([("ngram", NgramDrafter()), ("lookahead", part)], llama, 6, fit=0)
    filled, rows = pools(hybrid, part)
    assert rows == 3 and filled > 20
    assert pools(alone, alone)[1] == 3


def test_riding_rows_keep_their_places_in_the_text(llama, llama_prompts):
    part = LookaheadDrafter(n=4, w=5)
    hybrid = HybridDrafter([("ngram", NgramDrafter()), ("lookahead", part)], llama, 6, fit=0)
    DecodingEngine(llama, hybrid).generate(llama_prompts[0] * 2, GenerationSettings(20))
    tree, own = hybrid.propose(), hybrid.parts[1].tree
    riders, cells = ~tree.candidate, ~own.candidate
    assert 0 < int(riders.sum()) == int(cells.sum()) and int(tree.candidate.sum()) > 0
    assert torch.equal(tree.tokens[riders], own.tokens[cells])
    depth, own_depth = (depths(ancestor_rows(some.parents, 20))[1:] for some in (tree, own))
    assert torch.equal(depth[riders], own_depth[cells])


@pytest.mark.parametrize("budget,depth", [(32, 1), (2, 0)])
def test_a_part_left_alone_may_draft_deeper_than_the_merged_tree(llama, llama_prompts, budget, depth):
    parts = [("draft_model", DraftModelDrafter(llama, k=5)), ("ngram", NgramDrafter())]
    hybrid = HybridDrafter(parts, llama, budget, depth=depth)
    hybrid.parts[1].switch_off(0)
    settings = GenerationSettings(40)
    for prompt in llama_prompts:
        result = DecodingEngine(llama, hybrid).generate(prompt, settings)
        assert result.tokens == vanilla_tokens(llama, prompt, settings)
        assert set(result.accept_lengths[1:-1]) == {6}
    found = hybrid.findings()["parts"]["draft_model"]
    assert found["accepted"] == found["needed"] >= 5 * 5 * len(llama_prompts)


@pytest.mark.parametrize("kind", ["medusa", "ctc"])
def test_a_compiled_target_drafts_its_heads_through_programs(kind):
    torch.set_num_threads(1)
    llama = load_target("llama", torch.float32)
    llama.compile()
    plain = load_target("llama", torch.float32)
    llama_prompts = make_prompts(llama, 2)
    parts = [(kind, drafter_for(make_head(llama, kind), llama, 6)), ("ngram", NgramDrafter())]
    drafter = HybridDrafter(parts, llama, 6)
    hybrid = DecodingEngine(llama, drafter)
    vanilla = DecodingEngine(plain, build_drafter(DrafterSpec.parse("vanilla"), plain))
    for prompt in llama_prompts:
        settings = GenerationSettings(70)
        assert hybrid.generate(prompt, settings).tokens == vanilla.generate(prompt, settings).tokens
        drafter.parts[1].switch_off(drafter._ledger.steps)  # the head goes on by itself
        assert hybrid.generate(prompt, settings).tokens == vanilla.generate(prompt, settings).tokens
        drafter.parts[1]._until = 0


# ---- words -----------------------------------------------------------------------------------------------


def test_options_of_the_whole_may_stand_behind_any_part(llama):
    drafter = build_drafter(DrafterSpec.parse("h=ngram,n=3,fit=0+prompt_lookup,depth=5"), llama, 9)
    assert isinstance(drafter, HybridDrafter)
    assert (drafter.fit, drafter._deepest_node, drafter.max_nodes, drafter.sources) == (
        False,
        5,
        9,
        ("ngram", "prompt_lookup"),
    )
    twice = build_drafter(DrafterSpec.parse("h=ngram+ngram,keep=1"), llama, 9)
    assert twice.sources == ("ngram", "ngram_2")


@pytest.mark.parametrize(
    "words,told",
    [
        ("h=ngram+vanilla", "vanilla, which drafts nothing"),
        ("h=ngram+magic:x", "known kinds"),
        ("h=ngram,size=3+prompt_lookup", "unknown option size"),
        ("h=ngram+prompt_lookup,fit=yes", "whole number"),
        ("h=ngram+prompt_lookup,fit=2", "fit is 0 or 1"),
    ],
)
def test_words_that_make_no_sense_are_refused(llama, words, told):
    with pytest.raises(ValueError, match=told):
        build_drafter(DrafterSpec.parse(words), llama, 9)


def test_one_part_is_no_hybrid_nor_are_too_many(llama):
    for parts in (1, 33):
        with pytest.raises(ValueError, match="2 to 32 parts"):
            HybridDrafter([(str(part), NgramDrafter()) for part in range(parts)], llama)
