"""Compensation: the update of a layer's kept weights that makes up for the removed ones.

The update δ minimises ½ δᵀ Q⁻¹ δ subject to δ_P = −w_P. This is the quadratic model of the loss increase
when the weights P are removed. Paper: eq. (obs), which removes one weight.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fishleg.inverse.operators import Masked, Operator
from fishleg.options.names import COMPENSATIONS


@dataclass(frozen=True)
class Compensation:
    """The update of a layer and the loss increase that Q predicts for it.

    Args:
        delta: The update δ, [n_out, n_in].
        predicted: The predicted loss increase.
        multipliers: The Lagrange multipliers of δ_P = −w_P, [n_out, n_in], zero for the kept weights. Only
            the method "joint" has them.
    """

    delta: Tensor
    predicted: float
    multipliers: Tensor | None = None


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
    """Return the update that removes weights and lets the kept weights compensate.

    The methods are:

    - joint: δ = −Q E_P (Q_PP)⁻¹ w_P, the optimum, by conjugate gradients with a Jacobi preconditioner. They
      may not converge if Q has little damping.
    - independent: the sum of the single-weight OBS updates, scaled to the length that is best under Q.
    - sum: the same sum without scaling, as published. It over-corrects at high sparsity.
    - none: the weights are removed, and nothing else changes.

    Paper: eq. (obs).

    Args:
        w: The weights of a layer, [n_out, n_in].
        q: The layer's Q.
        removed: The weights to remove, boolean [n_out, n_in].
        method: "joint", "independent", "sum" or "none".
        iterations: The largest number of conjugate-gradient iterations.
        tolerance: The relative error at which conjugate gradients stop.
        settle: Whether a solution that has not converged is checked: its loss increase is computed
            exactly, and the independent update is returned if it is better. Otherwise `predicted` is a
            lower bound of the optimum.

    Returns:
        The update and its predicted loss increase.

    Raises:
        ValueError: The method is unknown.
    """
    multipliers = None
    if method not in COMPENSATIONS:
        raise ValueError(f"compensation must be one of {', '.join(COMPENSATIONS)}, got {method!r}")
    w_P = torch.where(removed, w, torch.zeros_like(w))
    if method == "joint":
        x, converged = solve_removed(q, removed, w_P, iterations=iterations, tolerance=tolerance)
        multipliers = x
        delta = -q.matvec(x)
        # x·w_P − ½ xᵀQx is the dual value. It is never above the optimum, and its error is of second order
        # in the error of x.
        predicted = float((x * w_P).sum() + 0.5 * (x * delta).sum())
        if settle and not converged:
            delta = torch.where(removed, -w, delta)
            predicted, rough = _quadratic(q, delta), compensate(w, q, removed, "independent")
            if rough.predicted < predicted:
                return rough
    elif method == "none":
        delta, predicted = -w_P, _quadratic(q, -w_P)
    else:
        # δ = δ_none + s·δ_kept, where s minimises the quadratic model; s = 1 for a single weight
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
    """Solve Q_PP x = target_P by conjugate gradients with a Jacobi preconditioner.

    Args:
        q: The layer's Q.
        removed: The set P, boolean [n_out, n_in].
        target: The right-hand side, [n_out, n_in]; zero outside P.
        iterations: The largest number of iterations.
        tolerance: The relative error, in the norm of the preconditioner, at which the iterations stop.

    Returns:
        x, [n_out, n_in], zero outside P; and whether the error is within the tolerance.
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
    """Return Q⁻¹ v; for M Q M its inverse on the kept weights, without forming the matrix."""
    if isinstance(q, Masked):
        return solve_removed(q.inner, q.mask, v, iterations=200, tolerance=1e-5)[0]
    return q.solve(v)
