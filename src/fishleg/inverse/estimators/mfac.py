"""Low-rank Q of M-FAC."""

from __future__ import annotations

import torch

from fishleg.inverse.estimators.problem import EstimationProblem
from fishleg.inverse.estimators.registry import Method
from fishleg.inverse.operators import LowRank, Operator


def estimate_low_rank(problem: EstimationProblem) -> dict[str, Operator]:
    """Return Q = (γI + mean hhᵀ)⁻¹ of each layer in low-rank form.

    M-FAC keeps its gradients by definition: memory is samples × parameters.

    Args:
        problem: The model and its data.

    Returns:
        The operator of each layer.
    """
    stored = list(problem.draw())
    return {
        layer.name: LowRank(layer.shape, torch.stack([h[layer.name] for h in stored]), problem.gamma)
        for layer in problem.layers
    }


METHOD = Method(estimate_low_rank)
