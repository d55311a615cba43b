"""ANPD: adaptive n-grams over the text so far, the largest level that matches first (https://arxiv.org/abs/2404.08698)."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Any

import torch

from draft_heads.configs.options import option
from draft_heads.inference.drafters.options import TreeOptions
from draft_heads.inference.drafters.text.base import TextDrafter
from draft_heads.inference.tree import DraftTree

LANE = 21  # vocabularies of up to two million tokens
MOST_TOKENS = 1024  # of an n-gram: a mask of so many lanes is held for each length
MOST_KEPT = 1_000_000  # n-grams that are kept for the next text, each of about 200 bytes with its context

Followers = tuple[int, int, int, int, int]
"""What followed a context: the most frequent token (of equals the last), its count, the second (−1: none), its count,
the count of all."""

Context = Any  # the end of some text, as the table that is asked codes it


class NgramTable:
    """Levels 2 … n of counts over one growing text, or over several when the counts are kept (section 3.2).

    A context of c tokens is one integer, the token ids + 1 in lanes of `LANE` bits, the newest lowest. For tokens 4, 7,
    7: level 3 (two tokens of context) has seen token 7 once after `5 << LANE | 8`.
    """

    def __init__(self, n: int) -> None:
        """n: at least 2, because a context of no tokens predicts nothing."""
        self.n = n
        self.code: Context = 0  # of the text's last n − 1 tokens
        self._text, self._before, self._common = list[int](), list[int](), 0  # and how far this text is that before
        self._mask = (1 << LANE * (n - 1)) - 1
        self._levels: list[tuple[int, int, dict[int, int], dict[int, Followers]]] = [
            (1 << LANE * (context - 1), (1 << LANE * context) - 1, {}, {}) for context in range(1, n)
        ]  # smallest number with so many lanes, mask, counts by whole n-gram, followers by context
        self._longest_first = [(level + 2, mask, tops) for level, (_, mask, _, tops) in enumerate(self._levels)][::-1]

    def start(self, keep: bool = False) -> None:
        """A new text; no n-gram spans two of them.

        keep: what was counted is kept, and not counted again where the new text begins as the one before, as each
            turn of a conversation does
        """
        self._before = self._text or self._before if keep else []
        self._text, self._common = [], 0
        self.code = 0
        if not keep:
            for _, _, counts, tops in self._levels:
                counts.clear()
                tops.clear()
        elif self.grams() > MOST_KEPT:
            self._drop_rare()
            self._before = []  # some of it is not counted any more

    def grams(self) -> int:
        """How many n-grams are counted."""
        return sum(len(counts) for _, _, counts, _ in self._levels)

    def _drop_rare(self) -> None:
        """Drop what followed contexts seen fewer than 2 times, or 4, 8, …, until half of `MOST_KEPT` is left."""
        seen = Counter(
            tops.get(gram >> LANE, (1,))[-1].bit_length() for _, _, counts, tops in self._levels for gram in counts
        )  # 1: once, 2: 2 or 3 times, 3: 4 to 7 times → n-grams
        left, bits = self.grams(), 0
        while left > MOST_KEPT // 2:
            bits += 1
            left -= seen[bits]
        for _, _, counts, tops in self._levels:
            often = {context: top for context, top in tops.items() if top[-1] >> bits}
            frequent = {gram: count for gram, count in counts.items() if gram >> LANE in often}
            counts.clear()  # gives memory back, which removing keys does not
            counts.update(frequent)
            tops.clear()
            tops.update(often)

    def extend(self, tokens: Sequence[int]) -> None:
        """Count more of the text."""
        tokens = self._uncounted(tokens)
        code, whole, levels = self.code, self._mask, self._levels
        for token in tokens:
            for least, mask, counts, tops in levels:
                if code < least:
                    break  # the text is shorter than this context, and so than all longer ones
                context = code & mask
                gram = context << LANE | token + 1
                top = tops.get(context)
                count = counts[gram] = counts.get(gram, 0) + 1
                if top is None:
                    tops[context] = token, 1, -1, 0, 1
                    continue
                first, first_count, second, second_count, total = top
                if token == first:
                    tops[context] = first, count, second, second_count, total + 1
                elif count >= first_count:
                    tops[context] = token, count, first, first_count, total + 1
                elif count >= second_count:
                    tops[context] = first, first_count, token, count, total + 1
                else:
                    tops[context] = first, first_count, second, second_count, total + 1
            code = (code << LANE | token + 1) & whole
        self.code = code

    def _uncounted(self, tokens: Sequence[int]) -> Sequence[int]:
        """The rest of these tokens behind what the text has in common with the one before; `code` is that up to it."""
        at = len(self._text)
        self._text += tokens
        while self._common < min(len(self._text), len(self._before)):
            token = self._text[self._common]
            if token != self._before[self._common]:
                self._before = []
                break
            self.code = self.after(self.code, token)
            self._common += 1
        return tokens[max(0, self._common - at) :]

    def after(self, code: Context, token: int) -> Context:
        """The context `code` with one more token after it."""
        longer: int = (code << LANE | token + 1) & self._mask
        return longer

    def chain(self, most: int) -> list[int]:
        """What follows the text, each time the most frequent by the longest context; no more than `most` tokens."""
        tokens: list[int] = []
        code = self.code
        while len(tokens) < most and (found := next(self.levels(code), None)):
            tokens.append(found[1][0])
            code = self.after(code, tokens[-1])
        return tokens

    def levels(self, code: Context) -> Iterator[tuple[int, Followers]]:
        """The level of every context at the end of `code` that was seen before, longest first, and what followed it."""
        for level, mask, tops in self._longest_first:
            top = tops.get(code & mask)
            if top is not None:
                yield level, top

    def shares(self, code: Context) -> dict[int, float]:
        """Token → the share of what followed, all levels together; of each its two most frequent followers.

        A context that was seen P times has P / (P + 2) of the say, the rest goes to the next shorter one. Example: 8 9
        was followed once by 4, and 9 twice by 4 and twice by 6: 4 has ⅓ + ⅔·²⁄₆ = .56, 6 has ⅔·²⁄₆ = .22.
        """
        found: dict[int, float] = {}
        left = 1.0
        for _, (first, count, second, second_count, total) in self.levels(code):
            say = left / (total + 2)
            found[first] = found.get(first, 0.0) + say * count
            if second >= 0:
                found[second] = found.get(second, 0.0) + say * second_count
            left = 2 * say
        return found


def check_length(n: int) -> None:
    """ValueError for more tokens than an n-gram may have."""
    if n > MOST_TOKENS:
        raise ValueError(f"an n-gram has at most {MOST_TOKENS} tokens; got n={n}; lower it")


@dataclass(frozen=True)
class NgramOptions(TreeOptions):
    n: int = option(5, "tokens of the longest n-gram", least=2)
    k: int = option(7, "most tokens of a path", least=1)
    branches: int = option(1, "most continuations of a node (1: a path, more: a tree)", least=1)
    keep: int = option(
        0,
        "1: keep the counts for the next prompt; of more than a million (about 200 MiB) the rarest go",
        choices=(0, 1),
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_length(self.n)


class NgramDrafter(TextDrafter):
    """Step by step the most frequent continuation; stops where no level matches.

    As a tree (`branches` above 1), the likeliest continuations by all levels together (`NgramTable.shares`).
    """

    sources = ("ngram",)
    kind = "ngram"
    title = "ANPD: the most frequent continuation of the longest context seen before"
    extends_paths = True
    options_type = NgramOptions
    options: NgramOptions

    def __init__(self, device: torch.device | str = "cpu", **options: Any) -> None:
        """options: see `NgramOptions`."""
        self.options = chosen = NgramOptions(**options)
        depth = min(chosen.k, chosen.max_nodes)
        super().__init__(device, depth if chosen.branches == 1 else chosen.max_nodes, depth)
        self.carries_over = bool(chosen.keep)
        self.table = NgramTable(chosen.n)

    def start(self) -> None:
        self.table.start(keep=self.carries_over)

    def forget(self) -> None:
        self.table.start()

    def read(self, tokens: list[int]) -> None:
        self.table.extend(tokens)

    def end(self, slot: int, tokens: list[int]) -> None:
        if self.carries_over:
            self.read(tokens)

    def propose(self) -> DraftTree:
        if self.options.branches > 1:
            return self._branching()
        return self.chain(self.table.chain(self.max_depth))

    def _branching(self) -> DraftTree:
        """The nodes of the highest shares, multiplied along the path."""
        table = self.table
        tokens: list[int] = []
        parents: list[int] = []
        scores: list[float] = []
        waiting: list[tuple[float, int, int, int, int]] = []  # −share, order, token, parent, depth
        contexts = [table.code]  # after the text, and after every node

        def follow(parent: int, reached: float, depth: int) -> None:
            shares = sorted(table.shares(contexts[parent + 1]).items(), key=lambda item: -item[1])
            for token, share in shares[: self.options.branches]:
                order = len(tokens) + len(waiting)
                heappush(waiting, (-reached * share, order, token, parent, depth + 1))

        follow(-1, 1.0, 0)
        while waiting and len(tokens) < self.max_nodes:
            reached, _, token, parent, depth = heappop(waiting)
            tokens.append(token)
            parents.append(parent)
            scores.append(math.log(-reached))
            contexts.append(table.after(contexts[parent + 1], token))
            if depth < self.max_depth:
                follow(len(tokens) - 1, -reached, depth)
        return self.tree(tokens, parents, scores)
