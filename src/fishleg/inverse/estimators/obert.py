"""Block-diagonal Q of WoodFisher and oBERT."""

from __future__ import annotations

import torch
from torch import Tensor

from fishleg.inverse.estimators.problem import EstimationProblem
from fishleg.inverse.estimators.registry import Method
from fishleg.inverse.estimators.roots import inverse_root
from fishleg.inverse.operators import BlockFactor, Gram, Operator

_BLOCKS_AT_A_TIME = 4096  # float64 copies of all blocks would take several times their memory


def estimate_blocks(problem: EstimationProblem) -> dict[str, Operator]:
    """Return Q = (γI + mean hhᵀ)⁻¹ within blocks of `block_size` weights.

    This is what the Woodbury recursion of WoodFisher and oBERT yields. Only the sums of the blocks are
    stored, never the samples.

    Args:
        problem: The model and its data.

    Returns:
        The operator of each layer.
    """
    operators = {
        layer.name: Gram(
            layer.shape, BlockFactor(torch.Size(layer.shape).numel(), problem.options.block_size)
        )
        for layer in problem.layers
    }
    moments: dict[str, Tensor] = {}
    count = 0
    for h in problem.draw():
        count += 1
        for name, operator in operators.items():
            (moment,) = operator.factor.moment(h[name].reshape(1, -1))
            moments[name] = moments[name].add_(moment) if name in moments else moment
    for name, operator in operators.items():
        assert isinstance(operator.factor, BlockFactor)
        damped = moments.pop(name).div_(count)
        damped.diagonal(dim1=-2, dim2=-1).add_(problem.gamma)
        operator.to(damped)
        with torch.no_grad():
            parts = damped.split(_BLOCKS_AT_A_TIME), operator.factor.matrix.split(_BLOCKS_AT_A_TIME)
            for part, root in zip(*parts, strict=True):
                root.copy_(inverse_root(part))
    return dict(operators)


METHOD = Method(estimate_blocks)
