"""Kronecker-factored Q: KFAC and EKFAC."""

from __future__ import annotations

import logging

import torch
from torch import Tensor

from fishleg.curvature.kronecker_factors import Factors, kronecker_factors
from fishleg.inverse.estimators.diagonal import estimate_diagonal
from fishleg.inverse.estimators.problem import EstimationProblem
from fishleg.inverse.estimators.roots import inverse_root
from fishleg.inverse.operators import FullFactor, Kronecker, Operator

logger = logging.getLogger(__name__)


def estimate_kfac(problem: EstimationProblem) -> dict[str, Operator]:
    """Return KFAC's Q = (G + √γ/π)⁻¹ ⊗ (A + √γ·π)⁻¹ for every layer.

    Args:
        problem: The model and its data.

    Returns:
        The operator of each layer; diagonal where a layer has no Kronecker factors.
    """
    factors = _factors(problem)
    operators = _diagonal_rest(problem, factors, "kfac")
    for name, sides in factors.items():
        operators[name] = _kfac(*sides, problem.gamma)
    return _in_order(problem, operators)


def estimate_ekfac(problem: EstimationProblem) -> dict[str, Operator]:
    """Return EKFAC's Q: KFAC's eigenbasis with eigenvalues measured by samples in a second pass.

    Args:
        problem: The model and its data.

    Returns:
        The operator of each layer; diagonal where a layer has no Kronecker factors.
    """
    factors = _factors(problem)
    operators = _diagonal_rest(problem, factors, "ekfac")
    for name, (output_side, input_side) in factors.items():
        operator = _full_kronecker(output_side, input_side, inner=True)
        operator.eigenbasis_((output_side,), (input_side,), problem.gamma)
        operators[name] = operator
    for t, h in enumerate(problem.draw()):
        for name in factors:
            operators[name].natural_step_(h[name].unsqueeze(0), problem.gamma, 1 / (t + 1))
    return _in_order(problem, operators)


def _factors(problem: EstimationProblem) -> Factors:
    return kronecker_factors(
        problem.model, problem.layers, problem.pieces(), problem.likelihood, forward=problem.forward,
        generator=problem.generator, batch_statistics=problem.uses_batch_statistics,
        removed_rows=problem.removed_rows,
    )  # fmt: skip


def _diagonal_rest(problem: EstimationProblem, factors: Factors, method: str) -> dict[str, Operator]:
    rest = [layer for layer in problem.layers if layer.name not in factors]
    if unknown := [layer.name for layer in rest if layer.is_matrix]:
        logger.warning("%s has no factors for %s: Q is diagonal there", method, ", ".join(unknown))
    return estimate_diagonal(problem, rest)


def _in_order(problem: EstimationProblem, operators: dict[str, Operator]) -> dict[str, Operator]:
    return {layer.name: operators[layer.name] for layer in problem.layers}


def _kfac(output_side: Tensor, input_side: Tensor, gamma: float) -> Kronecker:
    """Return KFAC's Q; π² is the ratio of the factors' mean eigenvalues (Martens and Grosse)."""
    operator = _full_kronecker(output_side, input_side, inner=False)
    pi = float(((input_side.diagonal().mean()) / output_side.diagonal().mean().clamp(min=1e-30)).sqrt())
    pi = min(max(pi, 1e-6), 1e6)
    with torch.no_grad():
        for factor, matrix, damping in (
            (operator.L, output_side, gamma**0.5 / pi),
            (operator.R, input_side, gamma**0.5 * pi),
        ):
            assert isinstance(factor, FullFactor)
            factor.matrix.copy_(inverse_root(matrix + damping * torch.eye(len(matrix)).to(matrix)))
    return operator


def _full_kronecker(output_side: Tensor, input_side: Tensor, *, inner: bool) -> Kronecker:
    sides = FullFactor(len(output_side)), FullFactor(len(input_side))
    return Kronecker(*sides, outer=False, inner=inner).to(output_side)
