"""The GPU bench's check of answers: every drafter over small random targets, against transformers' `generate`."""

from __future__ import annotations

import copy
import traceback
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from draft_heads.configs.recipes import load_recipe
from draft_heads.heads.base import DraftHead
from draft_heads.heads.checkpoint import HEADS, new_head, recipe_settings
from draft_heads.inference.drafters.base import Drafter
from draft_heads.inference.drafters.registry import DrafterBuilder, DrafterSpec
from draft_heads.inference.engine import DecodingEngine
from draft_heads.inference.evaluation.lossless import Oracle, judge_all
from draft_heads.inference.generation import GenerationSettings
from draft_heads.inference.steps import StepRunner
from draft_heads.inference.target.target import Target
from draft_heads.scripts.checks.lossless_matrix import FREE, RANDOM_TARGETS, make_prompts, trained_head

HEAD_WORDS = tuple(f"{kind}:head" for kind in sorted(HEADS))
CHECKED = (
    *(*HEAD_WORDS, *(f"{words},tree=chain" for words in HEAD_WORDS), "ctc:head,tree=raw", "ctc:head,tree=plain"),
    *(*FREE.values(), "medusa:head+ngram", "ctc:head+ngram", "hydra:head+lookahead,n=4,w=4"),
)

GRAPHS = ", graphs"


def recipe_head(target: Target, kind: str) -> DraftHead:
    """An untrained head of the 8B recipe's settings."""
    with torch.device(target.device):
        return new_head(kind, target.config, **recipe_settings(kind, load_recipe(kind, "8b"))).to(target.dtype).eval()


def build(target: Target, words: str, nodes: int, head: Callable[[str], DraftHead] | None = None) -> Drafter:
    """A drafter from the words of a command line, with `head(kind)`, or else `recipe_head`, and as a draft model the
    target itself, which always agrees."""
    made = DrafterBuilder(target, nodes)
    made.head = lambda kind, path: head(kind) if head else recipe_head(target, kind)  # type: ignore[method-assign]
    made.draft_model = lambda kind, path: target  # type: ignore[method-assign]
    return made.build(DrafterSpec.parse("drafter=" + words.format(nodes=nodes, columns=min(nodes, 8))))


def check_fused(target: Target) -> None:
    """ValueError if a target that the fused forward serves runs through its modules: here, on this device."""
    if target.forward_kind != "fused":
        raise ValueError(f"{target.name} must run through the fused forward; a warning above says why it does not")


class OnDevice(TorchDispatchMode):
    """Collects the operations that have a tensor on another device than this one."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device, self.elsewhere = device, set[str]()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if any(isinstance(x, torch.Tensor) and x.device.type != self.device.type for x in tree_leaves((args, result))):
            self.elsewhere.add(str(function))
        return result


def correctness(
    device: torch.device, name: str, drafters: Sequence[str] = CHECKED, dtype: torch.dtype = torch.float32
) -> dict[str, Any]:
    """Counts of answers over a small random target: graphs on and off must both give `generate`'s.

    In half precision near ties may differ. ValueError if the fused forward, which graphs need, does not serve it.
    """
    counted: dict[str, Any] = {}
    torch.manual_seed(0)
    model = RANDOM_TARGETS[name]()
    same = Target(copy.deepcopy(model))
    target = Target(model.to(device, dtype), name=name)
    check_fused(target)
    texts, settings = make_prompts(target, 4), GenerationSettings(48, eos_token_ids=())
    oracle = Oracle(target, settings)
    known = [(text, oracle.answer(text)) for text in texts]
    # Drafts of untrained heads could not be worse. FlexAttention trains no heads of 8 values on a GPU.
    fitted = cache(lambda kind: trained_head(same, known, 60, kind).to(device, dtype))
    for words in ("vanilla", *drafters):
        for graphs in (True, False):
            try:
                engine = DecodingEngine(target, build(target, words, 12, fitted), captured=None if graphs else False)
                results = [engine.generate(text, settings) for text in texts]
                counts = judge_all(oracle, [(text, found.tokens) for text, found in zip(texts, results)]).as_dict()
                counts["steps"] = sum(len(result.accept_lengths) for result in results)
                counts["elsewhere"] = _elsewhere(engine.steps, texts[0]) if engine.steps.ahead and not graphs else []
            except Exception:  # the other drafters are still tried
                counts = {"unexplained": len(texts), "elsewhere": [], "failed": traceback.format_exc()}
            counted[f"{words}{GRAPHS if graphs else ''}"] = counts
    return counted


def draft_worse(answers: dict[str, Any]) -> list[str]:
    """The engines that take more steps with graphs than without: their answers are right, their drafts are not."""
    steps = {words: counts["steps"] for words, counts in answers.items() if "steps" in counts}
    pairs = ((words, steps.get(words.removesuffix(GRAPHS), taken), taken) for words, taken in steps.items())
    return [words for words, without, taken in pairs if taken > 1.1 * without + 2]


def _elsewhere(steps: StepRunner, text: list[int]) -> list[str]:
    """Operations of a short answer's steps with tensors that do not lie on its device."""
    watching, state = OnDevice(steps.target.device), steps.begin(len(text) + 64, GenerationSettings())
    step, _ = steps.prefill(text, state)
    for _ in range(4):
        with watching:
            step, _ = steps.run(step, state)
        state.cache.bound += 1 + steps.drafter.max_depth  # what it accepted is not read
    return sorted(watching.elsewhere)
