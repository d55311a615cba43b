"""Several drafters in one tree: equal prefixes merged, one node budget shared by calibrated acceptance.

`hybrid=ctc:RUN/head+ngram`: the parts' own probabilities mean different things, so a running calibration estimates from
what was accepted how likely a node is, whoever proposed it. N-grams lengthen the paths of all parts. Every part drafts
in every step: a part that one text does not need may be the best one for the next.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from draft_heads.configs.options import option
from draft_heads.inference.drafters.base import Drafter, check_max_nodes
from draft_heads.inference.drafters.heads.long_texts import LongTexts
from draft_heads.inference.drafters.hybrid.calibration import Calibration
from draft_heads.inference.drafters.hybrid.merge import LevelSource, MergedTree, PhraseSource, TreeSource, columns_of
from draft_heads.inference.drafters.options import DrafterOptions
from draft_heads.inference.drafters.text.base import committed_tokens
from draft_heads.inference.step import VerifiedStep, select_layers
from draft_heads.inference.target.cuda_graphs import CapturedSteps
from draft_heads.inference.target.target import Target
from draft_heads.inference.tree import DraftTree

OF_NGRAMS_ALONE = ("k", "branches", "max_nodes")
"""Options of a part that extends paths, which mean nothing where the paths are those of a hybrid's tree."""


class _Part:
    """One drafter of a hybrid: what it proposes in this step for each text, what it brought so far."""

    def __init__(self, name: str, drafter: Any) -> None:
        self.name, self.drafter = name, drafter
        self.all_layers: tuple[int, ...] = ()  # of the target, that `VerifiedStep.aux_hidden` holds
        self.sources: list[PhraseSource | LevelSource | TreeSource]  # of each text
        slots = range(drafter.slots)
        if drafter.extends_paths:
            self.sources = [PhraseSource(drafter.of_slot(slot).table) for slot in slots]
        else:
            self.sources = [LevelSource() if drafter.proposes_levels else TreeSource() for _ in slots]
        self.long_texts: LongTexts | None = getattr(drafter, "long_texts", None)
        if self.long_texts is not None:  # a step's tokens are those of all parts
            drafter.long_texts = None
        self.captures = drafter.on_device and not drafter.reads_choices  # it may draft as a CUDA graph
        self._unread: VerifiedStep | None = None  # a step that such a graph is about to observe
        self._visible_length = 0
        self.tree: DraftTree | None = None  # its own trees of this step
        self.rows: list[list[int]] = [[] for _ in slots]  # of the forward, for each row of its own tree
        self.accepted = self.needed = 0

    def observe(self, step: VerifiedStep, slot: int | None, captured: bool) -> None:
        """Read a step as the part alone would see it; n-grams have read it already. captured: `draft` reads it."""
        if self.drafter.extends_paths:
            return
        if step.aux_hidden is not None:
            states = select_layers(step.aux_hidden, self.all_layers, self.drafter.target_layers)
            step = replace(step, aux_hidden=states)
        self._unread = None
        if captured and self.captures:  # without what depends on the size of the last tree
            self._unread = replace(step, choices=None, source=None, tree=None)
            return
        if self.drafter.reads_choices and step.tree is not None and step.choices is not None:
            read = step.choices.tolist() if step.read_choices is None else step.read_choices
            # −1 is the choice at nodes that were not verified
            own = [[given[row] if row >= 0 else -1 for row in rows] for given, rows in zip(read, self.rows)]
            longest = max(map(len, own))
            even = [rows + [-1] * (longest - len(rows)) for rows in own]
            padded = torch.tensor(even, dtype=torch.long, device=step.choices.device)
            step = replace(step, choices=padded, read_choices=own, tree=self.tree)
        self.drafter.observe(step, slot)

    def set_visible_length(self, tokens: int) -> None:
        """See `Drafter.set_visible_length`."""
        self._visible_length = tokens
        self.drafter.set_visible_length(tokens)

    def draft(self, graphs: CapturedSteps | None) -> None:
        """Hand the drafts of all texts to their sources, with one copy to the host."""
        if self.drafter.extends_paths:
            return
        if self._unread is None:
            columns = self._columns()
        else:
            assert graphs is not None
            key, step, self._unread = (self, self._visible_length), self._unread, None
            _, columns = graphs(key, step, self._observe_and_draft, chained=True)  # it returns what it reads
        for source, of_text in zip(self.sources, columns.tolist()):
            source.set(of_text)  # type: ignore[union-attr]

    def _columns(self) -> Tensor:
        """What its sources read of its drafts, on the device."""
        if self.drafter.proposes_levels:
            levels: Tensor = self.drafter.propose_levels()
            return levels
        self.tree = self.drafter.propose()
        return columns_of(self.tree)

    def _observe_and_draft(self, step: VerifiedStep) -> tuple[VerifiedStep, Tensor]:
        self.drafter.observe(step)
        return step, self._columns()

    def settings(self) -> dict[str, Any]:
        """Those of the drafter that are in force in a hybrid."""
        unused = OF_NGRAMS_ALONE if self.drafter.extends_paths else ()
        return {name: value for name, value in self.drafter.settings().items() if name not in unused}


class _Text:
    """What a hybrid keeps of the text in a slot; its calibration stays for the next."""

    def __init__(self) -> None:
        self.calibration = Calibration()
        self.merged: MergedTree | None = None
        self.length = 0  # committed tokens that were observed
        self.running = False  # its prefill has been observed, and it has not ended


@dataclass(frozen=True)
class HybridOptions(DrafterOptions):
    depth: int = option(
        0, "deepest level of the tree (0: the parts' own, and four more where n-grams lengthen trees)", least=0
    )


class HybridDrafter(Drafter):
    """Proposes the merged tree of its parts, always of the whole budget where they propose so much."""

    kind = "hybrid"
    on_device = False  # trees are merged on the host
    carries_over, keeps_text = True, False  # the calibration
    title = "one tree of several drafters"
    options_type = HybridOptions
    options: HybridOptions

    def __init__(
        self, parts: Sequence[tuple[str, Drafter]], target: Target, max_nodes: int = 32, **options: Any
    ) -> None:
        """parts: names and drafters, of as many slots each; max_nodes: of a tree, the parts' windows included; options:
        see `HybridOptions`."""
        if len(parts) < 2:
            raise ValueError(f"a hybrid has at least 2 parts; got {len(parts)}; join them by +")
        windows = sum(drafter.window_nodes for _, drafter in parts)
        if windows >= check_max_nodes(max_nodes):
            raise ValueError(
                "the windows of a hybrid's parts leave at least one of its nodes for drafts; got windows of "
                f"{windows} nodes and max_nodes={max_nodes}; lower max_nodes, w or n of lookahead, or raise --max_nodes"
            )
        self.options = HybridOptions(**options)
        self.target = target
        self.slots = parts[0][1].slots
        self.max_nodes = max_nodes
        self.parts = [_Part(name, drafter) for name, drafter in parts]
        for part in self.parts:
            part.all_layers = self.target_layers
        self.sources = tuple(name for name, _ in parts)
        extending = [drafter for _, drafter in parts if drafter.extends_paths]
        tables = [[drafter.of_slot(slot).table for drafter in extending] for slot in range(self.slots)]  # type: ignore[attr-defined]
        self._tables = [max(of_text, key=lambda table: table.n, default=None) for of_text in tables]
        deepest = max(drafter.deepest_draft for _, drafter in parts)
        trees = max((drafter.deepest_draft for _, drafter in parts if not drafter.extends_paths), default=0)
        usual_depth = max(deepest, trees + 4) if extending else deepest
        self._deepest_node = min(self.options.depth or usual_depth, self.max_nodes)
        rows = max(drafter.max_depth for _, drafter in parts)
        self.max_depth = max(self._deepest_node, rows)  # window rows may be deeper than merged nodes
        self.vocabulary = max(drafter.vocabulary for _, drafter in parts)
        self._texts = [_Text() for _ in range(self.slots)]
        self._steps = 0

    @property
    def deepest_draft(self) -> int:
        return self._deepest_node

    @property
    def target_layers(self) -> tuple[int, ...]:
        return tuple(sorted({layer for part in self.parts for layer in part.drafter.target_layers}))

    def members(self) -> Iterator[Drafter]:
        yield self
        for part in self.parts:
            yield from part.drafter.members()

    def begin(self, slot: int, prompt: Tensor, capacity: int) -> None:
        text = self._texts[slot]
        text.merged, text.running, text.length = None, False, 0
        for part in self.parts:
            part.drafter.begin(slot, prompt, self._rows(capacity))

    def end(self, slot: int, tokens: list[int]) -> None:
        if (merged := self._texts[slot].merged) is not None:
            merged.learn(tokens)
        for part in self.parts:
            part.drafter.end(slot, tokens)

    def end_texts(self) -> None:
        for text in self._texts:
            text.running = False
        for part in self.parts:
            part.rows = [[] for _ in part.rows]
            part.drafter.end_texts()

    def forget(self) -> None:
        for text in self._texts:
            text.calibration = Calibration()

    def reserve(self, capacity: int) -> None:
        for part in self.parts:
            part.drafter.reserve(self._rows(capacity))

    def _rows(self, capacity: int) -> int:
        """A step may bring rows deeper than a part's own tree."""
        return capacity + self.max_depth + 1

    def memory(self) -> list[Tensor]:
        return [x for part in self.parts if part.captures for x in part.drafter.memory()]

    def set_visible_length(self, tokens: int) -> None:
        for part in self.parts:
            part.set_visible_length(tokens)

    def observe(self, step: VerifiedStep, slot: int | None = None) -> None:
        """Learn from what was accepted of each text, then let the parts observe the step."""
        for row, index in enumerate(range(self.slots) if slot is None else [slot]):
            text = self._texts[index]
            text.running = text.running or step.tree is None
            if not text.running:
                continue
            new = committed_tokens(step, row)
            if not new:  # the answer has ended, and what it drafted last lies in no later forward
                text.running = False
                for part in self.parts:
                    part.rows[index] = []
                continue
            if text.merged is not None:
                self._steps += 1
                self._credit(text.merged.learn(new), text.length)
            text.length += len(new)
            for part in self.parts:
                if part.drafter.extends_paths:
                    part.drafter.of_slot(index).read(new)
        for part in self.parts:
            part.observe(step, slot, captured=slot is None and self.graphs is not None)

    def _credit(self, accepted: list[tuple[int, int]], length: int) -> None:
        """Count for each part the accepted tokens it proposed first, after `length` tokens, those that only it brought,
        and those that it would have brought alone."""
        for place, part in enumerate(self.parts):
            part.accepted += sum(proposers & -proposers == 1 << place for proposers, _ in accepted)
            if part.long_texts is not None:
                its = [proposers >> place & 1 for proposers, _ in accepted]
                part.long_texts.add(length, 1 + [*its, 0].index(0))
            part.needed += sum(needs >> place & 1 for _, needs in accepted)

    def propose(self) -> DraftTree:
        """The merged trees, and after each the window rows of parts that read the target's choices there."""
        for part in self.parts:
            part.draft(self.graphs)
        device = self.target.device
        trees = [
            self._merge(slot, text).as_tree(device) if text.running else DraftTree.empty(device)
            for slot, text in enumerate(self._texts)
        ]
        return DraftTree.stack(trees)

    def _merge(self, slot: int, text: _Text) -> MergedTree:
        sources = [part.sources[slot] for part in self.parts]
        own = [
            (place, part, source)
            for place, (part, source) in enumerate(zip(self.parts, sources))
            if part.drafter.reads_choices and isinstance(source, TreeSource)
        ]
        drafts = self.max_nodes - sum(len(source.window_rows) for _, _, source in own)
        text.merged = merged = MergedTree(sources, text.calibration, drafts, self._deepest_node, self._tables[slot])
        for place, part, source in own:
            part.rows[slot] = merged.append_window_rows(place, source)
        return merged

    def settings(self) -> dict[str, Any]:
        """See `Drafter.settings`; under `parts` those of each part."""
        parts = {part.name: part.settings() for part in self.parts}
        return {"max_nodes": self.max_nodes, **super().settings(), "parts": parts}

    def findings(self) -> dict[str, Any]:
        """Target steps after which the text went on; for each part the `accepted` tokens that it proposed first, and
        the `needed` ones that it alone did, in those steps."""
        return {
            "steps": self._steps,
            "parts": {part.name: {"accepted": part.accepted, "needed": part.needed} for part in self.parts},
        }
