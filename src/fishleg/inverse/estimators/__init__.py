"""How Q is estimated: the learned Q of the paper and the Q of every rival, by name."""

from __future__ import annotations

from fishleg.inverse.estimators.block import estimate_blocks
from fishleg.inverse.estimators.diagonal import estimate_diagonal, estimate_identity
from fishleg.inverse.estimators.estimate import estimate_inverse, make_problem
from fishleg.inverse.estimators.exact import check_sizes, estimate_exact
from fishleg.inverse.estimators.kronecker import estimate_ekfac, estimate_kfac
from fishleg.inverse.estimators.learned import learn_inverse
from fishleg.inverse.estimators.low_rank import estimate_low_rank
from fishleg.inverse.estimators.problem import EstimationProblem
from fishleg.inverse.estimators.registry import (
    Method,
    add_built_in,
    find_method,
    register_method,
    unregister_method,
)

add_built_in("magnitude", Method(estimate_identity, needs_gamma=False))
add_built_in("diagonal", Method(estimate_diagonal))
add_built_in("obert", Method(estimate_blocks))
add_built_in("mfac", Method(estimate_low_rank))
add_built_in("kfac", Method(estimate_kfac))
add_built_in("ekfac", Method(estimate_ekfac))
add_built_in("exact", Method(estimate_exact, check=check_sizes))

__all__ = [
    "EstimationProblem",
    "Method",
    "estimate_inverse",
    "find_method",
    "learn_inverse",
    "make_problem",
    "register_method",
    "unregister_method",
]
