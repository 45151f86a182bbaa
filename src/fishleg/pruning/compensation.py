"""Use Q to prune: OBS saliency and the compensation of what is removed, layer by layer.

Everything here minimises ½ δᵀ Q⁻¹ δ subject to δ_P = −w_P, the quadratic model of the loss increase when
the weights P are deleted. Paper: eqs. (obs), (obs_score).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fishleg.inverse.operators import Masked, Operator
from fishleg.options.names import COMPENSATIONS


@dataclass(frozen=True)
class Compensation:
    """The update δ of a layer and the loss increase that Q predicts for it."""

    delta: Tensor
    predicted: float
    multipliers: Tensor | None = None  # of the constraints δ_P = −w_P, zero on what is kept; joint only


def compensate(
    w: Tensor,
    q: Operator,
    removed: Tensor,
    method: str = "joint",
    *,
    iterations: int = 50,
    tolerance: float = 1e-4,
    settle: bool = True,
) -> Compensation:
    """The update that deletes the weights `removed` (boolean, shaped as w) and makes up for it.

    joint: δ = −Q E_P (Q_PP)⁻¹ w_P, the optimum, by Jacobi-preconditioned conjugate gradients. Where these
    have not converged (a Q with hardly any damping) the loss increase is that of the update they got to, or
    of the independent one where that is lower; without `settle` it is their lower bound of the optimum's.
    independent: the sum of single-weight OBS updates, shortened to the length that is best under Q.
    sum: that sum as published (it over-corrects at high sparsity). none: deletion alone.
    """
    multipliers = None
    if method not in COMPENSATIONS:
        raise ValueError(f"compensation must be one of {', '.join(COMPENSATIONS)}, got {method!r}")
    w_P = torch.where(removed, w, torch.zeros_like(w))
    if method == "joint":
        x, converged = solve_removed(q, removed, w_P, iterations=iterations, tolerance=tolerance)
        multipliers = x
        delta = -q.matvec(x)
        # x·w_P − ½ xᵀQx: the dual value, never above the optimum, with an error of second order in CG's
        predicted = float((x * w_P).sum() + 0.5 * (x * delta).sum())
        if settle and not converged:
            delta = torch.where(removed, -w, delta)
            predicted, rough = _quadratic(q, delta), compensate(w, q, removed, "independent")
            if rough.predicted < predicted:
                return rough
    elif method == "none":
        delta, predicted = -w_P, _quadratic(q, -w_P)
    else:
        # δ = δ_none + s·δ_kept; s minimises the quadratic model, s = 1 for a single weight
        step = -q.matvec(w_P / q.diag().clamp(min=torch.finfo(w.dtype).tiny))
        step = torch.where(removed, torch.zeros_like(step), step)
        if method == "independent":
            curvature = _inverse_times(q, step)
            scale = float((w_P * curvature).sum() / (step * curvature).sum().clamp(min=1e-38))
            step = step * min(max(scale, 0.0), 1.0)
        delta = step - w_P
        predicted = _quadratic(q, delta)
    delta = torch.where(removed, -w, delta)  # exactly zero after w + δ
    return Compensation(delta, predicted, multipliers)


def solve_removed(
    q: Operator, removed: Tensor, target: Tensor, *, iterations: int = 50, tolerance: float = 1e-4
) -> tuple[Tensor, bool]:
    """x with support P and Q_PP x = target_P, by conjugate gradients with a Jacobi preconditioner.

    Also whether it is there: the error, in the preconditioner's norm, is within the tolerance.
    """
    zero = torch.zeros_like(target)
    inverse_diagonal = torch.where(removed, 1 / q.diag().clamp(min=torch.finfo(target.dtype).tiny), zero)
    x = inverse_diagonal * target
    residual = torch.where(removed, target - q.matvec(x), zero)
    z = inverse_diagonal * residual
    direction, rz = z, (residual * z).sum()
    limit = tolerance**2 * (target * inverse_diagonal * target).sum()
    for _ in range(iterations):
        if not bool(rz > limit):
            break
        product = torch.where(removed, q.matvec(direction), zero)
        alpha = rz / (direction * product).sum()
        x = x + alpha * direction
        residual = residual - alpha * product
        z = inverse_diagonal * residual
        rz, old = (residual * z).sum(), rz
        direction = z + (rz / old) * direction
    return x, not bool(rz > limit)


def _quadratic(q: Operator, delta: Tensor) -> float:
    return 0.5 * float((delta * _inverse_times(q, delta)).sum())


def _inverse_times(q: Operator, v: Tensor) -> Tensor:
    """Q⁻¹ v; for M Q M its inverse on what is kept, without forming it."""
    if isinstance(q, Masked):
        return solve_removed(q.inner, q.mask, v, iterations=200, tolerance=1e-5)[0]
    return q.solve(v)
