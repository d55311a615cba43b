"""What a hybrid writes down of its steps, and what it makes of that."""

import json

import pytest

from draft_heads.inference.drafters.hybrid import ledger as ledgers
from draft_heads.inference.drafters.hybrid.account import Account
from draft_heads.inference.drafters.hybrid.calibration import Calibration
from draft_heads.inference.drafters.hybrid.hybrid import HybridDrafter
from draft_heads.inference.drafters.hybrid.learned import Learned, LearnedPart
from draft_heads.inference.drafters.hybrid.running_costs import EARLY, RunningCosts
from draft_heads.inference.drafters.registry import drafter_for
from draft_heads.inference.drafters.text.ngram import NgramDrafter
from draft_heads.inference.engine import DecodingEngine
from draft_heads.inference.generation import GenerationSettings
from tests.inference.models import make_head, vanilla_tokens


def decoded(llama, prompts, monkeypatch, batch):
    """A hybrid that has decoded, and the drafts that were accepted in the steps it was told of.

    A forward takes a second, whatever its rows, and nothing else any time.
    """
    now, forward = 0.0, type(llama).forward_tree

    def verifying(*arguments):
        nonlocal now
        now += 1.0
        return forward(llama, *arguments)

    monkeypatch.setattr(llama, "forward_tree", verifying)
    monkeypatch.setattr(ledgers, "BATCH", batch)
    parts = [("medusa", drafter_for(make_head(llama, "medusa"), llama, 6)), ("ngram", NgramDrafter())]
    hybrid = HybridDrafter(parts, llama, 6, clock=lambda: now)
    hybrid._ledger._judge = lambda: None
    hybrid._ledger.costs._next_trial = 10**9  # none but the early ones
    settings, brought = GenerationSettings(90), 0
    engine = DecodingEngine(llama, hybrid)
    for prompt in prompts:
        result = engine.generate(prompt, settings)
        assert result.tokens == vanilla_tokens(llama, prompt, settings)
        brought += sum(length - 1 for length in result.accept_lengths[1:-1])  # the last step is not observed
    return hybrid, brought


@pytest.mark.parametrize("batch", [1, 32])
def test_every_step_is_learned_from_and_every_accepted_token_credited(llama, llama_prompts, monkeypatch, batch):
    hybrid, brought = decoded(llama, llama_prompts, monkeypatch, batch)
    ledger = hybrid._ledger
    assert bool(ledger._written) == (batch > 1) and len(ledger._written) < batch
    found = hybrid.findings()
    assert not ledger._written and json.dumps(found)
    parts = found["parts"].values()
    assert sum(part["accepted"] for part in parts) == brought > 0
    assert all(part["asked"] == found["steps"] and 0 <= part["needed"] <= brought for part in parts)
    fresh = len(llama_prompts)
    assert ledger.costs.steps == found["steps"] - fresh > EARLY
    for part in hybrid.parts:
        assert ledger.costs.steps - EARLY - fresh - batch <= part.account.steps <= ledger.costs.steps - EARLY + 1


def test_steps_before_learned_figures_are_taken_up_are_credited(llama, llama_prompts, monkeypatch):
    hybrid, _ = decoded(llama, llama_prompts[:1], monkeypatch, 32)
    ledger = hybrid._ledger
    assert ledger._written
    parts = [LearnedPart(Account(), False, None), LearnedPart(Account(), True, 500)]
    ledger.go_on(Learned(5, Calibration(), RunningCosts(), parts))
    assert [part.asked for part in hybrid.parts] == [ledger.steps, ledger.steps]
    assert [part.account.steps for part in hybrid.parts] == [0, 0] and ledger.only is hybrid.parts[0]


def test_what_steps_cost_is_known_as_soon_as_can_be(llama, llama_prompts, monkeypatch):
    hybrid, _ = decoded(llama, llama_prompts[:1], monkeypatch, 10**6)
    sizes = {step.rows for step in hybrid._ledger.costs._latest}
    assert hybrid._ledger.costs.steps == EARLY and len(sizes) >= 3
    assert hybrid._ledger.costs.seconds_per_token > 0


def test_without_measuring_the_whole_budget_is_drafted(llama, llama_prompts, monkeypatch):
    parts = [("medusa", drafter_for(make_head(llama, "medusa"), llama, 6)), ("ngram", NgramDrafter())]
    hybrid = HybridDrafter(parts, llama, 6, fit=0)
    sizes, propose = [], hybrid.propose
    monkeypatch.setattr(hybrid, "propose", lambda: (tree := propose(), sizes.append(len(tree)))[0])
    DecodingEngine(llama, hybrid).generate(llama_prompts[0], GenerationSettings(60))
    assert set(sizes) == {6} and hybrid.findings()["node_price"] == 0
    assert hybrid._ledger.costs.steps == 0 and all(part.account.steps == 0 for part in hybrid.parts)
