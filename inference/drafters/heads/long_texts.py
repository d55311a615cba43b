"""Says once that a head drafts too little in texts longer than those it was trained on."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

logger = logging.getLogger(__name__)

LEAST_BETA = 1.1
ENOUGH_STEPS = 256


@dataclass
class LongTexts:
    """Steps at places beyond `trained_length` tokens (0: unknown, nothing is counted), of all texts so far."""

    kind: str
    trained_length: int
    steps: int = 0
    tokens: int = 0
    told: bool = False

    def add(self, prompt_tokens: int, accept_lengths: Sequence[int]) -> None:
        """Count the steps of an answer; a warning when they are `ENOUGH_STEPS` with a β below `LEAST_BETA`."""
        if not self.trained_length or self.told:
            return
        place = prompt_tokens
        for number, length in enumerate(accept_lengths):
            if number and place >= self.trained_length:
                self.steps, self.tokens = self.steps + 1, self.tokens + length
            place += length
        if self.steps >= ENOUGH_STEPS and self.tokens < LEAST_BETA * self.steps:
            self.told = True
            logger.warning(
                "the %s head was trained on texts of up to %d tokens; beyond them a step gives %.2f tokens (%d steps "
                "so far), so drafting costs more than it saves: train on longer rows, or decode long texts without it",
                self.kind,
                self.trained_length,
                self.tokens / self.steps,
                self.steps,
            )
