"""Q of EKFAC: the eigenbasis of KFAC with measured eigenvalues."""

from __future__ import annotations

from fishleg.inverse.estimators.kfac import diagonal_rest, full_kronecker, in_layer_order, kronecker_sides
from fishleg.inverse.estimators.problem import EstimationProblem
from fishleg.inverse.estimators.registry import Method
from fishleg.inverse.operators import Operator


def estimate_ekfac(problem: EstimationProblem) -> dict[str, Operator]:
    """Return EKFAC's Q: KFAC's eigenbasis with eigenvalues measured by samples in a second pass.

    Args:
        problem: The model and its data.

    Returns:
        The operator of each layer; diagonal where a layer has no Kronecker factors.
    """
    factors = kronecker_sides(problem)
    operators = diagonal_rest(problem, factors, "ekfac")
    for name, (output_side, input_side) in factors.items():
        operator = full_kronecker(output_side, input_side, inner=True)
        operator.eigenbasis_((output_side,), (input_side,), problem.gamma)
        operators[name] = operator
    for t, h in enumerate(problem.draw()):
        for name in factors:
            operators[name].natural_step_(h[name].unsqueeze(0), problem.gamma, 1 / (t + 1))
    return in_layer_order(problem, operators)


METHOD = Method(estimate_ekfac)
