"""Drafting with a Chimera head: level by level, every node with its own k-gram and its own ancestors.

Shapes: n committed tokens, A newly committed ones, W nodes of a level, H hidden, C capacity.

The block reads h_1 … h_n, g_1 … g_n and the drafted tokens' g: h and g of a token lie side by side (slots 2i+1 and 2i)
in one buffer, since attention ignores the order of keys; drafts lie behind and are overwritten.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from draft_heads.configs.options import option
from draft_heads.heads.attention import Memory, TreeAttention
from draft_heads.heads.base import Rows, TargetView
from draft_heads.heads.block import DecoderBlock
from draft_heads.heads.chimera import ChimeraHead, KGramEncoder
from draft_heads.inference.drafters.base import tempered
from draft_heads.inference.drafters.heads.base import BlockCache, GivenMemory, HeadDrafter, RotationTable
from draft_heads.inference.drafters.heads.level_tree import LevelTreeOptions, grow_tree
from draft_heads.inference.step import VerifiedStep
from draft_heads.inference.target.target import Target
from draft_heads.inference.tree import DraftTree


@dataclass
class ChimeraContext:
    """What a draft behind n committed tokens reads.

    fusion   keys, values [1, G, C, D] of the block, h and g side by side; the first 2n slots are the context
    encoder  keys, values of an attending encoder (`target_layer0_…`), first n slots; None for k-grams
    rotation  of positions in the text and behind it
    length   [] int64, n
    last     [H] h_n
    recent   [k−1] int64, the last committed tokens, oldest first; −1 where there is none
    """

    fusion: Memory
    encoder: Memory | None
    rotation: RotationTable
    length: Tensor
    last: Tensor
    recent: Tensor


def draft_tree(
    head: ChimeraHead,
    view: TargetView,
    context: ChimeraContext,
    base: Tensor,
    max_nodes: int,
    cache: KGramCache | None = None,
    chain: bool = False,
) -> DraftTree:
    """The best tree behind base token `base []`."""
    length = context.length
    heads, most = head.block.heads, max_nodes * head.config.heads
    fusion = TreeAttention(context.fusion, 2 * length, heads, most)
    encoder = TreeAttention(context.encoder, length, heads, most) if context.encoder is not None else None
    grams = context.recent[None]  # [W, k−1], the tokens before a node's own
    if cache is None:
        grams = gram_states(head, view, grams)  # or [W, k−1, H], their embeddings
    cos, sin = context.rotation(length + torch.arange(head.config.heads, device=length.device))  # of every level

    def level_log_probs(level: int, tokens: Tensor, parents: Tensor) -> Tensor:
        nonlocal grams
        rotation = cos[:, :, level : level + 1], sin[:, :, level : level + 1]
        if encoder is not None:
            encoder.enter(parents)
            encoded = head.encoder(view.embed(tokens)[None].to(head.dtype), rotation, encoder)
        else:
            own = tokens if cache is not None else head.token_states(tokens, view)
            grams = torch.cat([grams[parents], own[:, None]], dim=1)
            encoded = (head.encoder(grams) if cache is None else encode_grams(head, view, grams, cache))[None]
            grams = grams[:, 1:]
        fusion.enter(parents)
        fused = head.fuse(encoded, rotation, fusion)[0]
        logits = head.head_logits(level, context.last.expand(len(tokens), -1), fused, view)
        return tempered(logits.float().log_softmax(-1), head.config.tree_temperature)

    root = torch.zeros(1, dtype=torch.long, device=base.device)
    first = level_log_probs(0, base[None], root)[0]
    return grow_tree(first, level_log_probs, max_nodes, head.config.heads, head.draft_vocab, chain)


def gram_states(head: ChimeraHead, view: TargetView, tokens: Tensor) -> Tensor:
    """[..., H], what the k-gram encoder reads of tokens; zeros for −1, before the first token."""
    return head.token_states(tokens.clamp(min=0), view) * (tokens >= 0)[..., None]


def encode_grams(head: ChimeraHead, view: TargetView, grams: Tensor, cache: KGramCache | None = None) -> Tensor:
    """g [W, H] of k-grams [W, k] (−1: before the first token), through the cache where there is one."""

    def encode(some: Tensor) -> Tensor:
        encoded: Tensor = head.encoder(gram_states(head, view, some))
        return encoded

    return encode(grams) if cache is None else cache.lookup(grams, encode)


def row_contexts(head: ChimeraHead, rows: Rows, view: TargetView, room: int) -> Any:
    """anchor n → the context of a draft at that anchor of one row, as the drafter would have it there."""
    encoded, states = head.encode_rows(rows, view), head.row_states(rows)
    rotation = head.block.rotation(rows.position_ids)
    past = head.block.context_keys_values(states, rotation)
    grams = head.block.context_keys_values(encoded, rotation)
    fusion = [torch.stack([g, h], dim=3).flatten(2, 3) for g, h in zip(grams, past)]
    encoder = None
    if isinstance(head.encoder, DecoderBlock):
        tokens = view.embed(rows.input_ids).to(head.dtype)
        encoder = head.encoder.context_keys_values(tokens, rotation)
    ids = torch.nn.functional.pad(rows.input_ids[0], (head.config.order - 1, 0), value=-1)
    table = RotationTable(head.block)
    table.reserve(len(ids) + head.config.heads)

    def at_anchor(anchor: int) -> ChimeraContext:
        length = anchor + 1
        recent = ids[length : length + head.config.order - 1]
        return ChimeraContext(
            GivenMemory.first(fusion, 2 * length, room),
            None if encoder is None else GivenMemory.first(encoder, length, room),
            table,
            torch.tensor(length, device=ids.device),
            states[0, anchor],
            recent,
        )

    return at_anchor


ON_HOST = 64  # encodings kept in host memory for each on the device


class KGramCache:
    """Keeps encodings of k-grams; the least recently used move from the device to host memory, and go from there.

    `hits`, `reloads` (from host memory) and `misses` count distinct k-grams looked up.
    """

    def __init__(self, size: int) -> None:
        """size: entries that stay on the device."""
        if size < 1:
            raise ValueError(f"kgram_cache must be 0 (off) or the number of entries, at least 1; got {size}")
        self.size = size
        self.table: OrderedDict[tuple[int, ...], Tensor] = OrderedDict()  # [H] each, the least recently used first
        self.evicted: dict[tuple[int, ...], Tensor] = {}  # in host memory
        self.hits = self.reloads = self.misses = 0

    def lookup(self, grams: Tensor, encode: Callable[[Tensor], Tensor]) -> Tensor:
        """g [W, H] of k-grams [W, k]; `encode` maps [w, k] to [w, H]."""
        keys = [tuple(gram) for gram in grams.tolist()]
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
        found = torch.stack([self.table[key] for key in keys])
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
    title = "level by level, each node with the k-gram that ends at it"
    options_type = ChimeraOptions

    def __init__(self, head: ChimeraHead, target: Target, max_nodes: int = 32, **options: Any) -> None:
        """options: see `ChimeraOptions`."""
        chosen = ChimeraOptions(max_nodes=max_nodes, **options)
        if chosen.kgram_cache and not isinstance(head.encoder, KGramEncoder):
            raise ValueError(
                f"kgram_cache needs a head with encoder kgram; this one has {head.config.encoder}; drop the option"
            )
        attending = isinstance(head.encoder, DecoderBlock)
        self._fusion, self._encoder = BlockCache(head, slots_per_token=2), BlockCache(head) if attending else None
        caches = [self._fusion] if self._encoder is None else [self._fusion, self._encoder]
        behind = (chosen.max_nodes + 1) * head.config.heads + 1
        super().__init__(head, target, chosen, head.config.heads, caches, behind, head.block)
        self.chain = chosen.tree == "chain"
        self.lend()
        self.cache = KGramCache(chosen.kgram_cache) if chosen.kgram_cache else None
        self.on_device = self.cache is None  # the host keeps the table of k-grams
        self.carries_over = self.cache is not None
        self._recent = torch.full((head.config.order - 1,), -1, device=target.device)
        self._context: ChimeraContext
        self._base: Tensor

    def lend(self) -> None:
        self.view = self._target.drafting_view(self.head)

    @staticmethod
    def propose_from(head: ChimeraHead, rows: Rows, view: TargetView, max_nodes: int) -> Callable[[int], DraftTree]:
        """Level by level, over the keys and values up to the anchor."""
        text, view = rows.input_ids[0], head.draft_view(view)
        context = row_contexts(head, rows, view, max_nodes * head.config.heads + 1)
        return lambda anchor: draft_tree(head, view, context(anchor), text[anchor + 1], max_nodes)

    def memory(self) -> list[Tensor]:
        return [*super().memory(), self._recent]

    def begin(self, prompt: Tensor, capacity: int) -> None:
        super().begin(prompt, capacity)
        self._recent.fill_(-1)

    def observe(self, step: VerifiedStep) -> None:
        head = self.head
        hidden = head.target_states(step.hidden, step.aux_hidden)
        text = torch.cat([self._recent, step.tokens])
        encoded = self._encode(text, step.tokens)
        both = torch.stack([encoded, hidden], dim=1).flatten(0, 1)[None]
        rows = 2 * self.length + torch.arange(both.shape[1], device=hidden.device)
        keys_values = head.block.context_keys_values(both, self._rotation(rows // 2))
        self._fusion.write(rows, *keys_values)
        self.length += step.count
        recent = text[step.count + torch.arange(len(self._recent), device=text.device)]
        self._recent.copy_(recent)
        self._context = ChimeraContext(self._fusion, self._encoder, self._rotation, self.length, hidden[-1], recent)
        self._base = step.base

    def _encode(self, text: Tensor, tokens: Tensor) -> Tensor:
        """g [A, H] of the newly committed tokens."""
        head, view = self.head, self.view
        if self._encoder is None:
            return encode_grams(head, view, text.unfold(0, head.config.order, 1), self.cache)
        slots, states = self._new_slots(tokens), view.embed(tokens).to(head.dtype)
        return head.encoder(states[None], self._rotation(slots), self._encoder.entering(slots, causal=True))[0]

    def findings(self) -> dict[str, Any]:
        """See `Drafter.findings`: how often the cache of k-grams had what was looked up."""
        cache = self.cache
        return {} if cache is None else {"hits": cache.hits, "reloads": cache.reloads, "misses": cache.misses}

    def propose(self) -> DraftTree:
        return draft_tree(self.head, self.view, self._context, self._base, self.max_nodes, self.cache, chain=self.chain)
