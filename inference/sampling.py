"""Lossless sampling: the token at a position is a function of the target's distribution there and of fixed noise.

`x = argmax(log p + G)` with Gumbel noise G is distributed as p. The noise depends on seed and position only, so drafted
trees and the vanilla loop give the same tokens, and losslessness is checked as for greedy decoding.

Shapes: P positions, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from draft_heads.configs.options import check_number, check_whole

_GOLDEN = 0x9E3779B97F4A7C15 - 2**64  # as signed 64-bit integers, which wrap around
SEEDS = 2**63
"""Seeds are 0 to SEEDS − 1; no two of them have the same noise."""
_FIRST, _SECOND = 0xBF58476D1CE4E5B9 - 2**64, 0x94D049BB133111EB - 2**64


def _splitmix64(x: Tensor) -> Tensor:
    """SplitMix64's finaliser: a bijection of 64-bit integers in which every output bit depends on every input bit."""
    x = (x ^ ((x >> 30) & (2**34 - 1))) * _FIRST
    x = (x ^ ((x >> 27) & (2**37 - 1))) * _SECOND
    return x ^ ((x >> 31) & (2**33 - 1))


def uniform(seed: int, positions: Tensor, count: int) -> Tensor:
    """[P, count] float64 in (0, 1), a function of seed, position and column only: the same on every device."""
    columns = torch.arange(1, count + 1, device=positions.device)
    row = _splitmix64(_splitmix64(positions * _GOLDEN + seed) + _GOLDEN)
    mixed = _splitmix64(row[:, None] + columns * _GOLDEN)
    shares = (((mixed >> 11) & (2**53 - 1)).double() + 0.5) * 2.0**-53
    return shares.clamp_(max=1 - 2.0**-53)  # the largest is rounded to 1, whose noise is infinite


def gumbel(seed: int, positions: Tensor, count: int) -> Tensor:
    """[P, count] float64, standard Gumbel noise."""
    return -(-uniform(seed, positions, count).log()).log()


def check_seed(name: str, seed: int) -> None:
    """ValueError unless a seed is one of `SEEDS`."""
    check_whole(name, seed)
    if not 0 <= seed < SEEDS:
        raise ValueError(f"{name} must be at least 0 and below 2^63; got {seed}; write for example 0")


def seed_of(seed: int, index: int) -> int:
    """The seed of answer number `index` of several: one more for each, and 0 after the last seed."""
    return (seed + index) % SEEDS


@dataclass(frozen=True)
class Sampling:
    """How tokens are sampled: temperature, top-k and top-p as in transformers' `generate`, in that order.

    temperature  above 0
    top_k        only the k most probable tokens; 0: all
    top_p        only the most probable tokens that together reach this probability; 1: all
    seed         of the noise, from 0 to 2^63 − 1
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        check_number("temperature", self.temperature)
        check_whole("top_k", self.top_k)
        check_number("top_p", self.top_p)
        check_seed("seed", self.seed)
        if not 1e-99 < self.temperature < float("inf"):  # logits over less would be infinite
            raise ValueError(
                f"temperature must be above 1e-99 to sample; got {self.temperature:g}; leave it out for greedy decoding"
            )
        if self.top_k < 0:
            raise ValueError(f"top_k must be 0 (all tokens) or more; got {self.top_k}; leave it out")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be above 0 and at most 1 (all tokens); got {self.top_p:g}; leave it out")

    def warped(self, logits: Tensor) -> Tensor:
        """[..., V] float64 logits of the distribution to sample from; −inf for excluded tokens."""
        scores = logits.double() / self.temperature
        if 0 < self.top_k < scores.shape[-1]:
            threshold = scores.topk(self.top_k, dim=-1).values[..., -1:]
            scores = scores.masked_fill(scores < threshold, -torch.inf)
        if self.top_p < 1:
            ascending, order = scores.sort(dim=-1)
            below = ascending.softmax(-1).cumsum(-1) <= 1 - self.top_p
            below[..., -1] = False  # the most probable token always stays
            scores = scores.masked_fill(below.scatter(-1, order, below), -torch.inf)
        return scores

    def choices(self, logits: Tensor, positions: Tensor) -> Tensor:
        """[P] int64, the sampled tokens at absolute `positions [P]` of the text."""
        return (self.warped(logits) + gumbel(self.seed, positions, logits.shape[-1])).argmax(-1)
