"""What a drafter has not been told yet of a text, to be told in one go."""

from __future__ import annotations

import torch
from torch import Tensor

from inference.drafters.base import VerifiedStep

HELD = 32
"""Steps whose memory is held at most; what counts of them is then put together elsewhere."""


class Untold:
    """The end of a text: its tokens, and the target's hidden state at each.

    Were all steps held, each would have to work in memory that none has used of late: on a CPU the target would take
    20 µs longer. Shapes: A rows of a step, H hidden, N tokens of several steps or of a prompt.

    behind  tokens behind a prompt
    """

    def __init__(self) -> None:
        self.behind = 0
        self._text: list[int] = []  # its tokens and the one that follows them
        self._states: list[Tensor] = []  # [N, H] each
        self._held: list[tuple[Tensor, int]] = []  # behind those: [A, H], and how many of these rows count

    def __len__(self) -> int:
        """Tokens whose states are known."""
        return max(0, len(self._text) - 1)

    def clear(self) -> None:
        """Another text begins, or this one has been told."""
        self.behind, self._text, self._states, self._held = 0, [], [], []

    def add(self, step: VerifiedStep, new: list[int]) -> None:
        """One step more; new: as `text.committed` says."""
        if step.tree is None:
            self._text, self._states = [*new], [step.hidden]
            return
        if not self._text:
            self._text.append(int(step.tokens[0]))
        self._text += new
        self.behind += len(new)
        self._held.append((step.hidden, len(new)))
        if len(self._held) >= HELD:
            self._states.append(torch.cat([hidden[:count] for hidden, count in self._held]))
            self._held.clear()

    def take(self, size: int | None = None) -> VerifiedStep:
        """All of it as one step of `size` rows (None: as many as there are), as if it had been one; then it is told."""
        count, text = len(self), self._text
        spare = 0 if size is None else size - count
        states = [*self._states, *(hidden[:kept] for hidden, kept in self._held)]
        hidden = torch.cat([*states, *[states[-1][-1:]] * spare])  # spare rows repeat the last one
        tokens, next_tokens = text[:-1] + text[-2:-1] * spare, text[1:] + text[-1:] * spare
        self.clear()
        device = hidden.device
        told = torch.tensor(tokens, device=device), torch.tensor(next_tokens, device=device)
        return VerifiedStep(*told, hidden, torch.tensor(count, device=device))
