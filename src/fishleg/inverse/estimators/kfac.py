"""Kronecker-factored Q of KFAC."""

from __future__ import annotations

import torch
from torch import Tensor

from fishleg.curvature.kronecker_factors import Factors, kronecker_factors
from fishleg.inverse.estimators.diagonal import estimate_diagonal
from fishleg.inverse.estimators.problem import EstimationProblem
from fishleg.inverse.estimators.registry import Method
from fishleg.inverse.estimators.roots import inverse_root
from fishleg.inverse.operators import FullFactor, Kronecker, Operator
from fishleg.runtime.process_group import get_logger

logger = get_logger(__name__)


def estimate_kfac(problem: EstimationProblem) -> dict[str, Operator]:
    """Return KFAC's Q = (G + √γ/π)⁻¹ ⊗ (A + √γ·π)⁻¹ for every layer.

    Args:
        problem: The model and its data.

    Returns:
        The operator of each layer; diagonal where a layer has no Kronecker factors.
    """
    factors = kronecker_sides(problem)
    operators = diagonal_rest(problem, factors, "kfac")
    for name, sides in factors.items():
        operators[name] = _kfac(*sides, problem.gamma)
    return in_layer_order(problem, operators)


def kronecker_sides(problem: EstimationProblem) -> Factors:
    """Return the Kronecker factors of every layer that has some.

    Args:
        problem: The model and its data.

    Returns:
        By layer name, the second moments of the output gradients and of the inputs.
    """
    return kronecker_factors(
        problem.model, problem.layers, problem.pieces(), problem.likelihood, forward=problem.forward,
        generator=problem.generator, batch_statistics=problem.uses_batch_statistics,
        removed_rows=problem.removed_rows,
    )  # fmt: skip


def diagonal_rest(problem: EstimationProblem, factors: Factors, method: str) -> dict[str, Operator]:
    """Return a diagonal Q for the layers without Kronecker factors, with a warning.

    Args:
        problem: The model and its data.
        factors: The layers that have factors.
        method: The name of the method, for the warning.

    Returns:
        The operators of the other layers.
    """
    rest = [layer for layer in problem.layers if layer.name not in factors]
    if unknown := [layer.name for layer in rest if layer.is_matrix]:
        logger.warning("%s has no factors for %s: Q is diagonal there", method, ", ".join(unknown))
    return estimate_diagonal(problem, rest)


def in_layer_order(problem: EstimationProblem, operators: dict[str, Operator]) -> dict[str, Operator]:
    """Return operators in the order of the problem's layers.

    Args:
        problem: The layers.
        operators: Their operators in any order.

    Returns:
        The same operators.
    """
    return {layer.name: operators[layer.name] for layer in problem.layers}


def _kfac(output_side: Tensor, input_side: Tensor, gamma: float) -> Kronecker:
    """Return KFAC's Q; π² is the ratio of the factors' mean eigenvalues (Martens and Grosse)."""
    operator = full_kronecker(output_side, input_side, inner=False)
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


def full_kronecker(output_side: Tensor, input_side: Tensor, *, inner: bool) -> Kronecker:
    """Return a Kronecker operator with full factors of the given sizes.

    Args:
        output_side: A matrix of the size of the output side, [n_out, n_out].
        input_side: A matrix of the size of the input side, [n_in, n_in].
        inner: Whether it has an inner diagonal E².

    Returns:
        The operator, in the dtype and on the device of the matrices.
    """
    sides = FullFactor(len(output_side)), FullFactor(len(input_side))
    return Kronecker(*sides, outer=False, inner=inner).to(output_side)


METHOD = Method(estimate_kfac)
