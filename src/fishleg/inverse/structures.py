"""The structures of Q: functions that build the operator of one layer, from its shape and the size limits.

A new structure is an `Operator`, a function here that builds it, and one line in `fishleg.options.names`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from fishleg.curvature.layers import Layer
from fishleg.inverse.operators import (
    BlockFactor,
    Diagonal,
    DiagonalFactor,
    Factor,
    FullFactor,
    Gram,
    Identity,
    Kronecker,
    Operator,
    SplitFactor,
)
from fishleg.options.names import STRUCTURES

__all__ = [
    "DEFAULT_STRUCTURE",
    "STRUCTURES",
    "Structure",
    "StructureBuild",
    "StructureLimits",
    "build_operator",
    "register_structure",
    "structure_name",
    "unregister_structure",
]


@dataclass(frozen=True)
class StructureLimits:
    """The sizes that the operators of a model must respect.

    Attributes:
        block_size: The size of the blocks of a block-diagonal Q.
        max_factor_dim: The largest dimension of a full factor.
        split_conv: Whether every convolution's input side is split into channel ⊗ kernel.
    """

    block_size: int = 50
    max_factor_dim: int = 2048
    split_conv: bool = False


StructureBuild = Callable[[Layer, StructureLimits], Operator]
Structure = str | Callable[[Layer], Operator]

DEFAULT_STRUCTURE = "eigen-kronecker"


def register_structure(name: str, build: StructureBuild, *, vectors: StructureBuild | None = None) -> None:
    """Register a structure of Q under a name.

    Args:
        name: The name of the structure, as the option `structure` takes it.
        build: Builds the operator of a layer with a weight matrix, from the layer and the size limits. The
            operator's shape must be `layer.shape`.
        vectors: Builds the operator of the layer that holds all parameters without matrix structure.
            None: a diagonal operator.

    Raises:
        ValueError: The name is empty or already registered.
    """
    STRUCTURES.add(name, (build, vectors or _diagonal))


def unregister_structure(name: str) -> None:
    """Remove a structure that `register_structure` added.

    Args:
        name: The name of the structure.
    """
    STRUCTURES.remove(name)


def build_operator(structure: Structure, layer: Layer, limits: StructureLimits) -> Operator:
    """Build the operator of one layer.

    Args:
        structure: A registered name, or a function from a layer to its operator.
        layer: The layer.
        limits: The size limits. A function as `structure` does not see them.

    Returns:
        An operator on tensors of `layer.shape`.

    Raises:
        ValueError: The operator does not have the shape of the layer.
    """
    if callable(structure):
        operator = structure(layer)
    else:
        for_matrices, for_vectors = STRUCTURES.find(structure)
        operator = (for_matrices if layer.is_matrix else for_vectors)(layer, limits)
    if operator.shape != layer.shape:
        raise ValueError(
            f"layer {layer.name!r} needs an operator of shape {layer.shape}, got {operator.shape}"
        )
    return operator


def structure_name(operator: Operator) -> str:
    """Describe the structure of an operator in a few characters, such as `D(Full⊗Full)E²`.

    Args:
        operator: The operator.

    Returns:
        The description.
    """
    if isinstance(operator, Kronecker):
        sides = f"{_factor_name(operator.L)}⊗{_factor_name(operator.R)}"
        outer = "D" if operator.log_d is not None else ""
        inner = "E²" if operator.log_e is not None else ""
        return f"{outer}({sides}){inner}"
    if isinstance(operator, Gram):
        return f"{_factor_name(operator.factor)} LLᵀ"
    return type(operator).__name__


def _factor_name(factor: Factor) -> str:
    return type(factor).__name__.removesuffix("Factor")


def _identity(layer: Layer, limits: StructureLimits) -> Operator:
    return Identity(layer.shape)


def _diagonal(layer: Layer, limits: StructureLimits) -> Operator:
    return Diagonal(layer.shape)


def _block(layer: Layer, limits: StructureLimits) -> Operator:
    return Gram(layer.shape, BlockFactor(_size(layer), limits.block_size))


def _full(layer: Layer, limits: StructureLimits, *, triangular: bool = False) -> Operator:
    n, limit = _size(layer), limits.max_factor_dim
    if n <= limit:
        return Gram(layer.shape, FullFactor(n, triangular=triangular))
    block = min(limits.block_size, limit)
    operator = Gram(layer.shape, BlockFactor(n, block))
    operator.note = f"n = {n} > max_factor_dim = {limit}: blocks of {block}"
    return operator


def _kronecker(
    layer: Layer, limits: StructureLimits, *, outer: bool = False, inner: bool = False
) -> Operator:
    n_out, n_in = layer.shape
    L, note_out = _side(layer, n_out, "output", limits)
    R, note_in = _side(layer, n_in, "input", limits)
    operator = Kronecker(L, R, outer=outer, inner=inner)
    operator.note = "; ".join(filter(None, [note_out, note_in]))
    return operator


def _side(layer: Layer, dim: int, side: str, limits: StructureLimits) -> tuple[Factor, str]:
    """Return the richest factor within the limits for one side, and a note if it is not a full one."""
    limit = limits.max_factor_dim
    is_conv_input = side == "input" and layer.kernel > 1
    parts_fit = max(layer.channels, layer.kernel) <= limit
    if is_conv_input and (limits.split_conv or dim > limit) and parts_fit:
        note = f"{side} side {dim} > max_factor_dim = {limit}: split into channel ⊗ kernel"
        factor = SplitFactor(layer.channels, layer.kernel, bias=layer.bias is not None)
        return factor, "" if limits.split_conv else note
    if dim <= limit:
        return FullFactor(dim), ""
    if dim <= 8 * limit:
        return BlockFactor(dim, limit), f"{side} side {dim} > max_factor_dim = {limit}: blocks of {limit}"
    return DiagonalFactor(dim), f"{side} side {dim} > 8 × max_factor_dim = {8 * limit}: diagonal"


def _size(layer: Layer) -> int:
    return torch.Size(layer.shape).numel()


# How each built-in structure is made: for layers with a weight matrix, and for all other parameters.
IDENTITY = (_identity, _identity)
DIAGONAL = (_diagonal, _diagonal)
BLOCK = (_block, _diagonal)
FULL = (_full, _diagonal)
TRIANGULAR = (partial(_full, triangular=True), _diagonal)
KRONECKER = (_kronecker, _diagonal)
SCALED_KRONECKER = (partial(_kronecker, outer=True), _diagonal)
EKFAC = (partial(_kronecker, inner=True), _diagonal)
EIGEN_KRONECKER = (partial(_kronecker, outer=True, inner=True), _diagonal)
