"""A drafter among others: when it is asked and what it is told."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

import torch
from torch import Tensor

from inference.drafters.account import TRIAL, Account
from inference.drafters.base import Drafter, VerifiedStep
from inference.drafters.medusa import MedusaDrafter
from inference.drafters.merged_tree import UNLIKELY, LevelSource, PhraseSource, Source, TreeSource
from inference.drafters.ngram import NgramDrafter
from inference.drafters.running_costs import Prices
from inference.drafters.text import TextDrafter
from inference.drafters.untold import Untold
from inference.program import program
from inference.target import Target
from inference.tree import DraftTree

Drafts = TypeVar("Drafts", DraftTree, Tensor)

PAUSE, SHARE = 8 * TRIAL, 0.01
"""Target steps for which a part that did not pay stays off at least, twice as many if it did not the time before
either; longer, if trials would else take more of the time than this share."""
WAITING = 1024
"""Tokens behind a prompt that a part on a device need not have taken in while it is not asked."""


class HybridPart:
    """One part, its drafts of the present step and its account."""

    def __init__(self, place: int, name: str, drafter: Drafter, target: Target, least: float = UNLIKELY) -> None:
        """place: among the hybrid's parts; least: probability below which a head does not speak of a token."""
        self.place, self.name, self.drafter = place, name, drafter
        self._reads = isinstance(drafter, TextDrafter)
        self._marks = not place or self._reads  # whether its trees name the place themselves
        if isinstance(drafter, TextDrafter):
            drafter.stand_at(place)
        self.phrases = isinstance(drafter, NgramDrafter)
        self.source: Source = TreeSource()
        if isinstance(drafter, NgramDrafter):
            drafter.hasten()
            self.source = PhraseSource(drafter.table)
        elif isinstance(drafter, MedusaDrafter) and drafter.tree == "best":
            self.source = LevelSource(least)
        self.tree = DraftTree.empty(target.device)
        self._draft: Callable[[VerifiedStep], DraftTree] = self._drafted
        self._speak: Callable[[VerifiedStep], Tensor] = self._spoken
        self.met = True  # whether nothing of it is left to compile
        if drafter.on_device and drafter.max_nodes and target.compiled:
            self.met = False
            drafter.prepare()
            self._draft, self._speak = program(self._drafted, target.device), program(self._spoken, target.device)
        self._untold = Untold()  # what it has not taken in yet …
        self._unread: list[int] = []  # … or read, where it reads text
        self.accepted = self.alone = 0  # tokens since the beginning: credited to it, and those nobody else had
        self.asked = 0  # target steps since the beginning in which it drafted
        self.switched: list[dict[str, int | None]] = []  # target steps after which it went off and on again
        self._until = 0  # target steps after which it is tried again
        self.rows: list[int] | None = None  # of the forward, for each row of its own tree, where it asks for choices
        self.riders: list[int] = []  # nodes of its own tree that ride along and are never accepted
        self._may_wait = True
        self.reach: int | None = None  # what its drafter is told of `Drafter.reach` before it is told anything else
        self.account = Account()

    # ---- on and off ----------------------------------------------------------------------------------------

    @property
    def off(self) -> bool:
        """Whether it has been switched off."""
        return bool(self.switched) and self.switched[-1]["on"] is None

    def switch_off(self, steps: int, seconds_per_step: float = 0.0) -> None:
        """It does not pay."""
        self.switched.append({"off": steps, "on": None})
        self.riders = []
        self._forget()  # it will begin with another text
        afford = self.account.spent / (SHARE * seconds_per_step) if seconds_per_step else 0.0
        self._until = steps + max(PAUSE << self.account.failed, round(afford))
        self.account.failed = True

    def pause(self, steps: int) -> int | None:
        """For how many more target steps it stays off; None: it is on."""
        return max(0, self._until - steps) if self.off else None

    def go_on(self, account: Account, pause: int | None, steps: int) -> None:
        """Take up what another process learned of it, and how that left it."""
        if self.off:  # since a moment ago; of that the other process knew more
            self.switched[-1]["on"] = steps
        self.account = account
        if pause:
            self.switched.append({"off": steps, "on": None})
            self._until = steps + pause
        elif pause == 0:
            account.begin_again()

    def pause_over(self, steps: int) -> bool:
        """Whether it has been off long enough to be given another trial, which then begins."""
        over = steps >= self._until
        if over:
            self.switched[-1]["on"] = steps
            self.account.begin_again()
        return over

    # ---- drafts --------------------------------------------------------------------------------------------

    @property
    def may_be_left(self) -> bool:
        """Whether a step may go without its drafts; one that reads what the target says of its rows needs them all."""
        return not self.phrases and not self.drafter.reads_choices

    def begin(self, prompt: Tensor, capacity: int) -> None:
        """See `Drafter.begin`."""
        self._forget()
        self.reach = None
        self.drafter.begin(prompt, capacity)
        # a part without memory need not be told: nothing of it outlives the next step
        self._may_wait = self.drafter.on_device and bool(self.drafter.memory())

    def _look(self) -> Drafter:
        """Its drafter, which knows how far to look."""
        if self.reach is not None:
            self.drafter.reach(self.reach)
            self.reach = None
        return self.drafter

    def speak(self, step: VerifiedStep, new: list[int]) -> None:
        """Take a step in; its drafts behind it enter the merged tree. new: as `text.committed` says."""
        if isinstance(self.source, LevelSource):
            self.source.take(self._behind(step, new, self._spoken, self._speak))
            return
        assert isinstance(self.source, TreeSource)
        self.tree = self._behind(step, new, self._drafted, self._draft)
        self.source.take(self.tree)
        if self.drafter.reads_choices:
            self.riders = [node for node, candidate in enumerate(self.tree.candidate.tolist()) if not candidate]

    def _behind(
        self,
        step: VerifiedStep,
        new: list[int],
        plain: Callable[[VerifiedStep], Drafts],
        fast: Callable[[VerifiedStep], Drafts],
    ) -> Drafts:
        """What one way to draft says behind a step; fast: that way compiled, where it is."""
        self._look()
        if step.tree is None:  # a prompt has a length of its own and is not compiled for
            return plain(step)
        self._meet(step)
        step = self._as_seen(step)
        self.catch_up(len(step.tokens) - len(new))
        if self._untold:
            self._untold.add(step, new)
            step = replace(self._untold.take(len(step.tokens)), choices=step.choices, tree=step.tree)
        return fast(step)

    def _meet(self, step: VerifiedStep) -> None:
        """Compile every way to draft before any other is needed, not in the middle of some later answer."""
        if self.met:
            return
        if isinstance(self.source, LevelSource):
            kept = [memory.clone() for memory in self.drafter.memory()]
            self._draft(step)
            self._speak(step)
            for memory, value in zip(self.drafter.memory(), kept):
                memory.copy_(value)
        self.met = True

    def draft_alone(self, step: VerifiedStep, new: list[int], prices: Callable[[int], Prices | None]) -> DraftTree:
        """Its own tree as the hybrid's: with its place among the sources, as far as it pays.

        new: as `text.committed` says.
        prices: what trees of so many nodes cost, None where nobody knows.
        """
        tree = self.tree = self._behind(step, new, self._drafted, self._draft)
        if self.may_be_left and (known := prices(len(tree))):
            tree = self.account.own.cut(tree, known)
        return tree if self._marks else replace(tree, source=tree.source + self.place)

    def learn(self, accepted: int) -> None:
        """So many nodes of its own tree were accepted."""
        if not self.phrases:
            self.account.own.learn(accepted)

    def credit(self, accepted: int, alone: int) -> None:
        """So many tokens are its merit, and so many of them nobody else's."""
        self.accepted += accepted
        self.alone += alone

    def leave(self, step: VerifiedStep, new: list[int]) -> None:
        """Do without its drafts. Its part of the work on a device waits until they are wanted, if ever they are.

        new: as `text.committed` says.
        """
        if self._reads:
            self._unread += new
        elif self._may_wait:
            self._untold.add(step, new)
            if self._untold.behind > WAITING:
                self.catch_up()
        elif not self.drafter.on_device:
            self._look().observe(step)

    def catch_up(self, room: int = 0) -> bool:
        """Take in what waits, in one go, where it is more than so many tokens. Returns whether it was."""
        if self._unread:
            self.drafter.read(self._unread)  # type: ignore[attr-defined]
            self._unread = []
        if not self._untold or len(self._untold) <= room:
            return False
        self._look().observe(self._untold.take())
        return True

    def _forget(self) -> None:
        self._untold.clear()
        self._unread = []

    def _drafted(self, step: VerifiedStep) -> DraftTree:
        self.drafter.observe(step)
        return self.drafter.propose()

    def _spoken(self, step: VerifiedStep) -> Tensor:
        assert isinstance(self.drafter, MedusaDrafter)
        self.drafter.observe(step)
        return self.drafter.propose_levels()

    def _as_seen(self, step: VerifiedStep) -> VerifiedStep:
        """A step whose tree is the part's own; −1 is the choice at nodes of it that were not verified."""
        own, self.rows = self.rows, None
        if own is None or step.choices is None:
            return step
        rows = torch.tensor(own, device=step.choices.device)
        choices = torch.where(rows >= 0, step.choices[rows], -1)
        return replace(step, choices=choices, tree=self.tree)
