"""Moved to fishleg.options."""

from fishleg.options import AuxiliaryOptions
from fishleg.options.names import EMPIRICAL_METHODS, ESTIMATORS, METHODS
from fishleg.options.pruning import DAMPING, MASK_SEARCH_DAMPING, ROW_DAMPING

__all__ = ["DAMPING", "EMPIRICAL_METHODS", "ESTIMATORS", "MASK_SEARCH_DAMPING", "METHODS", "ROW_DAMPING", "AuxiliaryOptions"]
