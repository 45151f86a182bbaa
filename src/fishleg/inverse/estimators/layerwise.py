"""Layer-wise methods: the change of each layer's own outputs is the loss. Wanda, SparseGPT and ALPS.

For the loss ½E‖ΔW a‖² of a layer with inputs a, F = I ⊗ A with A = E[aaᵀ], which needs forward passes only.
SparseGPT's Q is I ⊗ (A + λI)⁻¹ (Frantar and Alistarh, 2023); Wanda keeps its diagonal, so that the score of a
weight is w²·E[a²] up to a factor (Sun et al., 2024). λ is `relative_damping` times the mean of A's diagonal,
layer by layer, because nothing makes the layers comparable: use a pattern that treats layers alike, such as
"layer" or "2:4". ALPS (Meng et al., 2024) has the Q of SparseGPT; its masks come from ADMM, which is in
`fishleg.pruning.admm`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fishleg.curvature.kronecker_factors import input_factors
from fishleg.inverse.estimators.magnitude import estimate_identity
from fishleg.inverse.estimators.problem import EstimationProblem
from fishleg.inverse.estimators.registry import Method
from fishleg.inverse.estimators.roots import inverse_root
from fishleg.inverse.operators import Diagonal, DiagonalFactor, FullFactor, Kronecker, Operator
from fishleg.options.pruning import DAMPING
from fishleg.runtime.process_group import get_logger

logger = get_logger(__name__)
_SMALLEST = 1e-8  # Wanda has no damping; this keeps inputs that are always zero finite


def estimate_wanda(problem: EstimationProblem) -> dict[str, Operator]:
    """Return Q = I ⊗ diag(A)⁻¹ for every layer.

    Args:
        problem: The model and its data.

    Returns:
        The operator of each layer; the identity where a layer's inputs are not known.
    """
    operators = estimate_identity(problem)
    for name, (side, shape) in _inputs(problem, "wanda").items():
        operator = Diagonal(shape).to(side)
        diagonal = side.diagonal()
        with torch.no_grad():
            damped = diagonal + _SMALLEST * diagonal.mean().clamp(min=1e-30)
            operator.log_q.copy_(-damped.log().expand(shape))
        operators[name] = operator
    return operators


def estimate_sparsegpt(problem: EstimationProblem) -> dict[str, Operator]:
    """Return Q = I ⊗ (A + λI)⁻¹ for every layer.

    Args:
        problem: The model and its data.

    Returns:
        The operator of each layer; the identity where a layer's inputs are not known.
    """
    relative = problem.options.relative_damping
    relative = DAMPING if relative is None else relative
    operators = estimate_identity(problem)
    for name, (side, shape) in _inputs(problem, "sparsegpt").items():
        damped = side + relative * side.diagonal().mean() * torch.eye(len(side)).to(side)
        operator = Kronecker(DiagonalFactor(shape[0]), FullFactor(len(side)), outer=False, inner=False)
        operator.to(side)
        assert isinstance(operator.R, FullFactor)
        with torch.no_grad():
            operator.R.matrix.copy_(inverse_root(damped))
        operators[name] = operator
    return operators


def _inputs(problem: EstimationProblem, method: str) -> dict[str, tuple[Tensor, tuple[int, ...]]]:
    """Return the input side and the shape of every layer whose inputs are known; warn about the others."""
    found = input_factors(
        problem.model, problem.layers, problem.pieces(), forward=problem.forward,
        batch_statistics=problem.uses_batch_statistics,
    )  # fmt: skip
    unknown = [layer.name for layer in problem.layers if layer.name not in found]
    if unknown:
        logger.warning("%s knows no inputs of %s: magnitudes are used there", method, ", ".join(unknown))
    shapes = {layer.name: tuple(layer.shape) for layer in problem.layers}
    return {name: (side, shapes[name]) for name, side in found.items()}


WANDA = Method(estimate_wanda, needs_gamma=False, predicts=False)
SPARSEGPT = Method(estimate_sparsegpt, needs_gamma=False, predicts=False)
ALPS = SPARSEGPT
