"""A diagonal factor, for sides that are too large for a matrix."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from fishleg.inverse.operators.factors.base import Factor, Moment


class DiagonalFactor(Factor):
    """S = diag(exp(log_s)), for a side that is too large for a full or block-diagonal factor.

    `moment` has one part: Σ y², [dim].

    Args:
        dim: The number of rows and columns.
    """

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.dim = dim
        self.log_s = nn.Parameter(torch.zeros(dim))

    def dense(self) -> Tensor:
        """Return S, [dim, dim]."""
        return torch.diag(self.log_s.exp())

    def apply_function(self, X: Tensor, function: Callable[[Tensor], Tensor], transpose: bool) -> Tensor:
        """Return f(S) x or f(S)ᵀ x for each row x of X [..., dim]."""
        return X * function(self.log_s.exp())

    def solve_matrix(self, X: Tensor) -> Tensor:
        """Return S⁻¹ x for each row x of X [..., dim]."""
        return X * (-self.log_s).exp()

    def solve_transpose(self, X: Tensor) -> Tensor:
        """Return S⁻ᵀ x for each row x of X [..., dim]."""
        return X * (-self.log_s).exp()

    @torch.no_grad()
    def inverse_transpose(self) -> Factor:
        """Return S⁻ᵀ in the same structure, without gradients."""
        result = DiagonalFactor(self.dim).to(self.log_s)
        result.log_s.copy_(-self.log_s)
        return result.requires_grad_(False)

    def moment(self, Y: Tensor) -> Moment:
        """Return the projected second moment of the rows of Y [N, dim]."""
        return (Y.square().sum(0),)

    def noise_moment(self, variances: Tensor) -> Moment:
        """Return the projection of Sᵀ diag(variances) S."""
        return (variances * (2 * self.log_s).exp(),)

    def eye_(self) -> None:
        """Set S = I."""
        with torch.no_grad():
            self.log_s.zero_()

    def scale_(self, factor: float) -> None:
        """Set S ← factor · S."""
        with torch.no_grad():
            self.log_s.add_(torch.tensor(factor, dtype=self.log_s.dtype).log())

    def natural_step_(self, moment: Moment, eta: float) -> None:
        """Set 1/s² ← (1−η)/s² + η c, the exact running average of the precision."""
        with torch.no_grad():  # moment = s² c
            self.log_s.sub_(0.5 * torch.log((1 - eta) + eta * moment[0]))

    def eigenbasis_(self, moment: Moment) -> Tensor:
        """Return the diagonal of the moment, [dim], after setting S = I: no other basis is diagonal."""
        self.eye_()
        return moment[0]
