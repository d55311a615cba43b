"""Says once that a head drafts too little in texts longer than those it was trained on."""

from __future__ import annotations

import logging
from dataclasses import dataclass

logger = logging.getLogger(__name__)

LEAST_BETA = 1.1
ENOUGH_STEPS = 256


@dataclass
class LongTexts:
    """Steps at places beyond `trained_length` tokens (0: unknown, nothing is counted), of all texts so far, and the
    tokens that they gave."""

    kind: str
    trained_length: int
    steps: int = 0
    tokens: int = 0
    told: bool = False

    def add(self, place: int, tokens: int) -> None:
        """Count a step after `place` tokens of a text that gave `tokens`."""
        if self.trained_length and place >= self.trained_length:
            self.set(self.steps + 1, self.tokens + tokens)

    def set(self, steps: int, tokens: int) -> None:
        """The counts so far; a warning, once, when `ENOUGH_STEPS` steps have a β below `LEAST_BETA`."""
        self.steps, self.tokens = steps, tokens
        if self.told:
            return
        if self.steps >= ENOUGH_STEPS and self.tokens < LEAST_BETA * self.steps:
            self.told = True
            logger.warning(
                "the %s head was trained on texts of up to %d tokens; beyond them a step gives %.2f tokens with its "
                "own drafts (%d steps so far), so drafting costs more than it saves: train on longer rows, or decode "
                "long texts without it",
                self.kind,
                self.trained_length,
                self.tokens / self.steps,
                self.steps,
            )
