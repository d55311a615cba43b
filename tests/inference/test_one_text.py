"""An engine decodes one text at a time, and says so; engines of several threads share a target."""

import inspect
import sys
from threading import Thread, current_thread

import pytest
import torch

from draft_heads.inference import generate
from draft_heads.inference.batch import BatchEngine
from draft_heads.inference.drafters.base import VanillaDrafter
from draft_heads.inference.drafters.registry import DrafterBuilder, DrafterSpec
from draft_heads.inference.drafters.text.ngram import NgramDrafter
from draft_heads.inference.engine import DecodingEngine
from draft_heads.inference.evaluation.lossless import Oracle
from draft_heads.inference.generation import ContextError, Generation, GenerationSettings
from draft_heads.inference.target import probe, weights
from draft_heads.inference.target.target import Target
from tests.inference.models import RANDOM_TARGETS, load_target, make_drafter
from tests.tiny_chat import random_llama

PROMPT = list(range(3, 40))


def test_a_second_text_in_an_engine_ends_the_first_and_a_second_thread_is_refused():
    target = load_target("llama", torch.float64)
    answer = Oracle(target, GenerationSettings(max_new_tokens=60)).answer(PROMPT)
    engine = DecodingEngine(target, VanillaDrafter())
    first = engine.stream(PROMPT, GenerationSettings(60))
    next(first)
    assert engine.generate(PROMPT, GenerationSettings(60)).tokens == answer
    with pytest.raises(RuntimeError, match=r"another text was begun .*; make an engine with a drafter of its own"):
        next(first)
    first = engine.stream(PROMPT, GenerationSettings(60))
    next(first)
    with pytest.raises(ContextError):
        engine.generate([], GenerationSettings(60))  # touches nothing
    ended = Generation()
    for _ in engine.stream(PROMPT, GenerationSettings(60), ended):
        if ended.finish_reason:
            engine.generate(PROMPT, GenerationSettings(1))
    assert ended.tokens == answer
    within_a_step = GenerationSettings(60, stop=lambda tokens: engine.generate(PROMPT))  # as another thread may call it
    with pytest.raises(RuntimeError, match="one thread at a time; make an engine with a drafter of its own"):
        engine.generate(PROMPT, within_a_step)
    assert engine.generate(PROMPT, GenerationSettings(60)).tokens == answer


def test_ctrl_c_at_any_place_of_a_step_leaves_an_engine_that_decodes():
    """As a notebook interrupts a cell: here before each line of the engine's loop. Python runs no handler of a signal
    in the two that end a step."""
    target = load_target("llama", torch.float64)
    engine, settings = DecodingEngine(target, NgramDrafter()), GenerationSettings(6)
    source, first = inspect.getsourcelines(DecodingEngine.stream)
    end = first + next(at for at, line in enumerate(source) if line.strip() == "finally:")
    answer, lines = engine.generate(PROMPT, settings).tokens, 0

    def interrupted(frame, event, _):
        nonlocal lines
        if frame.f_code is not DecodingEngine.stream.__code__:
            return None
        lines -= event == "line"
        if lines < 0 and frame.f_lineno not in (end + 1, end + 2):
            raise KeyboardInterrupt
        return interrupted

    for at in range(30):
        lines = at
        with pytest.raises(KeyboardInterrupt):
            sys.settrace(interrupted)
            try:
                engine.generate(PROMPT, settings)
            finally:
                sys.settrace(None)
        assert engine.generate(PROMPT, settings).tokens == answer


@pytest.mark.parametrize("refused", [[], list(range(3, 40)) * 99])
def test_a_text_ends_when_the_weights_change_whatever_was_asked_meanwhile(refused):
    target = Target(random_llama().double())
    engine, batches = DecodingEngine(target, VanillaDrafter()), BatchEngine(target, VanillaDrafter(slots=2))
    text = engine.stream(PROMPT, GenerationSettings(60))
    next(text)
    batch = batches.as_completed([PROMPT] * 3, [2, 60, 60], GenerationSettings(60, ()))
    next(batch)
    with torch.no_grad():
        target.model.model.norm.weight.mul_(1.5)
    with pytest.raises(ContextError):
        engine.generate(refused)
    with pytest.raises(RuntimeError, match="weights were changed before this text had ended; begin it again"):
        next(text)
    with pytest.raises(RuntimeError, match="weights were changed before this batch had ended; begin it again"):
        next(batch)
    assert len(engine.generate(PROMPT, GenerationSettings(6)).tokens) == 6


def test_a_second_engine_whose_prefill_fails_has_ended_the_first_ones_text(monkeypatch):
    target, drafter = load_target("llama", torch.float64), NgramDrafter()
    engine, second = DecodingEngine(target, drafter), DecodingEngine(target, drafter)
    text = engine.stream(PROMPT, GenerationSettings(24, ()))
    next(text)
    with monkeypatch.context() as patch:
        patch.setattr(target, "prefill", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            second.generate(PROMPT)
    with pytest.raises(RuntimeError, match="another engine began a text with this one's drafter"):
        next(text)


def test_a_smaller_batch_after_one_that_was_left_drafts_for_its_own_texts_alone():
    """By the draft model's forwards, of which a text that was left would take more."""
    target, other = load_target("llama", torch.float64), load_target("llama", torch.float64)

    def forwards(words, left):
        builder = DrafterBuilder(target, 8, slots=3)
        builder.draft_model = lambda *_: other
        drafter = builder.build(DrafterSpec.parse(words))
        loops = [member.loop for member in drafter.members() if hasattr(member, "loop")]
        engine = BatchEngine(target, drafter)
        if left:
            batch = engine.as_completed([PROMPT] * 3, [2, 60, 60], GenerationSettings(60, ()))
            next(batch)
            batch.close()
        before = sum(loop.forwards for loop in loops)
        engine.generate([PROMPT[:9]], GenerationSettings(12, ()))
        return sum(loop.forwards for loop in loops) - before

    for words in ("d=draft_model:x,k=2", "d=draft_model:x,k=2+ngram"):
        assert forwards(words, left=True) == forwards(words, left=False) > 0


def test_a_batch_after_one_that_was_left_has_no_rows_of_its_windows():
    """A window is small at the beginning of a text, and full when the batch before is left."""
    target = load_target("llama", torch.float64)
    drafter = DrafterBuilder(target, 16, slots=2).build(DrafterSpec.parse("d=lookahead,n=3,w=3,g=2+ngram"))
    engine, prompts, settings = BatchEngine(target, drafter), [PROMPT, PROMPT[:9]], GenerationSettings(24, ())
    batch = engine.as_completed([PROMPT] * 3, [6, 60, 60], settings)
    next(batch)
    batch.close()
    expected = [Oracle(target, settings).answer(prompt) for prompt in prompts]
    assert [answer.tokens for answer in engine.generate(prompts, settings)] == expected


@pytest.mark.parametrize("other", [DecodingEngine, BatchEngine])
def test_a_drafter_that_another_engine_began_with_ends_the_first_text_unless_it_had_ended(other):
    target, drafter = load_target("llama", torch.float64), NgramDrafter()
    engine, second = DecodingEngine(target, drafter), other(target, drafter)
    settings = GenerationSettings(24, ())

    def answer():
        return second.generate(PROMPT if isinstance(second, DecodingEngine) else [PROMPT], settings)

    text = engine.stream(PROMPT, settings)
    next(text)
    answer()
    with pytest.raises(RuntimeError, match="another engine began a text with this one's drafter"):
        next(text)
    ended = Generation()
    for _ in engine.stream(PROMPT, settings, ended):
        if ended.finish_reason:
            answer()
    assert len(ended.tokens) == 24


def start_in_a_trial(monkeypatch, second):
    """The thread starts when a target is tried, and is given time in which it would run if nothing held it."""
    own = probe._compare_texts

    def compare(*args):
        if second.ident is None:
            second.start()
        if current_thread() is not second:  # either may merge the weights, which is a trial too
            second.join(timeout=0.3)
        return own(*args)

    monkeypatch.setattr(probe, "_compare_texts", compare)


@pytest.mark.parametrize("way", ["engine", "generate"])
def test_an_answer_begun_by_another_thread_waits_until_the_target_has_been_tried(monkeypatch, way):
    """A target is tried with a shorter window, in which the other answer would be another text."""
    settings = GenerationSettings(24, ())
    if way == "engine":
        target = load_target("mistral", torch.float64)
        answer = Oracle(target, settings).answer(PROMPT)
    else:
        model, ids = RANDOM_TARGETS["mistral"]().double(), torch.tensor([PROMPT])
        asked = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 24, "do_sample": False, "pad_token_id": 0}
        answer = model.generate(ids, **asked)[0, len(PROMPT) :].tolist()
    answers, made = [], []
    monkeypatch.setattr(generate, "Target", lambda model: made.append(Target(model)) or made[-1])

    def decode():
        if way == "engine":
            answers.append(DecodingEngine(target, VanillaDrafter()).generate(PROMPT, settings).tokens)
        else:
            text = model.generate(ids, **asked, custom_generate=generate.generate_fn(VanillaDrafter()))
            answers.append(text[0, len(PROMPT) :].tolist())

    second = Thread(target=decode)

    start_in_a_trial(monkeypatch, second)
    decode()
    second.join()
    assert second.ident and answers == [answer] * 2 and len(made) == (way == "generate")


def test_a_merge_that_failed_is_not_tried_again_by_a_thread_that_waited_for_it(monkeypatch):
    """Its second try could succeed: then one half of a step would be fused, the other not."""
    target, found, tried = load_target("llama", torch.float64), [], []
    second = Thread(target=lambda: found.append(target.fused))

    def fail_once(tried_target):
        tried.append(tried_target)
        if len(tried) == 1:
            second.start()
            second.join(timeout=0.3)
            raise ValueError("this once")
        return probe.probe(tried_target)

    monkeypatch.setattr(weights, "probe", fail_once)
    found.append(target.fused)
    second.join()
    assert found == [None, None] and len(tried) == 1 and target.forward_kind == "modules"


def test_labels_of_another_thread_wait_until_the_target_has_been_tried(monkeypatch):
    """In the shorter window of the trial they would be another text's, and so would the states beside them."""
    settings, rows = GenerationSettings(24, ()), [[*PROMPT, *range(40, 70)], PROMPT]
    expected = load_target("mistral", torch.float64).label(rows, True)
    target, found = load_target("mistral", torch.float64), []
    second = Thread(target=lambda: found.extend(target.label(rows, True)))

    start_in_a_trial(monkeypatch, second)
    DecodingEngine(target, VanillaDrafter()).generate(PROMPT, settings)
    second.join()
    assert [one.greedy_ids for one in found] == [one.greedy_ids for one in expected]
    assert all(torch.equal(one.hidden, other.hidden) for one, other in zip(found, expected, strict=True))


def test_a_trial_reads_the_lm_heads_product_of_its_own_thread():
    """Another thread runs the model while it is tried, as transformers' own `generate` in a server may."""
    target = load_target("llama", torch.float64)
    states = torch.zeros(1, 3, target.config.hidden_size, dtype=torch.float64)

    def run_elsewhere(*args):
        other = Thread(target=lambda: target.lm_head(states))
        other.start()
        other.join()

    hook = target.model.register_forward_pre_hook(run_elsewhere)
    rule, one_size = probe.probe(target)
    hook.remove()
    assert rule == target.rule and one_size


def test_the_outputs_of_layers_are_those_of_its_own_threads_forward():
    """Hooks are on the layers, which run for other threads too."""
    target, settings = load_target("llama", torch.float64), GenerationSettings(24, ())
    target.modules_only = True
    answer, answers = Oracle(target, settings).answer(PROMPT), []
    engine = DecodingEngine(target, make_drafter(target, "eagle3", {"target_layers": [1, 2]}))
    other = Thread(target=lambda: answers.append(engine.generate(PROMPT, settings).tokens))
    with target.modules._capture_outputs([1, 2], target.device) as outputs:
        other.start()
        other.join()
        assert answers == [answer] and not outputs and target.changes == 0
        target.modules(torch.tensor([PROMPT]), torch.arange(len(PROMPT))[None])
        assert [tuple(one.shape[:2]) for one in outputs] == [(1, len(PROMPT))] * 2
