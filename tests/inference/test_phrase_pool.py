"""The pool of phrases and the tree they are merged into."""

import pytest

from draft_heads.inference.drafters.text.phrase_pool import PhrasePool
from draft_heads.inference.tree import TokenTrie


def test_the_oldest_phrase_of_a_first_token_goes_and_one_seen_again_is_the_newest():
    pool = PhrasePool(length=3, most=2)
    for phrase in ((1, 2, 3), (1, 4, 5), (9, 9, 9), (1, 2, 3), (1, 6, 7)):
        pool.add(phrase)
    assert pool.newest(1, 5) == [(1, 6, 7), (1, 2, 3)] and len(pool) == 3
    assert pool.newest(1, 1) == [(1, 6, 7)] and pool.newest(1, 0) == [] and pool.newest(2, 5) == []
    pool.add((1, 6, 7))
    assert pool.newest(1, 5) == [(1, 6, 7), (1, 2, 3)]  # seen again, nothing has to go
    pool.remove((1, 6, 7))
    pool.remove((1, 6, 7))
    assert pool.newest(1, 5) == [(1, 2, 3)]
    pool.clear()
    assert len(pool) == 0


def test_long_phrases_are_cut_and_single_tokens_dropped():
    pool = PhrasePool(length=3, most=2)
    for phrase in ([1, 2, 3, 4], [1, 2], [1], []):
        pool.add(phrase)
    assert pool.newest(1, 5) == [(1, 2), (1, 2, 3)]


def test_pools_that_hold_nothing_are_refused():
    with pytest.raises(ValueError, match="tokens of a phrase must be at least 2; got 1"):
        PhrasePool(1, 3)
    with pytest.raises(ValueError, match="phrases of a first token must be at least 1; got 0"):
        PhrasePool(3, 0)


def test_equal_beginnings_are_merged():
    """b → x → z, b → y, and x → w below the node of x."""
    trie = TokenTrie(most=5)
    assert trie.add((10, 12)) == [0, 1] and trie.add((11,)) == [2] and trie.add((10, 13)) == [0, 3]
    assert trie.add((13, 14), parent=0) == [3, 4] and trie.add((12, 15), parent=0) == [1]
    assert trie.tokens == [10, 12, 11, 13, 14] and trie.parents == [-1, 0, -1, 0, 3]
