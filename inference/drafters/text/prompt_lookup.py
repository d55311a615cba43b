"""Prompt lookup: copy what followed the latest earlier occurrence of the text's newest tokens."""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from draft_heads.inference.drafters.text.base import TextDrafter, check_positive
from draft_heads.inference.drafters.text.ngram import LANE, MOST_TOKENS
from draft_heads.inference.tree import DraftTree


class PromptLookupDrafter(TextDrafter):
    """Copies up to k tokens that follow the latest match of the longest matching suffix of at most n tokens."""

    sources = ("prompt_lookup",)
    kind = "prompt_lookup"
    options: ClassVar[dict[str, Any]] = {"n": 3, "k": 10}

    def __init__(self, device: torch.device | str = "cpu", max_nodes: int = 32, n: int = 3, k: int = 10) -> None:
        """n: tokens of the longest suffix that is looked up; k: tokens copied at most."""
        check_positive(n=n, k=k, max_nodes=max_nodes)
        if n > MOST_TOKENS:
            raise ValueError(f"a suffix that is looked up has at most {MOST_TOKENS} tokens; got n={n}; 3 is usual")
        super().__init__(device, min(k, max_nodes), min(k, max_nodes))
        self._text: list[int] = []
        self._code = 0  # of the last n tokens, packed as in `NgramTable`
        self._sizes: list[tuple[int, int, dict[int, int]]] = [
            (1 << LANE * (size - 1), (1 << LANE * size) - 1, {}) for size in range(1, n + 1)
        ]  # smallest code of so many tokens, mask, suffix → position after its latest occurrence

    def start(self) -> None:
        self._text.clear()
        self._code = 0
        for _, _, places in self._sizes:
            places.clear()

    def read(self, tokens: list[int]) -> None:
        """Index the suffixes before each new token; nothing follows the newest suffix yet."""
        code, whole = self._code, self._sizes[-1][1]
        for token in tokens:
            for least, mask, places in self._sizes:
                if code < least:
                    break
                places[code & mask] = len(self._text)
            self._text.append(token)
            code = (code << LANE | token + 1) & whole
        self._code = code

    def propose(self) -> DraftTree:
        for _, mask, places in reversed(self._sizes):
            place = places.get(self._code & mask)
            if place is not None:
                copied = self._text[place : place + self.max_depth]
                while len(copied) < self.max_depth:  # the copy has reached its own beginning: the text goes round
                    copied += copied[: self.max_depth - len(copied)]
                return self.chain(copied)
        return self.chain([])
