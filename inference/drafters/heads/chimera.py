"""Drafting with a Chimera head: level by level, every node with its own k-gram and its own ancestors.

Shapes: B texts, n committed tokens, A newly committed ones, W nodes of a level, H hidden.

The block reads h_1 … h_n, g_1 … g_n and the drafted tokens' g: h and g of a token lie side by side (rows 2i+1 and 2i)
in one buffer, since attention ignores the order of keys; drafts lie after them and are overwritten.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from draft_heads.configs.options import option
from draft_heads.heads.base import TargetView
from draft_heads.heads.block import DecoderBlock
from draft_heads.heads.chimera import ChimeraHead, KGramEncoder
from draft_heads.heads.windows import rows_at
from draft_heads.inference.drafters.base import tempered
from draft_heads.inference.drafters.heads.base import BlockCache, HeadDrafter
from draft_heads.inference.drafters.heads.level_tree import LevelAttention, LevelTreeOptions, grow_tree
from draft_heads.inference.step import VerifiedStep
from draft_heads.inference.tree import DraftTree


def gram_states(head: ChimeraHead, view: TargetView, tokens: Tensor) -> Tensor:
    """[..., H], what the k-gram encoder reads of tokens; zeros for −1, before the first token."""
    return head.token_states(tokens.clamp(min=0), view) * (tokens >= 0)[..., None]


ON_HOST = 64  # encodings kept in host memory for each on the device


class KGramCache:
    """Keeps encodings of k-grams; the least recently used move from the device to host memory, and go from there.

    `hits`, `reloads` (from host memory) and `misses` count distinct k-grams looked up.
    """

    def __init__(self, size: int) -> None:
        """size: entries that stay on the device, at least 1."""
        self.size = size
        self.table: OrderedDict[tuple[int, ...], Tensor] = OrderedDict()  # [H] each, the least recently used first
        self.evicted: dict[tuple[int, ...], Tensor] = {}  # in host memory
        self.hits = self.reloads = self.misses = 0

    def clear(self) -> None:
        self.table.clear()
        self.evicted.clear()

    def lookup(self, grams: Tensor, encode: Callable[[Tensor], Tensor]) -> Tensor:
        """g [B, W, H] of k-grams [B, W, k]; `encode` maps [w, k] to [w, H]."""
        keys = [tuple(gram) for gram in grams.flatten(0, 1).tolist()]
        distinct = dict.fromkeys(keys)
        unseen = [key for key in distinct if key not in self.table and key not in self.evicted]
        fresh = dict(zip(unseen, encode(grams.new_tensor(unseen)).unbind())) if unseen else {}
        self.misses += len(unseen)
        for key in distinct:
            if key in self.table:
                self.table.move_to_end(key)
                self.hits += 1
            elif key in self.evicted:
                self.table[key] = self.evicted.pop(key).to(grams.device)
                self.reloads += 1
            else:
                self.table[key] = fresh[key].clone()  # a row would keep all of `encode`'s
        found = torch.stack([self.table[key] for key in keys]).unflatten(0, grams.shape[:2])
        while len(self.table) > self.size:
            oldest, encoding = self.table.popitem(last=False)
            self.evicted[oldest] = encoding.cpu()
            if len(self.evicted) > ON_HOST * self.size:
                del self.evicted[next(iter(self.evicted))]
        return found


@dataclass(frozen=True)
class ChimeraOptions(LevelTreeOptions):
    kgram_cache: int = option(0, "k-gram encodings kept on the device, 64 times as many on the host", least=0)


class ChimeraDrafter(HeadDrafter):
    """Keeps the block's keys and values of h_1 … h_n and g_1 … g_n; those of drafted tokens are dropped."""

    kind = "chimera"
    keeps_text = False  # encodings of k-grams
    reads_lm_head = True
    title = "level by level, each node with the k-gram that ends at it"
    options_type = ChimeraOptions

    def __init__(
        self, head: ChimeraHead, view: TargetView, max_nodes: int = 32, slots: int = 1, **options: Any
    ) -> None:
        """options: see `ChimeraOptions`."""
        chosen = ChimeraOptions(max_nodes=max_nodes, **options)
        if chosen.kgram_cache and not isinstance(head.encoder, KGramEncoder):
            raise ValueError(
                f"kgram_cache needs a head with encoder kgram; this one has {head.config.encoder}; drop the option"
            )
        attending = isinstance(head.encoder, DecoderBlock)
        self._fusion = BlockCache(head, slots, rows_per_token=2)
        self._encoder = BlockCache(head, slots) if attending else None
        caches = [self._fusion] if self._encoder is None else [self._fusion, self._encoder]
        after = (chosen.max_nodes + 1) * head.config.heads + 1
        super().__init__(head, view, chosen, slots, head.config.heads, caches, after, head.block)
        self.chain = chosen.tree == "chain"
        self.cache = KGramCache(chosen.kgram_cache) if chosen.kgram_cache else None
        self.on_device = self.cache is None  # the host keeps the table of k-grams
        self.carries_over = self.cache is not None
        self._recent = self._all_recent = torch.full((slots, head.config.order - 1), -1, device=self.view.device)
        self._has_read = torch.zeros(slots, dtype=torch.bool, device=self.view.device)  # since the last draft

    def memory(self) -> list[Tensor]:
        return [*super().memory(), self._all_recent]

    def use_slots(self, count: int) -> None:
        super().use_slots(count)
        self._recent = self._all_recent[:count]

    def begin(self, slot: int, prompt: Tensor, capacity: int) -> None:
        view = self.view
        super().begin(slot, prompt, capacity)
        if self.cache is not None and self.view is not view:  # of other weights of the target, whose embedding was read
            self.cache.clear()
        self._recent[slot : slot + 1].fill_(-1)

    def forget(self) -> None:
        if self.cache is not None:
            self.cache.clear()

    def read(self, step: VerifiedStep, texts: slice) -> tuple[Tensor, ...]:
        """h_n [B, H] and the base token [B]."""
        head, recent = self.head, self._recent[texts]
        if self.cache is not None:
            self._has_read[: self.slots][texts] |= step.count > 0
        hidden = head.target_states(step.hidden, step.aux_hidden)
        text = torch.cat([recent, step.tokens], dim=1)
        encoded = self._encode(text, step, texts)
        both = torch.stack([encoded, hidden], dim=2).flatten(1, 2)
        rows = 2 * self.length[texts, None] + torch.arange(both.shape[1], device=hidden.device)
        keys_values = head.block.context_keys_values(both, self._rotation(rows // 2))
        self._fusion.of(texts).write(rows, *keys_values)
        recent.copy_(text.gather(1, step.count[:, None] + torch.arange(recent.shape[1], device=text.device)))
        return hidden[:, -1], step.base

    def _encode(self, text: Tensor, step: VerifiedStep, texts: slice) -> Tensor:
        """g [B, A, H] of the newly committed tokens."""
        head, view, tokens = self.head, self.view, step.tokens
        if self._encoder is None:
            grams = text.unfold(1, head.config.order, 1)
            if self.cache is not None:  # rows that repeat the last token have its k-gram
                row = torch.arange(grams.shape[1], device=grams.device)
                grams = rows_at(grams, row.minimum(step.count[:, None] - 1).clamp(min=0))
            return self._encode_grams(grams, texts)
        places, states = self._places(tokens, texts), view.embed(tokens).to(head.dtype)
        attend = self._encoder.of(texts).entering(places, causal=True)
        encoded: Tensor = head.encoder(states, self._rotation(places), attend)
        return encoded

    def _encode_grams(self, grams: Tensor, texts: slice) -> Tensor:
        """g [B, W, H] of k-grams [B, W, k] (−1: before the first token), through the cache where there is one, which
        has those of slots only whose text goes on."""

        def encode(some: Tensor) -> Tensor:
            encoded: Tensor = self.head.encoder(gram_states(self.head, self.view, some))
            return encoded

        if self.cache is None or not (goes_on := self._has_read[: self.slots][texts]).any():
            return encode(grams)
        own = torch.arange(len(grams), device=grams.device)
        grams = grams[own.where(goes_on, goes_on.int().argmax())]  # those of the first such text in place of the others
        return self.cache.lookup(grams, encode)

    def findings(self) -> dict[str, Any]:
        """See `Drafter.findings`: how often the cache of k-grams had what was looked up."""
        cache = self.cache
        return {} if cache is None else {"hits": cache.hits, "reloads": cache.reloads, "misses": cache.misses}

    def propose(self) -> DraftTree:
        head, levels, most = self.head, self.head.config.heads, self.max_nodes * self.head.config.heads
        last, base = self.state
        fusion, encoder = LevelAttention(self._fusion, 2 * self.length, head.block.heads, most), None
        if self._encoder is not None:
            encoder = LevelAttention(self._encoder, self.length, head.block.heads, most)
        grams = self._recent[:, None]  # [B, W, k−1], the tokens before a node's own
        if self.cache is None:
            grams = gram_states(head, self.view, grams)  # or [B, W, k−1, H], their embeddings
        positions = self.length[:, None] + torch.arange(levels, device=self.length.device)
        cos, sin = self._rotation(positions)  # of every level

        def level_log_probs(level: int, tokens: Tensor, parents: Tensor) -> Tensor:
            nonlocal grams
            rotation = cos[:, :, level : level + 1], sin[:, :, level : level + 1]
            if encoder is not None:
                encoder.enter(parents)
                encoded = head.encoder(self.view.embed(tokens).to(head.dtype), rotation, encoder)
            else:
                own = tokens if self.cache is not None else head.token_states(tokens, self.view)
                grams = torch.cat([rows_at(grams, parents), own[:, :, None]], dim=2)
                encoded = head.encoder(grams) if self.cache is None else self._encode_grams(grams, slice(None))
                grams = grams[:, :, 1:]
            fusion.enter(parents)
            fused = head.fuse(encoded, rotation, fusion)
            logits = head.head_logits(level, last[:, None].expand_as(fused), fused, self.view)
            return tempered(logits.float().log_softmax(-1), head.config.tree_temperature)

        first = level_log_probs(0, base[:, None], torch.zeros_like(base)[:, None])[:, 0]
        tree = grow_tree(first, level_log_probs, self.max_nodes, levels, head.draft_vocab, self.chain)
        if self.cache is not None:
            self._has_read.zero_()
        return tree
