"""TODO."""

from __future__ import annotations

from collections.abc import Callable

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

STRUCTURES = (
    "identity",
    "diagonal",
    "block",
    "full",
    "triangular",
    "kronecker",
    "scaled-kronecker",
    "ekfac",
    "eigen-kronecker",
)
DEFAULT_STRUCTURE = "eigen-kronecker"
Structure = str | Callable[[Layer], Operator]


class StructureBuilder:
    """Chooses the operator of each layer from a structure's name and the size limits."""

    def __init__(self, structure: Structure, block_size: int, max_factor_dim: int, split_conv: bool) -> None:
        self.structure, self.block_size = structure, block_size
        self.max_factor_dim, self.split_conv = max_factor_dim, split_conv
        self.notes: dict[str, str] = {}

    def build(self, layer: Layer) -> Operator:
        structure, shape = self.structure, layer.shape
        n = torch.Size(shape).numel()
        if callable(structure):
            operator = structure(layer)
            if operator.shape != shape:
                raise ValueError(
                    f"layer {layer.name!r} needs an operator of shape {shape}, got {operator.shape}"
                )
            return operator
        if structure == "identity":
            return Identity(shape)
        if structure == "diagonal" or not layer.is_matrix:
            return Diagonal(shape)
        if structure == "block":
            return Gram(shape, BlockFactor(n, self.block_size))
        if structure in ("full", "triangular"):
            if n <= self.max_factor_dim:
                return Gram(shape, FullFactor(n, triangular=structure == "triangular"))
            block = min(self.block_size, self.max_factor_dim)
            self._note(layer, f"n = {n} > max_factor_dim = {self.max_factor_dim}: blocks of {block}")
            return Gram(shape, BlockFactor(n, block))
        return Kronecker(
            self._side(layer, shape[0], "output"),
            self._side(layer, shape[1], "input"),
            outer=structure in ("scaled-kronecker", "eigen-kronecker"),
            inner=structure in ("ekfac", "eigen-kronecker"),
        )

    def _side(self, layer: Layer, dim: int, side: str) -> Factor:
        limit = self.max_factor_dim
        is_conv_input = side == "input" and layer.kernel > 1
        fits = max(layer.channels, layer.kernel) <= limit
        if is_conv_input and (self.split_conv or dim > limit) and fits:
            if not self.split_conv:
                self._note(
                    layer, f"{side} side {dim} > max_factor_dim = {limit}: split into channel ⊗ kernel"
                )
            return SplitFactor(layer.channels, layer.kernel, bias=layer.bias is not None)
        if dim <= limit:
            return FullFactor(dim)
        if dim <= 8 * limit:
            self._note(layer, f"{side} side {dim} > max_factor_dim = {limit}: blocks of {limit}")
            return BlockFactor(dim, limit)
        self._note(layer, f"{side} side {dim} > 8 × max_factor_dim = {8 * limit}: diagonal")
        return DiagonalFactor(dim)

    def _note(self, layer: Layer, text: str) -> None:
        self.notes[layer.name] = "; ".join(filter(None, [self.notes.get(layer.name), text]))


def structure_name(operator: Operator) -> str:
    if isinstance(operator, Kronecker):
        sides = f"{type(operator.L).__name__[:-6]}⊗{type(operator.R).__name__[:-6]}"
        outer = "D" if operator.log_d is not None else ""
        inner = "E²" if operator.log_e is not None else ""
        return f"{outer}({sides}){inner}"
    if isinstance(operator, Gram):
        return f"{type(operator.factor).__name__[:-6]} LLᵀ"
    return type(operator).__name__
