"""Suffix arrays of token sequences, in numpy, sorted to a bounded depth.

For the tokens 1 2 1 2 3 the suffixes in order are 1 2 1 2 3, 1 2 3, 2 1 2 3, 2 3, 3: the array is 0 2 1 3 4. All
places where 1 2 stands are neighbours in it (0 and 2), and so are those among them that go on alike.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray


def suffix_array(
    tokens: NDArray[np.integer], depth: int = 32, progress: Callable[[int, int], None] = lambda done, of: None
) -> NDArray[np.int64]:
    """[N] int64, the places of `tokens [N]` in the order of the first `depth` tokens that stand there.

    By prefix doubling: a round sorts the places by pairs of ranks and so doubles the depth to which they are sorted.
    `depth` is a power of two. Equal places keep the order of the text; a text that ends sorts before one that goes on.
    Takes 32 bytes a token. `progress` is called with rounds done and of how many.
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
            break  # no two are alike any more
        half = 1 << (done - 1)
        behind = np.zeros_like(rank)
        behind[:-half] = rank[half:]
        pair = rank * (len(rank) + 1) + behind
        order = np.argsort(pair, kind="stable")
        rank = _ranks(pair[order], order)
    progress(rounds, rounds)
    return order


def _ranks(ordered: NDArray[np.integer], order: NDArray[np.int64]) -> NDArray[np.int64]:
    """[N] int64 from 1: equal keys have equal ranks. `ordered` are the keys in order, `order` their places."""
    rank = np.empty(len(order), dtype=np.int64)
    rank[order] = np.cumsum(np.concatenate([[True], ordered[1:] != ordered[:-1]])[: len(order)])
    return rank
