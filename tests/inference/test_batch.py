"""Several sequences at once answer as one by one, whatever each accepts and whenever each ends."""

from dataclasses import replace

import pytest
import torch

from draft_heads.data.labels.loops import IncrementalStop
from draft_heads.heads.checkpoint import HEADS
from draft_heads.inference.batch import BatchEngine
from draft_heads.inference.drafters.base import Drafter, SlotLoop, VanillaDrafter
from draft_heads.inference.drafters.hybrid.hybrid import HybridDrafter
from draft_heads.inference.drafters.registry import DrafterSpec, build_drafter, drafter_for
from draft_heads.inference.drafters.text.lookahead import LookaheadDrafter
from draft_heads.inference.drafters.text.ngram import NgramDrafter
from draft_heads.inference.engine import DecodingEngine
from draft_heads.inference.evaluation.lossless import Oracle
from draft_heads.inference.generation import ContextError, GenerationSettings
from draft_heads.inference.step import VerifiedStep
from draft_heads.inference.tree import DraftTree
from draft_heads.inference.verify import TypicalAcceptance
from draft_heads.scripts.checks.lossless_matrix import trained_head
from tests.inference.models import ScriptedDrafter, in_slots, load_target, make_head, make_prompts


@pytest.fixture(scope="module", params=["llama", "mistral"])
def target(request):
    return load_target(request.param, torch.float64)


@pytest.fixture(scope="module")
def prompts(target):
    return make_prompts(target, 5)


@pytest.fixture(scope="module")
def make_drafters(target, prompts):
    oracle = Oracle(target, GenerationSettings(40))
    texts = [(prompt, oracle.answer(prompt)) for prompt in prompts]
    heads = {kind: trained_head(target, texts, 30, kind) for kind in HEADS}
    return {
        "vanilla": lambda slots: VanillaDrafter(target.device, slots),
        **{kind: lambda slots, head=head: drafter_for(head, target, 8, slots=slots) for kind, head in heads.items()},
        "ngram": lambda slots: in_slots(lambda: NgramDrafter(branches=2), slots),
        "hybrid": lambda slots: HybridDrafter(
            [("ctc", drafter_for(heads["ctc"], target, 8, slots=slots)), ("ngram", in_slots(NgramDrafter, slots))],
            target,
            8,
        ),
    }


@pytest.mark.parametrize("kind", ["vanilla", *HEADS, "ngram", "hybrid"])
def test_a_batch_answers_as_one_by_one(target, prompts, make_drafters, kind):
    oracle = Oracle(target, GenerationSettings(40))
    ends = tuple({oracle.answer(prompt)[place] for place, prompt in enumerate(prompts[:3], start=5)})
    rules = [{}, {"eos_token_ids": ends}, {"temperature": 1.0}, {"typical": TypicalAcceptance()}]
    for settings in [GenerationSettings(40, **rule) for rule in (rules[:3] if kind == "hybrid" else rules)]:
        alone = DecodingEngine(target, make_drafters[kind](1))
        one_by_one = [alone.generate(prompt, settings) for prompt in prompts]
        batches = (1, 3, 16) if settings == GenerationSettings(40) else (3,)  # in 3 slots, texts follow others
        together = [
            answer
            for batch in batches
            for answer in BatchEngine(target, make_drafters[kind](batch)).generate(prompts, settings)
        ]
        for expected, answer in zip(len(batches) * one_by_one, together, strict=True):
            assert answer.tokens == expected.tokens and answer.finish_reason == expected.finish_reason
            if kind == "hybrid":  # its calibration depends on the answers before
                assert len(answer.sources) == len(answer.tokens) and sum(answer.accept_lengths) == len(answer.tokens)
            else:
                assert answer.accept_lengths == expected.accept_lengths and answer.sources == expected.sources
    assert kind in ("vanilla", "ngram") or any(len(set(answer.accept_lengths)) > 1 for answer in together)


@pytest.mark.parametrize("tree", ["default", "chain"])
@pytest.mark.parametrize("kind", HEADS)
@torch.inference_mode()
def test_the_drafts_of_a_batch_are_those_of_each_text_by_itself(target, prompts, kind, tree):
    """After prompts of several lengths, and after a step that committed another number of tokens of each."""
    head, options = make_head(target, kind, scale=0.3).eval(), {} if tree == "default" else {"tree": tree}
    layers, texts = head.config.target_layers, [prompts[0], prompts[1][:5], [*prompts[2], *prompts[3]]]
    together = drafter_for(head, target, 12, slots=3, **options)
    alone = [drafter_for(head, target, 12, **options) for _ in texts]
    accepted, rows = (1, 3, 2), torch.arange(4)
    before, after = [], []
    for text, count in zip(texts, accepted):
        ids = torch.tensor([text])
        hidden, _ = target.forward_rows(ids, torch.ones_like(ids), torch.arange(len(text))[None], layers)
        prompt = len(text) - 1 - count
        before.append(VerifiedStep.of_prompt(ids[0, :prompt], hidden[0, :prompt], ids[0, prompt : prompt + 1]))
        place = prompt + rows.clamp(max=count - 1)[None]
        following = ids[:, prompt + 1 :].gather(1, rows.clamp(max=count - 1)[None])
        step = VerifiedStep(ids[:, place[0]], following, hidden[:, place[0]], torch.tensor([count]))
        after.append(replace(step, tree=DraftTree.empty()))
    for slot, (drafter, step) in enumerate(zip(alone, before)):
        for each, place in ((together, slot), (drafter, 0)):
            each.begin(place, step.tokens[0], 80)
            each.observe(step, place)
    for steps in (None, after):
        if steps is not None:
            fields = ("tokens", "next_tokens", "hidden", "count")
            whole = VerifiedStep(*(torch.cat([getattr(step, name) for step in steps]) for name in fields))
            together.observe(replace(whole, tree=DraftTree.empty(texts=3)))
        found = together.propose()
        for slot, drafter in enumerate(alone):
            if steps is not None:
                drafter.observe(steps[slot])
            expected = drafter.propose()
            own, size = found.map(lambda x, slot=slot: x[slot : slot + 1]), len(expected)
            assert size > 2 and torch.equal(own.tokens[:, :size], expected.tokens)
            assert torch.equal(own.parents[:, :size], expected.parents) and not own.candidate[:, size:].any()
            torch.testing.assert_close(own.log_probs[:, :size], expected.log_probs, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("slots", [2, 3, 16])
def test_texts_whose_window_rides_along_may_end_one_before_another(target, prompts, slots):
    """The trees of a step are as large as the largest; a text that has ended had a larger one."""
    window = in_slots(lambda: LookaheadDrafter(n=3, w=4), slots)
    hybrid = HybridDrafter([("ngram", in_slots(NgramDrafter, slots)), ("lookahead", window)], target, 64)
    oracle = Oracle(target, GenerationSettings(40))
    settings = GenerationSettings(40, tuple({oracle.answer(prompt)[5 + n] for n, prompt in enumerate(prompts[:3])}))
    expected = [Oracle(target, settings).answer(prompt) for prompt in prompts]
    assert len(set(map(len, expected))) > 1
    for _ in range(2):
        assert [answer.tokens for answer in BatchEngine(target, hybrid).generate(prompts, settings)] == expected


class Counted(ScriptedDrafter):
    """Always wrong; counts its drafts."""

    def __init__(self):
        super().__init__([7] * 100, 2)
        self.proposed = 0

    def propose(self):
        self.proposed += 1
        return super().propose()


@pytest.mark.parametrize("hybrid", [False, True])
def test_nothing_is_drafted_for_a_slot_whose_text_ended_together_with_all_others(target, prompts, hybrid):
    each = [Counted() for _ in range(3)]
    drafter = SlotLoop(each)
    if hybrid:
        drafter = HybridDrafter(
            [("wrong", drafter), ("window", in_slots(lambda: LookaheadDrafter(n=3, w=2), 3))], target
        )
    engine, settings = BatchEngine(target, drafter), GenerationSettings(6, ())
    expected = [answer.tokens for answer in BatchEngine(target, VanillaDrafter(slots=3)).generate(prompts, settings)]
    assert [answer.tokens for answer in engine.generate(prompts[:3], settings)] == expected[:3]
    for count, drafted in ((1, [5, 0, 0]), (4, [10, 5, 5])):  # the fourth follows three that end together
        before = [one.proposed for one in each]
        assert [answer.tokens for answer in engine.generate(prompts[:count], settings)] == expected[:count]
        assert [one.proposed - was for one, was in zip(each, before)] == drafted


@pytest.mark.parametrize("words", ["lookahead,n=3,w=7", "ngram,keep=1", "h=lookahead+ngram", "self_speculative,skip=1"])
def test_a_drafter_of_several_slots_is_described_as_that_of_one(target, words):
    alone, batch = (build_drafter(DrafterSpec.parse(words), target, 64, slots=slots) for slots in (1, 2))
    for wrapped, one in ((batch, alone), (SlotLoop([alone]), alone)):
        named = {*Drafter.__annotations__, "deepest_draft", "target_layers"} - {"slots", "drafts_for", "graphs"}
        assert {name: getattr(wrapped, name) for name in named} == {name: getattr(one, name) for name in named}


def test_room_is_reserved_in_every_slot(target):
    each, reserved = [VanillaDrafter(), VanillaDrafter()], []
    for index, drafter in enumerate(each):
        drafter.reserve = lambda capacity, index=index: reserved.append((index, capacity))
        drafter.members = lambda drafter=drafter: iter([drafter])
    SlotLoop(each).reserve(70)
    assert reserved == [(0, 70), (1, 70)]


def test_an_answer_of_one_token_leaves_nothing_behind(target):
    short, long = [3] * 10, [7] * 190
    first = Oracle(target, GenerationSettings(1)).answer(long)
    settings = GenerationSettings(40, tuple(first))
    expected = [Oracle(target, settings).answer(prompt) for prompt in (short, long)]
    engine = BatchEngine(target, VanillaDrafter(target.device, 2))
    assert [answer.tokens for answer in engine.generate([short, long], settings)] == expected
    assert [answer.tokens for answer in engine.generate([long, short], settings)] == expected[::-1]


def test_what_cannot_be_batched_is_refused(target, prompts):
    engine = BatchEngine(target, VanillaDrafter(target.device, 2))
    assert engine.generate([]) == []
    for generate in (engine.generate, engine.generate_or_none):
        with pytest.raises(ValueError, match=r"prompts is a list of prompts; got 'Hi'; write \['Hi'\]"):
            generate("Hi")
    assert engine.generate_or_none([[1] * target.max_positions]) == [None]
    with pytest.raises(ContextError, match="positions"):
        engine.generate([prompts[0], [1] * target.max_positions])
    with pytest.raises(ValueError, match="got 999999"):
        engine.generate([prompts[0], [1, 999_999]])
    with pytest.raises(ValueError, match="got 999999"):
        list(engine.as_completed([prompts[0], [1, 999_999]], [4, 4], GenerationSettings()))


@pytest.mark.parametrize("kind", ["medusa", "ngram", "hybrid"])
def test_a_drafter_that_another_batch_took_over_is_not_used_on(target, prompts, make_drafters, kind):
    drafter = make_drafters[kind](2)
    one, other = BatchEngine(target, drafter), BatchEngine(target, drafter)
    settings, rest = GenerationSettings(40, ()), ([9, 40], GenerationSettings(40, ()))
    answers = one.as_completed(prompts[:2], *rest)
    assert len(next(answers).answer.tokens) == 9
    expected = one.generate(prompts[:1], settings)[0].tokens
    answers = one.as_completed(prompts[:2], *rest)
    next(answers)
    assert other.generate(prompts[:1], settings)[0].tokens == expected
    with pytest.raises(RuntimeError, match="a drafter drafts for one batch at a time"):
        next(answers)
    assert one.generate(prompts[:1], settings)[0].tokens == expected


class Session:
    """Has a stop rule beside what cannot be copied."""

    def __init__(self, target):
        self.engine, self.asked = DecodingEngine(target, VanillaDrafter()), []

    def stop(self, tokens):
        self.asked.append(tuple(tokens))
        return 6 if len(tokens) == 6 else None


def test_the_stop_rule_of_a_batch_is_the_one_that_was_given(target, prompts):
    session = Session(target)
    expected = [Oracle(target, GenerationSettings(6, ())).answer(prompt) for prompt in prompts]
    settings = GenerationSettings(40, (), stop=session.stop)
    answers = BatchEngine(target, VanillaDrafter(target.device, 3)).generate(prompts, settings)
    assert [(answer.tokens, answer.finish_reason) for answer in answers] == [(tokens, "stop") for tokens in expected]
    assert sorted(session.asked) == sorted(tuple(tokens[:n]) for tokens in expected for n in range(1, 7))


def test_a_rule_that_keeps_the_text_reads_each_token_of_a_batch_once(target, prompts):
    pushed = []

    class Detector:
        def push(self, token):
            pushed.append(token)

    settings = GenerationSettings(20, (), stop=IncrementalStop(Detector))
    answers = BatchEngine(target, VanillaDrafter(target.device, 3)).generate(prompts, settings)
    assert sorted(pushed) == sorted(token for answer in answers for token in answer.tokens)
