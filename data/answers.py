"""The target's own greedy answers to many prompts at once.

The prompts form one left-padded batch; finished rows are removed from it, so late steps compute only the answers that
are still being written. The tokens are those of `generate(do_sample=False)` with a neutral generation config (tested),
up to numerical ties. Shapes: B rows, L tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from draft_heads.data.labeller import Labeller
from draft_heads.data.loops import LoopDetector


@dataclass(frozen=True)
class Answer:
    """tokens as generated; `finish`: `end` (an end-of-turn token, the last of them), `limit` or `loop`."""

    tokens: list[int]
    finish: Literal["end", "limit", "loop"]


def answer_prompts(
    target: Labeller,
    prompts: list[list[int]],
    limits: list[int],
    batch_size: int,
    cut_loops: bool = False,
    progress: Callable[[int], None] = lambda count: None,
) -> list[Answer]:
    """One greedy answer per prompt, at most `limits[i] >= 1` new tokens each; prompts of similar length share a batch.

    With `cut_loops` an answer is cut at its `loop_start`; `progress` is called with the number of new answers.
    """
    order = sorted(range(len(prompts)), key=lambda i: (len(prompts[i]), i))
    answers: dict[int, Answer] = {}
    for start in range(0, len(order), batch_size):
        batch = order[start : start + batch_size]
        limits_B = [limits[i] for i in batch]
        answers.update(zip(batch, _answer_batch(target, [prompts[i] for i in batch], limits_B, cut_loops)))
        progress(len(batch))
    return [answers[i] for i in range(len(prompts))]


@torch.inference_mode()
def _answer_batch(target: Labeller, prompts: list[list[int]], limits: list[int], cut_loops: bool) -> list[Answer]:
    device, ends = target.device, set(target.end_token_ids)
    width = max(map(len, prompts))
    ids_BL = torch.full((len(prompts), width), target.pad_token_id, dtype=torch.long)
    mask_BL = torch.zeros((len(prompts), width + max(limits)), dtype=torch.long)
    for b, prompt in enumerate(prompts):
        ids_BL[b, width - len(prompt) :] = torch.tensor(prompt)
        mask_BL[b, width - len(prompt) :] = 1
    ids_BL, mask_BL = ids_BL.to(device), mask_BL.to(device)
    position_BL = (mask_BL[:, :width].cumsum(-1) - 1).clamp(min=0)
    padded = len({len(prompt) for prompt in prompts}) > 1

    tokens: list[list[int]] = [[] for _ in prompts]
    finish: dict[int, Literal["end", "limit", "loop"]] = {}
    detectors = [LoopDetector() for _ in prompts] if cut_loops else []
    active = list(range(len(prompts)))
    cache = DynamicCache(config=target.model.config)
    capacity = width + max(limits)
    cache.layers = [_InPlaceLayer(capacity) if type(layer) is DynamicLayer else layer for layer in cache.layers]
    while True:
        out = target.model(
            input_ids=ids_BL,
            attention_mask=mask_BL[:, :width] if padded else None,
            position_ids=position_BL,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        next_B = out.logits[:, -1].argmax(-1)
        for b, token in zip(active, next_B.tolist()):  # the step's one synchronisation
            if b in finish:
                continue
            tokens[b].append(token)
            if token in ends:
                finish[b] = "end"
            elif cut_loops and detectors[b].push(token):
                finish[b] = "loop"
            elif len(tokens[b]) == limits[b]:
                finish[b] = "limit"
        if len(finish) == len(prompts):
            return [Answer(tokens[b], finish[b]) for b in range(len(prompts))]
        ids_BL, position_BL, width = next_B[:, None], position_BL[:, -1:] + 1, width + 1
        finished = sum(b in finish for b in active)
        if finished * 8 >= len(active):  # copying the cache pays once an eighth of the rows has ended
            keep = [slot for slot, b in enumerate(active) if b not in finish]
            index = torch.tensor(keep)  # on the CPU, since the layers of a sharded target lie on several devices
            cache.batch_select_indices(index)
            ids_BL, position_BL, mask_BL = ids_BL[index], position_BL[index], mask_BL[index]
            active = [active[slot] for slot in keep]


class _InPlaceLayer(DynamicLayer):
    """Keys and values are views of the filled part of two buffers of `capacity` tokens: no step concatenates."""

    def __init__(self, capacity: int) -> None:
        super().__init__()
        self._capacity = capacity
        self._buffers: tuple[Tensor, ...] | None = None

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        start = self.get_seq_length()
        end = start + key_states.shape[-2]
        if self._buffers is None:
            self._buffers = tuple(
                x.new_empty((*x.shape[:2], self._capacity, x.shape[-1])) for x in (key_states, value_states)
            )
        for buffer, new in zip(self._buffers, (key_states, value_states)):
            buffer[:, :, start:end] = new
        self.keys, self.values = (buffer[:, :, :end] for buffer in self._buffers)
        return self.keys, self.values

    def batch_select_indices(self, indices: Tensor) -> None:
        if self._buffers is None:
            return
        length = self.get_seq_length()
        old, self._buffers = self._buffers, tuple(x.new_empty((len(indices), *x.shape[1:])) for x in self._buffers)
        for buffer, larger in zip(self._buffers, old):
            buffer[:, :, :length] = larger[indices, :, :length]
        self.keys, self.values = (buffer[:, :, :length] for buffer in self._buffers)
