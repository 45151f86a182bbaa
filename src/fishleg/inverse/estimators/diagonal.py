"""Q = I (magnitude pruning) and the inverse of F's diagonal."""

from __future__ import annotations

from fishleg.curvature.layers import Layer
from fishleg.inverse.estimators.problem import EstimationProblem
from fishleg.inverse.operators import Diagonal, Identity, Operator
from fishleg.runtime.tensors import at_least_float32


def estimate_identity(problem: EstimationProblem) -> dict[str, Operator]:
    """Return Q = I for every layer: scores are squared weights.

    Args:
        problem: The model; no data are read.

    Returns:
        The operator of each layer.
    """
    parameters = dict(problem.model.named_parameters())
    weights = {layer.name: at_least_float32(parameters[layer.weight].detach()) for layer in problem.layers}
    return {layer.name: Identity(layer.shape).to(weights[layer.name]) for layer in problem.layers}


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
