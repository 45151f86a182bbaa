"""How Q is estimated: the learned Q of the paper and the Q of every rival, one file per method.

`fishleg.options.names.METHODS` lists the methods with their files.
"""

from __future__ import annotations

from fishleg.inverse.estimators.estimate import estimate_inverse, make_problem
from fishleg.inverse.estimators.learned import learn_inverse
from fishleg.inverse.estimators.problem import EstimationProblem
from fishleg.inverse.estimators.registry import Method, find_method, register_method, unregister_method

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
