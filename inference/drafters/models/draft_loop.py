"""A draft model's own greedy text behind another text: token by token, or tree by tree with a drafter inside.

Shapes: n tokens of a text, A newly committed ones, M nodes, R = M+1 rows of a forward, H hidden, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from draft_heads.inference.drafters.base import Drafter
from draft_heads.inference.step import VerifiedStep, verify_step
from draft_heads.inference.target.compiled import program
from draft_heads.inference.target.kv_cache import KVCache
from draft_heads.inference.target.target import Target
from draft_heads.inference.tree import DraftTree

_ONE_BY_ONE = 4  # so few new tokens are fed through the compiled forward of one row
_RUN = 4  # so many forwards of one row are compiled together: a third of their time goes into calling them


class DraftLoop:
    """Drafts behind any text that only grows: what is cached beyond their longest common prefix is dropped.

    forwards and drafted count the model's forwards (those that only feed a text included) and the tokens they gave.
    """

    def __init__(self, model: Target, inner: Drafter | None = None) -> None:
        """inner: drafts for the draft model, which verifies its trees; None: token by token."""
        self.model, self.inner = model, inner
        self.forwards = self.drafted = 0
        self._capacity = 0
        self._cache: KVCache | None = None
        self._hidden: Tensor | None = None  # of every cached token, [capacity, H], for the inner drafter
        self._aux: Tensor | None = None  # likewise [capacity, k·H], where it reads more layers
        self._kept, self._ahead = 0, list[int]()  # cached: so many tokens of the text, then these
        self._told, self._told_ahead = 0, list[int]()  # the same of what the inner drafter was told
        self._depth = torch.zeros(1, 1, dtype=torch.long, device=model.device)
        self._alone = torch.ones(1, 1, 1, dtype=torch.bool, device=model.device)
        self._next, self._next_run, self._verify = self._row, self._run, self._verify_tree
        if model.compiled:
            self._next, self._next_run = program(self._row, model.device), program(self._run, model.device)
            self._verify = program(self._verify_tree, model.device)

    def begin(self, capacity: int) -> None:
        """Forget the last text; the next one and its answer take `capacity` tokens."""
        self._capacity = min(capacity, self.model.max_positions)
        inside = 0 if self.inner is None else self.inner.max_depth + max(self.inner.max_nodes, self.inner.max_depth) + 2
        rows = self._capacity + inside + 1
        if self._cache is None or self._cache.capacity < rows:
            self._cache = None  # its memory is given back before more is asked for
            self._cache = self.model.new_cache(-(-rows // 256) * 256)
            if self.model.fused is not None:
                self._cache.allocate(self.model.fused.like)
            if self.inner is not None:
                states = torch.empty(self._cache.capacity, 0, dtype=self.model.dtype, device=self.model.device)
                size, layers = self.model.config.hidden_size, len(self.inner.target_layers)
                self._hidden = states.new_empty(len(states), size)
                self._aux = states.new_empty(len(states), layers * size) if layers else None
        self._cache.clear()
        self._kept = self._told = 0
        self._ahead, self._told_ahead = [], []

    def draft(self, text: list[int], count: int) -> list[int]:
        """The model's next tokens behind `text`, whose last token is the target's base token.

        `count` of them, with an inner drafter perhaps more; fewer where the answer or the model's context ends.
        """
        room = self._capacity - len(text)
        if min(room, count) < 1:
            return []
        kept = self._kept
        for token in self._ahead:
            if kept >= len(text) - 1 or token != text[kept]:
                break
            kept += 1
        kept = min(kept, len(text) - 1)  # there must be something to feed
        self._cut(kept)
        by = self._by_tokens if self.inner is None else self._by_trees
        drafted = by(text, kept, min(room, count))
        self._kept, self._ahead = len(text), drafted[:-1]
        self.drafted += len(drafted[:room])
        return drafted[:room]

    @property
    def cache(self) -> KVCache:
        """The model's cache; there is one once a text has begun."""
        assert self._cache is not None, "begin before drafting"
        return self._cache

    def _cut(self, length: int) -> None:
        """Keep the first tokens only."""
        self.cache.lengths.fill_(length)
        self.cache.settle(length)

    def _by_tokens(self, text: list[int], kept: int, count: int) -> list[int]:
        """As many forwards as tokens; they are read back together, at the end."""
        fresh = torch.tensor(text[kept:], device=self.model.device)
        cache = self.cache
        if len(fresh) <= (_ONE_BY_ONE if self.model.compiled else 1):
            for token in fresh.split(1):
                choice = self._step(token, cache)
        else:
            choice = self.model.prefill(fresh, cache)[1].argmax()[None]
            self.forwards += 1
        chosen = [choice]
        done = 1
        while done < count:
            whole = self.model.compiled and count - done >= _RUN
            chosen.append(self._step(chosen[-1][-1:], cache, _RUN if whole else 1))
            done += len(chosen[-1])
        return torch.cat(chosen).tolist()

    def _step(self, token: Tensor, cache: KVCache, rows: int = 1) -> Tensor:
        """See `_row` and `_run`, with what the host does around them."""
        cache.set_visible_length(rows)
        choices = (self._next if rows == 1 else self._next_run)(token, cache)
        cache.settle(cache.bound + rows)
        self.forwards += rows
        return choices

    def _row(self, token: Tensor, cache: KVCache) -> Tensor:
        """[1] the model's own choice behind `token [1]`, which is committed."""
        _, logits, _ = self.model.forward_tree(token[None], self._depth, self._alone, cache)
        cache.lengths += 1
        return logits[0].argmax(-1)

    def _run(self, token: Tensor, cache: KVCache) -> Tensor:
        """[_RUN] choices, each behind the one before."""
        choices = []
        for _ in range(_RUN):
            token = self._row(token, cache)
            choices.append(token)
        return torch.cat(choices)

    def _by_trees(self, text: list[int], kept: int, count: int) -> list[int]:
        """The inner drafter proposes, the model verifies, until `count` tokens are there."""
        assert self.inner is not None and self._hidden is not None
        fresh = torch.tensor(text[kept:], device=self.model.device)
        if len(fresh) > 1:
            hidden, _, aux_hidden = self.model.prefill(fresh[:-1], self.cache, self.inner.target_layers)
            self._keep(kept, hidden, aux_hidden)
            self.forwards += 1
        self._tell(text)
        base, drafted = fresh[-1:], list[int]()
        while True:
            step = self._verified(base, self.inner.propose())
            new = step.next_tokens.tolist()[: int(step.count)]
            drafted += new
            if len(drafted) >= count:
                return drafted
            self.inner.observe(step)
            self._told_ahead += new
            base = step.next_tokens[-1:]

    def _tell(self, text: list[int]) -> None:
        """The inner drafter takes in the text up to its base token, all of it where it was told another one."""
        assert self.inner is not None and self._hidden is not None
        place = self._told + len(self._told_ahead)
        goes_on = 0 < place < len(text) and text[self._told : place] == self._told_ahead
        start = place - 1 if goes_on else 0
        tokens = torch.tensor(text[start:], device=self.model.device)
        hidden = self._hidden[start : len(text) - 1].clone()  # a drafter may keep it
        aux_hidden = None if self._aux is None else self._aux[start : len(text) - 1].clone()
        if goes_on:
            count = torch.full_like(tokens[0], len(hidden))
            tree = DraftTree.empty(tokens.device)
            self.inner.observe(VerifiedStep(tokens[:-1], tokens[1:], hidden, count, tree=tree, aux_hidden=aux_hidden))
        else:
            step = VerifiedStep.of_prompt(tokens[:-1], hidden, tokens[-1], aux_hidden)
            if self._told:
                self.inner.rewind(step, self._capacity)
            else:
                self.inner.begin(step.tokens, self._capacity)
                self.inner.observe(step)
        self._told, self._told_ahead = len(text), []

    def _verified(self, base: Tensor, tree: DraftTree) -> VerifiedStep:
        """One forward over a tree behind `base [1]`; the model's own path is committed."""
        assert self.inner is not None and self._hidden is not None
        cache = self.cache
        cache.set_visible_length(1 + max(len(tree), self.inner.max_depth))
        step = self._verify(base, tree.map(lambda x: x[None]), cache).sequence(0, tree)
        self.forwards += 1
        start, accepted = cache.bound, int(step.count)
        cache.settle(start + accepted)
        self._keep(start, step.hidden[:accepted], None if step.aux_hidden is None else step.aux_hidden[:accepted])
        return step

    def _keep(self, start: int, hidden: Tensor, aux_hidden: Tensor | None) -> None:
        """States of tokens that were committed from position `start` on."""
        for store, states in ((self._hidden, hidden), (self._aux, aux_hidden)):
            if store is not None and states is not None:
                store[start : start + len(states)] = states

    def _verify_tree(self, base: Tensor, tree: DraftTree, cache: KVCache) -> VerifiedStep:
        assert self.inner is not None
        return verify_step(self.model, cache, base, tree, self.inner.max_depth, target_layers=self.inner.target_layers)
