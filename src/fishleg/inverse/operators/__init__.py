"""Q blocks: symmetric positive-definite operators on the parameters of one layer, one family per file."""

from __future__ import annotations

from fishleg.inverse.operators.base import Operator
from fishleg.inverse.operators.diagonal import Diagonal, Identity
from fishleg.inverse.operators.factors import BlockFactor, DiagonalFactor, Factor, FullFactor, SplitFactor
from fishleg.inverse.operators.gram import Gram
from fishleg.inverse.operators.kronecker import Kronecker
from fishleg.inverse.operators.low_rank import LowRank
from fishleg.inverse.operators.masked import Masked

__all__ = [
    "BlockFactor",
    "Diagonal",
    "DiagonalFactor",
    "Factor",
    "FullFactor",
    "Gram",
    "Identity",
    "Kronecker",
    "LowRank",
    "Masked",
    "Operator",
    "SplitFactor",
]
