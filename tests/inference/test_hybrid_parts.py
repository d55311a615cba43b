"""When the parts of a hybrid are switched off and tried again, and what that is decided by."""

import math

import pytest
import torch

from draft_heads.inference.drafters.hybrid.account import CLEAR, LOST, MEMORY, Account
from draft_heads.inference.drafters.hybrid.hybrid import HybridDrafter
from draft_heads.inference.drafters.hybrid.hybrid_part import PAUSE, HybridPart
from draft_heads.inference.drafters.hybrid.ledger import BATCH
from draft_heads.inference.drafters.hybrid.merging import merge
from draft_heads.inference.drafters.hybrid.running_costs import EARLY
from draft_heads.inference.drafters.models.draft_model import DraftModelDrafter
from draft_heads.inference.drafters.registry import drafter_for
from draft_heads.inference.drafters.text.lookahead import LookaheadDrafter
from draft_heads.inference.drafters.text.ngram import NgramDrafter
from draft_heads.inference.drafters.text.prompt_lookup import PromptLookupDrafter
from draft_heads.inference.engine import DecodingEngine
from draft_heads.inference.generation import GenerationSettings
from tests.inference.models import ScriptedDrafter, make_head, vanilla_tokens


class Clock:
    """Time passes only where it is told to."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        self.now += 1e-6
        return self.now

    def slow_forwards(self, target, monkeypatch, seconds=1.0, a_row=0.0):
        """A forward of the target takes so long."""
        forward = target.forward_tree

        def verifying(tokens, *others):
            self.now += seconds + a_row * len(tokens)
            return forward(tokens, *others)

        monkeypatch.setattr(target, "forward_tree", verifying)


class SlowDrafter(ScriptedDrafter):
    """A second for drafts that are never right."""

    def __init__(self, clock, reads_choices=False):
        super().__init__([7] * 10**6, 2)
        self.clock, self.reads_choices = clock, reads_choices

    def propose(self):
        self.clock.now += 1.0
        return super().propose()


def until(done, engine, prompt, settings):
    """Decode until something has happened."""
    for _ in range(100):
        if done():
            return
        engine.generate(prompt, settings)
    raise AssertionError("it does not happen")


@pytest.mark.parametrize("reads_choices", [False, True])
def test_a_part_that_does_not_pay_is_switched_off_and_tried_again(llama, llama_prompts, reads_choices):
    clock = Clock()
    slow = SlowDrafter(clock, reads_choices)
    hybrid = HybridDrafter([("slow", slow), ("ngram", NgramDrafter())], llama, 8, clock=clock)
    engine = DecodingEngine(llama, hybrid)
    settings = GenerationSettings(60)
    until(lambda: hybrid.parts[0].off, engine, llama_prompts[0], settings)
    found = hybrid.findings()["parts"]
    steps = found["slow"]["switched"][0]["off"]
    assert LOST <= steps <= LOST + EARLY + 3 * BATCH and found["ngram"]["switched"] == []
    assert found["slow"]["asked"] == steps and found["slow"]["accepted"] == 0
    spent = clock.now
    engine.generate(llama_prompts[1], settings)
    assert clock.now - spent < 1.0
    wait = hybrid.parts[0]._until - steps
    assert wait > 5 * PAUSE  # its trial took as long as so many steps
    hybrid.findings()  # which counts what was drafted alone
    hybrid._ledger.steps = steps + wait
    engine.generate(llama_prompts[1], settings)
    assert hybrid.findings()["parts"]["slow"]["switched"][0]["on"] == steps + wait
    assert clock.now - spent > 1.0


def test_n_grams_that_cost_more_than_they_bring_leave_a_head_to_itself(llama, llama_prompts, monkeypatch):
    clock, merged = Clock(), []

    def merging(*arguments):
        clock.now += 1.0
        merged.append(hybrid._ledger.steps)
        return merge(*arguments)

    clock.slow_forwards(llama, monkeypatch, 0.1)
    monkeypatch.setattr("draft_heads.inference.drafters.hybrid.hybrid.merge", merging)
    prompt, settings = llama_prompts[0], GenerationSettings(100)
    head = ScriptedDrafter(vanilla_tokens(llama, prompt, settings), 3)
    hybrid = HybridDrafter([("head", head), ("ngram", NgramDrafter())], llama, 8, clock=clock)
    engine = DecodingEngine(llama, hybrid)
    until(lambda: hybrid.parts[1].off, engine, prompt, settings)
    assert hybrid.parts[1].switched[0]["off"] <= LOST + EARLY + 3 * BATCH and not hybrid.parts[0].off
    merged.clear()
    result = engine.generate(prompt, settings)
    assert not merged and result.target_steps <= 1 + -(-99 // 4)


@pytest.mark.parametrize("parts,costs", [(2, 0.5), (3, 0.0)])
def test_merging_is_laid_to_either_of_two_parts_and_to_none_of_three(llama, llama_prompts, monkeypatch, parts, costs):
    clock = Clock()

    def merging(*arguments):
        clock.now += 1.0
        return merge(*arguments)

    clock.slow_forwards(llama, monkeypatch, 1.0)
    monkeypatch.setattr("draft_heads.inference.drafters.hybrid.hybrid.merge", merging)
    names = [str(part) for part in range(parts)]
    hybrid = HybridDrafter([(name, PromptLookupDrafter()) for name in names], llama, 6, clock=clock)
    hybrid._ledger._judge = lambda: None
    engine = DecodingEngine(llama, hybrid)
    for prompt in llama_prompts:
        engine.generate(prompt, GenerationSettings(60))
    for part in hybrid.parts:
        assert part.account.cost / part.account.steps == pytest.approx(costs, abs=0.03)


def test_of_two_parts_that_say_the_same_one_is_left(llama, llama_prompts, monkeypatch):
    clock = Clock()
    clock.slow_forwards(llama, monkeypatch)
    answer = vanilla_tokens(llama, llama_prompts[0], GenerationSettings(100))

    class Head(ScriptedDrafter):
        def propose(self):
            clock.now += 0.2
            return super().propose()

    hybrid = HybridDrafter([(name, Head(answer, 3)) for name in ("first", "second")], llama, 8, clock=clock)
    engine = DecodingEngine(llama, hybrid)
    until(lambda: hybrid._ledger.only is not None, engine, llama_prompts[0], GenerationSettings(100))
    found = hybrid.findings()["parts"]
    assert found["first"]["needed"] + found["second"]["needed"] < found["first"]["accepted"] / 10
    other = hybrid._ledger.only
    for _ in range(20):
        engine.generate(llama_prompts[0], GenerationSettings(100))
    assert hybrid._ledger.only is other and hybrid.findings()["parts"][other.name]["needed"] > 500


def test_a_window_owes_for_its_rows(llama, llama_prompts, monkeypatch):
    clock = Clock()
    clock.slow_forwards(llama, monkeypatch, 1.0, a_row=0.1)
    parts = [("ngram", NgramDrafter()), ("lookahead", LookaheadDrafter(n=4, w=5)), ("copy", PromptLookupDrafter())]
    hybrid = HybridDrafter(parts, llama, 6, clock=clock)
    hybrid._ledger._judge = lambda: None
    engine = DecodingEngine(llama, hybrid)
    for prompt in llama_prompts:
        engine.generate(prompt, GenerationSettings(90))
    lookahead = hybrid.parts[1]
    assert len(lookahead.riders) == 15
    assert lookahead.account.cost / lookahead.account.steps == pytest.approx(1.7 / 3.3, abs=0.1)


@pytest.mark.parametrize("name", ["ctc", "medusa", "hydra", "hydra++", "chimera", "draft_model"])
def test_a_part_drafts_among_others_and_alone_as_by_itself(llama, llama_prompts, name):
    def drafter():
        if name == "draft_model":
            return DraftModelDrafter(llama.without_layers([1]), k=3)
        return drafter_for(heads[name], llama, 6)

    heads = {
        **{kind: make_head(llama, kind) for kind in ("ctc", "medusa", "hydra", "chimera")},
        "hydra++": make_head(llama, "hydra", prefix_attention=True),
    }
    apart = drafter()
    hybrid = HybridDrafter([("part", drafter()), ("ngram", NgramDrafter())], llama, 6)
    part, ngram = hybrid.parts
    part.met = False  # as where it is compiled: what that tries out leaves no trace
    hybrid._ledger._judge = lambda: None
    begin, observe, propose = hybrid.begin, hybrid.observe, hybrid.propose
    merged, alone = [], []

    def beginning(prompt, capacity):
        apart.begin(prompt, capacity + 20)
        begin(prompt, capacity)

    def observing(step):
        apart.observe(step)
        observe(step)
        if len(merged) % 40 == 39 and hybrid._merged is not None:  # in the midst of an answer
            ngram.switch_off(hybrid._ledger.steps)
            ngram._until = 0
            hybrid._ledger.begin_again()

    def proposing():
        tree = propose()
        (alone if hybrid._merged is None else merged).append(tree)
        if name == "medusa" and hybrid._merged is not None:
            # which says what comes at each depth, and leaves the tree to the hybrid
            assert torch.equal(part.source.levels, apart.propose_levels())
        else:
            own, same = part.tree, apart.propose()
            assert own.tokens.tolist() == same.tokens.tolist() and own.parents.tolist() == same.parents.tolist()
            assert torch.allclose(own.log_probs, same.log_probs)
        return tree

    hybrid.begin, hybrid.observe, hybrid.propose = beginning, observing, proposing
    engine = DecodingEngine(llama, hybrid)
    settings = GenerationSettings(90)
    for prompt in llama_prompts:
        assert engine.generate(prompt, settings).tokens == vanilla_tokens(llama, prompt, settings)
    assert len(merged) > 80 and len(alone) > 20


def test_n_grams_left_alone_draft_as_if_there_were_no_hybrid(llama, llama_prompts):
    parts = [("medusa", drafter_for(make_head(llama, "medusa"), llama, 6)), ("ngram", NgramDrafter())]
    hybrid = HybridDrafter(parts, llama, 6)
    hybrid.parts[0].switch_off(0)
    settings = GenerationSettings(60)
    result = DecodingEngine(llama, hybrid).generate(llama_prompts[0], settings)
    alone = DecodingEngine(llama, NgramDrafter(max_nodes=6)).generate(llama_prompts[0], settings)
    assert result.accept_lengths == alone.accept_lengths and set(result.sources) <= {-1, 1}
    found = hybrid.findings()
    assert found["steps"] == result.target_steps - 2 == found["parts"]["ngram"]["asked"]  # the last is not observed
    assert found["parts"]["medusa"]["asked"] == 0


def test_a_part_that_fails_again_is_off_for_longer(llama):
    part = HybridPart(0, "ngram", NgramDrafter(), llama)
    pauses, steps = [], 0
    for lost in (0.0, 1.0, 100.0):
        part.switch_off(steps, lost)
        pauses.append(part.pause(steps))
        steps = part._until
        assert part.pause_over(steps) and not part.pause_over(steps - 1)
    assert pauses == [PAUSE, 2 * PAUSE, 100 * 100]  # trials shall take no more than a hundredth of the time


def told(hybrid, *brought, cost):
    """As if parts had decoded: what each brought in the same steps, and what it cost of each."""
    for part, tokens in zip(hybrid.parts, brought):
        part.account.add([tokens] * 400, cost * 400)
    hybrid._ledger._judge()


def test_a_part_that_paid_once_more_has_failed_for_the_first_time_afterwards(llama):
    hybrid = HybridDrafter([("ngram", NgramDrafter()), ("other", NgramDrafter())], llama, 6)
    paid, failed = hybrid.parts
    paid.failed = failed.failed = True
    told(hybrid, 2, 1, cost=0.6)  # one saves .8 steps and costs .6, one saves .4
    assert not paid.off and not paid.failed
    assert failed.off and failed.failed and failed.pause(0) == max(2 * PAUSE, round(100 * 0.2 * 400))
    assert hybrid._ledger.only is paid and paid.account.steps == 0  # which has to show what it brings alone


def test_one_is_switched_off_at_a_time_and_never_the_last_one(llama):
    hybrid = HybridDrafter([(name, NgramDrafter()) for name in "abc"], llama, 6)
    for off in ([False, True, False], [True, True, False], [True, True, False]):
        told(hybrid, 1, 0, 2, cost=0.9)
        assert [part.off for part in hybrid.parts] == off


def test_all_parts_are_judged_over_as_many_steps_when_one_comes_back(llama):
    hybrid = HybridDrafter([("ngram", NgramDrafter()), ("lookahead", LookaheadDrafter(n=4, w=5))], llama, 6)
    ngram, lookahead = hybrid.parts
    lookahead.switch_off(0)
    ngram.account.add([0] * 9, 1.0)
    hybrid._ledger.steps = lookahead._until - 1
    hybrid.begin(torch.tensor([1, 2, 3]), 80)
    assert lookahead.off and ngram.account.steps == 9
    hybrid._ledger.steps += 1
    hybrid.begin(torch.tensor([1, 2, 3]), 80)
    assert not lookahead.off and ngram.account.steps == lookahead.account.steps == 0


def test_a_balance_says_how_sure_it_is():
    account, steps = Account(), 400
    assert account.balance() == (0.0, math.inf) and account.loss() == 0
    account.add([0, 2] * (steps // 2), 0.0)
    error = 1 / math.sqrt(steps)
    assert account.balance() == pytest.approx((1.0, error)) and account.loss() == pytest.approx(-1.0)
    account.add([], 0.525 * steps)  # .525 of a step; two steps of .475 would have been shorter: may be bad luck
    assert account.balance() == pytest.approx((0.475 - 0.525, 0.475 * error)) and account.loss() == 0
    account.add([], 0.275 * steps)
    assert account.loss() == pytest.approx(0.8 - 0.2 - CLEAR * 0.2 * error)


def test_what_has_not_cost_much_yet_is_no_reason():
    account = Account()
    for cost in (0.0, 0.7, 0.01):
        account.add([0] * 100, 0.0)
        account.add([], cost * LOST)
        assert (account.loss() > 0) == (account.cost >= LOST)
    account.add([], 0.3 * LOST)
    assert account.loss() == pytest.approx(1.01 * LOST / 300)


def test_what_was_long_ago_counts_less_and_less():
    account = Account()
    for brought in (3, 0, 0, 0, 0):
        account.add([brought] * (MEMORY // 2 + 1), 0.0)
    assert account.steps <= MEMORY and 0 < account.balance()[0] < 0.5
    assert Account(account.state()).state() == account.state()
    account.begin_again()
    assert account.steps == 0


def test_what_was_done_without_a_part_is_not_laid_to_its_account(llama, llama_prompts):
    parts = [("ngram", NgramDrafter()), ("copy", PromptLookupDrafter()), ("lookahead", LookaheadDrafter(n=4, w=5))]
    hybrid = HybridDrafter(parts, llama, 6)
    hybrid._ledger._judge = lambda: None
    engine = DecodingEngine(llama, hybrid)
    hybrid.parts[1].switch_off(0)
    engine.generate(llama_prompts[0], GenerationSettings(50))
    assert hybrid._ledger._written
    hybrid.parts[1]._until = 0
    engine.generate(llama_prompts[1], GenerationSettings(20))
    asked = {name: part["asked"] for name, part in hybrid.findings()["parts"].items()}
    assert asked["copy"] < 20 < 40 < asked["ngram"] == asked["lookahead"]
