"""What a hybrid writes down of its steps, and what it makes of that."""

import json

import pytest
import torch

from inference.drafters import ledger as ledgers
from inference.drafters.account import LOOK, Account, Choice
from inference.drafters.base import VerifiedStep
from inference.drafters.hybrid import HybridDrafter
from inference.drafters.hybrid_part import PAUSE, HybridPart
from inference.drafters.learned import Learned
from inference.drafters.ledger import BATCH, NOTED, Decision
from inference.drafters.ngram import NgramDrafter
from inference.drafters.registry import drafter_for
from inference.drafters.running_costs import EARLY
from inference.engine import DecodingEngine, GenerationSettings
from tests.inference.models import make_head, vanilla_tokens


def decoded(llama, llama_prompts, monkeypatch, settled, asks, joins):
    """A hybrid of Medusa and n-grams that has decoded, and the drafts that were accepted in the steps it was told of.

    What it decides is given by the last token; a forward takes a second, whatever its rows, and nothing else any time.
    """
    now, forward = 0.0, type(llama).forward_tree

    def verifying(*arguments):
        nonlocal now
        now += 1.0
        return forward(llama, *arguments)

    monkeypatch.setattr(llama, "forward_tree", verifying)
    parts = [("medusa", drafter_for(make_head(llama, "medusa"), llama, 6)), ("ngram", NgramDrafter())]
    hybrid = HybridDrafter(parts, llama, 6, clock=lambda: now)
    account = hybrid.parts[0].account
    pays, joining = account.asking.pays, account.joining.pays
    account.asking.pays = lambda situation, price: pays(situation, price) is not None and situation in asks
    account.joining.pays = lambda situation, price: joining(situation, price) is not None and situation in joins
    account.asking.clear = account.joining.clear = lambda situation, price: settled
    hybrid._situation = lambda: hybrid._new[-1] % 3
    hybrid._ledger.judge = lambda: None
    hybrid._ledger.costs._next_trial = 10**9  # none but the early ones
    engine = DecodingEngine(llama, hybrid)
    settings, brought = GenerationSettings(90), 0
    for prompt in llama_prompts:
        result = engine.generate(prompt, settings)
        assert result.tokens == vanilla_tokens(llama, prompt, settings)
        brought += sum(length - 1 for length in result.accept_lengths[1:-1])  # the last step is not observed
    return hybrid, brought


def test_steps_that_are_written_down_teach_what_they_would_have_taught_at_once(llama, llama_prompts, monkeypatch):
    monkeypatch.setattr(ledgers, "NOTED", BATCH)
    told = []
    for settled in (False, True):
        hybrid, brought = decoded(llama, llama_prompts, monkeypatch, settled, asks=(1,), joins=())
        ledger = hybrid._ledger
        assert bool(ledger._written) == settled
        found = hybrid.findings()
        assert not ledger._written
        assert sum(part["accepted"] for part in found["parts"].values()) == brought
        assert found["parts"]["medusa"]["asked"] > EARLY and ledger.costs.steps > 2 * BATCH
        account = hybrid.parts[0].account
        assert {len(account.asking._situations), len(ledger.prospects._worths)} == {3}
        gains = {key: (seen.asked.total, seen.left.total) for key, seen in account.asking._situations.items()}
        told.append((found, ledger.costs.state_dict(), ledger.prospects.state_dict(), gains))
    (*at_once, gained), (*later, gained_later) = told
    assert json.dumps(at_once) == json.dumps(later)
    for key, sums in gained.items():  # what follows the last step of an answer is not known to those written down
        assert gained_later[key] == pytest.approx(sums, abs=2 * len(llama_prompts))


def test_of_what_is_clear_most_is_only_counted(llama, llama_prompts, monkeypatch):
    followed = []
    conclude = Account.conclude
    monkeypatch.setattr(Account, "conclude", lambda account, worth: followed.append(worth) or conclude(account, worth))
    runs = []
    for noted in (BATCH, NOTED):
        monkeypatch.setattr(ledgers, "NOTED", noted)
        followed.clear()
        hybrid, brought = decoded(llama, llama_prompts, monkeypatch, True, asks=(), joins=())
        found = hybrid.findings()
        assert sum(part["accepted"] for part in found["parts"].values()) == brought
        ledger, account = hybrid._ledger, hybrid.parts[0].account
        behind_others = followed.count(None)
        runs.append((found, account.steps + sum(ledger._counted.values()), ledger.costs.steps, behind_others))
    (all_told, every_step, learned, ends), (told, steps, noted, gaps) = runs
    assert told == all_told and steps == every_step
    assert noted < 0.6 * learned and gaps > ends  # what follows a gap says nothing of the step before it


def test_merged_trees_that_are_written_down_are_credited(llama, llama_prompts, monkeypatch):
    hybrid, brought = decoded(llama, llama_prompts, monkeypatch, True, asks=(0, 1, 2), joins=(0, 1))
    assert any(step.merged for step in hybrid._ledger._written)
    found = hybrid.findings()["parts"]
    assert sum(part["accepted"] for part in found.values()) == brought > 0


def test_the_same_is_decided_for_a_while_without_thinking(llama, llama_prompts, monkeypatch):
    thought = []
    choose = Account.choose
    monkeypatch.setattr(Account, "choose", lambda account, *seen: thought.append(seen) or choose(account, *seen))
    hybrid, _ = decoded(llama, llama_prompts, monkeypatch, True, asks=(), joins=())
    steps = hybrid.findings()["steps"]
    often = EARLY + steps / BATCH
    assert often <= len(thought) / 2 < often + 2 * steps / BATCH + 3 * len(llama_prompts) + 9 < steps


def test_what_was_clear_is_not_to_who_learned_otherwise(llama):
    first, second = (HybridDrafter([("ngram", NgramDrafter()), ("other", NgramDrafter())], llama, 6) for _ in range(2))
    ledger, taught = first._ledger, second._ledger
    ledger._clear[0] = Decision()
    parts = [(part.account, None) for part in second.parts]
    ledger.go_on(Learned(5, taught.calibration, taught.costs, taught.prospects, parts))
    assert not ledger._clear and ledger.costs is taught.costs and first.parts[0].account is second.parts[0].account


def test_a_part_that_fails_again_is_off_for_longer(llama):
    part = HybridPart(0, "ngram", NgramDrafter(), llama)
    pauses, steps = [], 0
    for _ in range(3):
        part._untold.add(VerifiedStep(*map(torch.zeros, (3, 3, (3, 1), ()))), [1, 2, 3, 4])
        part._unread = [1]
        part.switch_off(steps)
        assert not part._untold and not part._unread  # of this text it needs nothing any more
        pauses.append(part.pause(steps))
        steps = part._until
        assert part.pause_over(steps)
    assert pauses == [PAUSE, 2 * PAUSE, 2 * PAUSE]
    assert Account.from_state(json.loads(json.dumps(part.account.state_dict()))).failed


def test_a_part_that_paid_once_more_has_failed_for_the_first_time_afterwards(llama):
    hybrid = HybridDrafter([("ngram", NgramDrafter()), ("other", NgramDrafter())], llama, 6)
    ledger = hybrid._ledger
    ledger.costs.seconds_per_token = 1.0
    for part, brought in zip(hybrid.parts, (2, 1)):
        part.account.failed = True
        for _ in range(4 * LOOK):
            part.account.decide(Choice())
            part.account.close_step(brought, verifying=1.5)
    ledger.judge()
    paid, failed = hybrid.parts
    assert not paid.off and not paid.account.failed
    assert failed.off and failed.account.failed and failed.pause(0) == 2 * PAUSE
    assert ledger.only is paid
