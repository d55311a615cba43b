"""A head that drafts for another engine's requests, which this file is: it reads, verifies and forgets as it likes."""

from dataclasses import dataclass, field

import pytest
import torch

from draft_heads.heads.checkpoint import HEADS
from draft_heads.inference.drafters.registry import drafter_for
from draft_heads.inference.engine import DecodingEngine
from draft_heads.inference.generation import GenerationSettings
from draft_heads.inference.serving.request_drafter import ReadTokens, RequestDrafter
from draft_heads.scripts.checks.lossless_matrix import trained_head
from tests.inference.models import load_target, make_head, make_prompts

TOKENS, DRAFTED = 30, 3


@pytest.fixture(scope="module")
def target():
    return load_target("llama", torch.float64)


@pytest.fixture(scope="module")
def prompts(target):
    return [prompt[:length] for prompt, length in zip(make_prompts(target, 5), (9, 2, 30, 17, 1))]


def trained(target, prompts, kind):
    plain = DecodingEngine(target, drafter_for(make_head(target, "medusa"), target))
    texts = [(prompt, plain.generate(prompt, GenerationSettings(TOKENS + 8)).tokens) for prompt in prompts]
    return trained_head(target, texts, 40, kind)


@dataclass
class Request:
    """A prompt with its answer so far; `read` of its tokens have states in the engine's cache."""

    name: str
    text: list[int]
    prompt: int
    read: int = 0
    drafts: list[int] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)

    @property
    def answer(self):
        return self.text[self.prompt :]


@torch.inference_mode()
def step(target, drafter, requests, pieces, layers):
    """One step of an engine that reads at most `pieces` tokens of each request, verifies drafts and asks for more."""
    read, states, aux = [], [], []
    row = 0
    for request in requests:
        known = len(request.text)
        rows = [*request.text, *request.drafts] if request.read == known - 1 else request.text
        rows = rows[: max(known, request.read + pieces)][: request.read + pieces]
        ids = torch.tensor([rows])
        hidden, aux_hidden = target.forward_rows(ids, torch.ones_like(ids), torch.arange(len(rows))[None], layers)
        start, samples, end = request.read, len(rows) >= known, len(rows)
        if samples:
            chosen = target.logits(hidden[0]).argmax(-1).tolist()
            end = next((i for i in range(known, len(rows)) if rows[i] != chosen[i - 1]), len(rows))
            new = [*rows[known:end], chosen[end - 1]]
            request.text += new
            request.steps.append(len(new))
        read.append(ReadTokens(request.name, start, request.text[start : end + 1], row, samples))
        states.append(hidden[0, start:])
        aux.append(None if aux_hidden is None else aux_hidden[0, start:])
        request.read, row = end, row + len(rows) - start
    found = drafter.draft(read, torch.cat(states), torch.cat(aux) if layers else None)
    for request, drafts, asked in zip(requests, found, read):
        assert bool(drafts) <= asked.drafts and len(drafts) <= DRAFTED
        request.drafts = drafts


def make(target, head, slots, context=128, **options):
    return RequestDrafter(drafter_for(head, target, DRAFTED, slots=slots, tree="chain", **options), context)


@pytest.mark.parametrize(("kind", "options"), [*((kind, {}) for kind in HEADS), ("chimera", {"kgram_cache": 500})])
def test_requests_are_drafted_for_as_one_text_is(target, prompts, kind, options):
    """They come and go, in pieces, in any order: tokens and accepted lengths are those of our own chains."""
    head = trained(target, prompts, kind)
    layers = head.config.target_layers
    alone = DecodingEngine(target, drafter_for(head, target, DRAFTED, tree="chain"))
    expected = [alone.generate(prompt, GenerationSettings(TOKENS, eos_token_ids=())) for prompt in prompts]
    assert any(max(answer.accept_lengths) > 2 for answer in expected)
    drafter = make(target, head, slots=4, **options)
    waiting = [Request(str(number), list(prompt), len(prompt)) for number, prompt in enumerate(prompts)]
    running, ended, tick = [], [], 0
    while waiting or running:
        if waiting and len(running) < 3 and tick % 2 == 0:
            running.append(waiting.pop(0))
        chosen = running[tick % 2 :][::-1] if len(running) > 2 else running  # now and then one is not scheduled
        step(target, drafter, chosen, 5, layers)
        ended += [request for request in running if len(request.answer) >= TOKENS]
        running = [request for request in running if len(request.answer) < TOKENS]
        drafter.forget({request.name for request in running})
        assert len(drafter) <= len(running)
        tick += 1
    for request in ended:
        answer = expected[int(request.name)]
        assert request.answer[:TOKENS] == answer.tokens
        assert request.steps[:-1] == answer.accept_lengths[: len(request.steps) - 1]


def test_a_request_that_was_preempted_or_began_in_a_cache_of_prefixes_goes_on(target, prompts):
    head = trained(target, prompts, "ctc")
    plain = DecodingEngine(target, drafter_for(head, target, DRAFTED, tree="chain"))
    expected = [plain.generate(prompt, GenerationSettings(TOKENS)).tokens for prompt in prompts[:2]]
    drafter = make(target, head, slots=1)
    first, second = (Request(str(n), list(prompt), len(prompt)) for n, prompt in enumerate(prompts[:2]))
    for _ in range(6):
        step(target, drafter, [first], 50, ())
    first.read, first.drafts = 0, []  # preempted: all of it is read again, in the slot that the other one takes now
    step(target, drafter, [second], 50, ())
    for _ in range(TOKENS):
        step(target, drafter, [first], 4, ())
    second.read = max(0, len(second.text) - 3)  # resumed with most of it in a cache
    for _ in range(TOKENS):
        step(target, drafter, [second], 50, ())
    for request, tokens in zip((first, second), expected):
        assert request.answer[:TOKENS] == tokens
    assert len(drafter) == 1 and max(second.steps) > 1


def test_a_request_that_is_read_again_from_its_beginning_is_drafted_for_as_before(target, prompts):
    head, steps = trained(target, prompts, "ctc"), []
    for stops in (0, 5):
        drafter, request = make(target, head, slots=2), Request("a", list(prompts[0]), len(prompts[0]))
        for _ in range(stops):
            step(target, drafter, [request], 50, ())
        request.read, request.drafts = 0, []
        while len(request.answer) < TOKENS:
            step(target, drafter, [request], 50, ())
        steps.append(request.steps)
    assert steps[0] == steps[1] and max(steps[0]) > 1  # the step that read all of it again would have kept one token


def test_a_text_longer_than_the_context_begins_anew(target, prompts):
    head = trained(target, prompts, "eagle3")
    drafter = make(target, head, slots=2, context=12)
    memory = drafter.bytes
    request = Request("a", list(prompts[0]), len(prompts[0]))
    for _ in range(TOKENS):
        step(target, drafter, [request], 50, head.config.target_layers)
        assert drafter._texts["a"].length <= 12
    plain = DecodingEngine(target, drafter_for(head, target, DRAFTED)).generate(prompts[0], GenerationSettings(TOKENS))
    assert request.answer[:TOKENS] == plain.tokens and sum(request.steps) > len(request.steps)
    assert drafter.bytes == memory > 0
    long = Request("b", list(prompts[2]), len(prompts[2]))
    step(target, drafter, [long], 50, head.config.target_layers)
    assert drafter._texts["b"].length == 6 and len(long.drafts) == DRAFTED  # the last ones of its prompt
