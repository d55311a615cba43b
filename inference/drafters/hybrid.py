"""Several drafters in one tree: equal prefixes merged, one node budget, shared by calibrated acceptance.

`hybrid=ctc:RUN/head+ngram`: which node is worth its place is not left to the parts' own probabilities, which mean
different things. A running calibration says how often tokens proposed so were accepted. Nodes and whole parts that cost
more time here than the tokens they bring would otherwise take are left out; the findings say when a part was.
"""

from __future__ import annotations

import time
from bisect import bisect
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from contextlib import ExitStack
from typing import Any, ClassVar

import torch
from torch import Tensor

from inference.drafters.account import CLEAR, LOOK, TRIAL
from inference.drafters.asking import Prospects
from inference.drafters.base import Drafter, VerifiedStep, check_max_nodes
from inference.drafters.calibration import Calibration
from inference.drafters.hybrid_part import HybridPart
from inference.drafters.learned import Learned, LearnedFile
from inference.drafters.merged_tree import UNLIKELY, MergedTree, PhraseSource, SilentSource
from inference.drafters.ngram import NgramDrafter
from inference.drafters.ngram_table import NgramTable
from inference.drafters.running_costs import Prices, RunningCosts, Step, typical
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
        self._costs, self._prospects = RunningCosts(), Prospects()
        least = UNLIKELY if fit else 0.0
        self.parts = [HybridPart(place, name, drafter, target, least) for place, (name, drafter) in enumerate(parts)]
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
        self._file = learned
        self._waiting = learned and learned.load()  # until everything is compiled, for which all parts must draft
        self._before = 0  # target steps of earlier processes that taught this one
        tables = [part.drafter.table for part in self.parts if isinstance(part.drafter, NgramDrafter)]
        self._contexts = max(tables, key=lambda table: table.n, default=NgramTable(2))
        self._context = 0  # the text, as n-grams code it
        self._renew_active()
        self._merged: MergedTree | None = None
        self._lone: HybridPart | None = None  # the only part that drafted the present step
        self._likely: list[tuple[int, int, Hashable]] = []  # place, token, entry: n-grams' word for the next token
        self._step: VerifiedStep | None = None
        self._steps = self._count = 0  # target steps, and tokens of the last one
        self._expected: float | None = None  # accepted drafts of the present tree; None: nobody said
        self._situation_now: Hashable = None  # what n-grams say at the beginning of the step
        self._chose = False  # whether parts were asked or left by what that brings
        self._fresh = False  # whether it is the first behind a prompt
        self._trial = False  # whether the present tree has a size that is tried
        self._rows = self._riders = 0  # of the present tree, and those among them that are never accepted
        self._began = self._proposed = 0.0  # when the present step began, and when its tree was ready
        self._observed = self._merging = 0.0  # when the step before was observed; seconds of merging in this one
        self._mergers: Sequence[HybridPart] = ()  # whose drafts the present tree merges
        self._overheads: deque[float] = deque(maxlen=TRIAL)  # seconds in which nobody drafted and nothing was merged

    @property
    def on_device(self) -> bool:
        """Trees are merged by the host."""
        return False

    @property
    def active(self) -> list[HybridPart]:
        """The parts that have not been switched off."""
        return [part for part in self.parts if not part.off]

    def _renew_active(self) -> None:
        self._active = self.active
        self._only = self._active[0] if len(self._active) == 1 else None

    def begin(self, prompt: Tensor, capacity: int) -> None:
        """See `Drafter.begin`; a part may be shown more rows a step than it drafts itself."""
        self._merged = self._step = None
        self._context = 0
        if self._waiting and (not self.target.compiled or all(part.met for part in self.parts)):
            self._go_on(self._waiting)
        for part in self.parts:
            part.account.forget_step()  # the last of the answer before, which was not observed
        back = [part for part in self.parts if part.off and part.pause_over(self._steps)]
        for part in self.parts:
            if not part.off:
                part.begin(prompt, capacity + self.max_depth + 1)
            if back:
                part.account.settle()  # all are judged at a time, over as many steps
        self._renew_active()

    def reach(self, tokens: int) -> None:
        """See `Drafter.reach`."""
        for part in self._active:
            part.drafter.reach(tokens)

    def _go_on(self, learned: Learned) -> None:
        """As if there had been no end."""
        self._waiting, self._before = None, learned.steps
        self._calibration, self._costs, self._prospects = learned.calibration, learned.costs, learned.prospects
        for part, (account, pause) in zip(self.parts, learned.parts):
            part.go_on(account, pause, self._steps)
            if self._costs.seconds_per_token:
                account.renew(self._costs.seconds_per_token)

    def observe(self, step: VerifiedStep) -> None:
        """Learn from what was accepted; parts that have to be drafted with take the step in then."""
        new = committed(step)
        self._step, self._count = step, len(new)
        if self._only is not None and step.tree is not None and self._merged is None:
            return self._observe_only(self._only, new)
        self._observed = now = self._clock()
        if step.tree is not None:
            self._steps += 1
            brought = self._credited(new)
            if self._merged is not None:
                self._share_merging(self._clock() - now)  # what was considered is counted
            if self.fit and len(self._active) > 1:
                self._learn(new, brought, now)
        self._began = self._clock()
        for part in self._active:
            if part.phrases:
                start = self._clock()
                part.drafter.read(new)  # type: ignore[attr-defined]
                part.account.drafting += self._clock() - start
        for token in new[-self._contexts.n :]:
            self._context = self._contexts.after(self._context, token)

    def _observe_only(self, part: HybridPart, new: list[int]) -> None:
        """For the only part that is left, which drafted the step by itself: as little as can be."""
        self._steps += 1
        part.credit_alone(len(new) - 1)
        if part.phrases:
            part.drafter.read(new)  # type: ignore[attr-defined]

    def _credited(self, new: list[int]) -> dict[str, int]:
        """Credit the accepted tokens; per part those that nobody else had."""
        if self._merged is None:
            assert self._lone is not None
            self._lone.credit_alone(len(new) - 1)
            for place, token, entry in self._likely:
                self._calibration.count_alone(place, entry, token == new[0])
            return {self._lone.name: len(new) - 1}
        brought: dict[str, int] = {}
        for node in self._merged.learn(new):
            part, alone = self.parts[self._merged.source[node]], self._merged.alone[node]
            part.accepted += 1
            part.alone += alone
            brought[part.name] = brought.get(part.name, 0) + alone
        return brought

    def _learn(self, new: list[int], brought: dict[str, int], now: float) -> None:
        """What the step cost, and what each part made of it."""
        active, costs = self._active, self._costs
        took = Step(self._rows, now - self._proposed, now - self._began, len(new))
        renewed = not self._fresh and costs.add(took)  # memory is cold behind a prompt
        if self._trial:  # of another size than pays
            for part in active:
                (part.account.read_prompt if self._fresh else part.account.forget_step)()
            return
        price = costs.price(took.verify) if self._chose else None
        if price is not None:
            self._prospects.learn(self._situation_now, costs.worth(len(new), took.seconds))
        for part in active:
            part.account.verifying += len(part.riders) * costs.seconds_per_node
            if part.may_be_left and price is not None:
                part.account.learn(len(new) - 1, price, self._expected)
            part.account.close_step(brought.get(part.name, 0))
            if renewed:
                part.account.renew(costs.seconds_per_token)
        if active[0].account.steps % LOOK == 0 and costs.seconds_per_token:
            self._judge(active)
            self._renew_active()

    def _judge(self, active: Sequence[HybridPart]) -> None:
        """Switch off a part that costs more than it brings; clearly so, or after a trial (`Account.verdict`: two).

        First those that are only asked where it pays: were n-grams taken from them, they would be asked always. So
        n-grams stay until there is a verdict on each of those.
        """
        costs, over = self._costs, active[0].account.steps >= TRIAL
        heads = [part for part in active if part.may_be_left]
        overhead = typical(self._overheads) if len(active) == 2 else 0.0  # a part left alone has none
        losing: list[tuple[bool, float, HybridPart]] = []
        for part in sorted(active, key=lambda part: not part.may_be_left):
            if not over and not part.drafter.reads_choices:
                continue  # it is asked in some steps only, or costs next to nothing
            if part.may_be_left:
                loss = part.account.verdict(costs.seconds_per_token)
            elif part.phrases and len(active) == 2 and heads:
                loss = part.account.verdict_beside(heads[0].account, costs.seconds_per_token, overhead)
            elif part.phrases and any(head.account.unsure for head in heads):
                continue
            else:
                balance, error = part.account.balance(costs.seconds_per_token)
                loss = -balance - (0.0 if over else CLEAR * error)
            if loss > 0:
                losing.append((part.may_be_left, loss, part))
        if losing:
            max(losing, key=lambda one: one[:2])[2].switch_off(self._steps, costs.tokens_per_step)
        if losing or over:
            for part in active:
                part.account.settle()

    def propose(self) -> DraftTree:
        """The merged tree, and behind it the rows that parts want to ride along; of a single part, its own tree."""
        assert self._step is not None, "observe the prefill before proposing"
        if self._only is not None:
            self._merged, self._lone, self._likely = None, self._only, []
            return self._only.draft_alone(self._step, self._count, self._prices_of)
        active = self._active
        trial = self._costs.trial(self.budget) if self.fit else None
        self._fresh, self._merging = self._step.tree is None, 0.0
        wait = self.fit and self.target.compiled and self._fresh
        self._trial = trial is not None or wait
        asked = self._choose(active, self._step, wait)
        tree = self._alone(asked[0], self._step) if len(asked) == 1 else self._merge(asked, self._step, trial)
        self._rows, self._proposed = len(tree), self._clock()
        drafting = sum(part.account.drafting for part in active)
        self._overheads.append(self._proposed - self._observed - drafting - self._merging)
        return tree

    def _choose(self, active: list[HybridPart], step: VerifiedStep, wait: bool) -> list[HybridPart]:
        """The parts to ask in this step: all where costs are not known, else those that pay.

        wait: behind a prompt, for whose length nothing is compiled; what can wait is not drafted there.
        """
        self._likely = []
        choose = self._chose = self.fit and self._costs.seconds_per_token > 0
        situation: Hashable = self._situation() if choose and any(part.may_be_left for part in active) else None
        self._situation_now = situation
        prospect = self._prospects(situation) if choose else None
        asked = []
        for part in active:
            part.account.conclude(None if self._fresh else prospect)
            start = self._clock()
            if not (wait and part.may_be_left) and part.account.choose(situation, choose and part.may_be_left):
                asked.append(part)
                if part.may_be_left:
                    situation = situation, part.place  # what the next one brings is less where this one speaks too
                if part.catch_up(len(step.tokens) - self._count):
                    part.account.read(self._clock() - start)
            else:
                part.leave(step, self._count)
                part.account.drafting += self._clock() - start
        heads = [part for part in asked if not part.phrases]
        choose = choose and not self._trial and len(heads) == 1 < len(asked) and heads[0].may_be_left
        return heads if choose and not heads[0].account.choose_company() else asked

    def _alone(self, part: HybridPart, step: VerifiedStep) -> DraftTree:
        """Its own tree, at no cost of others."""
        self._merged, self._lone, self._riders, self._expected = None, part, 0, None
        start = self._clock()
        tree = part.draft_alone(step, self._count, self._prices_of)
        part.account.drafting += 0.0 if part.phrases else self._clock() - start
        return tree

    def _prices_of(self, nodes: int) -> Prices | None:
        """Of trees of so many nodes and fewer, where they matter and are known."""
        return self._costs.prices(nodes) if self.fit else None

    def _merge(self, asked: Sequence[HybridPart], step: VerifiedStep, trial: int | None) -> DraftTree:
        """One tree of those who were asked."""
        start = self._clock()
        for part in asked:
            part.asked += 1
            if not part.phrases:
                part.speak(step, self._count)
                now = self._clock()
                part.account.drafting += now - start
                start = now
        self._riders = sum(len(part.riders) for part in asked)
        prices = self._costs.prices(self.budget, self._riders) if self.fit and trial is None else None
        merged = self._merged = MergedTree(
            [part.source if part in asked else _SILENT for part in self.parts],
            self._calibration,
            self._context,
            self._contexts,
            self.budget if trial is None else trial,
            self._deepest_node,
            prices and prices.bounds,
        )
        self._expected = None
        if prices is not None:
            size, self._expected = prices.best(merged.scores)
            merged.cut(size)
        tree = self._with_riders(merged.as_tree(self.target.device))
        self._merging = self._clock() - start
        self._mergers = asked
        self._share_merging(self._merging)
        return tree

    def _share_merging(self, seconds: float) -> None:
        """Merging took so long, which is shared by those who need not be asked."""
        others = max(1, len(self._mergers) - 1)  # with one fewer of two there would be nothing to merge
        for part in self._mergers:
            part.account.merging += 0.0 if part.phrases else seconds / others

    def _situation(self) -> int | None:
        """How likely the best n-gram's word for the next token is right, as a class; None: it has none."""
        best = 0.0
        for part in self._active:
            if isinstance(part.source, PhraseSource) and (found := part.source.first(self._context)):
                token, entry, guess = found
                best = max(best, self._calibration.alone(part.place, entry, guess))
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
                parts = [(part.account, part.pause(self._steps)) for part in self.parts]
                steps = self._before + self._steps
                self._file.save(Learned(steps, self._calibration, self._costs, self._prospects, parts))

    def findings(self) -> dict[str, Any]:
        """Per part: accepted tokens credited to it, those nobody else had, and when it was switched off and on again.

        Times are target steps, `asked` is in how many a part was asked for drafts of its own; `learned_before` is how
        many of earlier processes it began with; `node_price` is what a node costs at present on average, in tokens that
        would come in that time anyway.
        """
        return {
            "steps": self._steps,
            "learned_before": self._before,
            "node_price": self._costs.node_price,
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
