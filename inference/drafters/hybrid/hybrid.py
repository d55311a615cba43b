"""Several drafters in one tree: equal prefixes merged, one node budget shared by calibrated acceptance.

`hybrid=ctc:RUN/head+ngram`: the parts' own probabilities mean different things, so a running calibration estimates from
what was accepted how likely a node is, whoever proposed it. N-grams lengthen the paths of all parts. Every part drafts
in every step: a part that one text does not need may be the best one for the next.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from draft_heads.configs.options import option
from draft_heads.inference.drafters.base import Drafter, check_max_nodes
from draft_heads.inference.drafters.hybrid.calibration import Calibration
from draft_heads.inference.drafters.hybrid.merge import LevelSource, MergedTree, PhraseSource, Source, TreeSource
from draft_heads.inference.drafters.options import DrafterOptions
from draft_heads.inference.drafters.text.base import committed_tokens
from draft_heads.inference.step import VerifiedStep
from draft_heads.inference.target.compiled import program
from draft_heads.inference.target.target import Target
from draft_heads.inference.tree import DraftTree


class _Part:
    """One drafter of a hybrid: what it proposes in this step, what it brought so far."""

    def __init__(self, name: str, drafter: Any, target: Target) -> None:
        self.name, self.drafter = name, drafter
        self.tree = DraftTree.empty(target.device)  # its own of this step
        self.all_layers: tuple[int, ...] = ()  # of the target, that `VerifiedStep.aux_hidden` holds
        self.rows: list[int] = []  # of the forward, for each row of its own tree, if it reads choices
        self.source: Source
        if drafter.extends_paths:
            self.source = PhraseSource(drafter.table)
        else:
            self.source = LevelSource() if drafter.proposes_levels else TreeSource()
        self._draft: Callable[[VerifiedStep], DraftTree | Tensor] = self._observe_and_propose
        if drafter.on_device and target.compiled:
            self._draft = program(self._observe_and_propose, target.device)
        self.accepted = self.needed = 0

    def draft(self, step: VerifiedStep) -> None:
        """Take a step in and hand the drafts after it to the source; n-grams have read it already."""
        if self.drafter.extends_paths:
            return
        if step.aux_hidden is not None:
            step = replace(step, aux_hidden=self._own_layers(step.aux_hidden))
        if self.drafter.on_device:  # compiled programs would be made anew for every list
            step = replace(step, new_tokens=None, read_choices=None)
        # a prompt has a length of its own and is not compiled for
        drafts = self._observe_and_propose(step) if step.tree is None else self._draft(self._with_own_tree(step))
        self.source.set(drafts)  # type: ignore[attr-defined]
        if not self.drafter.proposes_levels:
            assert isinstance(drafts, DraftTree)
            self.tree = drafts

    def _own_layers(self, aux_hidden: Tensor) -> Tensor | None:
        """[A, k·H] of the part's own k layers, from those of all parts."""
        if not self.drafter.target_layers:
            return None
        width = aux_hidden.shape[-1] // len(self.all_layers)
        states = aux_hidden.split(width, dim=-1)
        return torch.cat([states[self.all_layers.index(layer)] for layer in self.drafter.target_layers], dim=-1)

    def _observe_and_propose(self, step: VerifiedStep) -> DraftTree | Tensor:
        self.drafter.observe(step)
        drafts: DraftTree | Tensor
        drafts = self.drafter.propose_levels() if self.drafter.proposes_levels else self.drafter.propose()
        return drafts

    def _with_own_tree(self, step: VerifiedStep) -> VerifiedStep:
        """The step as a part that reads choices proposed it; −1 is the choice at nodes that were not verified."""
        if not self.drafter.reads_choices or step.choices is None:
            return step
        read = step.choices.tolist() if step.read_choices is None else step.read_choices
        own = [read[row] if row >= 0 else -1 for row in self.rows]
        return replace(step, choices=torch.tensor(own), read_choices=own, tree=self.tree)


@dataclass(frozen=True)
class HybridOptions(DrafterOptions):
    depth: int = option(
        0, "deepest level of the tree (0: the parts' own, and four more where n-grams lengthen trees)", least=0
    )


class HybridDrafter(Drafter):
    """Proposes the merged tree of its parts, always of the whole budget where they propose so much."""

    kind = "hybrid"
    on_device = False  # trees are merged on the host
    carries_over = True  # the calibration
    title = "one tree of several drafters"
    options_type = HybridOptions
    options: HybridOptions

    def __init__(
        self, parts: Sequence[tuple[str, Drafter]], target: Target, max_nodes: int = 32, **options: Any
    ) -> None:
        """parts: names and drafters; max_nodes: of the merged tree; options: see `HybridOptions`."""
        if len(parts) < 2:
            raise ValueError(f"a hybrid has at least 2 parts; got {len(parts)}; join them by +")
        self.options = HybridOptions(**options)
        self.target = target
        self.budget = check_max_nodes(max_nodes)
        self.parts = [_Part(name, drafter, target) for name, drafter in parts]
        for part in self.parts:
            part.all_layers = self.target_layers
        self.sources = tuple(name for name, _ in parts)
        tables = [part.drafter.table for part in self.parts if part.drafter.extends_paths]
        self._table = max(tables, key=lambda table: table.n, default=None)
        deepest = max(drafter.max_depth for _, drafter in parts)
        trees = max((drafter.max_depth for _, drafter in parts if not drafter.extends_paths), default=0)
        usual_depth = max(deepest, trees + 4) if tables else deepest
        self._deepest_node = min(self.options.depth or usual_depth, self.budget)
        self.max_nodes = self.budget + sum(drafter.max_nodes for _, drafter in parts if drafter.reads_choices)
        self.max_depth = max(self._deepest_node, deepest)  # window rows may be deeper than merged nodes
        self.vocabulary = max(drafter.vocabulary for _, drafter in parts)
        self._calibration = Calibration()
        self._steps = 0
        self._step: VerifiedStep | None = None
        self._merged: MergedTree | None = None

    @property
    def target_layers(self) -> tuple[int, ...]:
        return tuple(sorted({layer for part in self.parts for layer in part.drafter.target_layers}))

    def members(self) -> Iterator[Drafter]:
        yield self
        for part in self.parts:
            yield from part.drafter.members()

    def begin(self, prompt: Tensor, capacity: int) -> None:
        self._merged = self._step = None
        for part in self.parts:
            part.drafter.begin(prompt, capacity + self.max_depth + 1)  # a step may bring rows deeper than its own tree

    def set_visible_length(self, tokens: int) -> None:
        for part in self.parts:
            part.drafter.set_visible_length(tokens)

    def observe(self, step: VerifiedStep) -> None:
        """Learn from what was accepted; parts that draft trees of their own observe the step when they draft."""
        self._step = step
        new = committed_tokens(step)
        if self._merged is not None:
            self._steps += 1
            self._credit(self._merged.learn(new))
        for part in self.parts:
            if part.drafter.extends_paths:
                part.drafter.read(new)

    def _credit(self, accepted: list[tuple[int, int]]) -> None:
        """Count for each part the accepted tokens it proposed first, and those that only it brought."""
        for source, _ in accepted:
            self.parts[source].accepted += 1
        for place, part in enumerate(self.parts):
            part.needed += sum(needs >> place & 1 for _, needs in accepted)

    def propose(self) -> DraftTree:
        """The merged tree, and after it the window rows of parts that read the target's choices there."""
        assert self._step is not None, "observe the prefill before proposing"
        for part in self.parts:
            part.draft(self._step)
        sources = [part.source for part in self.parts]
        merged = MergedTree(sources, self._calibration, self.budget, self._deepest_node, self._table)
        for place, part in enumerate(self.parts):
            if part.drafter.reads_choices and isinstance(part.source, TreeSource):
                part.rows = merged.append_window_rows(place, part.source)
        self._merged = merged
        return merged.as_tree(self.target.device)

    def settings(self) -> dict[str, Any]:
        """See `Drafter.settings`; under `parts` those of each part."""
        parts = {part.name: part.drafter.settings() for part in self.parts}
        return {"max_nodes": self.budget, **super().settings(), "parts": parts}

    def findings(self) -> dict[str, Any]:
        """Target steps; for each part the `accepted` tokens it proposed first, and the `needed` ones it alone did."""
        return {
            "steps": self._steps,
            "parts": {part.name: {"accepted": part.accepted, "needed": part.needed} for part in self.parts},
        }
