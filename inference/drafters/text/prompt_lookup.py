"""Prompt lookup: copy what followed the latest earlier occurrence of the text's newest tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from draft_heads.configs.options import option
from draft_heads.inference.drafters.options import TreeOptions
from draft_heads.inference.drafters.text.base import TextDrafter
from draft_heads.inference.drafters.text.ngram import LANE, check_length
from draft_heads.inference.tree import DraftTree


@dataclass(frozen=True)
class PromptLookupOptions(TreeOptions):
    n: int = option(3, "tokens of the longest suffix that is looked up", least=1)
    k: int = option(10, "most tokens copied", least=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_length(self.n)


class PromptLookupDrafter(TextDrafter):
    """Copies up to k tokens that follow the latest match of the longest matching suffix of at most n tokens."""

    sources = ("prompt_lookup",)
    kind = "prompt_lookup"
    title = "what followed the last occurrence of the newest tokens"
    options_type = PromptLookupOptions
    options: PromptLookupOptions

    def __init__(self, device: torch.device | str = "cpu", **options: Any) -> None:
        """options: see `PromptLookupOptions`."""
        self.options = PromptLookupOptions(**options)
        depth = min(self.options.k, self.options.max_nodes)
        super().__init__(device, max_nodes=depth, max_depth=depth)
        self._text: list[int] = []
        self._code = 0  # of the last n tokens, packed as in `NgramTable`
        self._sizes: list[tuple[int, int, dict[int, int]]] = [
            (1 << LANE * (size - 1), (1 << LANE * size) - 1, {}) for size in range(1, self.options.n + 1)
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
