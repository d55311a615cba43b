"""Several drafters in one tree: equal prefixes merged, one node budget, shared by calibrated acceptance.

`hybrid=ctc:RUN/head+ngram`: which node is worth its place is not left to the parts' own probabilities, which mean
different things. A running calibration says how often tokens proposed so were accepted. Nodes and whole parts that cost
more time here than the tokens they bring would otherwise take are left out; the findings say when a part was.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, ClassVar

import torch
from torch import Tensor

from draft_heads.inference.drafters.base import Drafter, check_max_nodes
from draft_heads.inference.drafters.hybrid.hybrid_part import HybridPart
from draft_heads.inference.drafters.hybrid.learned import Learned, LearnedFile, LearnedPart
from draft_heads.inference.drafters.hybrid.ledger import Ledger, Written
from draft_heads.inference.drafters.hybrid.merged_tree import UNLIKELY, Merged, SilentSource
from draft_heads.inference.drafters.hybrid.merging import merge
from draft_heads.inference.drafters.hybrid.running_costs import Step
from draft_heads.inference.drafters.text.base import committed
from draft_heads.inference.drafters.text.ngram import NgramDrafter
from draft_heads.inference.step import VerifiedStep
from draft_heads.inference.target.target import Target
from draft_heads.inference.tree import DraftTree

MOST_PARTS = 32
"""As many as a word has bits to say who is needed for a node."""

_SILENT = SilentSource()


class HybridDrafter(Drafter):
    """Proposes the merged tree of its parts; n-gram parts lengthen every path."""

    kind = "hybrid"
    on_device = False  # the host merges trees
    options: ClassVar[dict[str, Any]] = {"depth": 0, "fit": 1, "learned": ""}

    def __init__(
        self,
        parts: Sequence[tuple[str, Drafter]],
        target: Target,
        max_nodes: int = 32,
        depth: int = 0,
        fit: int = 1,
        learned: LearnedFile | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """depth: the tree's deepest level, 0: the parts' deepest, and four more where n-grams lengthen it;
        fit: 1 leaves out nodes and parts that do not pay on this machine, 0 always drafts `max_nodes`;
        learned: what outlives the process, read now and written by `close`."""
        if not 2 <= len(parts) <= MOST_PARTS:
            raise ValueError(f"a hybrid has 2 to {MOST_PARTS} parts; got {len(parts)}; join them by +")
        if fit not in (0, 1) or depth < 0:
            raise ValueError(f"a hybrid's fit is 0 or 1 and its depth not negative; got {fit} and {depth}")
        self.target = target
        self.budget = check_max_nodes(max_nodes)
        self.fit, self._clock = bool(fit), clock
        least = UNLIKELY if fit else 0.0
        self.parts = [HybridPart(place, name, drafter, target, least) for place, (name, drafter) in enumerate(parts)]
        self._ledger = Ledger(self.parts, self.fit)
        self.sources = tuple(name for name, _ in parts)
        phrases = any(part.phrases for part in self.parts)
        deepest = max(part.drafter.max_depth for part in self.parts)
        trees = max((part.drafter.max_depth for part in self.parts if not part.phrases), default=0)
        self._deepest_node = min(depth or (max(deepest, trees + 4) if phrases else deepest), self.budget)
        riding = sum(part.drafter.max_nodes for part in self.parts if part.drafter.reads_choices)
        # a part that is left alone drafts by its own measure
        self.max_nodes = max(self.budget + riding, *(part.drafter.max_nodes for part in self.parts))
        self.max_depth = max(self._deepest_node, deepest)
        self._file = learned
        self._waiting = learned and learned.load()  # until everything is compiled, for which all parts must draft
        self._before = 0  # target steps of earlier processes that taught this one
        self._sole: NgramDrafter | None = None  # n-grams, where they draft the rest of the answer by themselves …
        self._sole_steps = self._sole_accepted = 0  # … so many steps, and accepted drafts, so far
        self._step: VerifiedStep | None = None
        self._merged: Merged | None = None  # of the present step, as all that follows
        self._fresh = self._trial = False  # see `ledger.Written`
        self._rows = 0
        self._began = self._proposed = 0.0  # when it began, and when its tree was ready
        self._drafting = [0.0] * len(self.parts)  # seconds of each part

    def begin(self, prompt: Tensor, capacity: int) -> None:
        """See `Drafter.begin`; a part may be shown more rows a step than it drafts itself."""
        self._credit_sole()
        self._merged = self._step = self._sole = None
        ledger = self._ledger
        if self._waiting and (not self.target.compiled or all(part.met for part in self.parts)):
            ledger.go_on(self._waiting)
            self._before = self._waiting.steps
            self._waiting = None
        if any([part.off and part.pause_over(ledger.steps) for part in self.parts]):
            ledger.catch_up()  # with what was done without them
            ledger.begin_again()
        ledger.renew_active()
        for part in ledger.active:
            part.drafter.begin(prompt, capacity + self.max_depth + 1)

    def set_visible_length(self, tokens: int) -> None:
        """See `Drafter.set_visible_length`."""
        for part in self._ledger.active:
            part.drafter.set_visible_length(tokens)

    def observe(self, step: VerifiedStep) -> None:
        """Learn from what was accepted; parts that have to be drafted with take the step in then."""
        new = committed(step)
        if self._sole is not None:  # as little as can be
            self._sole.read(new)
            self._sole_steps += 1
            self._sole_accepted += len(new) - 1
            return
        now, ledger = self._clock(), self._ledger
        self._step = step
        if self._merged is not None:
            took = Step(self._rows, now - self._proposed, now - self._began, len(new))
            shared = self._proposed - self._began - sum(self._drafting)
            ledger.write(Written(took, new, self._merged, self._drafting, shared, self._fresh, self._trial))
        elif step.tree is not None and ledger.only is not None:
            self._credit_only(1, len(new) - 1)
        self._began, self._drafting = now, [0.0] * len(self.parts)
        for part in ledger.active:
            if part.phrases:
                start = self._clock()
                part.drafter.read(new)  # type: ignore[attr-defined]
                self._drafting[part.place] = self._clock() - start

    def _credit_only(self, steps: int, accepted: int) -> None:
        """For the only part that is left, which drafted so many steps by itself."""
        part = self._ledger.only
        assert part is not None
        self._ledger.steps += steps
        part.asked += steps
        part.accepted += accepted
        part.needed += accepted

    def _credit_sole(self) -> None:
        if self._sole is not None:
            self._credit_only(self._sole_steps, self._sole_accepted)
            self._sole_steps = self._sole_accepted = 0

    def propose(self) -> DraftTree:
        """The merged tree, and behind it the rows that parts want to ride along; of a single part, its own tree."""
        if self._sole is not None:
            return self._sole.propose()
        step, ledger = self._step, self._ledger
        assert step is not None, "observe the prefill before proposing"
        self._merged, self._fresh = None, step.tree is None
        part = ledger.only
        if part is None:
            tree = self._merge(step)
            self._rows, self._proposed = len(tree), self._clock()
            return tree
        if isinstance(part.drafter, NgramDrafter):
            self._sole = part.drafter
            return self._sole.propose()
        return part.draft_alone(step)

    def _merge(self, step: VerifiedStep) -> DraftTree:
        """One tree of all active parts."""
        ledger = self._ledger
        start = self._clock()
        for part in ledger.active:
            if not part.phrases:
                part.speak(step)
                now = self._clock()
                self._drafting[part.place] = now - start
                start = now
        size, prices = None, None
        if self.fit:
            size = ledger.costs.trial(self.budget)
            if size is None:
                prices = ledger.costs.prices(self.budget, sum(len(part.riders) for part in ledger.active))
        self._trial = size is not None
        merged = self._merged = merge(
            [_SILENT if part.off else part.source for part in self.parts],
            ledger.calibration,
            self.budget if size is None else size,
            self._deepest_node,
            prices and prices.bounds,
        )
        if prices is not None:
            merged.cut(prices.best(merged.scores))
        return self._with_riders(merged.as_tree(self.target.device))

    def _with_riders(self, tree: DraftTree) -> DraftTree:
        """The rows of parts that are read back and never accepted, behind the merged nodes."""
        assert self._merged is not None
        for index, part in enumerate(self.parts):
            if part.drafter.reads_choices and not part.off:
                rows = self._merged.rows(index, len(part.tree))
                parents = part.tree.parents.tolist()
                for place, node in enumerate(part.riders, start=len(tree) + 1):
                    rows[node + 1] = place
                own = part.tree.tokens.new_tensor(part.riders)
                hang = part.tree.tokens.new_tensor([rows[parents[node] + 1] - 1 for node in part.riders])
                taken = DraftTree(
                    part.tree.tokens[own],
                    hang,
                    part.tree.log_probs[own],
                    torch.full_like(own, index),
                    torch.zeros_like(own, dtype=torch.bool),
                )
                tree = DraftTree(*map(torch.cat, zip(tree.tensors(), taken.tensors())))
                part.rows = rows
        return tree

    def close(self) -> None:
        """Every part writes what it keeps, and the whole what it learned."""
        with ExitStack() as all_of_them:  # one that fails does not keep the others from it
            for part in self.parts:
                all_of_them.callback(part.drafter.close)
            if self._file and not self._waiting:
                self._catch_up()
                ledger = self._ledger
                parts = [LearnedPart(part.account, part.failed, part.pause(ledger.steps)) for part in self.parts]
                self._file.save(Learned(self._before + ledger.steps, ledger.calibration, ledger.costs, parts))

    def _catch_up(self) -> None:
        """Learn from what was only counted or written down."""
        self._credit_sole()
        self._ledger.catch_up()

    def findings(self) -> dict[str, Any]:
        """Per part: accepted tokens credited to it, those that would not have been drafted without it, and when it was
        switched off and on again.

        Times are target steps, `asked` is in how many a part drafted; `learned_before` is how many of earlier processes
        it began with; `node_price` is what a node costs at present on average, in tokens that would come in that time
        anyway.
        """
        self._catch_up()
        return {
            "steps": self._ledger.steps,
            "learned_before": self._before,
            "node_price": self._ledger.costs.node_price,
            "parts": {
                part.name: {
                    "accepted": part.accepted,
                    "needed": part.needed,
                    "asked": part.asked,
                    "switched": part.switched,
                }
                for part in self.parts
            },
        }
