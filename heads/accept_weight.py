"""Weights of a loss by how probable it is that a draft gets as far: `--accept_weight` α, for every head.

What decoding gains is the expected number of accepted drafts, Σ_u Ψ_u, Ψ_u the probability that a draft is right up to
its label u: the CTC prefix score of the labels, or Π_{j≤u} p_j(y_j) where each offset is a prediction of its own. In
its gradient the step of label u, −log Ψ_u / Ψ_{u−1}, weighs Ψ_u. So here the loss stays a sum over a window, in which
that step weighs

    w_u = max(stopgrad(Ψ_{u−1})^α, 0.05)

α = 0 is the plain loss; α = 1 the expectation for a single draft, where labels that it would never reach cost almost
nothing; a tree of drafts reaches more, so values between are for trees. The floor keeps later labels learning at first.
Weights are for training only: losses of held-out rows compare across α.

Worked example: Ψ_1 = .8, Ψ_2 = .4 and α = .5 give the weights 1, .894, .632.

Beyond the papers; the idea is D-PACE's (arXiv 2605.18810).
"""

from __future__ import annotations

from torch import Tensor

FLOOR = 0.05


def accept_weights(log_reached: Tensor, alpha: float) -> Tensor:
    """[…] the weight of the step after a prefix of this log-probability […], with no gradient."""
    return (alpha * log_reached.detach()).exp().clamp(min=FLOOR)
