"""Steps captured as CUDA graphs, without a GPU by a stand-in: what is captured, when it is replayed and over which
memory; answers do not change."""

import itertools
from contextlib import contextmanager
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch

from draft_heads.heads.checkpoint import HEADS as REGISTERED
from draft_heads.inference.drafters.base import Drafter, VanillaDrafter
from draft_heads.inference.drafters.registry import drafter_for
from draft_heads.inference.drafters.text.ngram import NgramDrafter
from draft_heads.inference.engine import DecodingEngine
from draft_heads.inference.evaluation.lossless import Oracle
from draft_heads.inference.generation import GenerationSettings
from draft_heads.inference.target.cuda_graphs import CapturedSteps, _pool_and_stream, cuda_graph, current
from draft_heads.inference.target.target import Target
from draft_heads.inference.tree import padded_nodes
from draft_heads.inference.verify import TypicalAcceptance
from tests.inference.models import (
    HEADS,
    RANDOM_TARGETS,
    Rerun,
    drafter_of,
    load_target,
    make_drafter,
    make_head,
    make_prompts,
    oracle_of,
)

HOST_DRAFTERS = ["ngram", "prompt_lookup", "lookahead,n=4,w=4", "medusa:head+ngram", "ctc:head+lookahead,n=4,w=4"]
HOST_DRAFTERS += ["ctc:head,tree=raw", "chimera:head,kgram_cache=16", "medusa:head+ngram,depth=30"]


class Counted(Rerun):
    made = 0

    def __init__(self, work):
        super().__init__(work)
        Counted.made += 1


@pytest.mark.parametrize(("kind", "settings"), HEADS)
def test_captured_steps_give_the_same_answers(kind, settings):
    target = load_target("qwen3", torch.float64)
    engine = DecodingEngine(target, make_drafter(target, kind, settings), ahead=True, captured=CapturedSteps(Counted))
    Counted.made = 0
    prompts = [*make_prompts(target, 2), [7] * 90]
    for prompt in (*prompts, prompts[0]):
        for sampling in ({}, {"temperature": 0.8, "seed": 3}):
            rules = GenerationSettings(40, **sampling)
            assert engine.generate(prompt, rules).tokens == oracle_of("qwen3", torch.float64, rules).answer(prompt)
    assert 2 <= Counted.made <= 12


@pytest.mark.parametrize("words", HOST_DRAFTERS)
def test_of_steps_drafted_on_the_host_the_verification_is_captured(words):
    target = load_target("qwen3", torch.float64)
    drafter = drafter_of(target, words)
    engine = DecodingEngine(target, drafter, captured=CapturedSteps(Counted))
    other = DecodingEngine(target, NgramDrafter(), captured=CapturedSteps(Counted))
    Counted.made = 0
    rules = GenerationSettings(40)
    prompts = [*make_prompts(target, 2), [7] * 90]
    assert not engine.steps.ahead and engine.generate([5], GenerationSettings(1)).tokens and Counted.made
    sizes, lengths = {padded_nodes(n) for n in range(drafter.max_nodes + 1)}, engine.steps.cache.capacity // 64
    assert Counted.made == len(engine.steps.captured) >= len(sizes) * (lengths - 1)
    heads = sum(part.captures for part in drafter.parts) if "+" in words else 0  # captured when they first draft
    for prompt in prompts:
        expected = oracle_of("qwen3", torch.float64, rules).answer(prompt)
        assert engine.generate(prompt, rules).tokens == expected
        several = [engine.stream(prompt, rules), other.stream(prompt, rules)]  # taking turns, as in a server
        answers: list[list[int]] = [[], []]
        for pieces in itertools.zip_longest(*several, fillvalue=()):
            for answer, tokens in zip(answers, pieces):
                answer += tokens
        assert answers == [expected, expected]
    assert Counted.made == len(engine.steps.captured) + len(other.steps.captured)
    drafts = {key for key in engine.steps.captured if not isinstance(key[0], int)}
    assert heads <= len(drafts) <= heads * lengths and bool(heads) == ("head+" in words)
    assert len(engine.steps.captured) - len(drafts) <= len(sizes) * lengths  # no answer waited for a capture


class Frozen(Rerun):
    """A graph that knows the memory and the visible length of its hybrid's heads, and says when it is replayed."""

    replaying = False
    drafter: ClassVar[Drafter]

    def __init__(self, work):
        super().__init__(work)
        frozen = self.seen()

        def replay():
            assert not frozen or self.seen() == frozen
            Frozen.replaying = True
            work()
            Frozen.replaying = False

        self.replay = replay

    @staticmethod
    def seen():
        if Frozen.drafter.graphs is None:  # of a verification
            return []
        heads = [part.drafter for part in Frozen.drafter.parts if part.captures]
        return [(x.data_ptr(), head._visible_length) for head in heads for x in head.memory()]


@pytest.mark.parametrize("words", ["medusa:head+ngram", "ctc:head+lookahead,n=4,w=4", "hydra:head+chimera:head+ngram"])
def test_the_heads_of_a_hybrid_draft_as_graphs_what_they_draft_without(words, monkeypatch):
    target = load_target("qwen3", torch.float64)
    engines = [
        DecodingEngine(target, drafter_of(target, words), captured=captured)
        for captured in (False, CapturedSteps(Frozen))
    ]
    rules, engines[1].steps.reserved = GenerationSettings(60), 48
    Frozen.drafter = engines[1].drafter
    prompts = [*make_prompts(target, 3), [7] * 90]
    answers = [[engine.generate(prompt, rules) for engine in engines] for prompt in prompts]
    for eager, captured in answers:
        assert captured.tokens == eager.tokens and captured.accept_lengths == eager.accept_lengths
        assert captured.sources == eager.sources
    longer = DecodingEngine(target, engines[1].drafter, captured=False)  # engines may share a drafter, in turn
    longer.generate([7] * 240, GenerationSettings(5))
    engines[1].generate([7] * 90, rules)
    beside, heads = [], [part.drafter for part in engines[1].drafter.parts if part.captures]
    for head in heads:  # every visible length of these texts is captured now
        propose = head.propose_levels if head.proposes_levels else head.propose

        def watched(propose=propose):
            beside.extend([] if Frozen.replaying else [1])
            return propose()

        monkeypatch.setattr(head, "propose_levels" if head.proposes_levels else "propose", watched)
    again = engines[1].generate([7] * 90, rules)
    assert again.tokens == answers[-1][0].tokens
    assert len(beside) == len(heads)  # the first step, which knows no accepted tree yet


def test_a_device_with_an_index_is_the_current_one_and_has_a_pool_of_its_own(monkeypatch):
    entered, made = [], []

    @contextmanager
    def device(which):
        entered.append(which.index)
        yield

    @contextmanager
    def graph(captured, pool, stream):
        made.append((pool, stream))
        yield

    for name, fake in {
        "device": device,
        "graph": graph,
        "current_device": lambda: entered[-1],
        "graph_pool_handle": lambda: f"pool of {entered[-1]}",
        "Stream": lambda: f"stream of {entered[-1]}",
        "CUDAGraph": SimpleNamespace,
    }.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    monkeypatch.setattr(torch, "zeros", lambda *arguments, **settings: None)
    _pool_and_stream.cache_clear()
    for index in (1, 0, 1):
        with current(torch.device("cuda", index)):
            cuda_graph(lambda: None)
    _pool_and_stream.cache_clear()
    assert made == [(f"pool of {n}", f"stream of {n}") for n in (1, 1, 0, 0, 1)]  # an anchor, then the graph


class Watched(Rerun):
    """A graph that knows where the memory of its engine lay, and whether its device was the current one."""

    def __init__(self, work):
        super().__init__(work)
        self.at = self.memory()
        assert Watched.inside, "captured on another device"
        work = self.replay

        def replay():
            assert self.memory() == self.at, "a graph's memory has moved"
            work()

        self.replay = replay

    @staticmethod
    def memory():
        steps = Watched.engine.steps
        return [x.data_ptr() for x in (*steps.cache.memory(), *steps.drafter.memory())]


@pytest.mark.parametrize("words", ["vanilla", *(f"{kind}:head" for kind in REGISTERED), *HOST_DRAFTERS])
def test_graphs_are_captured_on_their_device_and_replayed_over_the_memory_they_know(words, monkeypatch):
    target = load_target("qwen3", torch.float64)
    drafter = drafter_of(target, words)
    engine = DecodingEngine(target, drafter, ahead=drafter.on_device, captured=CapturedSteps(Watched))
    engine.steps.reserved, Watched.engine, Watched.inside = 48, engine, 0

    @contextmanager
    def inside(device):
        Watched.inside += 1
        yield
        Watched.inside -= 1

    monkeypatch.setattr("draft_heads.inference.steps.current", inside)
    rules = GenerationSettings(30)
    for prompt in (list(range(3, 13)), [7] * 60, list(range(3, 13)), [9] * 110):
        assert engine.generate(prompt, rules).tokens == oracle_of("qwen3", torch.float64, rules).answer(prompt)
    anything = GenerationSettings(12, typical=TypicalAcceptance(epsilon=1e-9, delta=1e-9))
    plain = DecodingEngine(target, drafter_of(target, words))
    before = len(engine.steps.captured)
    answer = engine.generate([7] * 60, anything).tokens
    assert "+" in words or answer == plain.generate([7] * 60, anything).tokens  # hybrids have learned meanwhile
    assert len(engine.steps.captured) <= before  # not beside the graphs of exact acceptance: instead of them


def test_texts_that_outgrow_the_reserved_memory_double_it():
    target = load_target("qwen3", torch.float64)
    engine = DecodingEngine(target, VanillaDrafter(), ahead=True, captured=CapturedSteps(Counted))
    engine.steps.reserved = 32
    assert [engine.steps.reserved_length(text) for text in (1, 32, 33, 64, 65, 1)] == [32, 32, 64, 64, 128, 128]
    assert engine.steps.reserved_length(target.max_positions) == target.max_positions


def test_steps_are_captured_anew_when_memory_has_moved():
    target = load_target("qwen3", torch.float64)
    engine = DecodingEngine(target, VanillaDrafter(), ahead=True, captured=CapturedSteps(Counted))
    prompt, rules = list(range(3, 40)), GenerationSettings(10)
    for _ in range(3):
        engine.steps.cache = None  # as for a prompt that the old cache has no room for
        assert engine.generate(prompt, rules).tokens == Oracle(target, rules).answer(prompt)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize(("kind", "settings"), HEADS)
def test_on_a_gpu_steps_are_captured_and_never_wait_for_the_device(kind, settings):
    target = Target(RANDOM_TARGETS["llama"]().double().cuda())
    drafter = make_drafter(target, kind, settings) if kind == "vanilla" else None
    if drafter is None:
        drafter = drafter_for(make_head(target, kind, scale=0.4, **settings).cuda().eval(), target, 12)
    engine = DecodingEngine(target, drafter)
    run, rules, prompt = engine.steps.run, GenerationSettings(60), list(range(3, 40))

    def watched(*arguments):
        torch.cuda.set_sync_debug_mode("error")
        try:
            return run(*arguments)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    expected = Oracle(target, rules).answer(prompt)
    assert engine.generate(prompt, rules).tokens == expected
    engine.steps.run = watched
    assert engine.generate(prompt, rules).tokens == expected
