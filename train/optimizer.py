"""Muon for a head's weight matrices, AdamW for everything else, as one optimizer.

Muon follows the momentum of a matrix, orthogonalised by a few Newton–Schulz steps; the step is scaled to AdamW's size,
so one learning rate serves both. torch's own computes those steps in bfloat16 whatever the device, which a CPU without
bfloat16 arithmetic does a hundred times slower than float32; hence this one, in the gradient's own type on CPU.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

QUINTIC = (3.4445, -4.7750, 2.0315)
"""Coefficients of x ← a·x + b·x³ + c·x⁵: five rounds bring every singular value in (0, 1] near 1."""


def orthogonalised(matrix: Tensor, rounds: int = 5) -> Tensor:
    """[M, N] → [M, N] with the same singular vectors and all singular values between about 0.7 and 1.2."""
    a, b, c = QUINTIC
    x = matrix.bfloat16() if matrix.is_cuda else matrix
    x = x.T if matrix.shape[0] > matrix.shape[1] else x
    x = x / x.norm().clamp(min=1e-7)
    for _ in range(rounds):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.T if matrix.shape[0] > matrix.shape[1] else x).to(matrix.dtype)


class Muon(Optimizer):
    """Momentum with Nesterov's look-ahead, orthogonalised; decoupled weight decay. For matrices only."""

    def __init__(self, matrices: list[nn.Parameter], lr: float, weight_decay: float, momentum: float = 0.95) -> None:
        super().__init__(matrices, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            momentum = group["momentum"]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                if not self.state[parameter]:
                    self.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
                mean = self.state[parameter]["momentum_buffer"]
                mean.lerp_(parameter.grad, 1 - momentum)
                ahead = parameter.grad.lerp(mean, momentum)
                rms_of_adamw = 0.2 * max(parameter.shape) ** 0.5
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                parameter.add_(orthogonalised(ahead), alpha=-group["lr"] * rms_of_adamw)


def is_for_muon(name: str, parameter: Tensor, tables: tuple[str, ...]) -> bool:
    """Muon updates 2-D weights that are not embeddings or vocabulary matrices.

    tables: the endings of those matrices' names
    """
    return parameter.dim() == 2 and not name.endswith(tables)


class MuonWithAdamW(Optimizer):
    """Muon for the parameters that `is_for_muon` names, AdamW for the rest; state and groups are those of the two."""

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, nn.Parameter]],
        tables: tuple[str, ...],
        lr: float,
        weight_decay: float,
        betas: tuple[float, float],
        eps: float = 1e-8,
    ) -> None:
        named = [(name, parameter) for name, parameter in named_parameters if parameter.requires_grad]
        chosen = [p for name, p in named if is_for_muon(name, p, tables)]
        rest = [p for name, p in named if not is_for_muon(name, p, tables)]
        if not chosen:
            raise ValueError(
                "--head_optimizer muon updates the matrices of a head beside its vocabulary tables, and this head has "
                "none; pass --head_optimizer adamw, with its --learning_rate and --weight_decay"
            )
        self.parts: tuple[Optimizer, ...] = ()
        super().__init__(chosen + rest, {"lr": lr})
        muon = (Muon(chosen, lr, weight_decay),) if chosen else ()
        adamw = (AdamW(rest, lr=lr, weight_decay=0.0, betas=betas, eps=eps),) if rest else ()
        self.parts = (*muon, *adamw)

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
