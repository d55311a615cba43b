"""The draft model's decoding loop: greedily, token by token, or tree by tree with an inner drafter.

Shapes: n tokens of a text, A newly committed ones, M nodes, R = M+1 rows of a forward, H hidden, V vocabulary.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from draft_heads.inference.drafters.base import Drafter
from draft_heads.inference.drafters.heads.long_texts import LongTexts
from draft_heads.inference.step import VerifiedStep, verify_step
from draft_heads.inference.target.kv_cache import KVCache
from draft_heads.inference.target.target import Target
from draft_heads.inference.tree import DraftTree


class DraftLoop:
    """Continues a text greedily; cached tokens beyond the longest common prefix with the last text are dropped.

    forwards and drafted count the model's forwards (those that only read a text included) and the drafted tokens.
    """

    def __init__(self, model: Target, inner: Drafter | None = None) -> None:
        """inner: a drafter whose trees the draft model verifies; None: token by token."""
        self.model, self.inner = model, inner
        self.forwards = self.drafted = 0
        self._long_texts: LongTexts | None = getattr(inner, "long_texts", None)
        if inner is not None and self._long_texts is not None:  # it does not observe every step as one
            inner.long_texts = None  # type: ignore[attr-defined]
        self._capacity, self._changes = 0, model.changes
        self._cache: KVCache | None = None
        self._hidden: Tensor | None = None  # of every cached token, [capacity, H], for the inner drafter
        self._aux: Tensor | None = None  # likewise [capacity, k·H], if it reads more layers
        self._cached, self._cached_drafts = 0, list[int]()  # in the cache: so many tokens of the text, then these
        self._observed, self._observed_drafts = 0, list[int]()  # the same for the inner drafter
        self._depth = torch.zeros(1, 1, dtype=torch.long, device=model.device)
        self._self_mask = torch.ones(1, 1, 1, dtype=torch.bool, device=model.device)

    def begin(self, capacity: int) -> None:
        """Start a new text; it and its answer have at most `capacity` tokens."""
        self.model.refresh()
        if self._changes != self.model.changes:
            self._changes, self._cache = self.model.changes, None
        self._capacity = min(capacity, self.model.max_positions)
        extra = 0 if self.inner is None else self.inner.max_depth + max(self.inner.max_nodes, self.inner.max_depth) + 2
        rows = self._capacity + extra + 1
        if self._cache is None or self._cache.capacity < rows:
            self._cache = self._hidden = self._aux = None  # free their memory before allocating more
            cache = self.model.new_cache(-(-rows // 256) * 256)
            if self.model.fused is not None:
                cache.allocate(self.model.fused.like)
            if self.inner is not None:
                size, layers = self.model.config.hidden_size, len(self.inner.target_layers)
                weight = self.model.embedding.weight
                self._hidden = weight.new_empty(cache.capacity, size)
                self._aux = weight.new_empty(cache.capacity, layers * size) if layers else None
            self._cache = cache  # now that all is there: an error or Ctrl-C above leaves nothing half made
        self._cache.clear()
        self._cached = self._observed = 0
        self._cached_drafts, self._observed_drafts = [], []

    def draft(self, text: list[int], count: int) -> list[int]:
        """The model's next tokens after `text` and its base token: `count`, more with an inner drafter, fewer at the
        end of the answer or the model's context."""
        room = self._capacity - len(text)
        if min(room, count) < 1:
            return []
        kept = self._cached
        for token in self._cached_drafts:
            if kept >= len(text) - 1 or token != text[kept]:
                break
            kept += 1
        kept = min(kept, len(text) - 1)  # at least one token must be fed
        self.cache.lengths.fill_(kept)
        self.cache.bound = kept
        draft = self._by_tokens if self.inner is None else self._by_trees
        try:
            drafted = draft(text, kept, min(room, count))
        except Exception:  # want of memory, perhaps: a shorter text asks for less
            self._cache = None
            raise
        self._cached, self._cached_drafts = len(text), drafted[:-1]
        self.drafted += len(drafted[:room])
        return drafted[:room]

    @property
    def cache(self) -> KVCache:
        """The model's cache, which `begin` allocates."""
        assert self._cache is not None, "call begin before draft"
        return self._cache

    def _by_tokens(self, text: list[int], kept: int, count: int) -> list[int]:
        """One forward per token; the tokens are copied to the host together, at the end."""
        fresh = torch.tensor(text[kept:], device=self.model.device)
        cache = self.cache
        if len(fresh) == 1:
            chosen = [self._after(fresh, cache)]
        else:
            chosen = [self.model.prefill(fresh, cache)[1].argmax()[None]]
            self.forwards += 1
        while len(chosen) < count:
            chosen.append(self._after(chosen[-1], cache))
        return torch.cat(chosen).tolist()

    def _after(self, token: Tensor, cache: KVCache) -> Tensor:
        """[1] the model's choice after `token [1]`, which is committed."""
        cache.set_visible_length(1)
        _, logits, _ = self.model.forward_tree(token[None], self._depth, self._self_mask, cache)
        cache.lengths += 1
        cache.bound += 1
        self.forwards += 1
        return logits[0].argmax(-1)

    def _by_trees(self, text: list[int], kept: int, count: int) -> list[int]:
        """The inner drafter proposes and the model verifies, until there are `count` tokens."""
        assert self.inner is not None and self._hidden is not None
        fresh = torch.tensor(text[kept:], device=self.model.device)
        if len(fresh) > 1:
            hidden, _, aux_hidden = self.model.prefill(fresh[:-1], self.cache, self.inner.target_layers)
            self._keep(kept, hidden, aux_hidden)
            self.forwards += 1
        self._update_inner(text)
        base, drafted = fresh[-1:], list[int]()
        while True:
            step = self._verify_and_commit(base, self.inner.propose())
            new = step.next_tokens[0].tolist()[: int(step.count)]
            drafted += new
            if len(drafted) >= count and not self.inner.reads_choices:
                return drafted
            self.inner.observe(step)  # also the last one, where the rows beside the path teach it n-grams
            self._observed_drafts += new
            if len(drafted) >= count:
                return drafted
            base = step.base

    def _update_inner(self, text: list[int]) -> None:
        """The inner drafter observes the text up to its base token; all of it if it has observed another text."""
        assert self.inner is not None and self._hidden is not None
        end = self._observed + len(self._observed_drafts)
        extends = 0 < end < len(text) and text[self._observed : end] == self._observed_drafts
        start = end - 1 if extends else 0
        tokens = torch.tensor(text[start:], device=self.model.device)
        hidden = self._hidden[start : len(text) - 1].clone()  # a drafter may keep it
        aux_hidden = None if self._aux is None else self._aux[start : len(text) - 1].clone()
        step = VerifiedStep.of_prompt(tokens[:-1], hidden, tokens[-1:], aux_hidden)
        if extends:
            self.inner.observe(replace(step, tree=DraftTree.empty(tokens.device)))  # no prompt
        elif self._observed:
            self.inner.rewind(step, self._capacity)
        else:
            self.inner.begin(0, tokens[:-1], self._capacity)
            self.inner.observe(step, 0)
        self._observed, self._observed_drafts = len(text), []

    def _verify_and_commit(self, base: Tensor, tree: DraftTree) -> VerifiedStep:
        """One forward over a tree after `base [1]`; the path of the model's own choices is committed."""
        assert self.inner is not None and self._hidden is not None
        cache = self.cache
        cache.set_visible_length(1 + max(len(tree), self.inner.max_depth))
        layers = self.inner.target_layers
        step = verify_step(self.model, cache, base, tree, self.inner.max_depth, target_layers=layers)
        self.forwards += 1
        start, accepted = cache.bound, int(step.count)
        cache.bound = start + accepted
        if self._long_texts is not None:
            self._long_texts.add(start, accepted)
        aux_hidden = None if step.aux_hidden is None else step.aux_hidden[0, :accepted]
        self._keep(start, step.hidden[0, :accepted], aux_hidden)
        return step

    def _keep(self, start: int, hidden: Tensor, aux_hidden: Tensor | None) -> None:
        """States of tokens that were committed from position `start` on."""
        for store, states in ((self._hidden, hidden), (self._aux, aux_hidden)):
            if store is not None and states is not None:
                store[start : start + len(states)] = states
