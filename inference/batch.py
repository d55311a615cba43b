"""Several sequences at once: their trees are verified in one forward, each accepts what it accepts.

Every sequence has a drafter of its own and a row of the cache. The tokens are those of decoding one by one. When an
answer ends, the next prompt takes its place. Shapes: B places, R rows of a forward (the largest tree's), V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from draft_heads.inference.drafters.base import Drafter, VerifiedStep
from draft_heads.inference.engine import Generation, GenerationSettings, Stopper, choices, room
from draft_heads.inference.target.compiled import program
from draft_heads.inference.target.kv_cache import KVCache
from draft_heads.inference.target.target import Target
from draft_heads.inference.tree import DraftTree, ancestor_rows, depths
from draft_heads.inference.verify import accepted_rows, greedy_path


@dataclass
class _Place:
    """A sequence in work: its answer so far, what ends it, its next base token, how much of it is in the cache."""

    result: Generation
    stopper: Stopper
    base: Tensor
    committed: int

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
        if target.compiled:
            self._forward = program(self._forward, target.device)  # type: ignore[method-assign]
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
        most = max(self.drafters[0].max_nodes, self.drafters[0].max_depth)
        cache = self.target.new_cache(longest + most + 1, len(places))
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
        cache.lengths[place] = len(prompt_ids)
        base = choices(logits[None], prompt.new_tensor([len(prompt_ids)]), settings.sampling)[0]
        self.drafters[place].observe(VerifiedStep.of_prompt(prompt, hidden, base))
        started = _Place(result, Stopper(settings, self.target.tokenizer, limit), base, len(prompt_ids))
        if _take(started, [int(base)], [-1]):
            return started
        cache.lengths[place] = 0
        return None

    def _step(self, places: list[_Place | None], settings: GenerationSettings, cache: KVCache) -> None:
        """One target forward for all; places whose answers end become None."""
        device = self.target.device
        trees = [
            DraftTree.empty(device) if place is None else drafter.propose()
            for drafter, place in zip(self.drafters, places)
        ]
        bases = [None if place is None else place.base for place in places]
        tokens, depth, sees = stacked(trees, bases, device)
        deepest = self.drafters[0].max_depth
        cache.settle(max(place.committed for place in places if place is not None))
        cache.set_visible_length(1 + max(tokens.shape[1] - 1, deepest))
        hidden, logits = self._forward(tokens, depth, sees, cache)
        positions = depth + cache.lengths[:, None] + 1
        chosen = choices(logits.flatten(0, 1), positions.flatten(), settings.sampling).view_as(tokens)

        steps = []
        for row, (tree, place) in enumerate(zip(trees, places)):
            count = 1 + len(tree)
            within = tree if place is None else tree.no_deeper(place.remaining, depth[row, 1:count])
            on_path, base = greedy_path(within, chosen[row, :count], sees[row, :count, :count])
            path, accepted = accepted_rows(on_path, depth[row, :count], deepest)
            source = torch.cat([tree.source, tree.source.new_full((1,), -1)])[path - 1]
            steps.append((path, accepted if place is not None else torch.zeros_like(accepted), base, source))
        paths, counts, next_bases, sources = (torch.stack(parts) for parts in zip(*steps))
        cache.commit(paths, counts)
        kept = tokens.gather(1, paths)
        news = torch.cat([counts[:, None], kept[:, 1:], next_bases[:, None], sources[:, 1:]], dim=1)
        told = news.tolist()  # the one synchronisation
        for row, place in enumerate(places):
            if place is None:
                continue
            accepted, base = told[row][0], told[row][deepest + 1]
            drafts, drafted_by = told[row][1 : deepest + 1], told[row][deepest + 2 :]
            place.base = next_bases[row]
            place.committed += accepted
            if _take(place, [*drafts[: accepted - 1], base], [*drafted_by[: accepted - 1], -1]):
                path = paths[row, :accepted]
                following = torch.cat([kept[row, 1:accepted], place.base[None]])
                self.drafters[row].observe(
                    VerifiedStep(
                        kept[row, :accepted],
                        following,
                        hidden[row, path],
                        counts[row],
                        chosen[row, : 1 + len(trees[row])],
                        trees[row],
                    )
                )
            else:
                places[row] = None
                cache.lengths[row] = 0

    def _forward(self, tokens: Tensor, depth: Tensor, sees: Tensor, cache: KVCache) -> tuple[Tensor, Tensor]:
        """Hidden [B, R, H] and logits [B, R, V] of all sequences' rows."""
        assert self.target.fused is not None
        hidden = self.target.fused(tokens, depth, sees, cache)
        return hidden, self.target.logits(hidden)


def _take(place: _Place, new: list[int], sources: list[int]) -> bool:
    """Add a step's tokens to the answer, as far as it goes; whether it goes on."""
    kept, reason = place.stopper.cut(place.result.tokens, new)
    place.result.tokens.extend(kept)
    place.result.sources.extend(sources[: len(kept)])
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
