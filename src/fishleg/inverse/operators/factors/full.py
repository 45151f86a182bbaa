"""A factor without structure, or its lower triangle."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from fishleg.inverse.operators.factors.base import Factor, Moment
from fishleg.inverse.operators.factors.matrices import congruence, inverse, natural_matrix_step


class FullFactor(Factor):
    """S is any square matrix, or any lower triangular matrix.

    `moment` has one part: Σ y yᵀ, [dim, dim].

    Args:
        dim: The number of rows and columns.
        triangular: Whether S is lower triangular. The upper triangle of the parameter is then ignored.
    """

    def __init__(self, dim: int, *, triangular: bool = False) -> None:
        super().__init__()
        self.dim = dim
        self.triangular = triangular
        self.matrix = nn.Parameter(torch.eye(dim))

    def dense(self) -> Tensor:
        """Return S, [dim, dim]."""
        return self.matrix.tril() if self.triangular else self.matrix

    def apply_function(self, X: Tensor, function: Callable[[Tensor], Tensor], transpose: bool) -> Tensor:
        """Return f(S) x or f(S)ᵀ x for each row x of X [..., dim]."""
        S = function(self.dense())
        return X @ (S if transpose else S.mT)

    def left(self, X: Tensor) -> Tensor:
        """Return S X for X [..., dim, k]."""
        return self.dense() @ X

    def left_transpose(self, X: Tensor) -> Tensor:
        """Return Sᵀ X for X [..., dim, k]."""
        return self.dense().mT @ X

    @torch.no_grad()
    def inverse_transpose(self) -> Factor:
        """Return S⁻ᵀ in the same structure, without gradients."""
        result = FullFactor(self.dim).to(self.matrix)
        result.matrix.copy_(inverse(self.dense()).mT)
        return result.requires_grad_(False)

    def column_norms(self) -> Tensor:
        """Return the squared lengths of the columns of S, [dim]."""
        norms: Tensor = torch.linalg.vector_norm(self.dense(), dim=0)
        return norms.square()

    def moment(self, Y: Tensor) -> Moment:
        """Return the projected second moment of the rows of Y [N, dim]."""
        return (Y.mT @ Y,)

    def noise_moment(self, variances: Tensor) -> Moment:
        """Return the projection of Sᵀ diag(variances) S."""
        return (congruence(self.dense(), variances),)

    def eye_(self) -> None:
        """Set S = I."""
        with torch.no_grad():
            self.matrix.zero_().fill_diagonal_(1.0)

    def scale_(self, factor: float) -> None:
        """Set S ← factor · S."""
        with torch.no_grad():
            self.matrix.mul_(factor)

    def natural_step_(self, moment: Moment, eta: float) -> None:
        """Set S ← S (I − η/2 (M − I)), clipped."""
        with torch.no_grad():
            self.matrix.copy_(natural_matrix_step(self.dense(), moment[0], eta, triangular=self.triangular))

    def eigenbasis_(self, moment: Moment) -> Tensor:
        """Return the eigenvalues, [dim], after setting S to the eigenvectors."""
        if self.triangular:  # the identity is the only orthogonal triangular matrix, up to signs
            self.eye_()
            return moment[0].diagonal()
        with torch.no_grad():
            values: Tensor
            values, basis = torch.linalg.eigh(moment[0].double())
            self.matrix.copy_(basis)
        return values.to(self.matrix.dtype)
