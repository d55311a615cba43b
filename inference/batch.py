"""Several sequences at once: their trees are verified in one forward, each accepts what it accepts.

Every sequence has a drafter of its own and a row of the cache. The tokens are those of decoding one by one. When an
answer ends, the next prompt takes its place. Shapes: B places, R rows of a forward (the largest tree's), V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from inference.drafters.base import Drafter, VerifiedStep
from inference.engine import Generation, GenerationSettings, Stopper, choices, propose, room
from inference.kv_cache import KVCache
from inference.target import Target
from inference.tree import DraftTree, ancestor_rows, depths
from inference.verify import greedy_path


@dataclass
class _Place:
    """A sequence in work: its answer so far, what ends it, its next base token."""

    result: Generation
    stopper: Stopper
    base: Tensor

    @property
    def remaining(self) -> int:
        """Tokens that may still be written."""
        return self.stopper.limit - len(self.result.tokens)


class BatchEngine:
    """Decodes many prompts, up to `batch` at a time; greedy or drawn, always exact."""

    def __init__(self, target: Target, make_drafter: Callable[[], Drafter], batch: int) -> None:
        """Raises ValueError for a target that has no batched forward, or a batch below one."""
        if batch < 1:
            raise ValueError(f"a batch has at least one sequence; got {batch}")
        if target.fused is None:
            raise ValueError(
                f"batches need a Llama-like target on one device, unquantised; {target.name} is of "
                f"{target.config.model_type}; decode its prompts one by one with DecodingEngine"
            )
        self.target = target
        self.drafters = [make_drafter() for _ in range(batch)]

    @torch.inference_mode()
    def generate(self, prompts: Sequence[list[int]], settings: GenerationSettings | None = None) -> list[Generation]:
        """The answers, in the prompts' order. Raises ContextError (before any work) if a prompt does not fit."""
        settings = settings or GenerationSettings()
        if settings.typical is not None:
            raise ValueError("batches are verified exactly; typical acceptance needs DecodingEngine")
        limits = [room(self.target, len(prompt), settings.max_new_tokens) for prompt in prompts]
        results = [Generation() for _ in prompts]
        if not prompts:
            return results
        longest = max(len(prompt) + limit for prompt, limit in zip(prompts, limits))
        places: list[_Place | None] = [None] * min(len(self.drafters), len(prompts))
        cache = self.target.new_cache(longest + self.drafters[0].max_nodes + 1, len(places))
        waiting = list(range(len(prompts)))[::-1]
        while True:
            for place in range(len(places)):
                while places[place] is None and waiting:
                    index = waiting.pop()
                    places[place] = self._begin(place, prompts[index], limits[index], results[index], settings, cache)
            if not any(places):
                return results
            self._step(places, settings, cache)

    def _begin(
        self,
        place: int,
        prompt_ids: list[int],
        limit: int,
        result: Generation,
        settings: GenerationSettings,
        cache: KVCache,
    ) -> _Place | None:
        """Prefill a prompt into its place; None where its first token is its last."""
        assert self.target.fused is not None
        prompt = torch.tensor(prompt_ids, device=self.target.device)
        one = cache.only(place, self.target.fused.like)
        self.drafters[place].begin(prompt, len(prompt_ids) + limit)
        hidden, logits = self.target.prefill(prompt, one)
        cache.lengths[place] = one.length
        base = choices(logits[None], prompt.new_tensor([len(prompt_ids)]), settings)[0]
        self.drafters[place].observe(VerifiedStep(prompt, hidden, base))
        started = _Place(result, Stopper(settings, self.target.tokenizer, limit), base)
        return started if _take(started, [int(base)]) else None

    def _step(self, places: list[_Place | None], settings: GenerationSettings, cache: KVCache) -> None:
        """One target forward for all; places whose answers end become None."""
        assert self.target.fused is not None
        trees = [
            DraftTree.empty(self.target.device) if place is None else propose(drafter, place.remaining)
            for drafter, place in zip(self.drafters, places)
        ]
        bases = [None if place is None else place.base for place in places]
        tokens, depth, sees = stacked(trees, bases, self.target.device)
        positions = depth + torch.tensor(cache.lengths, device=tokens.device)[:, None] + 1
        hidden, logits = self.target.fused.step(tokens, depth, sees, cache)
        chosen = choices(logits.flatten(0, 1), positions.flatten(), settings).view_as(tokens)

        on_paths, next_bases = torch.zeros_like(tokens), chosen[:, 0].clone()
        for row, tree in enumerate(trees):
            count = 1 + len(tree)
            path, next_bases[row] = greedy_path(tree, chosen[row, :count], sees[row, :count, :count])
            on_paths[row, :count] = path.long()
        rows = tokens.shape[1]
        told = torch.cat([on_paths, tokens, next_bases[:, None]], dim=1).tolist()  # the step's one synchronisation
        paths = [
            [] if place is None else [row for row in range(rows) if row_told[row]]
            for place, row_told in zip(places, told)
        ]
        cache.keep_each(paths)
        for row, place in enumerate(places):
            if place is None:
                continue
            kept, count = torch.tensor(paths[row], device=tokens.device), 1 + len(trees[row])
            place.base = next_bases[row]
            if _take(place, [*(told[row][rows + accepted] for accepted in paths[row][1:]), told[row][-1]]):
                step = VerifiedStep(tokens[row, kept], hidden[row, kept], place.base, chosen[row, :count], trees[row])
                self.drafters[row].observe(step)
            else:
                places[row] = None
                cache.lengths[row] = 0


def _take(place: _Place, new: list[int]) -> bool:
    """Add a step's tokens to the answer, as far as it goes; whether it goes on."""
    kept, reason = place.stopper.cut(place.result.tokens, new)
    place.result.tokens.extend(kept)
    place.result.accept_lengths.append(len(kept))
    place.result.finish_reason = reason
    return not reason


def stacked(
    trees: Sequence[DraftTree], bases: Sequence[Tensor | None], device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens [B, R], depths [B, R] and who sees whom [B, R, R] of trees behind their base tokens.

    Smaller trees are filled up with rows that see themselves only and that nothing sees.
    """
    rows = 1 + max(map(len, trees))
    tokens = torch.zeros(len(trees), rows, dtype=torch.long, device=device)
    depth = torch.zeros_like(tokens)
    sees = torch.eye(rows, dtype=torch.bool, device=device).repeat(len(trees), 1, 1)
    for row, (tree, base) in enumerate(zip(trees, bases)):
        count = 1 + len(tree)
        own = ancestor_rows(tree.parents, len(tree))
        if base is not None:
            tokens[row, :1] = base
        tokens[row, 1:count] = tree.tokens
        depth[row, :count] = depths(own)
        sees[row, :count, :count] = own
    return tokens, depth, sees
