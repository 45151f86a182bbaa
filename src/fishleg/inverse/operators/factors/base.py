"""The interface of a factor: a square matrix S that is cheap to apply, to square and to learn.

A factor acts on the last dimension of its argument: `apply_matrix(X)` maps every row x of X to S x. In a
Kronecker product, L is the factor of the output side of a weight matrix and R that of the input side.

Every structure has the same methods and never forms S in them. `dense()` is the definition of S.
`moment(Y)` is the second moment Σ y yᵀ, projected on the structure. It is the only statistic that the
natural step and the eigenbasis need.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
from torch import Tensor, nn

Moment = tuple[Tensor, ...]  # the parts depend on the structure; see `Factor.moment` of each class


class Factor(nn.Module, ABC):
    """A learnable square matrix S.

    Attributes:
        dim: The number of rows and columns of S.
    """

    dim: int

    @abstractmethod
    def dense(self) -> Tensor:
        """Form S as a dense matrix. This is the definition of the factor.

        Returns:
            S, [dim, dim].
        """

    @abstractmethod
    def apply_function(self, X: Tensor, function: Callable[[Tensor], Tensor], transpose: bool) -> Tensor:
        """Compute f(S) x, or f(S)ᵀ x, for each row x of a matrix; f acts on each entry of S.

        Args:
            X: The rows x, [..., dim].
            function: The function f, with f(0) = 0 and f(ab) = f(a)f(b): the identity or the square.
            transpose: Whether to apply f(S)ᵀ instead of f(S).

        Returns:
            The products, [..., dim].
        """

    @abstractmethod
    def moment(self, Y: Tensor) -> Moment:
        """Compute Σ y yᵀ over the rows of a matrix, projected on this structure.

        Args:
            Y: The rows y, [N, dim].

        Returns:
            The parts of the projected second moment.
        """

    @abstractmethod
    def noise_moment(self, variances: Tensor) -> Moment:
        """Compute Sᵀ diag(variances) S, projected on this structure.

        This is the expected `moment` of independent noise after whitening. Damping enters the natural step
        in this form.

        Args:
            variances: The variance of each coordinate, [dim].

        Returns:
            The parts of the projected second moment.
        """

    @abstractmethod
    def eye_(self) -> None:
        """Set S = I."""

    @abstractmethod
    def scale_(self, factor: float) -> None:
        """Set S ← factor · S.

        Args:
            factor: The number that multiplies S, > 0.
        """

    @abstractmethod
    def natural_step_(self, moment: Moment, eta: float) -> None:
        """Set S ← S (I − η/2 (M − I)), clipped so that S stays invertible.

        Args:
            moment: The whitened second moment M = SᵀCS, as `moment` returns it.
            eta: The step size η.
        """

    @abstractmethod
    def eigenbasis_(self, moment: Moment) -> Tensor:
        """Set S to the eigenvectors of a second moment.

        Args:
            moment: The second moment before whitening, as `moment` returns it.

        Returns:
            The eigenvalues, [dim].
        """

    @abstractmethod
    def inverse_transpose(self) -> Factor:
        """Compute S⁻ᵀ, the factor of (SSᵀ)⁻¹.

        Returns:
            A factor of the same structure, without gradients.
        """

    def apply_matrix(self, X: Tensor) -> Tensor:
        """Compute S x for each row x of a matrix.

        Args:
            X: The rows x, [..., dim].

        Returns:
            The products, [..., dim].
        """
        return self.apply_function(X, _unchanged, False)

    def apply_transpose(self, X: Tensor) -> Tensor:
        """Compute Sᵀ x for each row x of a matrix.

        Args:
            X: The rows x, [..., dim].

        Returns:
            The products, [..., dim].
        """
        return self.apply_function(X, _unchanged, True)

    def apply_squares(self, X: Tensor) -> Tensor:
        """Compute (S∘S) x for each row x of a matrix. With x = 1 this is diag(SSᵀ).

        Args:
            X: The rows x, [..., dim].

        Returns:
            The products, [..., dim].
        """
        return self.apply_function(X, torch.square, False)

    def solve_matrix(self, X: Tensor) -> Tensor:
        """Compute S⁻¹ x for each row x of a matrix.

        Args:
            X: The rows x, [..., dim].

        Returns:
            The solutions, [..., dim].
        """
        return _solve_rows(self.dense(), X)

    def solve_transpose(self, X: Tensor) -> Tensor:
        """Compute S⁻ᵀ x for each row x of a matrix.

        Args:
            X: The rows x, [..., dim].

        Returns:
            The solutions, [..., dim].
        """
        return _solve_rows(self.dense().mT, X)

    def left(self, X: Tensor) -> Tensor:
        """Compute the matrix product S X.

        Args:
            X: Matrices, [..., dim, k].

        Returns:
            S X, [..., dim, k].
        """
        return self.apply_matrix(X.mT).mT

    def left_transpose(self, X: Tensor) -> Tensor:
        """Compute the matrix product Sᵀ X.

        Args:
            X: Matrices, [..., dim, k].

        Returns:
            Sᵀ X, [..., dim, k].
        """
        return self.apply_transpose(X.mT).mT

    def left_squares(self, X: Tensor) -> Tensor:
        """Compute the matrix product (S∘S) X.

        Args:
            X: Matrices, [..., dim, k].

        Returns:
            (S∘S) X, [..., dim, k].
        """
        return self.apply_squares(X.mT).mT

    def gram_diag(self) -> Tensor:
        """Compute diag(SSᵀ).

        Returns:
            The diagonal, [dim].
        """
        return self.apply_squares(self.ones())

    def column_norms(self) -> Tensor:
        """Compute the squared lengths of the columns of S.

        Returns:
            The squared lengths, [dim].
        """
        return self.apply_function(self.ones(), torch.square, True)

    def ones(self) -> Tensor:
        """Make a vector of ones with the device and dtype of this factor.

        Returns:
            The ones, [dim].
        """
        reference = next(self.parameters())
        return torch.ones(self.dim, dtype=reference.dtype, device=reference.device)


def add_moments(a: Moment, b: Moment) -> Moment:
    """Add two moments of one factor.

    Args:
        a: The first moment.
        b: The second moment, of the same structure.

    Returns:
        The sum, part by part.
    """
    return tuple(x + y for x, y in zip(a, b, strict=True))


def _solve_rows(S: Tensor, X: Tensor) -> Tensor:
    flat = X.reshape(-1, X.shape[-1])
    solved: Tensor = torch.linalg.solve(S, flat.mT).mT
    return solved.reshape(X.shape)


def _unchanged(S: Tensor) -> Tensor:
    return S
