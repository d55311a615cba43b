"""A decoding step at the shapes of Llama-3.1-8B and Qwen3-8B on the meta device, as a CUDA graph would capture it.

No value may be read on the host, no tensor may be made from host data or lie on the CPU, and what a step hands on must
have the shapes and types of what it was given. Kernels are counted: on a GPU each is a launch.
"""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from draft_heads.configs.recipes import SHAPES, load_recipe
from draft_heads.heads.checkpoint import new_head, recipe_settings
from draft_heads.heads.target_view import LogitsRule
from draft_heads.inference.drafters.base import VanillaDrafter
from draft_heads.inference.drafters.registry import drafter_for
from draft_heads.inference.engine import DecodingEngine
from draft_heads.inference.generation import GenerationSettings
from draft_heads.inference.step import VerifiedStep
from draft_heads.inference.steps import StepRunner
from draft_heads.inference.target import target as target_module
from draft_heads.inference.target import weights as weights_module
from draft_heads.inference.target.target import Target
from tests.meta import MetaOnly, NoHostValues

LLAMA_8B = {**SHAPES["8b"], "intermediate_size": 14336, "num_hidden_layers": 32, "vocab_size": 128256}
MODELS = {"llama": (LlamaForCausalLM, LlamaConfig, LLAMA_8B), "qwen3": (Qwen3ForCausalLM, Qwen3Config, SHAPES["8b"])}
NODES = 32
LAYER_KERNELS = 36
"""Kernels of the verify step: 32.5 on Llama, 35.1 on Qwen3; ten of a layer's are attention, which is one on CUDA."""


def make_engine(model, kind, monkeypatch, **sizes):
    target, drafter = make_drafter(model, kind, monkeypatch, **sizes)
    return DecodingEngine(target, drafter, ahead=True)


def make_drafter(model, kind, monkeypatch, slots=1, **sizes):
    for module in (target_module, weights_module):  # a probe needs values
        monkeypatch.setattr(module, "probe", lambda target: (LogitsRule(), True))
    monkeypatch.setattr(F, "rms_norm", lambda states, *_: states.clone())  # one kernel on CUDA, many on meta
    model_class, config_class, shape = MODELS[model]
    with torch.device("meta"):
        whole = model_class(config_class(**shape | sizes, max_position_embeddings=8192)).bfloat16()
    target = Target(whole)
    assert target.fused is not None
    if kind == "vanilla":
        drafter = VanillaDrafter("meta")
    else:
        with torch.device("meta"):
            head = new_head(kind, target.config, **recipe_settings(kind, load_recipe(kind, "8b"))).bfloat16().eval()
        drafter = drafter_for(head, target, NODES, slots=slots)
    return target, drafter


def described(step):
    return [(x.shape, x.dtype, x.device) for x in step.tensors()]


def rehearse(engine):
    """Kernels of drafting and of verification in one step of the decoding loop."""
    steps = engine.steps
    begin, prefill, run = (method.__wrapped__ for method in (StepRunner.begin, StepRunner.prefill, StepRunner.run))
    with torch.no_grad():  # inference_mode would hide what composite operations are made of
        text = begin(steps, 1024, GenerationSettings())
        step, _ = prefill(steps, [0] * 512, text)
        step, _ = run(steps, step, text)  # allocates
    drafting, verifying = MetaOnly(), MetaOnly()
    text.cache.bound += 1 + engine.drafter.max_depth
    text.cache.set_visible_length(1 + NODES)
    with torch.no_grad(), NoHostValues():
        with drafting:
            drafted = steps.draft(step, text)
        with verifying:
            after, packed = steps.verify(drafted, text)
    assert described(after) == described(step)
    assert packed.shape == (1 + 2 * step.tokens.shape[1],)
    return drafting.kernels, verifying.kernels


def rehearse_batch(target, drafter):
    """Kernels of one draft for all texts."""
    config, slots = target.config, drafter.slots
    aux = len(drafter.target_layers) * config.hidden_size

    def step_of(texts, tokens):
        ids = torch.zeros(texts, tokens, dtype=torch.long, device="meta")
        hidden, read = (ids.new_zeros(texts, tokens, size, dtype=torch.bfloat16) for size in (config.hidden_size, aux))
        return VerifiedStep(ids, ids, hidden, ids[:, 0], aux_hidden=read if aux else None)

    drafting = MetaOnly()
    with torch.no_grad():
        for slot in range(slots):
            drafter.begin(slot, torch.zeros(64, dtype=torch.long, device="meta"), 1024)
            drafter.observe(step_of(1, 64), slot)
        drafter.set_visible_length(512)
        with NoHostValues(), drafting:
            drafter.observe(step_of(slots, 1 + drafter.max_depth))
            tree = drafter.propose()
    assert tree.tokens.shape == (slots, NODES)
    return drafting.kernels


@pytest.mark.parametrize("model", MODELS)
def test_a_step_needs_no_host_and_is_short(model, monkeypatch):
    """Drafting with a head: `tests/test_every_head.py`."""
    engine = make_engine(model, "vanilla", monkeypatch)
    _, verifying = rehearse(engine)
    assert verifying.total() <= LAYER_KERNELS * engine.target.config.num_hidden_layers, verifying.most_common(12)


MISTAKES = {
    "a missing device": lambda tree: replace(tree, tokens=tree.tokens + torch.arange(len(tree))),
    "a value read on the host": lambda tree: tree.limit_depth(int(tree.parents.max()), tree.parents),
    "a tensor made from a list": lambda tree: tree.take(torch.tensor([[*range(len(tree))]], device="meta")),
    "a boolean index": lambda tree: tree.map(lambda x: x[tree.candidate]),
    "an index of 0 dimensions": lambda tree: replace(tree, tokens=tree.tokens - tree.tokens[0, tree.parents[0, 0]]),
    "another type than before": lambda tree: replace(tree, log_probs=tree.log_probs.double()),
    "another size than before": lambda tree: tree.padded(2 * len(tree)),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_planted_mistake_is_caught(mistake, monkeypatch):
    engine = make_engine("llama", "medusa", monkeypatch, num_hidden_layers=1)
    propose, calls = engine.drafter.propose, []

    def mistaken():
        calls.append(mistake)
        return MISTAKES[mistake](propose()) if len(calls) > 1 else propose()

    monkeypatch.setattr(engine.drafter, "propose", mistaken)
    with pytest.raises(AssertionError):
        rehearse(engine)
