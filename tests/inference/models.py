"""Small random models, heads and a drafter the inference tests share."""

import functools

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from draft_heads.heads.checkpoint import head_variants, new_head
from draft_heads.inference.drafters.base import Drafter, SlotLoop, VanillaDrafter
from draft_heads.inference.drafters.registry import DrafterBuilder, DrafterSpec, drafter_for
from draft_heads.inference.engine import DecodingEngine
from draft_heads.inference.evaluation.lossless import Oracle, judge_all
from draft_heads.inference.target.target import Target
from draft_heads.inference.tree import DraftTree
from draft_heads.scripts.checks.lossless_matrix import RANDOM_TARGETS, load_target, make_prompts, untrained_head

__all__ = [
    "HEADS",
    "RANDOM_TARGETS",
    "ForkedDrafter",
    "Rerun",
    "ScriptedDrafter",
    "ScriptedOnDevice",
    "check_prompts",
    "drafter_of",
    "in_slots",
    "load_target",
    "make_drafter",
    "make_head",
    "make_prompts",
    "oracle_of",
    "small_model",
    "untrained_head",
    "vanilla_tokens",
]

HEADS = [("vanilla", {}), *dict(head_variants().values()).items(), ("ctc", {"frames_from": "chain"})]
"""Of each kind the last variant, which has most parts; `tests/test_every_head.py` lets every variant run ahead."""


def vanilla_tokens(target, prompt, settings):
    """What the engine says without drafts."""
    return DecodingEngine(target, VanillaDrafter()).generate(prompt, settings).tokens


@functools.cache
def oracle_of(name, dtype, settings):
    """transformers' answers of a random target, each asked for once however many tests compare with it."""
    return Oracle(load_target(name, dtype), settings)


def make_head(target, kind="ctc", seed=1, scale=0.05, **settings):
    """An untrained head, disturbed so that all its parts matter."""
    torch.manual_seed(seed)
    head = new_head(kind, target.config, **settings)
    for parameter in head.parameters():
        parameter.data += scale * torch.randn_like(parameter)
    return head.to(target.dtype)


def make_drafter(target, kind, settings, max_nodes=12):
    """The drafter of an untrained head, or `vanilla`."""
    if kind == "vanilla":
        return VanillaDrafter(target.device)
    return drafter_for(make_head(target, kind, scale=0.4, **settings).eval(), target, max_nodes)


def drafter_of(target, words, max_nodes=12):
    """The drafter that `words` name, its heads untrained: `medusa:head+ngram`."""
    builder = DrafterBuilder(target, max_nodes)
    builder.head = lambda kind, path: make_head(target, kind, scale=0.4).eval()
    return builder.build(DrafterSpec.parse(f"drafter={words}"))


def in_slots(make, count):
    """One drafter of `count` slots of those that `make` makes for one text."""
    return SlotLoop([make() for _ in range(count)])


class ScriptedDrafter(Drafter):
    """Drafts the continuation it was given: every draft accepted, `depth` tokens a step."""

    def __init__(self, answer, depth):
        self.answer, self.max_nodes, self.max_depth = answer, depth, depth

    @property
    def on_device(self):
        return False

    def begin(self, slot, prompt, capacity):
        self.position = -len(prompt)

    def observe(self, step, slot=None):
        self.position += int(step.count)

    def propose(self):
        tokens = self.answer[self.position + 1 :][: self.max_depth]
        tokens = torch.tensor([tokens + [0] * (self.max_depth - len(tokens))])
        return DraftTree.build(tokens, torch.arange(self.max_depth)[None] - 1)


class ScriptedOnDevice(ScriptedDrafter):
    """One whose steps may start ahead: it reads none of the text's tokens."""

    on_device = True


class ForkedDrafter(ScriptedDrafter):
    """A wrong draft in front of every right one: accepted rows are never simply the first ones."""

    def __init__(self, answer, depth):
        super().__init__(answer, depth)
        self.max_nodes = 2 * depth

    def propose(self):
        right = super().propose()
        tokens = torch.stack([(right.tokens + 1) % 211, right.tokens], dim=2).flatten(1)
        parents = (2 * right.parents + 1).repeat_interleave(2, dim=1)
        return DraftTree.build(tokens, parents)


def small_model(seed=5, positions=256, vocabulary=211, dtype=torch.float64):
    """A draft model for the random targets: one layer of half their size, random too."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        max_position_embeddings=positions,
        initializer_range=0.3,
        bos_token_id=0,
        eos_token_id=None,
    )
    return Target(LlamaForCausalLM(config).to(dtype), name="small")


def check_prompts(target, drafter, prompts, settings, oracle):
    """Decode every prompt with `drafter` and judge it."""
    engine = DecodingEngine(target, drafter)
    return judge_all(oracle, [(prompt, engine.generate(list(prompt), settings).tokens) for prompt in prompts])


class Rerun:
    """Stands in for a graph where there is no GPU: runs the work at every replay, and not when capturing."""

    def __init__(self, work):
        self.replay = work
