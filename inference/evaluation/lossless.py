"""Losslessness check: every answer against transformers' own `generate`, differences judged by their size.

The oracle shares only the weights with the engine: it has its own cache and its own loop, one token at a time.
Two correct programs may still differ where the two best logits are almost equal, because they add the same numbers in
another order. So each answer is judged at its first difference (later tokens depend on it): it is a *near tie* when, in
the next higher precision, the two logits are no further apart than the numerical noise of transformers' own forward,
measured here (`gap_noise`); otherwise it is *unexplained*, and one unexplained difference is a failure. In float64
every difference is unexplained.

Shapes: L length, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from inspect import signature
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only
from transformers import LogitsProcessor, LogitsProcessorList, TopPLogitsWarper

from draft_heads.data.generation_config import process_logits
from draft_heads.inference.evaluation.decoded import Difference
from draft_heads.inference.evaluation.hf_generate import hf_generate, sampling_processors, stop_length
from draft_heads.inference.generation import GenerationSettings, room
from draft_heads.inference.processors import processors_of
from draft_heads.inference.target.library_names import CACHE
from draft_heads.inference.target.target import Target

NOISE_PROMPTS = 4
LOGIT_ROWS = 4096
"""Positions whose logits exist at once, 2.5 GB of a vocabulary of 150,000; of a longer text its forward is repeated."""

HIGHER_PRECISION = {torch.float32: torch.float64, torch.bfloat16: torch.float32, torch.float16: torch.float32}
"""Where differences are rescored; float64 is exact enough to allow none at all."""


class Oracle:
    """transformers' answers under the engine's stop rules, and the size of differences from them.

    `settings` are the engine's. Answers are computed once per distinct prompt, so drafters share them.
    """

    def __init__(self, target: Target, settings: GenerationSettings) -> None:
        self.target = target
        self.settings = settings
        self._answers: dict[tuple[int, ...], list[int]] = {}
        self._noise: float | None = None

    def add_answers(self, answers: dict[tuple[int, ...], list[int]]) -> None:
        """Add answers that the oracle gave earlier, or in another process."""
        self._answers.update(answers)

    def answer(self, prompt: Sequence[int]) -> list[int]:
        """The new tokens of `generate` on `prompt`, EOS included, cut where the settings stop; ContextError if it does
        not fit."""
        key = tuple(prompt)
        if key not in self._answers:
            settings, target = self.settings, self.target
            tokens = hf_generate(target, key, settings, self._limit(key))  # stops at EOS only
            self._answers[key] = tokens[: stop_length(tokens, settings, target.tokenizer)]
        return self._answers[key]

    @property
    def noise(self) -> float:
        """The largest error of a gap between two logits in transformers' own forward, measured when first read.

        At every position of up to `NOISE_PROMPTS` answered prompts, spread evenly, with their answers.
        """
        if self._noise is None:
            texts = sorted(self._answers.items())
            if not texts:
                raise ValueError("noise is measured on answered prompts; call answer() first")
            chosen = texts[:: max(1, len(texts) // NOISE_PROMPTS)][:NOISE_PROMPTS]
            noise = max(self._noise_of(prompt, answer) for prompt, answer in chosen)
            sampling = self.settings.sampling
            self._noise = noise if sampling is None else noise / sampling.temperature
        return self._noise

    @property
    def measured_noise(self) -> float | None:
        """The noise if a difference required measuring it, else None."""
        return self._noise

    def _noise_of(self, prompt: Sequence[int], answer: Sequence[int]) -> float:
        own = self._processors(prompt)
        changed = None if own is None else (own, len(prompt))
        drawn = sampling_processors(self.settings.sampling)
        return gap_noise(self.target.model, (*prompt, *answer), self.target.device, changed, drawn)

    def _limit(self, prompt: Sequence[int]) -> int:
        return room(self.target, len(prompt), self.settings.max_new_tokens)

    def _processors(self, prompt: Sequence[int]) -> LogitsProcessorList | None:
        return processors_of(self.target, self.settings, prompt, self._limit(prompt))

    @torch.no_grad()
    def gap(self, prompt: Sequence[int], answer: Sequence[int], token: int, other: int) -> float:
        """Distance of two logits of the token that follows `answer` to `prompt`, in the next higher precision than the
        target's; where top-k or top-p leaves out the likelier one or the one that was chosen, or nearly, `from_cut`."""
        ids_1L = torch.tensor([[*prompt, *answer]], device=self.target.device)
        with higher_precision(self.target.model, HIGHER_PRECISION[self.target.dtype]):
            last = {"logits_to_keep": 1} if chooses_rows(self.target.model) else {}
            logits_1V = self.target.model(input_ids=ids_1L, use_cache=False, **last).logits[:, -1]
        warpers = sampling_processors(self.settings.sampling)
        for process in (*(self._processors(prompt) or ()), *warpers[:1]):  # the first is the temperature
            logits_1V = process(ids_1L, logits_1V)
        tempered_V, both, ranked_V = logits_1V[0], [token, other], None
        for process in warpers[1:]:
            if isinstance(process, TopPLogitsWarper):
                ranked_V = logits_1V[0]
            logits_1V = process(ids_1L, logits_1V)
        gap, kept_V = abs(float(logits_1V[0, token]) - float(logits_1V[0, other])), logits_1V[0].isfinite()
        if not (tempered_V.isfinite() & ~kept_V).any() or not tempered_V[both].isfinite().all():
            return gap
        top_p = 1.0 if self.settings.sampling is None else self.settings.sampling.top_p
        distances = [from_cut(one, tempered_V, kept_V, ranked_V, top_p) for one in both]
        if kept_V[both].all():
            return min(gap, distances[int(logits_1V[0, both].argmax())])
        return max(distance for distance, kept in zip(distances, kept_V[both]) if not kept)


def from_cut(token: int, logits_V: Tensor, kept_V: Tensor, ranked_V: Tensor | None, top_p: float) -> float:
    """How far `token` is from the other side of the cut that leaves all of `logits_V` but `kept_V` out.

    As logits are: the distance from the nearest token there. As top-p decides, by the mass before a token: the distance
    of that mass from `top_p` in log-odds, which errors of at most ε in the gaps of logits change by at most ε.

    ranked_V: what top-p reads, None without it; −inf where top-k came first
    """
    own = float(logits_V[token])
    if kept_V[token]:
        distance = own - float(logits_V[logits_V.isfinite() & ~kept_V].max())
    else:
        distance = float(logits_V[kept_V].min()) - own
    if ranked_V is None or not ranked_V[token].isfinite():
        return distance
    mass_V = ranked_V.double().softmax(-1)
    before = mass_V[ranked_V > ranked_V[token]].sum()
    return min(distance, abs(float(before.logit()) - math.log(top_p / (1 - top_p))))


def chooses_rows(model: nn.Module) -> bool:
    """Whether a forward makes the logits of some rows only, if asked; those of a long text are gigabytes."""
    return "logits_to_keep" in signature(model.forward).parameters


def _is_packed(tensor: Tensor) -> bool:
    """Whether a tensor holds a quantiser's numbers: of 8 bits, several in one of 32, or in a class of its own."""
    kind = type(tensor.data)
    few_bits = tensor.dtype.itemsize == 1 and tensor.dtype != torch.bool
    return few_bits or tensor.dtype == torch.int32 or kind not in (Tensor, nn.Parameter)


@contextmanager
def higher_precision(model: nn.Module, dtype: torch.dtype) -> Iterator[None]:
    """In this context the model computes in `dtype`.

    A module's weights are cast for its forward only: there is never a second copy of more than one module. A module
    with packed weights computes as it does, between states that are cast: without scales those numbers mean nothing.
    """
    experts: Any = model if dtype == torch.float64 and hasattr(model, "set_experts_implementation") else None
    experts_before = experts and experts.get_experts_implementation()
    usual, own = (
        next(p.dtype for p in model.parameters() if p.dtype.itemsize > 1),
        dict[nn.Module, list[tuple[Tensor, Tensor]]](),
    )

    packed = {
        module
        for module in model.modules()
        if any(map(_is_packed, (*module.parameters(recurse=False), *module.buffers(recurse=False))))
    }

    def states_in(values: Any, wanted: torch.dtype) -> Any:
        return tree_map_only(Tensor, lambda x: x.to(wanted) if x.is_floating_point() else x, values)

    def cast(module: nn.Module, args: Any, options: Any) -> Any:
        tensors = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
        own[module] = []
        if module in packed:
            return states_in(args, usual), states_in(options, usual)
        own[module] = [(tensor, tensor.data) for tensor in tensors if tensor.is_floating_point()]
        for tensor, values in own[module]:
            tensor.data = values.to(dtype)
        return None

    def restore(module: nn.Module, args: Any, output: Any) -> Any:
        for tensor, values in own.pop(module):
            tensor.data = values
        return states_in(output, dtype) if module in packed else None

    hooks = [module.register_forward_pre_hook(cast, with_kwargs=True) for module in model.modules()]
    hooks += [module.register_forward_hook(restore, always_call=True) for module in model.modules()]
    try:
        if experts is not None:
            experts.set_experts_implementation("eager")  # their grouped product has no float64
        yield
    finally:
        if experts is not None:
            experts.set_experts_implementation(experts_before)
        for hook in hooks:
            hook.remove()
        for kept in own.values():  # of modules within which Ctrl-C came
            for tensor, values in kept:
                tensor.data = values


@torch.no_grad()
def gap_noise(
    model: Any,
    tokens: Sequence[int],
    device: torch.device | str,
    changed: tuple[LogitsProcessorList, int] | None = None,
    drawn: Sequence[LogitsProcessor] = (),
) -> float:
    """The largest error of a gap between two logits in transformers' own forward, over all positions of a text.

    Read three times: one token after another, all tokens at once, and those one precision higher, whose first two
    tokens the gap is of: the best two, or the two that a draw ranks first. The first two readings differ by the order
    of sums, which can be small where both round alike; from the third they differ by all that was rounded.

    changed: what changes the logits, and the prompt's length, before which it changes nothing and nothing counts.
    drawn: what a draw does to the logits after that; it ranks the tokens, and the gap is the logits' own.
    """
    ids_1L = torch.tensor([list(tokens)], device=device)
    processors, start = changed or (None, 1)

    pairs: list[Tensor] = []  # of each position, the first two tokens of the first reading

    def gap(length: int, logits_V: Tensor) -> Tensor:
        if processors is not None:
            logits_V = process_logits(processors, ids_1L[:, :length], logits_V[None])[0]
        if len(pairs) == length - start:
            ranked_1V: Any = logits_V[None]
            for process in drawn:
                ranked_1V = process(ids_1L[:, :length], ranked_1V)
            pairs.append(ranked_1V[0].topk(2).indices)
        best, second = logits_V[pairs[length - start]].double()
        return best - second

    def whole() -> Tensor:
        gaps = []
        at_once = LOGIT_ROWS if chooses_rows(model) else len(tokens)
        for first in range(0, len(tokens), at_once):
            wanted = range(first, min(first + at_once, len(tokens)))
            keep = {"logits_to_keep": torch.tensor(wanted, device=device)} if len(wanted) < len(tokens) else {}
            rows = model(input_ids=ids_1L, use_cache=False, **keep).logits[0]
            gaps += [gap(row + 1, rows[row - first]) for row in wanted if row + 1 >= start]
        return torch.stack(gaps)

    higher = HIGHER_PRECISION.get(model.dtype)
    with nullcontext() if higher is None else higher_precision(model, higher):
        right = whole()
    once, cache, decoded = whole(), None, []
    for length in range(1, len(tokens) + 1):
        output = model(input_ids=ids_1L[:, length - 1 : length], use_cache=True, **{CACHE: cache})
        cache = output[CACHE]
        if length >= start:
            decoded.append(gap(length, output.logits[0, -1]))
    alone = torch.stack(decoded)
    noise = torch.stack([alone - once, alone - right, once - right]).abs()
    return float(noise.nan_to_num(0.0, posinf=0.0).max())  # of a forced token, and where a forward overflows, none


@dataclass(frozen=True)
class LosslessCounts:
    """How turns of so many new tokens in all were judged; None: identical."""

    judged: Sequence[Difference | None]
    tokens: int

    @property
    def differences(self) -> list[Difference]:
        return [difference for difference in self.judged if difference is not None]

    @property
    def unexplained(self) -> int:
        return sum(not difference.near_tie for difference in self.differences)

    @property
    def flips_per_1000_tokens(self) -> float:
        """Answers that differ, for every 1,000 tokens decoded; a near tie may flip in half precision."""
        return 1000 * len(self.differences) / max(self.tokens, 1)

    def as_dict(self) -> dict[str, int]:
        """The four counts of `report.json`; identical_turns + near_ties + unexplained = turns."""
        turns, different, unexplained = len(self.judged), len(self.differences), self.unexplained
        ties = different - unexplained
        return {"identical_turns": turns - different, "turns": turns, "near_ties": ties, "unexplained": unexplained}


def first_difference(expected: Sequence[int], received: Sequence[int]) -> int | None:
    """Index of the first token that differs, or where the shorter one ends: ([5, 6], [5, 6, 7]) -> 2."""
    pairs = zip_longest(expected, received)
    return next((position for position, (token, other) in enumerate(pairs) if token != other), None)


def judge(oracle: Oracle, prompt: Sequence[int], tokens: Sequence[int]) -> Difference | None:
    """The judged first difference of an answer from the oracle's, None when there is none."""
    expected = oracle.answer(prompt)
    position = first_difference(expected, tokens)
    if position is None:
        return None
    token, other = (answer[position] if position < len(answer) else None for answer in (expected, tokens))
    if token is None or other is None or oracle.target.dtype not in HIGHER_PRECISION:
        return Difference(position, token, other, near_tie=False)
    gap = oracle.gap(prompt, expected[:position], token, other)
    return Difference(position, token, other, gap <= oracle.noise, gap, oracle.noise)


def judge_all(oracle: Oracle, answers: Iterable[tuple[Sequence[int], Sequence[int]]]) -> LosslessCounts:
    """Counts over (prompt, answer); the oracle answers all prompts before the first is judged: one noise for all."""
    answers = list(answers)
    tokens = sum(len(oracle.answer(prompt)) for prompt, _ in answers)
    return LosslessCounts([judge(oracle, *answer) for answer in answers], tokens)
