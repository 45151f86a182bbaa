"""The inverse of F's diagonal."""

from __future__ import annotations

from fishleg.curvature.layers import Layer
from fishleg.inverse.estimators.problem import EstimationProblem
from fishleg.inverse.estimators.registry import Method
from fishleg.inverse.operators import Diagonal, Operator


def estimate_diagonal(problem: EstimationProblem, layers: list[Layer] | None = None) -> dict[str, Operator]:
    """Return Q = (diag(F) + γI)⁻¹ for every layer, from streamed samples.

    Args:
        problem: The model and its data.
        layers: The layers; default: those of the problem.

    Returns:
        The operator of each layer.
    """
    wanted = problem.layers if layers is None else layers
    operators: dict[str, Operator] = {layer.name: Diagonal(layer.shape) for layer in wanted}
    if not wanted:
        return operators
    for t, h in enumerate(problem.draw()):
        for name, operator in operators.items():
            operator.to(h[name]).natural_step_(h[name].unsqueeze(0), problem.gamma, 1 / (t + 1))
    return operators


METHOD = Method(estimate_diagonal)
