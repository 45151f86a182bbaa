"""The factors S of a Q block S Sᵀ or of a Kronecker product: square matrices, one family per file."""

from __future__ import annotations

from fishleg.inverse.operators.factors.base import Factor, Moment, add_moments
from fishleg.inverse.operators.factors.block import BlockFactor
from fishleg.inverse.operators.factors.diagonal import DiagonalFactor
from fishleg.inverse.operators.factors.full import FullFactor
from fishleg.inverse.operators.factors.split import SplitFactor

__all__ = [
    "BlockFactor",
    "DiagonalFactor",
    "Factor",
    "FullFactor",
    "Moment",
    "SplitFactor",
    "add_moments",
]
