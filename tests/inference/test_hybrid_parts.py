"""When the parts of a hybrid are asked, left and switched off, and what they are told then."""

import json
import random

import pytest
import torch

from inference.drafters.account import LOOK, TRIAL, VERDICTS, Account
from inference.drafters.asking import FEW, Asking, Company, Prospects
from inference.drafters.draft_model import DraftModelDrafter
from inference.drafters.hybrid import HybridDrafter
from inference.drafters.hybrid_part import PAUSE
from inference.drafters.lookahead import LookaheadDrafter
from inference.drafters.merging import merge
from inference.drafters.ngram import NgramDrafter
from inference.drafters.registry import drafter_for
from inference.drafters.running_costs import EARLY
from inference.engine import DecodingEngine, GenerationSettings
from tests.inference.models import ScriptedDrafter, make_head, vanilla_tokens


class Clock:
    """Time passes only where it is told to."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        self.now += 1e-6
        return self.now


class SlowDrafter(ScriptedDrafter):
    """A second for drafts that are never right."""

    def __init__(self, clock, reads_choices=False):
        super().__init__([7] * 10**6, 2)
        self.clock, self.reads_choices = clock, reads_choices

    def propose(self):
        self.clock.now += 1.0
        return super().propose()


def engine_until_it_is_off(llama, prompt, slow):
    """A hybrid of it and n-grams that has decoded until it was switched off."""
    hybrid = HybridDrafter([("slow", slow), ("ngram", NgramDrafter())], llama, 8, clock=slow.clock)
    engine = DecodingEngine(llama, hybrid)
    while not hybrid.parts[0].off:
        engine.generate(prompt, GenerationSettings(60))
    return engine, hybrid


def test_a_part_that_does_not_pay_is_switched_off_and_tried_again(llama, llama_prompts):
    clock = Clock()
    engine, hybrid = engine_until_it_is_off(llama, llama_prompts[0], SlowDrafter(clock))
    found = hybrid.findings()["parts"]
    steps = found["slow"]["switched"][0]["off"]
    assert 2 * TRIAL <= steps <= 2 * TRIAL + EARLY + 16 and found["ngram"]["switched"] == []
    assert EARLY <= found["slow"]["asked"] < TRIAL / 2  # where it never pays it is soon left
    spent = clock.now
    engine.generate(llama_prompts[1], GenerationSettings(60))
    assert clock.now - spent < 1.0
    wait = hybrid.parts[0]._until - steps
    assert wait > 10 * PAUSE  # its trial took as long as so many steps
    hybrid.findings()  # which counts what was drafted alone
    hybrid._ledger.steps = steps + wait
    engine.generate(llama_prompts[1], GenerationSettings(60))
    assert hybrid.findings()["parts"]["slow"]["switched"][0]["on"] == steps + wait
    assert clock.now - spent > 1.0


def test_a_part_whose_rows_are_needed_is_asked_always_until_it_clearly_loses(llama, llama_prompts):
    _, hybrid = engine_until_it_is_off(llama, llama_prompts[0], SlowDrafter(Clock(), reads_choices=True))
    found = hybrid.findings()["parts"]["slow"]
    assert found["switched"][0]["off"] <= found["asked"] < 2 * LOOK + EARLY


@pytest.mark.parametrize("name", ["ctc", "medusa", "hydra", "hydra++", "chimera", "draft_model"])
def test_a_part_that_was_left_for_some_steps_drafts_as_if_it_had_not_been(llama, llama_prompts, monkeypatch, name):
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
    part = hybrid.parts[0]
    part.met = False  # as where it is compiled: what that tries out leaves no trace
    hybrid._ledger.judge = lambda: None
    generator = random.Random(1)
    monkeypatch.setattr("inference.drafters.hybrid_part.WAITING", 12)
    part.account.asking.pays = lambda situation, price: generator.random() < 0.15
    part.account.joining.pays = lambda situation, price: generator.random() < 0.7
    part.account.asking.learn = part.account.joining.learn = lambda *told: None
    begin, observe, propose = hybrid.begin, hybrid.observe, hybrid.propose
    compared, by_itself = [], 0

    def beginning(prompt, capacity):
        apart.begin(prompt, capacity + 20)
        begin(prompt, capacity)

    def observing(step):
        apart.observe(step)
        observe(step)

    def proposing():
        nonlocal by_itself
        tree = propose()
        if part in hybrid._decision.asked:
            by_itself += hybrid._decision.asked == [part]
            if (
                name == "medusa" and hybrid._merged is not None
            ):  # which says what comes at each depth, and leaves the tree to the hybrid
                assert torch.equal(part.source.levels, apart.propose_levels())
            else:
                own, same = part.tree, apart.propose()
                assert own.tokens.tolist() == same.tokens.tolist() and own.parents.tolist() == same.parents.tolist()
                assert torch.allclose(own.log_probs, same.log_probs)
            compared.append(hybrid._ledger.steps)
        return tree

    hybrid.begin, hybrid.observe, hybrid.propose = beginning, observing, proposing
    engine = DecodingEngine(llama, hybrid)
    settings = GenerationSettings(90)
    for prompt in llama_prompts:
        assert engine.generate(prompt, settings).tokens == vanilla_tokens(llama, prompt, settings)
    assert EARLY + 10 < len(compared) < hybrid.findings()["steps"] - 40
    assert 0 < by_itself < len(compared) - EARLY


def test_the_only_part_that_is_asked_drafts_by_itself(llama, llama_prompts):
    hybrid = HybridDrafter(
        [("medusa", drafter_for(make_head(llama, "medusa"), llama, 6)), ("ngram", NgramDrafter())], llama, 6
    )
    hybrid.parts[0].account.asking.pays = lambda situation, price: False
    hybrid.parts[0].account.asking.learn = lambda *told: None
    alone = NgramDrafter(max_nodes=6)
    engine = DecodingEngine(llama, hybrid)
    engine.generate(llama_prompts[0], GenerationSettings(60))
    assert hybrid._ledger.costs.seconds_per_token > 0
    result = engine.generate(llama_prompts[0], GenerationSettings(60))
    assert hybrid._merged is None and hybrid._decision.asked == hybrid.parts[1:]
    assert (
        result.accept_lengths[2:]
        == DecodingEngine(llama, alone).generate(llama_prompts[0], GenerationSettings(60)).accept_lengths[2:]
    )
    assert set(result.sources) <= {-1, 1}


def test_what_two_parts_bring_is_told_apart(llama, llama_prompts):
    parts = [(kind, drafter_for(make_head(llama, kind), llama, 6)) for kind in ("medusa", "hydra")]
    hybrid = HybridDrafter([*parts, ("ngram", NgramDrafter())], llama, 6)
    hybrid._ledger.judge = lambda: None
    together = set()
    propose = hybrid.propose

    def proposing():
        tree = propose()
        if not hybrid._decision.trial and hybrid._ledger.costs.seconds_per_token:
            together.add(tuple(part in hybrid._decision.asked for part in hybrid.parts[:2]))
        return tree

    hybrid.propose = proposing
    engine = DecodingEngine(llama, hybrid)
    for prompt in llama_prompts:
        engine.generate(prompt, GenerationSettings(90))
    assert len(together) == 4  # each with the other and without


def test_one_stretch_of_text_alone_does_not_decide_about_a_part():
    account = Account()
    gains = iter([0.5, 0.5, 0.0, 0.0])
    account._to_leave = 0.15
    account.asking.profit = lambda price: next(gains)
    lacking = [account.verdict(1.0) for _ in range(4)]
    assert lacking == pytest.approx([0, -0.35, -0.55 / 3, -0.1])  # no verdict by one alone
    account.begin_again()
    account.asking.profit = lambda price: 0.0
    assert [account.verdict(1.0) for _ in range(2)] == pytest.approx([0, 0.15])
    account.read(3.0)
    account._steps = [(False, 0.0, 0)] * 10
    account._verdicts = 0
    assert [account.verdict(1.0) for _ in range(2)] == pytest.approx([0, 0.15 + 0.3])


def test_what_was_spent_long_ago_counts_no_more():
    account = Account()
    account._price, account._seconds_per_token = 0.5, 1.0
    for _ in range(100):
        account.decide(account.choose("here", may_be_left=False))
    assert 40 < account.spent < 50
    account.asking.pays = lambda situation, price: False
    for _ in range(2 * VERDICTS * TRIAL):
        account.decide(account.choose("here", may_be_left=True))
    assert account.spent < 10
    account.begin_again()
    assert account.spent == 0


def test_all_parts_are_judged_over_as_many_steps_when_one_comes_back(llama):
    hybrid = HybridDrafter([("ngram", NgramDrafter()), ("lookahead", LookaheadDrafter(n=4, w=5))], llama, 6)
    ngram, lookahead = hybrid.parts
    lookahead.switch_off(0)
    for _ in range(LOOK - 1):  # at the next step they would be judged, one of them by that step alone
        ngram.account.close_step(0)
    hybrid._ledger.steps = lookahead._until - 1
    hybrid.begin(torch.tensor([1, 2, 3]), 80)
    assert lookahead.off and ngram.account.steps == LOOK - 1
    hybrid._ledger.steps += 1
    hybrid.begin(torch.tensor([1, 2, 3]), 80)
    assert not lookahead.off and ngram.account.steps == lookahead.account.steps == 0


def test_expectations_are_corrected_by_what_came():
    account = Account()
    for _ in range(400):
        account.decide(account.choose("here", True))
        account.learn(1 if account.choice.asked else 0, 0.25, 2.0)  # one is accepted where two are expected
        account.conclude(0.0)
    seen = account.asking._situations["here"]
    assert seen.asked.value == pytest.approx(1 - 0.25, abs=0.2) and seen.left.value == pytest.approx(-0.25)


def test_n_grams_that_cost_more_than_they_bring_leave_a_head_to_itself(llama, llama_prompts, monkeypatch):
    clock, merged = Clock(), []

    def merging(*arguments):
        clock.now += 1.0
        merged.append(hybrid._ledger.steps)
        return merge(*arguments)

    def verifying(*arguments):
        clock.now += 0.1
        return forward(*arguments)

    forward = llama.forward_tree
    monkeypatch.setattr(llama, "forward_tree", verifying)
    monkeypatch.setattr("inference.drafters.hybrid.merge", merging)
    prompt, settings = llama_prompts[0], GenerationSettings(100)
    head = ScriptedDrafter(vanilla_tokens(llama, prompt, settings), 3)
    hybrid = HybridDrafter([("head", head), ("ngram", NgramDrafter())], llama, 8, clock=clock)
    engine = DecodingEngine(llama, hybrid)
    while not hybrid.parts[1].off:
        engine.generate(prompt, settings)
    steps = hybrid.parts[1].switched[0]["off"]
    assert 2 * TRIAL <= steps <= 2 * TRIAL + EARLY + 16 and not hybrid.parts[0].off
    assert len([step for step in merged if step > EARLY + 16]) < TRIAL / 2  # soon it drafts alone
    merged.clear()
    result = engine.generate(prompt, settings)
    assert not merged and result.target_steps <= 1 + -(-99 // 4)


def test_what_others_bring_is_counted_above_the_part_alone_in_every_step():
    asking, joining = Asking(), Asking()
    for situation, asked, left, beside, alone in (("a", 2, 0, 3, 1), ("b", 1, 0.5, 1, 1), ("c", 1, 0, 1, 1)):
        for _ in range(FEW):
            for where, value in ((True, asked), (False, left)):
                asking.pays(situation, 1.0)
                asking.learn(situation, where, value)
            if situation != "c":  # where nobody knows of company
                for where, value in ((True, beside), (False, alone)):
                    joining.pays(situation, 0.5)
                    joining.learn(situation, where, value)
    # a: 3 beside others at .5 instead of 1 alone; b: to leave it saves .75 and costs 1 − .5; c: the same, and costs 1
    assert asking.profit_of_company(joining, 0.75, 0.5) == pytest.approx((1.5 + 0.25 + 0) / 3)
    assert asking.profit_of_company(joining, 1.15, 0.5) == pytest.approx((1.5 + 0.65 + 0.15) / 3)
    assert asking.profit_of_company(joining, 0.25, 2.5) == 0


def test_company_that_is_not_clear_by_itself_follows_what_pays_on_average():
    company = Company()

    def learn(situation, beside, alone, times=8):
        """Values that scatter by 2 around these."""
        for turn in range(times):
            company.pays(situation, 0.5)
            for where, value in ((True, beside), (False, alone)):
                company.learn(situation, where, value + (2 if turn % 2 else -2))

    learn("pays", 6.0, 1.0)
    assert company.pays("new", 0.5) and not company.clear("new", 0.5)  # to be tried
    company.learn("new", True, 1.0)
    assert not company.pays("new", 0.5)  # and the other way
    learn("doubtful", 1.2, 1.0)
    assert company.clear("doubtful", 0.5) and company.pays("doubtful", 0.5)
    learn("harms", 1.0, 6.0)
    assert not company.pays("harms", 0.5) and company.pays("pays", 0.5)
    learn("harms as well", 1.0, 6.0)
    assert not company.pays("doubtful", 0.5)  # on average it does not pay any more


def test_a_step_is_worth_what_follows_it_too():
    account, prospects = Account(), Prospects()
    for _ in range(FEW):
        assert prospects("phrase") == 0  # nobody knows yet
        prospects.learn("phrase", 2.0)
        prospects.learn("nothing", -1.0)
    for _ in range(40):
        account.decide(account.choose("here", True))
        account.learn(1, 0.25, None)
        account.conclude(prospects("nothing" if account.choice.asked else "phrase"))
    seen = account.asking._situations["here"]
    assert (seen.asked.value, seen.left.value) == (pytest.approx(1 - 0.25 - 1), pytest.approx(1 - 0.25 + 2))
    again = Prospects.from_state(json.loads(json.dumps(prospects.state_dict())))
    assert (again("phrase"), again("nothing"), again("elsewhere")) == (2, -1, 0)


def test_the_last_step_of_an_answer_teaches_nothing():
    account = Account()
    account.decide(account.choose("here", True))
    account.learn(5, 0.0, None)
    account.conclude(None)
    account.conclude(1.0)
    assert account.asking._situations["here"].weight == 0
