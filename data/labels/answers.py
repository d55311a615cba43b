"""The target's own greedy answers to many prompts at once.

Every answer that is being written has a slot of the batch. A slot whose answer has ended goes to the next prompt, so
that no answer waits for a longer one; when no prompt is left, the batch shrinks. The tokens are those of
`generate(do_sample=False)` (tested), up to numerical ties: with the checkpoint's own logits processors, if its
generation config asks for any. Shapes: B slots.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import LogitsProcessorList

from draft_heads.data.generation_config import own_processors, process_logits
from draft_heads.data.labels.labeller import Labeller, checked_ids
from draft_heads.data.labels.loops import LoopDetector


@dataclass
class Answer:
    """tokens as generated; `finish`: `end` (an end-of-turn token, the last of them), `limit` or `loop`."""

    tokens: list[int] = field(default_factory=list)
    finish: Literal["end", "limit", "loop", ""] = ""  # "" while it is being written


@torch.inference_mode()
def answer_prompts(
    target: Labeller,
    prompts: list[list[int]],
    limits: list[int],
    batch_size: int,
    cut_loops: bool = False,
    progress: Callable[[int], None] = lambda count: None,
) -> list[Answer]:
    """One greedy answer per prompt, at most `limits[i] >= 1` new tokens each, `batch_size` of them at a time.

    With `cut_loops` an answer is cut at its `loop_start`; `progress` is called with the number of new answers.
    ValueError for a token id that the target does not have.
    """
    if not prompts:
        return []
    target.refresh()
    prompts = [checked_ids(target, prompt) for prompt in prompts]
    answers = [Answer() for _ in prompts]
    detectors = [LoopDetector() if cut_loops else None for _ in prompts]
    ends = set(target.end_token_ids)

    def write(index: int, token: int) -> bool:
        """Append a token to an answer; True if the answer goes on."""
        answer, detector = answers[index], detectors[index]
        answer.tokens.append(token)
        if token in ends:
            answer.finish = "end"
        elif detector is not None and detector.push(token):
            answer.finish = "loop"
        elif len(answer.tokens) == limits[index]:
            answer.finish = "limit"
        if answer.finish:
            progress(1)
        return not answer.finish

    # long ones first: what does not fit into memory shows at once, and the last steps are not for one long answer
    waiting = deque(sorted(range(len(prompts)), key=lambda i: -len(prompts[i])))
    batch = _Batch(target, max(map(sum, zip(map(len, prompts), limits))), min(batch_size, len(prompts)))
    while True:
        while batch.free and waiting:
            index = waiting.popleft()
            processors = own_processors(target, prompts[index], limits[index])
            token = batch.read(prompts[index], processors)
            if write(index, token):
                batch.place(index, token, prompts[index], processors)
        if not batch.running:
            return answers
        batch.release([index for index, token in batch.step() if not write(index, token)], shrink=not waiting)


class _Batch:
    """The slots, the last token of each, and the target's cache."""

    def __init__(self, target: Labeller, capacity: int, slots: int) -> None:
        """capacity: of a slot, prompt and answer together."""
        self.target = target
        self.cache: Any = target.new_cache(capacity + 1, slots)
        self._prompt_cache: Any = target.new_cache(capacity + 1)
        self.running: dict[int, int] = {}  # answer → its slot
        self.free = list(range(slots))
        self._tokens = torch.zeros(slots, dtype=torch.long, device=target.device)
        self._lengths: dict[int, int] = {}  # answer → tokens in the cache
        # answer → the processors that change its logits, and its text with the newest token
        self._processed: dict[int, tuple[LogitsProcessorList, list[int]]] = {}

    def read(self, prompt: list[int], processors: LogitsProcessorList | None) -> int:
        """The token that follows a prompt, whose keys and values `place` will copy."""
        self._prompt_cache.clear()
        logits: Tensor = self.target.prefill(torch.tensor(prompt, device=self.target.device), self._prompt_cache).logits
        return int(logits.argmax(-1)) if processors is None else _choice(processors, prompt, logits)

    def place(self, index: int, token: int, prompt: list[int], processors: LogitsProcessorList | None) -> None:
        """Give the answer to the prompt that was read last, and its first token, a slot."""
        slot = self.running[index] = self.free.pop()
        self._lengths[index] = len(prompt)
        if processors is not None:
            self._processed[index] = processors, [*prompt, token]
        self._tokens[slot] = token
        self.cache.copy_sequence(slot, self._prompt_cache)

    def step(self) -> list[tuple[int, int]]:
        """(answer, its next token) for all that are running."""
        self.cache.set_bound(max(self._lengths[index] for index in self.running))
        depths = torch.zeros_like(self._tokens)[:, None]
        sees = torch.ones_like(depths, dtype=torch.bool)[..., None]
        logits = self.target.forward_tree(self._tokens[:, None], depths, sees, self.cache).logits[:, 0]
        self._tokens = logits.argmax(-1)
        for index, (processors, text) in self._processed.items():
            text.append(_choice(processors, text, logits[self.running[index]]))
            self._tokens[self.running[index]] = text[-1]
        self.cache.lengths += 1
        tokens = self._tokens.tolist()  # the step's one synchronisation
        for index in self.running:
            self._lengths[index] += 1
        return [(index, tokens[slot]) for index, slot in self.running.items()]

    def release(self, ended: list[int], shrink: bool) -> None:
        """Free the slots of answers; with `shrink`, leave free slots out once they are a quarter of all."""
        self.free += [self.running.pop(index) for index in ended]
        for index in ended:
            self._processed.pop(index, None)
        if shrink and self.running and 4 * len(self.free) >= len(self._tokens):
            slots = torch.tensor(list(self.running.values()), device=self.target.device)
            self.cache.select_sequences(slots)
            self._tokens = self._tokens[slots]
            self.running = {index: slot for slot, index in enumerate(self.running)}
            self.free = []
        if self.free:
            self.cache.lengths[self.free] = 0  # free slots grow by one row per step and must not reach the end


def _choice(processors: LogitsProcessorList, text: list[int], logits: Tensor) -> int:
    """The best token after a text, of logits `[V]` that processors change."""
    ids = torch.tensor([text], device=logits.device)
    return int(process_logits(processors, ids, logits[None]).argmax(-1))
