"""The pool of phrases of lookahead decoding and Ouroboros."""

from __future__ import annotations

from collections.abc import Sequence

from draft_heads.configs.options import check_whole

Phrase = tuple[int, ...]


class PhrasePool:
    """At most `most` phrases for a first token, least recently added first: the oldest is evicted.

    Phrases have 2 to `length` tokens; longer ones are cut, shorter ones are ignored.
    """

    def __init__(self, length: int, most: int) -> None:
        check_whole("the phrases of a first token", most, least=1, remedy="15 are usual")
        check_whole("the tokens of a phrase", length, least=2, remedy="5 to 7 are usual")
        self.length, self.most = length, most
        self._phrases: dict[int, dict[Phrase, None]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._phrases.values()))

    def clear(self) -> None:
        self._phrases.clear()

    def add(self, phrase: Sequence[int]) -> None:
        """Add a phrase as the newest of its first token."""
        if len(phrase) < 2:
            return
        kept = tuple(phrase[: self.length])
        same = self._phrases.setdefault(kept[0], {})
        same.pop(kept, None)
        if len(same) == self.most:
            del same[next(iter(same))]
        same[kept] = None

    def remove(self, phrase: Phrase) -> None:
        """Remove one phrase, if present."""
        self._phrases.get(phrase[0], {}).pop(phrase, None)

    def newest(self, first: int, count: int) -> list[Phrase]:
        """Up to `count` phrases that begin with a token, the newest first."""
        return list(self._phrases.get(first, ()))[: -count - 1 : -1]
