"""Suffix arrays of token sequences, in numpy, sorted to a bounded depth.

For the tokens 1 2 1 2 3 the suffixes in order are 1 2 1 2 3, 1 2 3, 2 1 2 3, 2 3, 3: the array is 0 2 1 3 4. The
positions of 1 2 (0 and 2) are neighbours in it, and so are those among them with equal continuations.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray


def suffix_array(
    tokens: NDArray[np.integer], depth: int = 32, progress: Callable[[int, int], None] = lambda done, of: None
) -> NDArray[np.int64]:
    """[N] int64, the positions in `tokens [N]` sorted by the first `depth` tokens of the suffix that begins there.

    Prefix doubling: each round sorts by pairs of ranks and so doubles the sorted depth. `depth` is a power of two.
    Equal suffixes keep the order of the text; a shorter suffix sorts before a longer one that begins with it. Needs 32
    bytes of memory per token. `progress(done, of)` is called with the number of rounds.
    """
    if depth < 1 or depth & (depth - 1):
        raise ValueError(f"the depth of a suffix array is a power of two; got {depth}; choose 16, 32 or 64")
    rounds = depth.bit_length()
    progress(0, rounds)
    order = np.argsort(tokens, kind="stable")
    rank = _ranks(np.asarray(tokens)[order], order)
    for done in range(1, rounds):
        progress(done, rounds)
        if len(rank) == 0 or rank.max() == len(rank):
            break  # all ranks differ
        half = 1 << (done - 1)
        second = np.zeros_like(rank)
        second[:-half] = rank[half:]
        pair = rank * (len(rank) + 1) + second
        order = np.argsort(pair, kind="stable")
        rank = _ranks(pair[order], order)
    progress(rounds, rounds)
    return order


def _ranks(ordered: NDArray[np.integer], order: NDArray[np.int64]) -> NDArray[np.int64]:
    """[N] int64 from 1, equal keys have equal ranks: `ordered` are the sorted keys, `order` their positions."""
    rank = np.empty(len(order), dtype=np.int64)
    rank[order] = np.cumsum(np.concatenate([[True], ordered[1:] != ordered[:-1]])[: len(order)])
    return rank
