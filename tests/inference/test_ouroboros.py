"""Ouroboros: what each of its four ingredients does, and that the tokens stay the target's own."""

import json

import pytest
import torch

from draft_heads.inference.batch import BatchEngine
from draft_heads.inference.drafters.base import VanillaDrafter
from draft_heads.inference.drafters.models.draft_model import DraftModelDrafter
from draft_heads.inference.drafters.models.ouroboros import OuroborosDrafter, agreement, matching_runs
from draft_heads.inference.drafters.registry import DrafterSpec, build_drafter
from draft_heads.inference.engine import DecodingEngine
from draft_heads.inference.evaluation.lossless import Oracle
from draft_heads.inference.generation import GenerationSettings
from draft_heads.inference.step import VerifiedStep
from draft_heads.inference.target.target import Target
from draft_heads.scripts import tune_ouroboros
from draft_heads.scripts.tune_ouroboros import main
from tests.inference.models import in_slots, make_prompts, small_model
from tests.inference.trees import check_tree

TINY = "tests/tiny_target"
SMALL = {"gamma": 4, "w": 4, "p": 4}
OFF = {"accelerate": 0, "lengthen": 0, "from_verification": 0, "reuse_history": 0}
LITERAL = {"beside": 0, "from_text": 0}


@pytest.mark.parametrize(
    "own,options",
    [
        (False, {}),
        (True, SMALL),
        (False, LITERAL),
        (True, {**SMALL, **OFF, "accelerate": 1}),
        (True, {**SMALL, **OFF, "lengthen": 1}),
        (False, {**SMALL, "max_nodes": 5}),
        (True, {"max_nodes": 1}),
    ],
)
def test_the_tokens_are_the_targets_own(target, own, options):
    engine = DecodingEngine(target, OuroborosDrafter(target if own else small_model(), **options))
    for prompt in [*make_prompts(target, 2), [5]]:
        result = engine.generate(prompt, GenerationSettings(30))
        assert result.tokens == Oracle(target, GenerationSettings(30)).answer(prompt)


def test_drawn_tokens_and_batches_are_those_of_the_plain_loop(llama):
    prompts = make_prompts(llama, 3)
    model = small_model()
    for settings in (GenerationSettings(30, temperature=0.8, seed=2), GenerationSettings(30)):
        expected = [DecodingEngine(llama, VanillaDrafter()).generate(p, settings).tokens for p in prompts]
        engine = DecodingEngine(llama, OuroborosDrafter(model, **SMALL))
        assert [engine.generate(prompt, settings).tokens for prompt in prompts] == expected
        together = BatchEngine(llama, in_slots(lambda: OuroborosDrafter(model, **SMALL), 2)).generate(prompts, settings)
        assert [answer.tokens for answer in together] == expected


@pytest.mark.parametrize("positions", [30, 70, 256])
def test_either_context_may_end(target, positions):
    prompt = (make_prompts(target, 1)[0] * 12)[: 230 if positions == 256 else 60]
    settings = GenerationSettings(60)
    drafter = OuroborosDrafter(small_model(positions=positions), w=30)
    result = DecodingEngine(target, drafter).generate(prompt, settings)
    assert result.tokens == Oracle(target, settings).answer(prompt)


# ----------------------------------------------------------------------------------------------------
# One switch after the other


def test_without_all_of_them_it_is_speculative_decoding(target):
    settings = GenerationSettings(40)
    plain = DecodingEngine(target, DraftModelDrafter(small_model(), k=4))
    engine = DecodingEngine(target, OuroborosDrafter(small_model(), gamma=4, **OFF))
    assert engine.drafter.max_nodes == engine.drafter.max_depth == 4
    for prompt in make_prompts(target, 2):
        assert engine.generate(prompt, settings).accept_lengths == plain.generate(prompt, settings).accept_lengths


def test_accelerated_drafts_are_what_the_draft_model_says_from_fewer_forwards(llama):
    prompt = make_prompts(llama, 1)[0][:10] * 4
    expected = Oracle(llama, GenerationSettings(100)).answer(prompt)
    drafter = OuroborosDrafter(llama, gamma=8, **{**OFF, "accelerate": 1, "reuse_history": 1})
    length = len(prompt) + len(expected)
    for start in range(0, len(expected) - 6):
        drafter.pool.add(expected[start : start + 6])  # stays, because phrases outlive a prompt
    result = DecodingEngine(llama, drafter).generate(prompt, GenerationSettings(60))
    assert result.tokens == expected[:60] and length > 100
    found = drafter.findings()
    assert found["draft_tokens"] > 3 * found["draft_forwards"]
    assert all(9 <= count <= 9 + 5 for count in result.accept_lengths[1:-1])
    assert max(result.accept_lengths) > 9  # what the last forward gave beyond γ is kept


def proposed(drafter, text=(3, 4, 5, 6)):
    """What is drafted behind a text, the last token being the base token."""
    with torch.inference_mode():
        tokens = torch.tensor(text)
        drafter.begin(0, tokens[:-1], 200)
        drafter.observe(VerifiedStep.of_prompt(tokens[:-1], torch.zeros(len(tokens) - 1, 32), tokens[-1:]))
        return drafter.propose()


def verified(drafter, tree, said):
    """The target says `said` at the base token and at every node."""
    one, said = torch.tensor([[6]]), torch.tensor([said])
    drafter.observe(VerifiedStep(one, said[:, :1], torch.zeros(1, 1, 32), one[0] - 5, said, tree=tree))


def trunk_of(model, count):
    drafter = DraftModelDrafter(model, k=count)
    return proposed(drafter).tokens[0].tolist()


def test_the_newest_phrases_lengthen_the_draft_and_share_what_they_have_in_common():
    """γ = 2, K = 2, P = 4: two branches of three nodes below d_2, of which the first is one."""
    model = small_model()
    first, last = trunk_of(model, 2)
    drafter = OuroborosDrafter(model, gamma=2, p=4, k=2, **LITERAL, **{**OFF, "lengthen": 1, "reuse_history": 1})
    for phrase in ((last, 20, 21, 22), (last, 30, 31, 32), (last, 30, 41, 42), (first, 9, 9, 9)):
        drafter.pool.add(phrase)
    tree = proposed(drafter)
    check_tree(tree)
    assert tree.tokens[0].tolist() == [first, last, 30, 41, 42, 31, 32]
    assert tree.parents[0].tolist() == [-1, 0, 1, 2, 3, 2, 5]
    assert (drafter.max_nodes, drafter.max_depth) == (2 + 2 * 3, 2 + 3)


def test_phrases_behind_the_base_token_stand_beside_the_trunk():
    model = small_model()
    first, last = trunk_of(model, 2)
    drafter = OuroborosDrafter(model, gamma=2, p=3, k=1, beside=2, **{**OFF, "lengthen": 1, "reuse_history": 1})
    for phrase in ((6, first, 20), (6, 8, 21), (last, 30, 31)):
        drafter.pool.add(phrase)
    tree = proposed(drafter)
    assert tree.tokens[0].tolist() == [first, last, 30, 31, 8, 21, 20]
    assert tree.parents[0].tolist() == [-1, 0, 1, 2, -1, 4, 0]


def test_matching_runs_of_a_refused_draft_become_phrases():
    """The worked example of `matching_runs`, and runs that are one token, or longer than a phrase."""
    a, b, x, c, e, f = range(1, 7)
    assert matching_runs([a, b, x, c, e, f], [a, b, 9, c, e, 9]) == [[c, e]]
    assert matching_runs([a, b], [a, b]) is None and matching_runs([], []) is None
    assert matching_runs([a, b, c, x, e], [9, b, 9, x, e]) == [[b], [x, e]]
    model = small_model()
    trunk = trunk_of(model, 7)
    drafter = OuroborosDrafter(model, gamma=7, p=3, **LITERAL, **{**OFF, "from_verification": 1})
    tree = proposed(drafter)
    assert tree.tokens[0].tolist() == trunk
    verified(drafter, tree, [trunk[0] + 1, trunk[1], trunk[2] + 1, *trunk[3:], 0])
    assert len(drafter.pool) == 2
    assert tuple(trunk[3:6]) in drafter.pool.newest(trunk[3], 9) and tuple(trunk[4:7]) in drafter.pool.newest(
        trunk[4], 9
    )


def test_unused_phrases_of_an_accepted_draft_are_set_right():
    """Trunk d_1 accepted, p^1 = (d, 20, 21) used as far as 20, p^2 = (d, 30, 31) unused: it becomes (d, 20, v_3)."""
    model = small_model()
    (last,) = trunk_of(model, 1)
    on = {**OFF, "lengthen": 1, "from_verification": 1, "reuse_history": 1}
    drafter = OuroborosDrafter(model, gamma=1, p=3, k=2, **LITERAL, **on)
    for phrase in ((last, 30, 31), (last, 20, 21)):
        drafter.pool.add(phrase)
    tree = proposed(drafter)
    assert tree.tokens[0].tolist() == [last, 20, 21, 30, 31]
    verified(drafter, tree, [last, 20, 50, 51, 60, 61])
    assert drafter.pool.newest(last, 9) == [(last, 20, 60), (last, 20, 21)]
    assert agreement((last, 20, 21), [20, 50, 51]) == 1 and agreement((last, 30, 31), [20, 60, 61]) == 0


def test_the_text_itself_becomes_phrases(llama):
    drafter = OuroborosDrafter(llama, p=3, **{**OFF, "from_verification": 1})
    proposed(drafter, (3, 4, 5, 6))
    assert drafter.pool.newest(3, 9) == [(3, 4, 5)] and drafter.pool.newest(4, 9) == [(4, 5, 6)]
    drafter.read([7])
    assert drafter.pool.newest(5, 9) == [(5, 6, 7)] and len(drafter.pool) == 3


@pytest.mark.parametrize("reuse", [0, 1])
def test_phrases_of_one_prompt_serve_the_next_where_history_is_reused(llama, reuse):
    prompt = make_prompts(llama, 1)[0]
    drafter = OuroborosDrafter(small_model(), reuse_history=reuse)
    engine = DecodingEngine(llama, drafter)
    first = engine.generate(prompt, GenerationSettings(60))
    again = engine.generate(prompt, GenerationSettings(60))
    assert again.tokens == first.tokens
    assert (again.target_steps < first.target_steps) == bool(reuse)


def test_the_target_as_its_own_draft_model_is_lengthened_by_whole_phrases(llama):
    """With its own answer in the pool: γ + overshoot + P − 1 drafts and the base token a step."""
    prompt = make_prompts(llama, 1)[0]
    drafter = OuroborosDrafter(llama, gamma=3, p=4, w=5)
    engine = DecodingEngine(llama, drafter)
    engine.generate(prompt, GenerationSettings(80))
    result = engine.generate(prompt, GenerationSettings(61))
    speculative = DecodingEngine(llama, DraftModelDrafter(llama, k=3)).generate(prompt, GenerationSettings(61))
    assert result.tokens == speculative.tokens and result.target_steps < 0.7 * speculative.target_steps


# ----------------------------------------------------------------------------------------------------
# Words, and the search for its options


@pytest.fixture(scope="module")
def tiny():
    return Target.from_pretrained(TINY, device="cpu")


@pytest.mark.parametrize(
    "words,told",
    [
        ("ouroboros", "ouroboros needs a path; got none; write ouroboros=MODEL"),
        (f"ouroboros={TINY},accelerate=2", "accelerate must be one of 0, 1; got 2"),
        (f"ouroboros={TINY},beside=-1", "beside must be at least 0; got -1"),
        (f"ouroboros={TINY},gamma=0", "gamma must be at least 1; got 0"),
        (f"ouroboros={TINY},p=1", "p must be at least 2; got 1"),
        (f"ouroboros={TINY},tuned=no.json", "a file of scripts/tune_ouroboros.py with gamma and w and p and k"),
        (f"draft_model={TINY},tuned=no.json", "takes no tuned=FILE"),
    ],
)
def test_what_makes_no_sense_is_refused(tiny, words, told):
    with pytest.raises(ValueError, match=told):
        build_drafter(DrafterSpec.parse(words), tiny)


def test_the_search_writes_what_the_drafter_loads(tiny, tmp_path, capsys):
    questions, tuned = tmp_path / "questions.jsonl", tmp_path / "tuned.json"
    rows = [{"question_id": i, "category": "x", "turns": [f"What is {i} plus 3?"]} for i in range(3)]
    questions.write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = [
        "--target", TINY, "--draft_model", TINY, "--benchmarks", f"mt_bench={questions}", "--prompts", "2",
        "--new_tokens", "6", "--gammas", "2", "3", "--windows", "4", "--phrases", "3", "4", "--output", str(tuned),
    ]  # fmt: skip
    assert main(command) == 0
    told = capsys.readouterr().out
    found = json.loads(tuned.read_text())
    assert f"written: gamma {found['gamma']}, w 4, p {found['p']}, k 3" in told
    for name, grid in (("gamma", (2, 3)), ("w", (4,)), ("p", (3, 4))):
        assert set(found["measured"][name]) == {"0", *map(str, grid)}
        assert found[name] == min(grid, key=lambda value: found["measured"][name][str(value)]["seconds_per_token"])
    drafter = build_drafter(DrafterSpec.parse(f"ouroboros={TINY},tuned={tuned},w=7"), tiny)
    assert (drafter.gamma, drafter.pool.length, drafter.pool.most) == (found["gamma"], found["p"], 7)
    assert main([*command, "--phrases", "1"]) == 2
    assert "--phrases must be at least 2; got 1" in capsys.readouterr().err
    assert main(command) == 2
    assert "tuned.json is there already; name another, or remove it" in capsys.readouterr().err


def test_the_search_keeps_what_takes_the_least_time_a_token(tiny, monkeypatch, capsys):
    """In half precision the answers of one value may end earlier than another's, which takes less time in all."""
    totals = {0: (90, 90, 1.0), 2: (100, 50, 1.0), 3: (60, 30, 0.7)}  # tokens, steps, seconds
    monkeypatch.setattr(tune_ouroboros, "time_engines", lambda *_: totals)
    best, measured = tune_ouroboros.search(tiny, tiny, [[5]], {"gamma": [2, 3]}, GenerationSettings(4))
    assert best["gamma"] == 2 and measured["gamma"][3] == {"beta": 2.0, "seconds_per_token": pytest.approx(0.7 / 60)}
    assert "gamma 2    β 2.00  10.00 ms a token  <" in capsys.readouterr().out


def test_every_forward_of_the_draft_model_teaches_the_lookahead_inside(llama):
    """Also the last one of a draft, whose tokens are drafted already: its window has found n-grams."""
    drafter = OuroborosDrafter(llama, **SMALL)
    inner, told = drafter.loop.inner, []
    observe = inner.observe
    inner.observe = lambda step, *slot: (told.append(step.choices is not None), observe(step, *slot))
    verified_ones, whole = [], drafter.loop._verify_and_commit
    drafter.loop._verify_and_commit = lambda *arguments: verified_ones.append(1) or whole(*arguments)
    DecodingEngine(llama, drafter).generate(make_prompts(llama, 1)[0], GenerationSettings(30))
    assert told.count(True) == len(verified_ones) > 5
