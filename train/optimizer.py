"""Muon for a head's weight matrices, AdamW for everything else, as one optimizer.

Muon (momentum, orthogonalised by Newton–Schulz) is torch's own; its step is scaled to AdamW's size, so one learning
rate serves both. On small targets it reaches a given loss in a fraction of AdamW's steps (docs/results.md).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.optim import AdamW, Muon, Optimizer


class MuonWithAdamW(Optimizer):
    """Muon for two-dimensional parameters of `matrices`, AdamW for the rest; state and groups are those of the two."""

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, nn.Parameter]],
        matrices: Callable[[str], bool],
        lr: float,
        weight_decay: float,
        betas: tuple[float, float],
    ) -> None:
        named = [(name, parameter) for name, parameter in named_parameters if parameter.requires_grad]
        chosen = [p for name, p in named if p.dim() == 2 and matrices(name)]
        rest = [p for name, p in named if not (p.dim() == 2 and matrices(name))]
        self.parts: tuple[Optimizer, ...] = ()
        super().__init__(chosen + rest, {"lr": lr})
        self.parts = (
            Muon(chosen, lr=lr, weight_decay=weight_decay, adjust_lr_fn="match_rms_adamw"),
            AdamW(rest, lr=lr, weight_decay=0.0, betas=betas),
        )

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return [group for part in self.parts for group in part.param_groups]

    @param_groups.setter
    def param_groups(self, value: Any) -> None:
        """The parts own their groups; what the base class would set is theirs already."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        with torch.no_grad():
            for part in self.parts:
                part.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        for part in self.parts:
            part.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        return {"parts": [part.state_dict() for part in self.parts]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for part, state in zip(self.parts, state_dict["parts"]):
            part.load_state_dict(state)
