"""Several drafters in one tree: equal prefixes merged, one node budget, shared by calibrated acceptance.

`hybrid=ctc:RUN/head+ngram`: which node is worth its place is not left to the parts' own probabilities, which mean
different things. A running calibration says how often tokens proposed so were accepted. Nodes and whole parts that cost
more time here than the tokens they bring would otherwise take are left out; the findings say when a part was.
"""

from __future__ import annotations

import time
from bisect import bisect
from collections.abc import Callable, Hashable, Sequence
from contextlib import ExitStack
from typing import Any, ClassVar

import torch
from torch import Tensor

from inference.drafters.base import Drafter, VerifiedStep, check_max_nodes
from inference.drafters.hybrid_part import HybridPart
from inference.drafters.learned import Learned, LearnedFile
from inference.drafters.ledger import Decision, Ledger, Written
from inference.drafters.merged_tree import UNLIKELY, Merged, PhraseSource, SilentSource
from inference.drafters.merging import merge
from inference.drafters.ngram import NgramDrafter
from inference.drafters.running_costs import Prices, Step
from inference.drafters.text import committed
from inference.target import Target
from inference.tree import DraftTree

CLASSES = (0.3, 0.55, 0.8)
"""Between the likelihoods of the n-grams' word that are told apart when it is decided whom else to ask."""

_SILENT = SilentSource()


class HybridDrafter(Drafter):
    """Proposes the merged tree of its parts; n-gram parts lengthen every path."""

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
        if len(parts) < 2:
            raise ValueError(f"a hybrid has at least two parts; got {len(parts)}; join them by +")
        if fit not in (0, 1) or depth < 0:
            raise ValueError(f"a hybrid's fit is 0 or 1 and its depth not negative; got {fit} and {depth}")
        self.target = target
        self.budget = check_max_nodes(max_nodes)
        self.fit, self._clock = bool(fit), clock
        least = UNLIKELY if fit else 0.0
        self.parts = [HybridPart(place, name, drafter, target, least) for place, (name, drafter) in enumerate(parts)]
        self._ledger = Ledger(self.parts, self.budget, self.fit, clock)
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
        self._decision = Decision()  # about the present step
        self._noted = True  # whether that will be written down
        self._reach: int | None = None  # as `reach` was told
        self._sole: NgramDrafter | None = None  # n-grams, where they draft the rest of the answer by themselves …
        self._sole_steps = self._sole_accepted = 0  # … so many steps, and accepted drafts, so far
        self._expected: float | None = None  # drafts that will be accepted; None: nobody said
        self._merged: Merged | None = None
        self._likely: list[tuple[int, int, Hashable]] = []  # place, token, entry: n-grams' word for the next token
        self._step: VerifiedStep | None = None
        self._new: list[int] = []  # tokens of the last step
        self._rows = 0  # of the present tree
        self._began = self._proposed = 0.0  # when the present step began, and when its tree was ready
        self._observed = self._merging = 0.0  # when the step before was observed; seconds of merging in this one
        self._drafting = [0.0] * len(self.parts)  # seconds in it: for a part's drafts, or for doing without them

    @property
    def on_device(self) -> bool:
        """Trees are merged by the host."""
        return False

    def begin(self, prompt: Tensor, capacity: int) -> None:
        """See `Drafter.begin`; a part may be shown more rows a step than it drafts itself."""
        self._catch_up()
        self._merged = self._step = self._sole = None
        if self._waiting and (not self.target.compiled or all(part.met for part in self.parts)):
            self._ledger.go_on(self._waiting)
            self._before = self._waiting.steps
            self._waiting = None
        back = [part for part in self.parts if part.off and part.pause_over(self._ledger.steps)]
        for part in self.parts:
            if not part.off:
                part.begin(prompt, capacity + self.max_depth + 1)
            if back:
                part.account.settle()  # all are judged at a time, over as many steps
        self._ledger.renew_active()

    def reach(self, tokens: int) -> None:
        """See `Drafter.reach`."""
        self._reach = tokens

    def observe(self, step: VerifiedStep) -> None:
        """Learn from what was accepted; parts that have to be drafted with take the step in then."""
        new = committed(step)
        if self._sole is not None:  # as little as can be
            self._sole.read(new)
            self._sole_steps += 1
            self._sole_accepted += len(new) - 1
            return
        ledger = self._ledger
        self._step, self._new = step, new
        if ledger.only is not None and step.tree is not None and self._merged is None:
            return self._observe_only(ledger.only, new)
        now = self._clock()
        if step.tree is not None:
            ledger.steps += 1
            if self._noted:
                self._note(now)
            else:
                self._decision.counted += 1
                self._decision.accepted += len(new) - 1
        self._observed, self._began = now, self._clock()
        self._drafting = [0.0] * len(self.parts)
        for part in ledger.active:
            if part.phrases:
                start = self._clock()
                part.drafter.read(new)  # type: ignore[attr-defined]
                self._drafting[part.place] = self._clock() - start

    def _note(self, now: float) -> None:
        """Write the step down that was observed just now."""
        ledger, new = self._ledger, self._new
        if self._merged is None:
            self._decision.asked[0].learn(len(new) - 1)
        ledger.write(
            Written(
                self._decision,
                Step(self._rows, now - self._proposed, now - self._began, len(new)),
                new,
                self._merged,
                self._likely,
                self._drafting,
                self._merging,
                self._proposed - self._observed,
                self._expected,
                ledger.counted(),
            )
        )

    def _observe_only(self, part: HybridPart, new: list[int]) -> None:
        """For the only part that is left, which drafted the step by itself."""
        part.learn(len(new) - 1)
        self._credit_only(part, 1, len(new) - 1)

    def _credit_only(self, part: HybridPart, steps: int, accepted: int) -> None:
        self._ledger.steps += steps
        part.asked += steps
        part.credit(accepted, alone=accepted)

    def _catch_up(self) -> None:
        """Learn from what was only counted or written down."""
        if self._ledger.only is not None:
            self._credit_only(self._ledger.only, self._sole_steps, self._sole_accepted)
            self._sole_steps = self._sole_accepted = 0
        self._ledger.catch_up()

    def propose(self) -> DraftTree:
        """The merged tree, and behind it the rows that parts want to ride along; of a single part, its own tree."""
        if self._sole is not None:
            return self._sole.propose()
        assert self._step is not None, "observe the prefill before proposing"
        step, ledger = self._step, self._ledger
        self._likely, self._merged, self._merging, self._expected = [], None, 0.0, None
        if ledger.only is None:
            fresh = step.tree is None
            situation = self._situation() if ledger.weighs else None
            self._decision = ledger.decide(situation, fresh, self.fit and self.target.compiled and fresh)
        if ledger.only is not None:
            ledger.only.reach = self._reach
            if isinstance(ledger.only.drafter, NgramDrafter):
                self._sole = ledger.only.drafter
            return self._of(ledger.only, step)
        decision = self._decision
        self._noted, asked = ledger.notes(decision), decision.asked
        for part in decision.heads:
            self._ask(part, step)
        for part in decision.left:
            self._leave(part, step)
        tree = self._alone(asked[0], step) if len(asked) == 1 else self._merge(asked, step, decision.size)
        self._rows, self._proposed = len(tree), self._clock()
        return tree

    def _ask(self, part: HybridPart, step: VerifiedStep) -> None:
        """What a part need know before it drafts."""
        start, part.reach = self._clock(), self._reach
        if part.catch_up(len(step.tokens) - len(self._new)):
            part.account.read(self._clock() - start)

    def _leave(self, part: HybridPart, step: VerifiedStep) -> None:
        """What it need know because it does not."""
        start, part.reach = self._clock(), self._reach
        part.leave(step, self._new)
        self._drafting[part.place] = self._clock() - start

    def _alone(self, part: HybridPart, step: VerifiedStep) -> DraftTree:
        """Its own tree, at no cost of others."""
        start = self._clock()
        tree = self._of(part, step)
        self._drafting[part.place] += self._clock() - start
        return tree

    def _of(self, part: HybridPart, step: VerifiedStep) -> DraftTree:
        return part.drafter.propose() if part.phrases else part.draft_alone(step, self._new, self._prices_of)

    def _prices_of(self, nodes: int) -> Prices | None:
        """Of trees of so many nodes and fewer, where they matter and are known."""
        return self._ledger.costs.prices(nodes) if self.fit else None

    def _merge(self, asked: Sequence[HybridPart], step: VerifiedStep, trial: int | None) -> DraftTree:
        """One tree of those who were asked."""
        start = self._clock()
        for part in asked:
            if not part.phrases:
                part.speak(step, self._new)
                now = self._clock()
                self._drafting[part.place] = now - start
                start = now
        riders = sum(len(part.riders) for part in asked)
        prices = self._ledger.costs.prices(self.budget, riders) if self.fit and trial is None else None
        merged = self._merged = merge(
            [part.source if part in asked else _SILENT for part in self.parts],
            self._ledger.calibration,
            self.budget if trial is None else trial,
            self._deepest_node,
            prices and prices.bounds,
        )
        if prices is not None:
            size, self._expected = prices.best(merged.scores)
            merged.cut(size)
        tree = self._with_riders(merged.as_tree(self.target.device))
        self._merging = self._clock() - start
        return tree

    def _situation(self) -> int | None:
        """How likely the best n-gram's word for the next token is right, as a class; None: it has none."""
        best = 0.0
        for part in self._ledger.active:
            if isinstance(part.source, PhraseSource) and (found := part.source.first()):
                token, entry, guess = found
                best = max(best, self._ledger.calibration.alone(part.place, entry, guess))
                self._likely.append((part.place, token, entry))
        return bisect(CLASSES, best) if best else None

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
                ledger = self._ledger
                self._catch_up()
                parts = [(part.account, part.pause(ledger.steps)) for part in self.parts]
                steps = self._before + ledger.steps
                self._file.save(Learned(steps, self._ledger.calibration, ledger.costs, ledger.prospects, parts))

    def findings(self) -> dict[str, Any]:
        """Per part: accepted tokens credited to it, those nobody else had, and when it was switched off and on again.

        Times are target steps, `asked` is in how many a part was asked for drafts of its own; `learned_before` is how
        many of earlier processes it began with; `node_price` is what a node costs at present on average, in tokens that
        would come in that time anyway.
        """
        self._catch_up()
        return {
            "steps": self._ledger.steps,
            "learned_before": self._before,
            "node_price": self._ledger.costs.node_price,
            "parts": {
                part.name: {
                    "accepted": part.accepted,
                    "alone": part.alone,
                    "asked": part.asked,
                    "switched": part.switched,
                }
                for part in self.parts
            },
        }
