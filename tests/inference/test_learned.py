"""What a hybrid learned outlives its process, and is refused where it is damaged or another's."""

import json

import pytest
import torch

from draft_heads.inference.drafters.hybrid.hybrid import HybridDrafter
from draft_heads.inference.drafters.hybrid.hybrid_part import PAUSE
from draft_heads.inference.drafters.hybrid.learned import LearnedFile
from draft_heads.inference.drafters.registry import DrafterSpec, build_drafter, drafter_for
from draft_heads.inference.drafters.text.ngram import NgramDrafter
from draft_heads.inference.engine import DecodingEngine
from draft_heads.inference.evaluation.options import drafter_specs
from draft_heads.inference.evaluation.replay import TokenizerTarget
from draft_heads.inference.evaluation.report import findings_note
from draft_heads.inference.generation import GenerationSettings
from tests.inference.models import load_target, make_head, make_prompts, vanilla_tokens

SETTINGS = GenerationSettings(60)


def hybrid(llama, path, kind="medusa"):
    parts = [(kind, drafter_for(make_head(llama, kind), llama, 6)), ("ngram", NgramDrafter())]
    return HybridDrafter(parts, llama, 6, learned=LearnedFile(path, {"parts": [kind, "ngram"]}, llama))


def taught(llama, prompts, path):
    """A hybrid that has decoded a while, its head, of random weights, switched off whatever the clock says."""
    drafter = hybrid(llama, path)
    engine = DecodingEngine(llama, drafter)
    drafter._ledger._judge = lambda: None
    for prompt in prompts * 3:
        engine.generate(prompt, SETTINGS)
    drafter.parts[0].switch_off(drafter._ledger.steps)
    drafter.close()
    return drafter


@pytest.fixture(scope="module")
def written(llama, llama_prompts, tmp_path_factory):
    path = tmp_path_factory.mktemp("deep") / "er" / "learned.json"
    return path, taught(llama, llama_prompts, path)


def test_the_next_process_goes_on_where_this_one_ended(llama, llama_prompts, written):
    path, first = written
    second = hybrid(llama, path)
    engine = DecodingEngine(llama, second)
    for prompt in llama_prompts:
        assert engine.generate(prompt, SETTINGS).tokens == vanilla_tokens(llama, prompt, SETTINGS)
    assert first.findings()["parts"]["medusa"]["asked"] > 0
    found = second.findings()
    assert found["learned_before"] == first.findings()["steps"] > 128
    assert found["parts"]["medusa"] == {"accepted": 0, "needed": 0, "asked": 0, "switched": [{"off": 0, "on": None}]}
    notes = findings_note({"h": found})
    assert notes[0] == f"h began with what {found['learned_before']} earlier target steps had taught it."
    assert notes[-1] == "h: medusa did not pay before and was off from the start."
    now, then = (one.parts[0].pause(one._ledger.steps) for one in (second, first))
    assert PAUSE - 500 < now <= then - found["steps"]


def test_everything_comes_back(llama, written):
    path, first = written
    second = hybrid(llama, path)
    second.begin(torch.tensor([1, 2, 3]), 80)
    assert json.dumps(second._ledger.calibration.state_dict()) == json.dumps(first._ledger.calibration.state_dict())
    assert len(first._ledger.calibration.state_dict()["cells"]) > 5
    for old, new in zip(first.parts, second.parts):
        assert (new.account.state(), new.failed) == (old.account.state(), old.failed)
    assert first.parts[0].account.steps > 64 and first.parts[0].failed
    assert (
        second._ledger.costs.steps == first._ledger.costs.steps
        and second._ledger.costs._latest == first._ledger.costs._latest
    )
    assert second._ledger.costs.seconds_per_token > 0


def test_what_this_process_switched_gives_way_to_what_was_learned(llama, written, tmp_path):
    drafter = hybrid(llama, written[0])  # medusa is off in the file
    for part in drafter.parts:
        part.switch_off(0)
    drafter._ledger.steps = 50
    drafter.begin(torch.tensor([1, 2, 3]), 80)
    assert [part.off for part in drafter.parts] == [True, False] and len(drafter._ledger.active) == 1
    assert drafter.parts[0].switched == [{"off": 0, "on": 50}, {"off": 50, "on": None}]


def test_a_pause_that_is_over_begins_a_trial(llama, written, tmp_path):
    state = json.loads(written[0].read_text())
    state["parts"][0]["pause"] = 0
    over = tmp_path / "over"
    over.write_text(json.dumps(state))
    drafter = hybrid(llama, over)
    drafter.begin(torch.tensor([1, 2, 3]), 80)
    assert not drafter.parts[0].off and drafter.parts[0].switched == []
    assert [part.account.steps for part in drafter.parts] == [0, 0]  # beside each other again


def test_one_file_that_cannot_be_written_does_not_cost_the_others(llama, llama_prompts, tmp_path):
    drafter = hybrid(llama, tmp_path / "learned")

    def fails():
        raise OSError("no room")

    drafter.parts[0].drafter.close = fails
    with pytest.raises(OSError, match="no room"):
        drafter.close()
    assert (tmp_path / "learned").exists()


@pytest.mark.parametrize("key", ["learned", "pool"])
def test_two_drafters_do_not_write_over_each_other(key):
    words = [f"a=ngram,{key}=x+prompt_lookup", f"b=ngram,k=3,{key}=x+prompt_lookup"]
    with pytest.raises(ValueError, match="'x' is given twice"):
        drafter_specs(words)


def test_what_is_compiled_meets_all_parts_before_any_is_left_out(tmp_path):
    torch.set_num_threads(1)
    llama = load_target("llama", torch.float32)
    prompts = make_prompts(llama, 2)
    path = tmp_path / "learned"
    taught(llama, prompts, path)
    llama.compile()
    of = json.loads(path.read_text())
    path.write_text(json.dumps({**of, "of": {**of["of"], "compiled": True}}))
    drafter = hybrid(llama, path)
    engine = DecodingEngine(llama, drafter)
    before = path.read_text()
    engine.generate(prompts[0], GenerationSettings(1))
    drafter.close()
    assert path.read_text() == before  # what was never taken up is not written over
    engine.generate(prompts[0], GenerationSettings(12))
    assert drafter.parts[0].asked and drafter.parts[0].met and not drafter.parts[0].off
    asked = drafter.parts[0].asked
    engine.generate(prompts[1], GenerationSettings(40))
    assert drafter.parts[0].off and drafter.parts[0].asked == asked


def test_the_command_lines_words(llama, llama_prompts, tmp_path):
    words = f"h=ngram,learned={tmp_path / 'learned.json'}+prompt_lookup"
    for before in (False, True):
        drafter = build_drafter(DrafterSpec.parse(words), llama, 8)
        DecodingEngine(llama, drafter).generate(llama_prompts[0], SETTINGS)
        drafter.close()
        assert (drafter.findings()["learned_before"] > 0) == before
    with pytest.raises(ValueError, match="max_nodes was 8 and is 9"):
        build_drafter(DrafterSpec.parse(words), llama, 9)
    with pytest.raises(ValueError, match=r"same machine; .* parts was"):
        build_drafter(DrafterSpec.parse(words.replace("ngram,", "ngram,k=3,")), llama, 8)


@pytest.mark.parametrize("words,told", [("learned=", "got no name"), ("learned=x", "a replay, which measures none")])
def test_it_is_of_a_target_and_has_a_name(llama, words, told):
    target = llama if words == "learned=" else TokenizerTarget(llama.tokenizer)
    with pytest.raises(ValueError, match=told):
        build_drafter(DrafterSpec.parse(f"h=ngram,{words}+prompt_lookup"), target, 8)


def test_another_machines_prices_are_refused(llama, written):
    path, _ = written
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    try:
        with pytest.raises(ValueError, match=f"threads was {threads} and is {threads + 1}; delete it"):
            hybrid(llama, path)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("keep", [0, 30, -40])
def test_a_file_cut_short_is_refused(llama, written, tmp_path, keep):
    cut = tmp_path / "cut"
    cut.write_text(written[0].read_text()[:keep])
    with pytest.raises(ValueError, match="cut short or is none"):
        hybrid(llama, cut)


@pytest.mark.parametrize(
    "change,told",
    [
        ({"format_version": 1}, "format_version 5; .* has 1"),
        ({"parts": []}, "cut short or is none"),
        ({"parts": 3}, "cut short or is none"),
        ({"calibration": {"cells": [[["x"], 1]], "alone": []}}, "cut short or is none"),
        ({"calibration": {"cells": [["x", 3, 1.0, 5.0]], "alone": []}}, "an entry for each of 2 sources"),
        ({"calibration": {"cells": [[1, 2, 3, 1.0, 5.0]], "alone": []}}, "an entry for each of 2 sources"),
        ({"calibration": {"cells": [], "alone": [[2, 3, 1.0, 5.0]]}}, "one of 2 sources; got 3 of 2"),
        ({"costs": {"steps": 100, "latest": []}}, "cut short or is none"),
        ({"of": None}, "cut short or is none"),
        ({"parts": [{"account": [1, 2, 3], "failed": False, "pause": None}] * 2}, "cut short or is none"),
        ({"parts": [{"account": [1, 2, 3, 4, 5], "failed": False, "pause": None}] * 2}, "cut short or is none"),
        ({"costs": {"steps": 100, "latest": [[1, 0.1, 0.1, 0]]}}, "cut short or is none"),
    ],
)
def test_a_file_that_was_changed_is_refused(llama, written, tmp_path, change, told):
    changed = tmp_path / "changed"
    changed.write_text(json.dumps({**json.loads(written[0].read_text()), **change}))
    with pytest.raises(ValueError, match=told):
        hybrid(llama, changed)
