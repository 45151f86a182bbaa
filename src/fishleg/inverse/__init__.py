"""What Q is: operators, the whole-model inverse Fisher, its learning, and the estimators of the rivals."""

from __future__ import annotations

from fishleg.inverse.auxiliary import Auxiliary, AuxiliaryStats
from fishleg.inverse.estimators import (
    EstimationProblem,
    estimate_inverse,
    find_method,
    learn_inverse,
    make_problem,
    register_method,
    unregister_method,
)
from fishleg.inverse.inverse_fisher import InverseFisher
from fishleg.inverse.inverse_updater import InverseUpdater
from fishleg.inverse.structures import register_structure

__all__ = [
    "Auxiliary",
    "AuxiliaryStats",
    "EstimationProblem",
    "InverseFisher",
    "InverseUpdater",
    "estimate_inverse",
    "find_method",
    "learn_inverse",
    "make_problem",
    "register_method",
    "register_structure",
    "unregister_method",
]
