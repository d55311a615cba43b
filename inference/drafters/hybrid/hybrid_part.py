"""A drafter among others: what it is told, what it says, and when it is switched off."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

import torch
from torch import Tensor

from draft_heads.inference.drafters.base import Drafter
from draft_heads.inference.drafters.heads.medusa import MedusaDrafter
from draft_heads.inference.drafters.hybrid.account import Account
from draft_heads.inference.drafters.hybrid.merged_tree import UNLIKELY, LevelSource, PhraseSource, Source, TreeSource
from draft_heads.inference.drafters.text.base import TextDrafter
from draft_heads.inference.drafters.text.ngram import NgramDrafter
from draft_heads.inference.step import VerifiedStep
from draft_heads.inference.target.compiled import program
from draft_heads.inference.target.target import Target
from draft_heads.inference.tree import DraftTree

Drafts = TypeVar("Drafts", DraftTree, Tensor)

PAUSE, SHARE = 1024, 0.01
"""Target steps for which a part that did not pay stays off at least, twice as many if it did not the time before
either; longer, if trials would else take more of the time than this share."""


class HybridPart:
    """One part, its drafts of the present step and its account."""

    def __init__(self, place: int, name: str, drafter: Drafter, target: Target, least: float = UNLIKELY) -> None:
        """place: among the hybrid's parts; least: probability below which a head does not speak of a token."""
        self.place, self.name, self.drafter = place, name, drafter
        self._marks = not place or isinstance(drafter, TextDrafter)  # whether its trees name the place themselves
        if isinstance(drafter, TextDrafter):
            drafter.set_source(place)
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
        self.accepted = self.needed = 0  # tokens since the beginning: credited to it, and those not had without it
        self.asked = 0  # target steps since the beginning in which it drafted
        self.switched: list[dict[str, int | None]] = []  # target steps after which it went off and on again
        self._until = 0  # target steps after which it is tried again
        self.rows: list[int] | None = None  # of the forward, for each row of its own tree, where it asks for choices
        self.riders: list[int] = []  # nodes of its own tree that ride along and are never accepted
        self.account = Account()
        self.failed = False  # whether it was switched off and has not paid since

    # ---- on and off ----------------------------------------------------------------------------------------

    @property
    def off(self) -> bool:
        """Whether it has been switched off."""
        return bool(self.switched) and self.switched[-1]["on"] is None

    def switch_off(self, steps: int, lost: float = 0.0) -> None:
        """It does not pay, which cost as much time as so many steps."""
        self.switched.append({"off": steps, "on": None})
        self.riders = []
        self._until = steps + max(PAUSE << self.failed, round(lost / SHARE))
        self.failed = True

    def pause(self, steps: int) -> int | None:
        """For how many more target steps it stays off; None: it is on."""
        return max(0, self._until - steps) if self.off else None

    def go_on(self, account: Account, failed: bool, pause: int | None, steps: int) -> None:
        """Take up what another process learned of it, and how that left it."""
        if self.off:  # since a moment ago; of that the other process knew more
            self.switched[-1]["on"] = steps
        self.account, self.failed = account, failed
        if pause:
            self.switched.append({"off": steps, "on": None})
            self._until = steps + pause

    def pause_over(self, steps: int) -> bool:
        """Whether it has been off long enough to be given another trial, which then begins."""
        over = steps >= self._until
        if over:
            self.switched[-1]["on"] = steps
        return over

    # ---- drafts --------------------------------------------------------------------------------------------

    def speak(self, step: VerifiedStep) -> None:
        """Take a step in; its drafts behind it enter the merged tree."""
        if isinstance(self.source, LevelSource):
            self.source.take(self._behind(step, self._spoken, self._speak))
            return
        assert isinstance(self.source, TreeSource)
        self.tree = self._behind(step, self._drafted, self._draft)
        self.source.take(self.tree)
        if self.drafter.reads_choices:
            self.riders = [node for node, candidate in enumerate(self.tree.candidate.tolist()) if not candidate]

    def _behind(
        self,
        step: VerifiedStep,
        plain: Callable[[VerifiedStep], Drafts],
        fast: Callable[[VerifiedStep], Drafts],
    ) -> Drafts:
        """What one way to draft says behind a step; fast: that way compiled, where it is."""
        if step.tree is None:  # a prompt has a length of its own and is not compiled for
            return plain(step)
        self._meet(step)
        return fast(self._as_seen(step))

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

    def draft_alone(self, step: VerifiedStep) -> DraftTree:
        """Take a step in; its own tree is the hybrid's, with its place among the sources."""
        tree = self.tree = self._behind(step, self._drafted, self._draft)
        return tree if self._marks else replace(tree, source=tree.source + self.place)

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
