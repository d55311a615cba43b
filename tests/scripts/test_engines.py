"""What the check of exports in vLLM counts; vLLM itself is not needed here."""

from types import SimpleNamespace

import pytest
import torch

from draft_heads.inference.engine import DecodingEngine
from draft_heads.inference.generation import Generation, GenerationSettings
from draft_heads.scripts.bench import vllm
from draft_heads.scripts.checks.engines import (
    FAR,
    Engines,
    acceptance_length,
    check_head,
    distance,
    own_chain,
    until_end,
)
from tests.inference.models import ScriptedDrafter, load_target, vanilla_tokens


def test_answers_are_compared_up_to_their_first_end():
    assert until_end([5, 6, 2, 7], (2,)) == [5, 6, 2] and until_end([5, 6], (2,)) == [5, 6]


def test_acceptance_is_counted_as_vllm_counts_it():
    assert acceptance_length({"spec_decode_num_drafts": 4, "spec_decode_num_accepted_tokens": 6}) == 2.5


def test_an_answers_last_step_counts_whole():
    """Three drafts a step, all accepted: 4 tokens a step, also where an answer of 6 tokens ends inside one."""
    target = load_target("llama", torch.float64)
    prompt = list(range(3, 30))
    text = vanilla_tokens(target, prompt, GenerationSettings(20))
    engine = DecodingEngine(target, ScriptedDrafter(text, 3))
    assert own_chain(engine, [prompt], 6) == (2, 6)


def test_samples_of_one_distribution_are_near_and_those_of_others_are_far():
    generator = torch.Generator().manual_seed(0)

    def samples(weights):
        drawn = torch.multinomial(torch.tensor(weights), 1024, True, generator=generator).tolist()
        return [[[token] for token in drawn]]

    one, same, other = samples([0.6, 0.3, 0.1]), samples([0.6, 0.3, 0.1]), samples([0.5, 0.4, 0.1])
    assert distance(one, same, 0) < FAR < distance(one, other, 0)


def test_a_bench_has_an_arm_for_each_of_two_heads_of_a_kind(monkeypatch, tmp_path):
    heads = {"A": "ctc", "B": "eagle3", "C": "ctc", "D": "eagle3"}
    folders = []
    stub = SimpleNamespace(fingerprint=dict, config=None)
    loaded = {path: SimpleNamespace(config=SimpleNamespace(kind=kind)) for path, kind in heads.items()}
    monkeypatch.setattr(vllm, "load_head", lambda path, fingerprint: loaded[path])
    monkeypatch.setattr(vllm, "write_folder", lambda head, name, folder, *_: folders.append(folder.name))
    found = vllm.arms(SimpleNamespace(heads=list(heads), tokens=4, output=tmp_path, target="T"), stub)
    drafting = {name: arm["additional_config"]["draft_head"] for name, arm in found.items() if len(arm) == 2}
    assert drafting == {"ctc": "A", "eagle3": "B", "ctc_2": "C", "eagle3_2": "D"}
    assert folders == ["eagle3_export", "eagle3_2_export"]
    exports = [arm["speculative_config"]["model"] for name, arm in found.items() if "export" in name]
    assert exports == [str(tmp_path / folder) for folder in folders]


def test_a_bench_has_rows_of_our_own_engine_beside_those_of_vllm():
    target, prompt = load_target("llama", torch.float64), list(range(3, 30))
    text = vanilla_tokens(target, prompt, GenerationSettings(12))
    options = SimpleNamespace(drafters=["ngram", "transformers"], max_nodes=4)
    own = vllm.own_engines(options, target)
    assert list(own) == ["our vanilla", "our ngram", "transformers"]
    for name, engine in own.items():
        (alone,) = vllm.measure_own(engine, [prompt, prompt], GenerationSettings(12))
        assert alone["answers"] == [text, text] and alone["speed"] > 0
        assert name == "our ngram" or alone["length"] == 1
    assert vllm.own_engines(SimpleNamespace(drafters=[]), target) == {}
    options.drafters = ["ngram,keep=1"]
    with pytest.raises(ValueError, match="keeps what it learned of them"):
        vllm.own_engines(options, target)


def test_the_acceptance_length_of_our_own_rows_leaves_the_prefill_out_as_vllms_does():
    answers = [Generation([5] * 9, [1, 3, 3, 2]), Generation([5], [1])]
    given = iter([answers[0], *answers])  # the first to warm up
    engine = SimpleNamespace(generate=lambda prompt, settings: next(given))
    (alone,) = vllm.measure_own(engine, [[3], [4]], GenerationSettings(9))
    counts = {"spec_decode_num_drafts": 3, "spec_decode_num_accepted_tokens": 2 + 2 + 1}
    assert alone["length"] == acceptance_length(counts) == 1 + 5 / 3


def test_of_our_own_rows_the_warm_up_teaches_no_drafter(monkeypatch):
    target, prompt = load_target("llama", torch.float64), list(range(3, 30))
    options = SimpleNamespace(drafters=["both=ngram+prompt_lookup"], max_nodes=4)
    engine, answers, forgotten_after = vllm.own_engines(options, target)["our both"], [], []
    generate, forget = engine.generate, vllm.forget_all
    monkeypatch.setattr(engine, "generate", lambda *given: answers.append(generate(*given)) or answers[-1])
    monkeypatch.setattr(vllm, "forget_all", lambda drafter: forgotten_after.append(len(answers)) or forget(drafter))
    vllm.measure_own(engine, [prompt, prompt], GenerationSettings(12))
    assert forgotten_after == [1] and len(answers) == 3


def vllm_stand_in(plain, found):
    """Engines whose runs give these results, by name."""

    class Stub(Engines):
        def run(self, name, tasks, **engine):
            return found[name]

    return Stub("python", "target", None, [[5, 6]] * 8, 4)


def results(**changes):
    """Of the eight tasks, as a head that works has them."""
    counts = {"spec_decode_num_drafts": 10, "spec_decode_num_accepted_tokens": 12}
    one = {"answers": [[[7, 8, 9, 3]]] * 8, "texts": ["a"] * 8, "counts": counts, "slots": 1, "memory": 100.0}
    return [{**one, **changes.get(f"task{number}", {})} for number in range(8)]


@pytest.mark.parametrize(
    ("changes", "failures"),
    [
        ({}, 0),
        ({"task0": {"counts": {"spec_decode_num_drafts": 10, "spec_decode_num_accepted_tokens": 11}}}, 1),
        ({"task1": {"answers": [[[7, 8, 9, 4]]] * 8}}, 1),
        ({"task2": {"texts": ["b"] * 8}}, 1),
        ({"task7": {"slots": 2}}, 1),
        ({"task6": {"memory": 200.0}}, 1),
    ],
)
def test_what_a_head_changes_in_an_engine_is_told(changes, failures, capsys):
    plain = results()
    once = {"answers": plain[1]["answers"], "counts": {"num_preemptions": 1, "prefix_cache_hits": 32}}
    engines = vllm_stand_in(plain, {"ctc": results(**changes), "ctc_preempted": [once, once | {"answers": []}]})
    head = SimpleNamespace(config=SimpleNamespace(kind="ctc"))
    check_head(engines, "RUN/head", head, (10, 12), plain)
    assert engines.failed == failures and capsys.readouterr().out.count("DIFFERENT") == failures


def test_a_row_of_ours_does_not_replace_one_of_vllm(monkeypatch, tmp_path):
    asked = ["vllm.py", "--python", "python", "--target", "data/tiny_target", "--output", str(tmp_path)]
    asked += ["--questions", "8", "--drafters", "ngram", "ngram=transformers,prompt_lookup=3"]
    monkeypatch.setattr("sys.argv", asked)
    monkeypatch.setattr(vllm, "measure", lambda *_: pytest.fail("vLLM is asked"))
    with pytest.raises(ValueError, match="names of their own; ngram is a row of vLLM; give another"):
        vllm.main()
