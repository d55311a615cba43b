"""Steps that run ahead of the host: sizes fixed, nothing asked, tokens read one step late; answers do not change."""

from typing import ClassVar

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from draft_heads.heads.checkpoint import HEADS as REGISTERED
from draft_heads.inference.drafters.base import VanillaDrafter
from draft_heads.inference.engine import DecodingEngine
from draft_heads.inference.evaluation.lossless import Oracle, judge_all
from draft_heads.inference.generation import GenerationSettings
from draft_heads.inference.target.cuda_graphs import CapturedSteps
from draft_heads.inference.target.host_sync import no_host_sync
from draft_heads.inference.target.kv_cache import PerLayerKVCache
from draft_heads.inference.target.target import Target
from draft_heads.inference.tree import padded_nodes
from tests.inference.models import (
    HEADS,
    RANDOM_TARGETS,
    ForkedDrafter,
    Rerun,
    ScriptedOnDevice,
    drafter_of,
    load_target,
    make_drafter,
    make_prompts,
    oracle_of,
)

ASKS_THE_HOST = {"aten::_local_scalar_dense", "aten::nonzero", "aten::is_nonzero", "aten::masked_select", "aten::equal"}


class HostQuestions(TorchDispatchMode):
    """Counts operations whose result's size or value the host has to read."""

    def __init__(self):
        super().__init__()
        self.asked = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function._schema.name
        by_mask = name == "aten::index" and any(i is not None and i.dtype == torch.bool for i in args[1])
        if name in ASKS_THE_HOST or by_mask:
            self.asked.append(name)
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize(("kind", "settings"), [("vanilla", {}), ("ctc", {})])
def test_a_step_asks_the_host_nothing_and_has_the_sizes_its_settings_say(kind, settings):
    target = load_target("llama", torch.float32)
    engine = DecodingEngine(target, make_drafter(target, kind, settings), ahead=True)
    assert engine.drafter.on_device
    run, counted, sizes = engine.steps.run, [], set()

    def watched(*arguments):
        with HostQuestions() as questions:
            result = run(*arguments)
        counted.append(questions.asked)
        sizes.add((len(result[0].tree), result[0].tokens.shape[1]))
        return result

    engine.steps.run = watched
    assert len(engine.generate(list(range(3, 40)), GenerationSettings(24)).tokens) == 24
    assert len(counted) > 5 and not any(counted), counted
    assert sizes == {(padded_nodes(engine.drafter.max_nodes), engine.drafter.max_depth + 1)}


def test_the_count_of_questions_sees_them():
    with HostQuestions() as questions:
        mask = torch.tensor([True, False])
        int(mask.sum())
        torch.arange(2)[mask]
    assert len(questions.asked) == 2


@pytest.mark.parametrize(("name", "sampling"), [("llama", {}), ("mistral", {"temperature": 0.8, "seed": 3})])
@pytest.mark.parametrize(("kind", "settings"), HEADS)
def test_answers_are_those_of_generate_wherever_they_end(kind, settings, name, sampling):
    target = load_target(name, torch.float64)
    engines = [DecodingEngine(target, make_drafter(target, kind, settings), ahead=ahead) for ahead in (True, False)]
    for prompt in make_prompts(target, 2):
        free = oracle_of(name, torch.float64, GenerationSettings(40, **sampling)).answer(prompt)
        for stop in (free[17], free[30]):
            rules = GenerationSettings(40, eos_token_ids=(stop,), **sampling)
            ahead, plain = (engine.generate(prompt, rules) for engine in engines)
            assert ahead.tokens == plain.tokens == free[: free.index(stop) + 1]
            assert ahead.accept_lengths == plain.accept_lengths and ahead.finish_reason == "eos"
        rules = GenerationSettings(7, **sampling)
        assert engines[0].generate(prompt, rules).tokens == free[:7]


@pytest.mark.parametrize("depth", [0, 7])
def test_a_step_has_room_behind_whatever_the_one_in_flight_commits(depth):
    """Memory is lent in steps of 64 rows: the text crosses such a border at every place inside a step."""
    target = load_target("llama", torch.float64)
    prompt = list(range(3, 40))
    text = prompt + Oracle(target, GenerationSettings(60)).answer(prompt)
    for length in range(38, 54):
        drafter = ScriptedOnDevice(text[length:], depth) if depth else VanillaDrafter()
        result = DecodingEngine(target, drafter, ahead=True).generate(text[:length], GenerationSettings(30))
        assert result.tokens == text[length : length + 30]


def test_it_holds_up_to_the_end_of_the_context():
    target = load_target("llama", torch.float64)
    prompt = [5] * (target.max_positions - 9)
    expected = DecodingEngine(target, VanillaDrafter()).generate(prompt, GenerationSettings(100))
    for kind, settings in HEADS:
        result = DecodingEngine(target, make_drafter(target, kind, settings), ahead=True).generate(
            prompt, GenerationSettings(100)
        )
        assert result.tokens == expected.tokens and result.finish_reason == "context", kind


def through_modules(name):
    """A random target that decodes through transformers' modules."""
    torch.manual_seed(0)
    target = Target(RANDOM_TARGETS[name]().double())
    target.modules_only = True
    return target


def test_targets_that_run_through_their_modules_run_ahead_too():
    target = through_modules("qwen2")
    prompt = list(range(3, 40))
    expected = Oracle(target, GenerationSettings(40)).answer(prompt)
    drafter = make_drafter(target, "medusa", {"layers": 1})
    assert target.fused is None
    assert DecodingEngine(target, drafter, ahead=True).generate(prompt, GenerationSettings(40)).tokens == expected


class HostReads(TorchFunctionMode):
    """Counts what copies a tensor's values to the host."""

    READS: ClassVar = {"tolist", "item", "numpy", "cpu", "equal", "__int__", "__bool__", "__float__", "__index__"}

    def __init__(self):
        super().__init__()
        self.read = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function.__name__ in self.READS:
            self.read.append(function.__name__)
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("words", "most"),
    [("ngram", 0), ("prompt_lookup", 0), ("lookahead,n=4,w=4", 0), ("medusa:head+ngram", 1), ("ctc:head+ngram", 1)],
)
def test_a_drafter_on_the_host_reads_what_the_engine_has_read(words, most):
    """The engine's own copy of a step's tokens is not counted; a head in a hybrid hands over its tree in one."""
    target = load_target("qwen3", torch.float64)
    engine = DecodingEngine(target, drafter_of(target, words), captured=CapturedSteps(Rerun))
    run, counts, seen = engine.steps.run, [], []

    def watched(*arguments):
        seen.extend(arguments[0].new_tokens[0])
        with HostReads() as reads, no_host_sync():  # as on a GPU
            result = run(*arguments)
        counts.append(len(reads.read))
        return result

    prompt, rules = list(range(3, 40)), GenerationSettings(40)
    engine.generate(prompt, rules)  # captures
    engine.steps.run = watched
    answer = engine.generate(prompt, rules).tokens
    assert answer == oracle_of("qwen3", torch.float64, rules).answer(prompt)
    assert seen == (prompt + answer)[: len(seen)] and len(seen) >= len(prompt) + 30
    assert len(counts) > 5 and max(counts[2:]) <= most, counts  # the first steps are not captured


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["vanilla", *REGISTERED])
def test_in_half_precision_every_difference_is_a_near_tie(kind, dtype):
    target = load_target("llama", dtype)
    rules = GenerationSettings(40)
    oracle = oracle_of("llama", dtype, rules)
    engine = DecodingEngine(target, make_drafter(target, kind, {}), ahead=True)
    turns = [(prompt, engine.generate(prompt, rules).tokens) for prompt in make_prompts(target, 2)]
    assert judge_all(oracle, turns).unexplained == 0


def test_layers_on_several_devices_have_memory_of_their_own():
    target = through_modules("mistral")
    prompt = list(range(3, 60))
    expected = Oracle(target, GenerationSettings(40)).answer(prompt)
    target.new_cache = lambda capacity: PerLayerKVCache(target.layer_devices, capacity, 1, target.device)
    engine = DecodingEngine(target, ForkedDrafter(expected, 4))
    result = engine.generate(prompt, GenerationSettings(40))
    assert result.tokens == expected and result.accept_lengths[1:-1] == [5] * 7
    assert len(engine.steps.cache.stores) == target.config.num_hidden_layers


def test_an_engine_works_inside_and_outside_of_inference_mode():
    target = load_target("llama", torch.float64)
    rules, prompt = GenerationSettings(20), list(range(3, 40))
    expected = Oracle(target, rules).answer(prompt)
    engine = DecodingEngine(target, make_drafter(target, "medusa", {}))
    with torch.inference_mode():
        assert engine.generate(prompt, rules).tokens == expected
    assert engine.generate(prompt, rules).tokens == expected
