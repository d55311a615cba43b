"""Several drafters in one tree: equal prefixes merged, one node budget, shared by calibrated acceptance.

`hybrid=ctc:RUN/head+ngram`: which node is worth its place is not left to the parts' own probabilities, which mean
different things. A running calibration says how often tokens proposed so were accepted. Nodes and whole parts that cost
more time here than the tokens they bring would otherwise take are left out; the findings say when a part was.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import median
from typing import Any, ClassVar

import torch
from torch import Tensor

from inference.drafters.base import Drafter, VerifiedStep, check_max_nodes
from inference.drafters.calibration import Calibration
from inference.drafters.merged_tree import MergedTree, PhraseSource, SilentSource, Source, TreeSource
from inference.drafters.ngram import NgramDrafter
from inference.drafters.ngram_table import NgramTable
from inference.drafters.running_costs import RunningCosts, Step
from inference.drafters.text import committed
from inference.program import program
from inference.target import Target
from inference.tree import DraftTree

TRIAL = 128
"""Target steps after which every part is judged, again and again."""
LOOK, CLEAR = 32, 0.15
"""Target steps after which one that loses more than this share of the time is not given the rest of its trial."""
PAUSE = 16 * TRIAL
"""Target steps for which a part that did not pay stays off; twice as many every further time."""

_SILENT = SilentSource()


class _Part:
    """A drafter among others, what it cost and what it brought since it was judged last."""

    def __init__(self, name: str, drafter: Drafter, target: Target) -> None:
        self.name, self.drafter = name, drafter
        self.phrases = isinstance(drafter, NgramDrafter)
        self.source: Source = PhraseSource(drafter.table) if isinstance(drafter, NgramDrafter) else TreeSource()
        self.tree = DraftTree.empty(target.device)
        self._draft: Callable[[VerifiedStep], DraftTree] = self._drafted
        if drafter.on_device and drafter.max_nodes and target.compiled:
            self._draft = program(self._drafted, target.device)
        self.seconds = 0.0  # that the present step owes to it
        self.spent: list[float] = []  # the same of every step since it was judged
        self.brought = 0  # tokens nobody else had, since it was judged
        self.accepted = self.alone = 0  # tokens since the beginning: credited to it, and those nobody else had
        self.switched: list[dict[str, int | None]] = []  # target steps after which it went off and on again
        self.rows: list[int] | None = None  # of the forward, for each row of its own tree, where it asks for choices
        self.riders = 0  # rows of the present tree that are its own and never accepted

    @property
    def off(self) -> bool:
        """Whether it has been switched off."""
        return bool(self.switched) and self.switched[-1]["on"] is None

    def switch_off(self, steps: int) -> None:
        """It does not pay."""
        self.switched.append({"off": steps, "on": None})

    def pause_over(self, steps: int) -> bool:
        """Whether it has been off long enough to be given another trial, which then begins."""
        last = self.switched[-1]
        assert last["off"] is not None
        over = steps >= last["off"] + PAUSE * 2 ** (len(self.switched) - 1)
        if over:
            last["on"] = steps
        return over

    def draft(self, step: VerifiedStep) -> DraftTree:
        """Take a step in and draft behind it; a prompt has a length of its own and is not compiled for."""
        return (self._drafted if step.tree is None else self._draft)(step)

    def _drafted(self, step: VerifiedStep) -> DraftTree:
        self.drafter.observe(step)
        return self.drafter.propose()


class HybridDrafter(Drafter):
    """Proposes the merged tree of its parts; n-gram parts lengthen every path."""

    options: ClassVar[dict[str, Any]] = {"depth": 0, "fit": 1}

    def __init__(
        self,
        parts: Sequence[tuple[str, Drafter]],
        target: Target,
        max_nodes: int = 32,
        depth: int = 0,
        fit: int = 1,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """depth: the tree's deepest level, 0: the parts' deepest, and four more where n-grams lengthen it;
        fit: 1 leaves out nodes and parts that do not pay on this machine, 0 always drafts `max_nodes`."""
        if len(parts) < 2:
            raise ValueError(f"a hybrid has at least two parts; got {len(parts)}; join them by +")
        if fit not in (0, 1) or depth < 0:
            raise ValueError(f"a hybrid's fit is 0 or 1 and its depth not negative; got {fit} and {depth}")
        self.target = target
        self.budget = check_max_nodes(max_nodes)
        self.fit, self._clock = bool(fit), clock
        self._costs = RunningCosts()
        self.parts = [_Part(name, drafter, target) for name, drafter in parts]
        self.sources = tuple(name for name, _ in parts)
        phrases = any(part.phrases for part in self.parts)
        deepest = max(part.drafter.max_depth for part in self.parts)
        trees = max((part.drafter.max_depth for part in self.parts if not part.phrases), default=0)
        self._deepest_node = min(depth or (max(deepest, trees + 4) if phrases else deepest), self.budget)
        riding = sum(part.drafter.max_nodes for part in self.parts if part.drafter.reads_choices)
        # a part that is left alone drafts by its own measure
        self.max_nodes = max(self.budget + riding, *(part.drafter.max_nodes for part in self.parts))
        self.max_depth = max(self._deepest_node, deepest)
        self._calibration = Calibration()
        tables = [part.drafter.table for part in self.parts if isinstance(part.drafter, NgramDrafter)]
        self._contexts = max(tables, key=lambda table: table.n, default=NgramTable(2))
        self._context = 0  # the text, as n-grams code it
        self._merged: MergedTree | None = None
        self._lone: _Part | None = None  # the only part that is left
        self._step: VerifiedStep | None = None
        self._steps = 0
        self._began = self._proposed = 0.0  # when the present step began, and when its tree was ready

    @property
    def on_device(self) -> bool:
        """Trees are merged by the host."""
        return False

    @property
    def active(self) -> list[_Part]:
        """The parts that have not been switched off."""
        return [part for part in self.parts if not part.off]

    def begin(self, prompt: Tensor, capacity: int) -> None:
        """See `Drafter.begin`; a part may be shown more rows a step than it drafts itself."""
        self._merged = self._step = self._lone = None
        self._context = 0
        for part in self.parts:
            if not part.off or part.pause_over(self._steps):
                part.drafter.begin(prompt, capacity + self.max_depth + 1)

    def observe(self, step: VerifiedStep) -> None:
        """Learn from what was accepted; the parts take the step in when they draft."""
        now = self._clock()
        new = committed(step)
        if self._merged is None and step.tree is not None:
            return self._observe_alone(step, new)
        if self._merged is not None:
            self._steps += 1
            self._learn(new, now)
        for token in new[-self._contexts.n :]:
            self._context = self._contexts.after(self._context, token)
        self._step, self._began = step, self._clock()
        for part in self.active:
            if part.phrases:
                start = self._clock()
                part.drafter.read(new)  # type: ignore[attr-defined]
                self._charge([part], start)

    def _observe_alone(self, step: VerifiedStep, new: list[int]) -> None:
        """For the only part that is left, which drafted this step by itself: as little as can be."""
        assert self._lone is not None
        self._steps += 1
        self._lone.accepted += len(new) - 1
        self._lone.alone += len(new) - 1
        self._step = step
        if self._lone.phrases:
            self._lone.drafter.read(new)  # type: ignore[attr-defined]

    def _learn(self, new: list[int], now: float) -> None:
        """What was right in the last tree, and what the step cost."""
        assert self._merged is not None
        for node in self._merged.learn(new):
            part, alone = self.parts[self._merged.source[node]], self._merged.alone[node]
            part.accepted += 1
            part.alone += alone
            part.brought += alone
        if not self.fit:
            return
        riders = sum(part.riders for part in self.active)
        self._costs.add(Step(len(self._merged.tokens) + riders, now - self._proposed, now - self._began, len(new)))
        for node, alone in enumerate(self._merged.alone):
            if alone:
                self.parts[self._merged.source[node]].seconds += self._costs.seconds_per_node
        for part in self.active:
            part.seconds += part.riders * self._costs.seconds_per_node
            part.spent.append(part.seconds)
            part.seconds = 0.0
        if self._costs.steps % LOOK == 0:
            self._judge(self.active)

    def _judge(self, active: Sequence[_Part]) -> None:
        """Switch off the part that loses most, if one takes longer than its own tokens would without it."""
        losses = [
            median(part.spent) * len(part.spent) - part.brought * self._costs.seconds_per_token for part in active
        ]
        window = len(active[0].spent)
        bound = 0.0 if window >= TRIAL else CLEAR * window * self._costs.seconds_per_step
        loses = len(active) > 1 and max(losses) > bound
        if loses:
            active[losses.index(max(losses))].switch_off(self._steps)
        if loses or window >= TRIAL:
            for part in active:
                part.spent.clear()
                part.brought = 0

    def propose(self) -> DraftTree:
        """The merged tree, and behind it the rows that parts want to ride along; of one part alone, its own tree."""
        assert self._step is not None, "observe the prefill before proposing"
        if self._merged is not None or self._lone is None:
            active = self.active
            self._lone = active[0] if len(active) == 1 else None
        if self._lone is not None:
            self._merged = None
            tree = self._lone.drafter.propose() if self._lone.phrases else self._lone.draft(self._step)
            place = self.parts.index(self._lone)
            return tree if place == 0 else replace(tree, source=tree.source + place)
        start = self._clock()
        for index, part in enumerate(self.parts):
            if not part.off and isinstance(part.source, TreeSource):
                part.tree = part.draft(self._as_seen_by(index, self._step))
                part.source.take(part.tree)
                start = self._charge([part], start)
        nodes, least = self._costs.plan(self.budget) if self.fit else (self.budget, 0.0)
        merged = self._merged = MergedTree(
            [_SILENT if part.off else part.source for part in self.parts],
            self._calibration,
            self._context,
            self._contexts,
            nodes,
            self._deepest_node,
            least,
        )
        device = self.target.device
        tree = DraftTree(
            torch.tensor(merged.tokens, dtype=torch.long, device=device),
            torch.tensor(merged.parents, dtype=torch.long, device=device),
            torch.tensor(merged.scores, dtype=torch.float32, device=device),
            torch.tensor(merged.source, dtype=torch.long, device=device),
            torch.ones(len(merged.tokens), dtype=torch.bool, device=device),
        )
        self._charge(active, start)
        tree = self._with_riders(tree)
        self._proposed = self._clock()
        return tree

    def _charge(self, parts: Sequence[_Part], start: float) -> float:
        """The time since `start` is owed to them; of two each owes all, as the other alone would not need it."""
        now = self._clock()
        for part in parts:
            part.seconds += (now - start) / max(1, len(parts) - 1)
        return now

    def _with_riders(self, tree: DraftTree) -> DraftTree:
        """The rows of parts that are read back and never accepted, behind the merged nodes."""
        assert self._merged is not None
        for index, part in enumerate(self.parts):
            part.rows, part.riders = None, 0
            if part.drafter.reads_choices and not part.off:
                rows = self._merged.rows(index, len(part.tree))
                parents = part.tree.parents.tolist()
                riders = [node for node, candidate in enumerate(part.tree.candidate.tolist()) if not candidate]
                for place, node in enumerate(riders, start=len(tree) + 1):
                    rows[node + 1] = place
                own = part.tree.tokens.new_tensor(riders)
                hang = part.tree.tokens.new_tensor([rows[parents[node] + 1] - 1 for node in riders])
                taken = DraftTree(
                    part.tree.tokens[own],
                    hang,
                    part.tree.log_probs[own],
                    torch.full_like(own, index),
                    torch.zeros_like(own, dtype=torch.bool),
                )
                tree = DraftTree(*map(torch.cat, zip(tree.tensors(), taken.tensors())))
                part.rows, part.riders = rows, len(riders)
        return tree

    def _as_seen_by(self, index: int, step: VerifiedStep) -> VerifiedStep:
        """A step whose tree is the part's own; −1 is the choice at nodes of it that were not verified."""
        part = self.parts[index]
        if part.rows is None or step.choices is None:
            return step
        rows = torch.tensor(part.rows, device=step.choices.device)
        choices = torch.where(rows >= 0, step.choices[rows], -1)
        return replace(step, choices=choices, tree=part.tree)

    def close(self) -> None:
        """Every part writes what it keeps."""
        for part in self.parts:
            part.drafter.close()

    def findings(self) -> dict[str, Any]:
        """Per part: accepted tokens credited to it, those nobody else had, and when it was switched off and on again.

        Times are target steps; `least` is the acceptance below which a node does not pay at present.
        """
        return {
            "steps": self._steps,
            "least": self._costs.least,
            "parts": {
                part.name: {"accepted": part.accepted, "alone": part.alone, "switched": part.switched}
                for part in self.parts
            },
        }
