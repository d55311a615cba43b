"""N-grams, calibration and merging in C++ against the same in Python."""

import itertools
import math
import random

import pytest
import torch

from draft_heads.inference.drafters.hybrid import calibration, merged_tree
from draft_heads.inference.drafters.hybrid.hybrid import HybridDrafter
from draft_heads.inference.drafters.hybrid.merged_tree import LevelSource, PhraseSource, SilentSource, TreeSource
from draft_heads.inference.drafters.registry import drafter_for
from draft_heads.inference.drafters.text import ngram_table
from draft_heads.inference.drafters.text.ngram import NgramDrafter
from draft_heads.inference.engine import DecodingEngine
from draft_heads.inference.generation import GenerationSettings
from draft_heads.inference.native import library, merging
from draft_heads.inference.tree import DraftTree, check_tree
from tests.inference.models import make_head


@pytest.fixture(scope="module", autouse=True)
def loaded():
    assert library.load_library(), "the tests need a C++ compiler"


# ---- n-grams ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [2, 3, 5, 9])
def test_n_grams_are_counted_alike(n):
    pick = random.Random(n)
    ours, other = merging.NgramTable(n), ngram_table.NgramTable(n)
    for text in range(12):
        for table in (ours, other):
            table.start(keep=text % 4 > 0)
        for _ in range(pick.randrange(30)):
            more = [pick.choice([0, 1, 2, 31_999, 150_000]) for _ in range(pick.randrange(6))]
            ours.extend(more)
            other.extend(more)
            assert list(ours.levels(ours.code)) == list(other.levels(other.code))
            assert ours.followers(ours.code) == other.followers(other.code)
            assert ours.chain(7) == other.chain(7)
            assert ours.shares(ours.code) == other.shares(other.code)
            token = pick.choice([0, 2, 7])
            longer = ours.after(ours.code, token), other.after(other.code, token)
            assert list(ours.levels(longer[0])) == list(other.levels(longer[1]))


def test_a_long_text_is_counted_alike():
    pick = random.Random(0)
    text = [pick.randrange(300) for _ in range(20_000)]
    ours, other = merging.NgramTable(4), ngram_table.NgramTable(4)
    ours.extend(text)
    other.extend(text)
    for token in range(300):
        codes = (table.after(table.after(table.code, token), pick.randrange(1)) for table in (ours, other))
        assert list(ours.levels(next(codes))) == list(other.levels(next(codes)))


def test_n_below_two_is_refused():
    with pytest.raises(ValueError, match="n=1"):
        merging.NgramTable(1)


# ---- merging ---------------------------------------------------------------------------------------------


def random_tree(pick):
    """Up to twelve nodes whose siblings differ; some of them, and all that hang on those, are no candidates."""
    size = pick.randrange(13)
    tokens, parents, scores, candidate = [], [], [], []
    taken = set()
    while len(tokens) < size:
        parent, token = pick.randrange(-1, len(tokens)), pick.randrange(6)
        if (parent, token) not in taken:
            taken.add((parent, token))
            before = scores[parent] if parent >= 0 else 0.0
            scores.append(before + math.log(pick.choice([1.0, 0.9, 0.5, 0.3, 0.01, 1e-20])))
            candidate.append(pick.random() < 0.9 and (parent < 0 or candidate[parent]))
            tokens.append(token)
            parents.append(parent)
    if scores and pick.random() < 0.1:
        scores[-1] = -math.inf
    tree = DraftTree.build(*(torch.tensor(x, dtype=torch.long) for x in (tokens, parents)), torch.tensor(scores))
    return DraftTree(tree.tokens, tree.parents, tree.log_probs, tree.source, torch.tensor(candidate, dtype=torch.bool))


def random_levels(pick):
    depths, ranks = pick.randrange(1, 4), pick.randrange(1, 5)
    noise = torch.randn(depths, 6, generator=torch.Generator().manual_seed(pick.randrange(1 << 30)))
    top = (3 * noise).double().log_softmax(-1).topk(ranks)
    return torch.stack([top.indices.double(), top.values])


class Sides:
    """The same sources with tables of either kind."""

    def __init__(self, pick):
        self.pick, sizes = pick, (2, 5)
        self.tables = [[make(n) for n in sizes] for make in (merging.NgramTable, ngram_table.NgramTable)]
        self.heads = [TreeSource(), LevelSource(pick.choice([0.0, 0.1])), TreeSource()]
        self.phrases = [[PhraseSource(table) for table in tables] for tables in self.tables]
        self.layer_types = merging.Calibration(5), calibration.Calibration()

    def step(self):
        """The sources of a step, some of them switched off, for either side."""
        more = [self.pick.randrange(4) for _ in range(4)]
        for table in itertools.chain(*self.tables):
            table.extend(more)
        for head in self.heads:
            head.take(random_levels(self.pick) if isinstance(head, LevelSource) else random_tree(self.pick))
        on = [self.pick.random() < 0.8 for _ in range(5)]
        return [
            [source if said else SilentSource() for source, said in zip([*self.heads, *phrases], on)]
            for phrases in self.phrases
        ]

    def merge(self, sources, *arguments):
        made = merging.MergedTree, merged_tree.MergedTree
        return [make(said, known, *arguments) for make, said, known in zip(made, sources, self.layer_types)]


def nodes(merged):
    tree = merged.as_tree(torch.device("cpu"))
    check_tree(tree)
    return tree.tokens.tolist(), tree.parents.tolist(), tree.source.tolist(), tree.candidate.tolist()


@pytest.mark.parametrize("seed", range(6))
def test_trees_and_what_is_learned_of_them_are_alike(seed):
    pick = random.Random(seed)
    sides = Sides(pick)
    waiting = []
    for step in range(150):
        max_nodes, max_depth = pick.randrange(12), pick.randrange(1, 7)
        bounds = [math.log(pick.choice([1e-9, 0.05, 0.3])) for _ in range(max_nodes)] if step % 3 else None
        ours, other = sides.merge(sides.step(), max_nodes, max_depth, bounds)
        assert nodes(ours) == nodes(other)
        assert ours.scores == pytest.approx(other.scores, rel=1e-6)
        if step % 4 == 0:
            for merged in (ours, other):
                merged.cut(max_nodes // 2)
            assert nodes(ours) == nodes(other) and len(ours) == len(other.tokens)
        for source in (0, 2):
            size = len(sides.heads[source].tree)
            assert ours.rows(source, size) == other.rows(source, size)
        waiting.append((ours, other))
        if step % 5 == 4:  # several at a time, after others were made
            for ours, other in waiting:
                followed = [pick.randrange(4) for _ in range(1 + pick.randrange(4))]
                if ours.scores and pick.random() < 0.7:
                    followed[0] = nodes(ours)[0][0]
                assert [ours.needing(source) for source in range(5)] == [other.needing(source) for source in range(5)]
                assert ours.learn(followed) == other.learn(followed)
            waiting = []
    states = [kind.state_dict() for kind in sides.kinds]
    assert len(states[0]["cells"]) > 100
    same_state(*states)


def same_state(ours, other):
    for cells in ("cells", "alone"):
        by_key = [{tuple(row[:-2]): row[-2:] for row in state[cells]} for state in (ours, other)]
        assert by_key[0].keys() == by_key[1].keys()
        for key, cell in by_key[0].items():
            assert cell == pytest.approx(by_key[1][key], rel=1e-9)


def test_what_was_learned_goes_from_one_to_the_other():
    sides = Sides(random.Random(3))
    for _ in range(60):
        for merged in sides.merge(sides.step(), 8, 5):
            merged.learn([1, 2])
    state = sides.kinds[1].state_dict()
    begun = merging.Calibration(5)
    begun.put(state)
    same_state(begun.state_dict(), state)
    back = calibration.Calibration.from_state(begun.state_dict(), 5)
    sides.kinds = begun, back
    for merged in sides.merge(sides.step(), 8, 5):
        merged.learn([1, 2])
    same_state(begun.state_dict(), back.state_dict())


def test_many_observations_forget_the_old_ones_alike():
    source = TreeSource()
    source.take(DraftTree.build(torch.tensor([5]), torch.tensor([-1]), torch.tensor([0.5]).log()))
    ours, other = merging.Calibration(1), calibration.Calibration()
    for made, known in ((merging.MergedTree, ours), (merged_tree.MergedTree, other)):
        tree = made([source], known, 1, 1)
        for step in range(9000):
            tree.learn([5 if step < 5000 else 6])
        assert math.exp(made([source], known, 1, 1).scores[0]) < 0.4
    same_state(ours.state_dict(), other.state_dict())


def test_trees_that_do_not_lie_in_one_piece_are_read_right():
    whole = torch.tensor([[5, -1], [6, 0], [7, -1]])
    tree = DraftTree.build(whole[:, 0], whole[:, 1], torch.tensor([0.6, 0.3, 0.3], dtype=torch.float64).log())
    source = TreeSource()
    source.take(tree)
    merged = merging.MergedTree([source], merging.Calibration(1), 4, 4)
    assert nodes(merged)[:2] == ([5, 6, 7], [-1, 0, -1])


# ---- in a hybrid -----------------------------------------------------------------------------------------


def test_without_a_compiler_a_hybrid_drafts_the_same(llama, llama_prompts, monkeypatch):
    def answers():
        parts = [("ctc", drafter_for(make_head(llama), llama, 12)), ("ngram", NgramDrafter(n=4))]
        drafter = HybridDrafter(parts, llama, 12, fit=0)
        engine = DecodingEngine(llama, drafter)
        said = [engine.generate(prompt, GenerationSettings(40)) for prompt in llama_prompts]
        return [(answer.tokens, answer.accept_lengths, answer.sources) for answer in said], drafter

    ours, drafter = answers()
    assert isinstance(drafter.parts[1].drafter.table, merging.NgramTable)
    monkeypatch.setattr(library, "load_library", lambda: False)
    other, drafter = answers()
    assert type(drafter.parts[1].drafter.table) is ngram_table.NgramTable
    assert ours == other


def test_texts_that_are_kept_are_counted_again():
    drafter = NgramDrafter(n=3, keep=1)
    drafter.start()
    drafter.read([1, 2, 3])
    drafter.hasten()
    assert isinstance(drafter.table, merging.NgramTable)
    drafter.start()
    drafter.read([1, 2])
    assert drafter.propose().tokens.tolist()[:1] == [3]
