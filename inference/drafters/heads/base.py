"""What the drafters of trained heads share.

Shapes: B texts, G key/value heads, C capacity, C' visible rows of a text, D head size, Q new rows, A newly committed
tokens.
"""

from __future__ import annotations

import sys
from abc import abstractmethod
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from draft_heads.configs.options import option
from draft_heads.heads.base import DraftHead, TargetView
from draft_heads.heads.block import Attend, DecoderBlock, Rotation, folded_attention
from draft_heads.heads.config import check_tree_temperature
from draft_heads.inference.drafters.base import Builder, Drafter
from draft_heads.inference.drafters.heads.fast_weights import prepare_for_drafting
from draft_heads.inference.drafters.heads.long_texts import LongTexts
from draft_heads.inference.drafters.options import TreeOptions
from draft_heads.inference.step import VerifiedStep
from draft_heads.inference.target.target import Target


class RotationTable:
    """The rotations of all positions of a text, for a block: a step picks its own in one operation.

    Shape: [C, 2, D], cosines and sines.
    """

    def __init__(self, block: DecoderBlock) -> None:
        self._block = block
        self._table = block.q_proj.weight.new_empty(0, 2, block.head_dim)

    def reserve(self, tokens: int) -> None:
        """Positions below `tokens`; computes only where there are too few."""
        if len(self._table) < tokens:
            positions = torch.arange(-(-tokens // 256) * 256, device=self._table.device)
            cos, sin = self._block.rotation(positions[None])
            self._table = torch.stack([cos[0, 0], sin[0, 0]], dim=1)

    def memory(self) -> list[Tensor]:
        return [self._table]

    def __call__(self, positions: Tensor) -> Rotation:
        """The rotation of `positions [B, Q]` for states [B, Q, H]."""
        rows = self._table.index_select(0, positions.flatten()).unflatten(0, positions.shape)
        cos, sin = rows[:, None].unbind(3)
        return cos, sin


class BlockCache:
    """Keys and values that a head's block has read: a buffer `[B, C, 2·G, D]` of which the first C' rows are visible,
    of all texts or of the first few.

    The number of rows in use stays on the device: places are tensors, and masks hide what lies after them.
    """

    def __init__(self, head: DraftHead, texts: int, rows_per_token: int = 1) -> None:
        config = head.config
        self._heads, self._rows_per_token = config.num_key_value_heads, rows_per_token
        self._store = next(head.parameters()).new_zeros(texts, 0, 2 * self._heads, config.head_dim)
        self._texts, self._visible = texts, self._store

    def reserve(self, tokens: int) -> None:
        """Room for `tokens` tokens of each text, all visible; allocates only where there is too little."""
        rows, (texts, size, *shape) = tokens * self._rows_per_token, self._store.shape
        if size < rows:
            grown = self._store.new_zeros(texts, -(-rows // 256) * 256, *shape)
            grown[:, :size] = self._store
            self._store = grown
        self._visible = self._store[: self._texts]

    def set_visible_length(self, tokens: int) -> None:
        """Only the first `tokens` tokens of each text are read until the next call."""
        rows = -(-tokens * self._rows_per_token // 16) * 16  # attention is slower over odd numbers of keys
        self._visible = self._store[: self._texts, :rows]

    @torch.inference_mode()  # in which the memory may have been made
    def forget(self, text: int) -> None:
        """Zero the rows of a text, for the next one there: masks hide numbers, but no NaN of half precision."""
        self._store[text].zero_()

    def use_texts(self, count: int) -> None:
        """Only the first `count` texts are read, from the next `reserve` or `set_visible_length` on."""
        self._texts = count

    def of(self, texts: slice) -> BlockCache:
        """The cache of some of the texts, over the same memory."""
        part = copy(self)
        part._store, part._visible = self._store[texts], self._visible[texts]
        return part

    def memory(self) -> list[Tensor]:
        return [self._store]

    @property
    def keys(self) -> Tensor:
        """[B, G, C', D]"""
        return self._visible[:, :, : self._heads].transpose(1, 2)

    @property
    def values(self) -> Tensor:
        """[B, G, C', D]"""
        return self._visible[:, :, self._heads :].transpose(1, 2)

    def write(self, places: Tensor, keys: Tensor, values: Tensor) -> None:
        """Put rows `[B, G, Q, D]` at `places [B, Q]` of each text."""
        texts, size = len(places), self._store.shape[1]
        if texts > 1:
            places = places + torch.arange(0, texts * size, size, device=places.device)[:, None]
        rows = torch.cat([keys, values], dim=1).transpose(1, 2).flatten(0, 1)
        self._store.flatten(0, 1).index_copy_(0, places.flatten(), rows)

    def index(self) -> Tensor:
        """[C'], every row's place."""
        return torch.arange(self._visible.shape[1], device=self._store.device)

    def entering(self, places: Tensor, causal: bool) -> Attend:
        """Attention that writes Q rows at ascending `places [B, Q]`; each sees all up to its own or the last of them.

        Worked example: rows at places 2, 3 see places 0 … 2 and 0 … 3 if causal, else both 0 … 3.
        """
        visible = self.index() <= (places[..., None] if causal else places[:, -1:, None])  # [B, Q or 1, C']

        def attend(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
            self.write(places, keys, values)
            mask = visible[:, None].expand(-1, -1, queries.shape[2], -1)
            return folded_attention(queries, self.keys, self.values, mask)

        return attend


@dataclass(frozen=True)
class HeadOptions(TreeOptions):
    tuned: ClassVar[tuple[str, ...]] = ("max_nodes", "tree_temperature")
    tuned_by: ClassVar[str] = "scripts/tune_tree.py"

    tree_temperature: float | None = option(
        None, "divides log-probabilities before a tree is made (default: the checkpoint's)"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.tree_temperature is not None:
            check_tree_temperature(self.tree_temperature)


class HeadDrafter(Drafter):
    """Made from (head, view, max_nodes, slots, **options), for decoding by `for_target`; `propose` needs an observed
    prefill.

    length  [B] int64, the committed tokens of each text that it has observed
    long_texts  counts its steps beyond the training's rows; None: a hybrid or a draft model's loop does
    caches  of what the head's blocks have read
    view    of the target, as it is when a text begins; with `reads_lm_head` of the head's draft vocabulary only

    A subclass implements `read` (newly committed tokens) and `propose`, which reads what `read` returned in `state`.
    """

    loads = "RUN/head"
    options_type: ClassVar[type[HeadOptions]] = HeadOptions
    options: HeadOptions
    reads_lm_head: ClassVar[bool] = False  # it scores its drafts with the target's LM head

    def __new__(cls, head: Any, *given: Any, **options: Any) -> Self:
        """ValueError for a head of another kind, before anything of it is read."""
        if head.config.kind != cls.kind:
            raise ValueError(
                f"{cls.__name__} drafts with {cls.kind} heads; got a {head.config.kind} head; use the drafter of that "
                "kind: `build_drafter` finds it"
            )
        return super().__new__(cls)

    def __init__(
        self,
        head: Any,
        view: TargetView,
        options: HeadOptions,
        slots: int,
        levels: int,
        caches: Sequence[BlockCache] = (),
        after: int = 0,
        block: DecoderBlock | None = None,
    ) -> None:
        """levels: of the deepest draft; after: rows that a draft writes to the caches after the text.

        block: whose rotations are kept, if any.
        """
        self.options = options
        if options.tree_temperature is not None:  # on a copy, because other drafters may use the same head
            head = copy(head)
            head.config = replace(head.config, tree_temperature=options.tree_temperature)
        self.head: Any = head
        self.view = self._of_draft_vocab(view)
        self.max_nodes = options.max_nodes
        self.max_depth = min(levels, self.max_nodes)
        self.vocabulary = head.config.vocab_size
        self.slots = slots
        self.long_texts: LongTexts | None = LongTexts(self.kind, head.config.trained_length)
        self._beyond = torch.zeros(2, dtype=torch.long, device=view.device)  # the counts of `long_texts`, for its `set`
        self._lengths = torch.ones(slots, dtype=torch.long, device=view.device)  # a slot without a text drafts too
        self.length = self._lengths
        self._visible_length = sys.maxsize
        self.state: tuple[Tensor, ...] = ()  # [B, …] each
        self._caches, self._after = caches, after
        self._kept: list[BlockCache | RotationTable] = [*caches]
        if block is not None:
            self._rotation = RotationTable(block)
            self._kept.append(self._rotation)

    @classmethod
    def for_target(
        cls, head: DraftHead, target: Target, max_nodes: int = 32, slots: int = 1, **options: Any
    ) -> HeadDrafter:
        """For decoding: made from a copy of the head and a view of the target that are fast for few rows."""
        head = prepare_for_drafting(head)
        view = target.drafting_view(head) if cls.reads_lm_head else target.view()
        make: Any = cls
        drafter: HeadDrafter = make(head, view, max_nodes, slots, **options)
        return drafter

    def _of_draft_vocab(self, view: TargetView) -> TargetView:
        lent: TargetView = self.head.draft_view(view) if self.reads_lm_head else view
        return lent

    @property
    def target_layers(self) -> tuple[int, ...]:
        return tuple(self.head.config.target_layers)

    @classmethod
    def from_options(cls, path: str, build: Builder, **options: Any) -> HeadDrafter:
        """See `Drafter.from_options`."""
        return cls.for_target(build.head(cls.kind, path), build.target, slots=build.slots, **options)

    def settings(self) -> dict[str, Any]:
        """See `Drafter.settings`; with the temperature in use, also where it is the checkpoint's."""
        return {**super().settings(), "tree_temperature": self.head.config.tree_temperature}

    def memory(self) -> list[Tensor]:
        return [self._lengths, self._beyond, *(buffer for kept in self._kept for buffer in kept.memory())]

    def begin(self, slot: int, prompt: Tensor, capacity: int) -> None:
        """See `Drafter.begin`; says once that drafts are not accepted beyond the length of the training's rows."""
        if self.long_texts is not None and self.long_texts.trained_length:
            self.long_texts.set(*self._beyond.tolist())
        self.view = self._of_draft_vocab(self.view.current())
        self.length[slot : slot + 1].zero_()
        for cache in self._caches:
            cache.forget(slot)
        self.reserve(capacity)

    def reserve(self, capacity: int) -> None:
        """Room for `capacity` tokens of each text; allocates only where there is too little."""
        for kept in self._kept:
            kept.reserve(capacity + self._after)

    def use_slots(self, count: int) -> None:
        """Draft for the first `count` slots only, until the next call; those after them have no text.

        `set_visible_length` is called before anything else.
        """
        self.slots, self.length = count, self._lengths[:count]
        self.state = tuple(
            torch.cat([x[:count], x[:1].expand(max(0, count - len(x)), *x.shape[1:])]) for x in self.state
        )
        for cache in self._caches:
            cache.use_texts(count)

    def set_visible_length(self, tokens: int) -> None:
        self._visible_length = tokens
        for cache in self._caches:
            cache.set_visible_length(tokens + self._after)

    def observe(self, step: VerifiedStep, slot: int | None = None) -> None:
        every = slot is None or self.slots == 1
        texts = slice(None) if slot is None or every else slice(slot, slot + 1)
        states = self.read(step, texts)
        trained = self.long_texts.trained_length if self.long_texts is not None else 0
        if slot is None and 0 < trained < self._visible_length:
            beyond = step.count * (self.length >= trained)
            self._beyond.add_(torch.stack([(beyond > 0).sum(), beyond.sum()]))
        self.length[texts].add_(step.count)
        if not every:
            before = self.state or [state.expand(self.slots, *state.shape[1:]) for state in states]
            states = tuple(old.slice_scatter(new, 0, texts.start, texts.stop) for old, new in zip(before, states))
        self.state = states

    @abstractmethod
    def read(self, step: VerifiedStep, texts: slice) -> tuple[Tensor, ...]:
        """Read the newly committed tokens of these texts; returns what `propose` needs of each, `[B, …]`."""

    def _places(self, tokens: Tensor, texts: slice) -> Tensor:
        """[B, A], the positions of newly committed `tokens [B, A]` of these texts."""
        return self.length[texts, None] + torch.arange(tokens.shape[1], device=tokens.device)
