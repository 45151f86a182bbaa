"""Magnitude pruning: Q = I."""

from __future__ import annotations

from fishleg.inverse.estimators.problem import EstimationProblem
from fishleg.inverse.estimators.registry import Method
from fishleg.inverse.operators import Identity, Operator
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


METHOD = Method(estimate_identity, needs_gamma=False, predicts=False)
