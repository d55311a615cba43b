"""Several drafters in one tree: merging, credit, riding rows, against the best part, and that decoding stays exact."""

import math
import random
from dataclasses import replace

import pytest
import torch

from draft_heads.inference.batch import BatchEngine
from draft_heads.inference.drafters.base import VanillaDrafter
from draft_heads.inference.drafters.heads.medusa import RankPaths
from draft_heads.inference.drafters.hybrid import merge
from draft_heads.inference.drafters.hybrid.calibration import Calibration, confidence
from draft_heads.inference.drafters.hybrid.hybrid import HybridDrafter
from draft_heads.inference.drafters.hybrid.merge import LevelSource, MergedTree, PhraseSource, TreeSource, columns_of
from draft_heads.inference.drafters.models.draft_model import DraftModelDrafter
from draft_heads.inference.drafters.models.ouroboros import OuroborosDrafter
from draft_heads.inference.drafters.registry import DrafterSpec, build_drafter, drafter_for
from draft_heads.inference.drafters.text.lookahead import LookaheadDrafter
from draft_heads.inference.drafters.text.ngram import NgramDrafter, NgramTable
from draft_heads.inference.drafters.text.prompt_lookup import PromptLookupDrafter
from draft_heads.inference.engine import DecodingEngine, GenerationSettings
from draft_heads.inference.tree import DraftTree, ancestor_rows, depths
from tests.inference.models import ForkedDrafter, ScriptedDrafter, make_head, vanilla_tokens
from tests.inference.trees import check_tree

# ---- merging ---------------------------------------------------------------------------------------------


def proposal(tokens, parents, probabilities):
    source = TreeSource()
    logs = torch.tensor(probabilities, dtype=torch.float64).log()
    source.set(
        columns_of(DraftTree.build(torch.tensor(tokens)[None], torch.tensor(parents)[None], logs[None]))[0].tolist()
    )
    return source


def merged(*sources, table=None, max_nodes=16, max_depth=8, calibration=None):
    return MergedTree(sources, calibration or Calibration(), max_nodes, max_depth, table)


def paths(tree):
    """The path of each node, in the nodes' order."""
    found = []
    for token, parent in zip(tree.tokens, tree.parents):
        found.append((*found[parent], token) if parent >= 0 else (token,))
    return found


def followers(n, *tokens):
    table = NgramTable(n)
    table.extend(tokens)
    return table


def test_equal_prefixes_are_merged_and_credited_to_the_first_who_has_them():
    first = proposal([5, 6], [-1, 0], [0.6, 0.5])  # 5, 5 6
    second = proposal([5, 7, 9], [-1, 0, -1], [0.7, 0.4, 0.2])  # 5, 5 7, 9
    tree = merged(first, second)
    check_tree(tree.as_tree(torch.device("cpu")))
    by_path = {path: (tree.source[i], tree.needs[i]) for i, path in enumerate(paths(tree))}
    assert by_path == {(5,): (0, 0), (5, 6): (0, 0b01), (5, 7): (1, 0b10), (9,): (1, 0b10)}


def test_leaves_are_lengthened_by_what_followed_them_in_the_text():
    table = followers(3, 1, 2, 3, 4, 9, 1)
    tree = merged(proposal([2], [-1], [0.9]), PhraseSource(table), table=table)
    assert {(2,), (2, 3), (2, 3, 4), (2, 3, 4, 9)} <= set(paths(tree))
    assert tree.source[tree.tokens.index(3)] == 1


def test_the_budget_goes_to_the_nodes_most_probably_accepted():
    wide = proposal([1, 2, 3, 4], [-1, -1, -1, -1], [0.4, 0.3, 0.2, 0.1])
    deep = proposal([8, 9], [-1, 0], [0.5, 0.45])
    assert set(merged(wide, deep, max_nodes=3).tokens) == {8, 9, 1}


def test_nodes_of_no_probability_are_merged_too():
    scores = torch.tensor([-1.0, -torch.inf, -torch.inf, -2000.0])
    source = TreeSource()
    tree = DraftTree.build(torch.tensor([[1, 2, 3, 4]]), torch.tensor([[-1, -1, 1, 0]]), scores[None])
    source.set(columns_of(tree)[0].tolist())
    assert merged(source, max_nodes=4).tokens[0] == 1


def test_no_path_is_deeper_than_asked():
    table = followers(2, 1, 1, 1)
    assert len(merged(LevelSource(), PhraseSource(table), table=table, max_depth=4).tokens) == 4


def test_random_merges_are_trees_whose_siblings_differ():
    draw = random.Random(0)
    for _ in range(50):
        sources = []
        for _ in range(3):
            nodes = {}  # parent and token → probability
            while len(nodes) < 12:
                nodes.setdefault((draw.randrange(-1, len(nodes)), draw.randrange(4)), 0.9 ** (1 + len(nodes)))
            sources.append(proposal([token for _, token in nodes], [parent for parent, _ in nodes], [*nodes.values()]))
        tree = merged(*sources, max_nodes=20)
        check_tree(tree.as_tree(torch.device("cpu")))
        assert len(tree.tokens) == 20 == len(set(paths(tree)))


def test_who_is_needed_for_a_node_is_needed_for_those_behind_it():
    table = followers(3, 9, 5, 1, 2, 3, 1)
    first = proposal([2, 7], [-1, 0], [0.6, 0.5])
    tree = merged(first, PhraseSource(table), proposal([9], [-1], [0.5]), table=table)
    needs = dict(zip(paths(tree), tree.needs))
    assert needs[2,] == 0 and needs[2, 7] == 0b001 and needs[2, 3] == 0b010 and needs[2, 3, 1] == 0b010
    assert needs[9,] == 0b100 and needs[9, 5] == 0b110
    assert tree.learn([2, 3, 1]) == [(0b011, 0), (0b010, 0b010), (0b010, 0b010)]


def test_learning_judges_every_proposal_behind_the_accepted_path_and_none_elsewhere():
    calibration = Calibration()
    tree = merged(proposal([5, 6, 7], [-1, -1, 0], [0.7, 0.3, 0.35]), calibration=calibration)
    assert tree.learn([5, 8, 7]) == [(1, 1)]  # 5 was accepted, then 8 came instead of 7
    right, wrong, behind = confidence(0.7), confidence(0.3), confidence(0.5)
    estimate = {entry: calibration.estimate((entry,), (0.0,)) for entry in (right, wrong, behind)}
    assert estimate[right] == pytest.approx((4 * 0.7 + 1) / 5)
    assert estimate[wrong] == pytest.approx(4 * 0.3 / 5)
    assert estimate[behind] == pytest.approx(4 * 0.5 / 5)


class AsTold(Calibration):
    """Believes every source's own probability."""

    def estimate(self, evidence, priors):
        return 1 - math.prod(1 - prior for prior in priors if prior is not None)


def levels(*rows):
    """A source of levels, each {token: probability}."""
    source, most = LevelSource(), max(map(len, rows))
    padded = [sorted(row.items(), key=lambda one: -one[1]) + [(0, 1e-9)] * (most - len(row)) for row in rows]
    told = torch.tensor(padded, dtype=torch.float64)
    source.set(torch.stack([told[..., 0], told[..., 1].log()]).tolist())
    return source


def test_what_depends_on_depth_alone_is_proposed_behind_every_node():
    table = followers(3, 1, 2, 3, 1)
    source = levels({7: 0.9}, {8: 0.8, 9: 0.1})
    found = paths(merged(source, PhraseSource(table), table=table, calibration=AsTold(), max_nodes=30))
    assert {(7,), (7, 8), (7, 9), (2,), (2, 8), (2, 9), (2, 3), (2, 3, 1)} <= set(found)
    assert not any(len(path) > 2 and path[-1] in (7, 8, 9) for path in found)


def test_a_tree_of_levels_alone_is_the_best_one(monkeypatch):
    monkeypatch.setattr(merge, "UNLIKELY", merge.LEAST)
    generator = torch.Generator().manual_seed(5)
    for nodes in (1, 4, 9, 24):
        log_probs = (torch.randn(3, 12, generator=generator, dtype=torch.float64) * 2).log_softmax(-1)
        best = RankPaths(3, nodes, 12).best_tree(log_probs[None])
        top = log_probs.topk(min(nodes, 12))
        source = LevelSource()
        source.set(torch.stack([top.indices.double(), top.values]).tolist())
        tree = merged(source, LevelSource(), calibration=AsTold(), max_nodes=nodes)
        assert sorted(tree.log_probs) == pytest.approx(sorted(best.log_probs[0].tolist()))


def test_of_a_level_the_unlikely_are_not_proposed_but_for_its_first():
    source = levels({7: 0.9, 8: 0.009}, {5: 0.005, 6: 0.004})
    assert [list(source.proposals(None, depth, 0)[0]) for depth in (0, 1, 2)] == [[7], [5], []]


# ---- in the engine ---------------------------------------------------------------------------------------


def parts_of(llama, name):
    """Made anew: drafters by name."""
    made = {
        "ngram": lambda: NgramDrafter(keep=1),
        "prompt_lookup": PromptLookupDrafter,
        "lookahead": lambda: LookaheadDrafter(n=3, w=4),
        "ouroboros": lambda: OuroborosDrafter(llama, gamma=2, w=3, p=3),
        "draft_model": lambda: DraftModelDrafter(llama.without_layers([1]), k=3),
        "hydra_prefix": lambda: drafter_for(make_head(llama, "hydra", prefix_attention=True), llama, 6),
    }
    head = lambda kind: drafter_for(make_head(llama, kind), llama, 6)  # noqa: E731
    return [(part, made[part]() if part in made else head(part)) for part in name.split("+")]


NAMES = ["ctc+ngram", "medusa+ngram+prompt_lookup", "chimera+hydra", "ngram+lookahead", "ctc+ouroboros+ngram"]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.8, "seed": 3}])
def test_decoding_is_exact(llama, llama_prompts, name, sampling):
    settings = GenerationSettings(60, **sampling)
    drafter = HybridDrafter(parts_of(llama, name), llama, 10)
    hybrid, vanilla = DecodingEngine(llama, drafter), DecodingEngine(llama, VanillaDrafter())
    for prompt in llama_prompts:
        result = hybrid.generate(prompt, settings)
        assert result.tokens == vanilla.generate(prompt, settings).tokens
        drafted = sum(source >= 0 for source in result.sources)
        assert drafted - (len(result.tokens) - result.target_steps) in (0, 1)  # the answer may end on a draft


@pytest.mark.parametrize("name", ["ctc", "hydra", "hydra_prefix", "chimera", "draft_model"])
def test_a_part_drafts_among_others_as_by_itself(llama, llama_prompts, monkeypatch, name):
    (_, apart), part, ngram = *parts_of(llama, name), *parts_of(llama, f"{name}+ngram")
    hybrid, trees = HybridDrafter([part, ngram], llama, 6), []
    begin, observe, propose = hybrid.begin, hybrid.observe, hybrid.propose
    monkeypatch.setattr(hybrid, "begin", lambda *given: (apart.begin(*given[:2], given[2] + 20), begin(*given)))
    monkeypatch.setattr(hybrid, "observe", lambda *given: (apart.observe(*given), observe(*given)))
    monkeypatch.setattr(hybrid, "propose", lambda: (trees.append(apart.propose()), propose())[1])
    for prompt in llama_prompts[:2]:
        DecodingEngine(llama, hybrid).generate(prompt, GenerationSettings(40))
        assert torch.equal(trees[-1].tokens, hybrid.parts[0].tree.tokens)
        assert torch.equal(trees[-1].parents, hybrid.parts[0].tree.parents)


def test_every_accepted_token_has_its_source_and_the_whole_budget_is_drafted(llama, llama_prompts, monkeypatch):
    tokens = vanilla_tokens(llama, llama_prompts[0], GenerationSettings(40))
    hybrid = HybridDrafter([("wrong", ScriptedDrafter([7] * 40, 3)), ("right", ScriptedDrafter(tokens, 3))], llama, 6)
    sizes, propose = [], hybrid.propose
    monkeypatch.setattr(hybrid, "propose", lambda: (tree := propose(), sizes.append(len(tree)))[0])
    result = DecodingEngine(llama, hybrid).generate(llama_prompts[0], GenerationSettings(40))
    assert result.tokens == tokens and result.target_steps < 15 and set(sizes[:-3]) == {6}
    taken = [hybrid.sources[source] for source in result.sources if source >= 0]
    assert len(taken) - (40 - result.target_steps) in (0, 1)  # the answer may end on a draft
    assert set(taken) - {"wrong"} == {"right"} and taken.count("right") > 20
    assert hybrid.findings()["parts"]["right"]["accepted"] >= taken.count("right") - 3  # the last step is not observed


class Asking(ScriptedDrafter):
    """Remembers what it is told about its own tree."""

    reads_choices = True

    def begin(self, slot, prompt, capacity):
        super().begin(slot, prompt, capacity)
        self.seen, self.proposed = [], None

    def observe(self, step, slot=None):
        super().observe(step)
        if step.tree is not None:
            seen = step.tree.tokens, self.proposed.tokens, step.choices
            self.seen.append([x[0].tolist() for x in seen])

    def propose(self):
        self.proposed = super().propose()
        return self.proposed


def test_a_part_is_told_what_the_target_said_about_its_own_tree(llama, llama_prompts):
    tokens = vanilla_tokens(llama, llama_prompts[0], GenerationSettings(40))
    asking, wide = Asking(tokens, 3), ScriptedDrafter([9] * 100, 4)
    engine = DecodingEngine(llama, HybridDrafter([("wide", wide), ("asking", asking)], llama, 4))
    assert engine.generate(llama_prompts[0], GenerationSettings(30)).tokens == tokens[:30]
    assert len(asking.seen) > 4
    for own, proposed, choices in asking.seen:
        assert own == proposed and len(choices) == 1 + len(own)
        said = [choice for choice in choices if choice >= 0]
        start = next(i for i in range(40) if tokens[i + 1 : i + 1 + len(own)] == own)
        assert said and said == tokens[start + 1 : start + 1 + len(said)]  # −1 where the budget left nodes out


def test_a_window_rides_along_behind_the_merged_nodes(llama, llama_prompts):
    part = LookaheadDrafter(n=4, w=5)
    hybrid = HybridDrafter([("ngram", NgramDrafter()), ("lookahead", part)], llama, 21)
    DecodingEngine(llama, hybrid).generate(llama_prompts[0] * 2, GenerationSettings(40))
    assert len(part._rows) == 3 and len(part.pool) > 20
    tree, own = hybrid.propose(), hybrid.parts[1].tree
    riding, cells = ~tree.candidate, ~own.candidate
    assert int(riding.sum()) == int(cells.sum()) == 15 and int(tree.candidate.sum()) > 0
    assert torch.equal(tree.tokens[riding], own.tokens[cells])
    depth, own_depth = (depths(ancestor_rows(some.parents, 20))[:, 1:] for some in (tree, own))
    assert torch.equal(depth[riding], own_depth[cells])


@pytest.mark.parametrize(
    ("words", "slots", "window"), [("", 1, 16), ("", 3, 16), (",max_nodes=8", 1, 4), (",n=4,w=5", 1, 15)]
)
def test_the_nodes_that_are_verified_keep_to_the_budget_windows_included(llama, llama_prompts, words, slots, window):
    """n = 5 and w = g = 15 shrink to 4 columns of 4 nodes, as `lookahead,max_nodes=32` does."""
    spec = DrafterSpec.parse(f"h=prompt_lookup+ngram+lookahead{words}")
    drafter, sizes = build_drafter(spec, llama, 32, slots), []
    propose = drafter.propose

    def watched():
        tree = propose()
        sizes.append((len(tree), int((~tree.candidate & (tree.log_probs > -math.inf)).sum(1).max())))
        return tree

    drafter.propose = watched
    prompts = [(prompt * 2)[: 40 - 5 * index] for index, prompt in enumerate(llama_prompts[:3])]
    settings = GenerationSettings(60)
    answers = BatchEngine(llama, drafter).generate(prompts, settings)
    plain = BatchEngine(llama, VanillaDrafter(slots=3)).generate(prompts, settings)
    assert [answer.tokens for answer in answers] == [answer.tokens for answer in plain]
    assert drafter.max_nodes == 32 == max(size for size, _ in sizes) and max(rows for _, rows in sizes) == window


def test_the_budget_of_a_window_is_known_once_a_drafter_is_built(llama):
    spec = DrafterSpec.parse("h=ngram+lookahead,n=20")  # 38 nodes are its least
    assert build_drafter(spec, llama, 64).parts[1].drafter.window_nodes == 19
    with pytest.raises(
        ValueError, match=r"n=20 needs at least 38 nodes .* got max_nodes=32; .* in a hybrid --max_nodes"
    ):
        build_drafter(spec, llama, 32)
    with pytest.raises(ValueError, match=r"got windows of 60 nodes and max_nodes=32; lower max_nodes, w or n"):
        build_drafter(DrafterSpec.parse("h=ngram+lookahead,max_nodes=0"), llama, 32)


# ---- against the best part ---------------------------------------------------------------------------------


class Scripted(ForkedDrafter):
    """Knows the answers to some prompts, each token behind a wrong one; elsewhere it is always wrong."""

    def __init__(self, answers, depth, log_prob):
        super().__init__([], depth)
        self.answers, self.log_prob = answers, log_prob

    def begin(self, slot, prompt, capacity):
        super().begin(slot, prompt, capacity)
        self.answer = self.answers.get(tuple(prompt.tolist()), [7] * 500)

    def propose(self):
        tree = super().propose()
        return replace(tree, log_probs=self.log_prob * torch.arange(1, len(tree) + 1)[None])


@pytest.mark.parametrize("sure", [-0.01, -2.0])
def test_a_hybrid_accepts_as_many_tokens_as_its_best_part_whichever_that_is_by_now(llama, llama_prompts, sure):
    settings, (*first, last) = GenerationSettings(100), llama_prompts
    answers = {tuple(prompt): vanilla_tokens(llama, prompt, settings) for prompt in llama_prompts}
    known = {prompt: answer for prompt, answer in answers.items() if prompt != tuple(last)}
    late = {tuple(last): answers[tuple(last)]}

    def parts():
        return [("late", Scripted(late, 3, -0.5)), ("weak", Scripted({}, 3, sure)), ("early", Scripted(known, 1, -0.5))]

    hybrid = DecodingEngine(llama, HybridDrafter(parts(), llama, 6))
    best = {name: DecodingEngine(llama, part) for name, part in parts()}
    for prompt in first * 4:  # `late` is of no use in 600 steps
        alone = best["early"].generate(prompt, settings)
        assert hybrid.generate(prompt, settings).target_steps <= alone.target_steps + 2
    alone = best["late"].generate(last, settings)
    assert alone.target_steps < 30
    assert hybrid.generate(last, settings).target_steps <= alone.target_steps + 4
    found = hybrid.drafter.findings()["parts"]
    assert found["weak"] == {"accepted": 0, "needed": 0} and min(found["early"]["needed"], found["late"]["needed"]) > 40


# ---- words -----------------------------------------------------------------------------------------------


def test_options_of_the_whole_may_stand_behind_any_part(llama):
    drafter = build_drafter(DrafterSpec.parse("h=ngram,n=3+prompt_lookup,depth=5"), llama, 9)
    assert isinstance(drafter, HybridDrafter)
    assert (drafter._deepest_node, drafter.max_nodes, drafter.sources) == (5, 9, ("ngram", "prompt_lookup"))
    twice = build_drafter(DrafterSpec.parse("h=ngram+ngram,keep=1"), llama, 9)
    assert twice.sources == ("ngram", "ngram_2")


@pytest.mark.parametrize(
    "words,told",
    [
        ("h=ngram+vanilla", "vanilla, which drafts nothing"),
        ("h=ngram+magic:x", "known kinds"),
        ("h=ngram,size=3+prompt_lookup", "unknown option size"),
        ("h=ngram+prompt_lookup,fit=0", "unknown option fit"),
        ("h=ngram,learned=file+prompt_lookup", "unknown option learned"),
        ("h=ngram+prompt_lookup,depth=-1", "depth must be at least 0; got -1"),
    ],
)
def test_words_that_make_no_sense_are_refused(llama, words, told):
    with pytest.raises(ValueError, match=told):
        build_drafter(DrafterSpec.parse(words), llama, 9)


def test_one_part_is_no_hybrid(llama):
    with pytest.raises(ValueError, match="at least 2 parts; got 1"):
        HybridDrafter([("ngram", NgramDrafter())], llama)


def test_levels_of_a_head_that_overflowed_are_the_least_likely():
    """Their log-probabilities are no numbers; the text goes on, without them where others are likelier."""
    source = LevelSource()
    source.set([[[5, 7]], [[math.nan, math.nan]]])
    (proposed,) = source._levels
    assert proposed == {5: (-8, math.exp(-30), None), 7: (-8, math.exp(-30), None)}


@pytest.mark.parametrize("second", ["prompt_lookup,k=3", "ngram"])
def test_a_window_deepens_no_draft(target, second):
    """Lookahead's window has rows that are deeper than any phrase; they are no drafts."""
    other = build_drafter(DrafterSpec.parse(second), target, 8)
    hybrid = HybridDrafter([("lookahead", LookaheadDrafter(n=3, w=7)), (other.kind, other)], target, 64)
    deepest = 3 if second != "ngram" else max(other.max_depth, 2 + 4)  # which go on four tokens beyond a phrase's two
    assert hybrid.deepest_draft == deepest < hybrid.max_depth == 3 - 2 + 7
