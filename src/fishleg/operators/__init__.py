"""What a Q block is: symmetric positive-definite operators with a common, small interface."""

from fishleg.operators.base import Operator
from fishleg.operators.factors import BlockFactor, DiagonalFactor, Factor, FullFactor, SplitFactor
from fishleg.operators.kronecker import Kronecker
from fishleg.operators.lowrank import LowRank
from fishleg.operators.masked import Masked
from fishleg.operators.simple import Diagonal, Gram, Identity

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
