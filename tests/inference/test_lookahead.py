"""Lookahead decoding: what a cell sees, how the window fills, and that none of it is ever accepted."""

import pytest
import torch

from draft_heads.inference.batch import BatchEngine
from draft_heads.inference.drafters.base import VanillaDrafter
from draft_heads.inference.drafters.registry import DrafterSpec, build_drafter
from draft_heads.inference.drafters.text.lookahead import LookaheadDrafter, LookaheadOptions
from draft_heads.inference.drafters.text.phrase_pool import PhrasePool
from draft_heads.inference.engine import DecodingEngine
from draft_heads.inference.evaluation.lossless import Oracle
from draft_heads.inference.generation import GenerationSettings
from draft_heads.inference.step import VerifiedStep
from draft_heads.inference.tree import DraftTree, ancestor_rows, depths
from tests.inference.models import in_slots, make_prompts
from tests.inference.trees import check_tree


def begun(drafter, prompt=(3, 4, 5), base=7):
    drafter.begin(0, torch.tensor(prompt), 100)
    drafter.observe(VerifiedStep.of_prompt(torch.tensor(prompt), torch.zeros(len(prompt), 4), torch.tensor([base])))
    return drafter


def depth_of(tree):
    return depths(ancestor_rows(tree.parents, 20))[0, 1:].tolist()


def answer(drafter, tree, choices, base=7):
    """The target refuses every draft and says `choices` at the rows behind the base token."""
    one = torch.tensor([[0]])
    said = torch.tensor([[base, *choices]])
    drafter.observe(VerifiedStep(one, torch.tensor([[base]]), torch.zeros(1, 1, 4), one[0] + 1, said, tree=tree))


def test_a_cell_sees_row_0_up_to_its_column_and_its_column_up_to_its_row():
    """The module's worked example, N = 3 and W = 2, with a phrase (7, 20, 21) behind base token 7."""
    drafter = begun(LookaheadDrafter(n=3, w=2))
    drafter.pool.add((7, 20, 21))
    answer(drafter, drafter.propose(), [11, 12, 0, 0])
    tree = drafter.propose()
    check_tree(tree)
    assert tree.tokens[0].tolist()[2:] == [11, 12, 20, 21]
    deepest = max(depth for depth, drafted in zip(depth_of(tree), tree.candidate[0].tolist(), strict=True) if drafted)
    assert deepest == drafter.deepest_draft == 2 < drafter.max_depth == max(depth_of(tree))
    assert tree.candidate[0].tolist() == [False] * 4 + [True] * 2
    sees = ancestor_rows(tree.parents, drafter.max_depth)
    assert [row.nonzero().flatten().tolist() for row in sees[0]] == [
        [0], [0, 1], [0, 1, 2], [0, 1, 3], [0, 1, 2, 4], [0, 5], [0, 5, 6],
    ]  # fmt: skip
    assert depths(sees).tolist() == [[0, 1, 2, 2, 3, 1, 2]]
    assert drafter.max_depth == 3 and drafter.max_nodes == 8


def test_the_window_fills_row_by_row_and_then_makes_n_grams():
    """N = 3, W = 2: row 0 of the prompt, row 1 what the target says behind it, then columns are 3-grams."""
    drafter = begun(LookaheadDrafter(n=3, w=2, g=2))
    first = drafter.propose()
    row = first.tokens[0].tolist()
    assert len(row) == 2 and set(row) <= {3, 4, 5}
    answer(drafter, first, [11, 12])
    second = drafter.propose()
    assert second.tokens[0].tolist() == [*row, 11, 12] and len(drafter.pool) == 0
    answer(drafter, second, [0, 0, 21, 22])
    assert (row[0], 11, 21) in drafter.pool.newest(row[0], 2) and (row[1], 12, 22) in drafter.pool.newest(row[1], 2)
    assert len(drafter.pool) == 2 and drafter.propose().tokens[0].tolist() == [11, 12, 21, 22]


@torch.inference_mode()
def test_the_last_row_is_what_the_target_says_behind_the_cells_of_its_column(target):
    """Each cell of the last row against a plain forward over exactly the text it shall see."""
    prompt, n, w = make_prompts(target, 1)[0], 4, 3
    drafter = LookaheadDrafter(n=n, w=w)
    steps = []
    observe = drafter.observe
    drafter.observe = lambda step, *slot: (steps.append(step), observe(step, *slot))
    text = prompt + DecodingEngine(target, drafter).generate(prompt, GenerationSettings(12)).tokens
    end = len(prompt)
    checked = 0
    for step in steps[1:]:
        cells = int((~step.tree.candidate).sum())
        if step.tree.candidate[0, : (n - 1) * w].any() or cells < (n - 1) * w:
            end += int(step.count)
            continue
        grid = step.tree.tokens[0, : (n - 1) * w].view(n - 1, w).tolist()
        for column in range(w):
            seen = [*text[: end + 1], *grid[0][: column + 1], *(grid[row][column] for row in range(1, n - 1))]
            logits = target.prefill(torch.tensor(seen), target.new_cache(len(seen)))[1]
            assert int(logits.argmax()) == int(step.choices[0, 1 + (n - 2) * w + column])
            checked += 1
        end += int(step.count)
    assert checked >= 3 * w


@pytest.mark.parametrize("options", [{"n": 3, "w": 4}, {}, {"n": 2, "w": 1, "g": 5}, {"max_nodes": 8}])
def test_the_tokens_are_the_targets_own(target, options):
    engine = DecodingEngine(target, LookaheadDrafter(**options))
    for prompt in [*make_prompts(target, 2), [5]]:
        result = engine.generate(prompt, GenerationSettings(50))
        assert result.tokens == Oracle(target, GenerationSettings(50)).answer(prompt)


def test_phrases_are_accepted_where_the_text_repeats_itself(llama):
    """A pool that knows the answer: every step accepts a phrase of N − 1 drafts."""
    prompt = make_prompts(llama, 1)[0]
    expected = Oracle(llama, GenerationSettings(41)).answer(prompt)
    pool = PhrasePool(5, 15)
    for start in range(len(expected) - 4):
        pool.add(expected[start : start + 5])
    result = DecodingEngine(llama, LookaheadDrafter(n=5, w=3, pool=pool)).generate(prompt, GenerationSettings(41))
    assert result.tokens == expected and set(result.accept_lengths[1:]) == {5}


def test_drawn_tokens_are_those_of_the_plain_loop(llama):
    settings = GenerationSettings(40, temperature=0.7, seed=1)
    engine = DecodingEngine(llama, LookaheadDrafter(n=3, w=5))
    for prompt in make_prompts(llama, 2):
        assert engine.generate(prompt, settings).tokens == (
            DecodingEngine(llama, VanillaDrafter()).generate(prompt, settings).tokens
        )


def test_a_window_larger_than_the_context_left_changes_nothing(target):
    prompt = (make_prompts(target, 1)[0] * 12)[:230]
    result = DecodingEngine(target, LookaheadDrafter(n=5, w=40)).generate(prompt, GenerationSettings(100))
    assert result.tokens == Oracle(target, GenerationSettings(100)).answer(prompt)
    assert len(result.tokens) == 26 and result.finish_reason == "context"


def test_batches_and_fixed_sizes_give_the_same_tokens(llama):
    prompts = make_prompts(llama, 3)
    settings = GenerationSettings(30)
    alone = DecodingEngine(llama, LookaheadDrafter(n=3, w=4))
    together = BatchEngine(llama, in_slots(lambda: LookaheadDrafter(n=3, w=4), 2)).generate(prompts, settings)
    expected = [alone.generate(prompt, settings) for prompt in prompts]
    assert [a.tokens for a in together] == [a.tokens for a in expected]
    assert [a.accept_lengths for a in together] == [a.accept_lengths for a in expected]


def test_a_tree_that_is_not_its_own_leaves_the_window_as_it_is():
    drafter = begun(LookaheadDrafter(n=3, w=2))
    tree = drafter.propose()
    answer(drafter, DraftTree.build(tree.tokens + 1, tree.parents), [11, 12])
    assert torch.equal(drafter.propose().tokens, tree.tokens)
    answer(drafter, tree.padded(8), [11, 12, *[0] * 6])
    assert drafter.propose().tokens[0].tolist()[2:] == [11, 12]


def test_window_and_phrases_share_a_budget_evenly():
    def fit_window(n, w, g, max_nodes):
        return LookaheadOptions(n=n, w=w, g=g, max_nodes=max_nodes).fit_window()

    assert fit_window(5, 15, 15, 0) == (15, 15) and fit_window(5, 15, 15, 120) == (15, 15)
    assert fit_window(5, 15, 15, 32) == (4, 4) and fit_window(5, 15, 15, 8) == (1, 1)
    assert fit_window(3, 1, 9, 8) == (1, 3) and fit_window(3, 9, 1, 8) == (3, 1)
    for n in range(2, 7):
        for most in range(2 * (n - 1), 40):
            assert LookaheadDrafter(n=n, max_nodes=most).max_nodes <= most


@pytest.mark.parametrize(
    "options,told",
    [
        ("w=0", "w must be at least 1; got 0"),
        ("n=1", "n must be at least 2; got 1"),
        ("g=-1", "g must be at least 0; got -1"),
        ("max_nodes=7", r"n=5 needs at least 8 nodes \(a column of the window, a phrase\); got max_nodes=7"),
        ("size=3", "unknown option size"),
    ],
)
def test_windows_that_make_no_sense_are_refused(llama, options, told):
    with pytest.raises(ValueError, match=told):
        build_drafter(DrafterSpec.parse(f"lookahead,{options}"), llama)


def test_the_budget_of_other_drafters_is_not_that_of_the_window(llama):
    assert build_drafter(DrafterSpec.parse("lookahead"), llama, 32).max_nodes == 120
    assert build_drafter(DrafterSpec.parse("lookahead,max_nodes=32"), llama, 64).max_nodes == 32
