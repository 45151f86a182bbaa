"""Q blocks of the form S Sᵀ for any factor S, without Kronecker structure."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fishleg.inverse.operators.base import Operator
from fishleg.inverse.operators.factors import BlockFactor, Factor, FullFactor, add_moments


class Gram(Operator):
    """Q = S Sᵀ on the flattened parameters; S is full, triangular or block-diagonal.

    Args:
        shape: The shape of one tensor that Q acts on.
        factor: The factor S, of dimension prod(shape).

    Raises:
        ValueError: The dimension of the factor does not fit the shape.
    """

    has_natural_step = True

    def __init__(self, shape: Sequence[int], factor: Factor) -> None:
        super().__init__()
        self.shape = tuple(shape)
        if factor.dim != self.n:
            raise ValueError(f"factor of size {factor.dim} does not fit shape {self.shape} (n = {self.n})")
        self.factor = factor

    def dense(self) -> Tensor:
        """Return Q, [n, n]."""
        S = self.factor.dense()
        return S @ S.mT

    def matvec(self, V: Tensor) -> Tensor:
        """Return Q v for each v of V [..., *shape]."""
        return self.factor.apply_matrix(self.factor.apply_transpose(self._flatten(V))).reshape(V.shape)

    def solve(self, V: Tensor) -> Tensor:
        """Return Q⁻¹ v for each v of V [..., *shape]."""
        return self.factor.solve_transpose(self.factor.solve_matrix(self._flatten(V))).reshape(V.shape)

    def diag(self) -> Tensor:
        """Return the diagonal of Q, [*shape]."""
        return self.factor.gram_diag().reshape(self.shape)

    def inverse_diag(self) -> Tensor:
        """Return diag(Q⁻¹), [*shape]."""
        return self.factor.inverse_transpose().gram_diag().reshape(self.shape)

    def entries(self, rows: Tensor, columns: Tensor) -> Tensor:
        """Return Q[rows, columns] for flat indices of shapes that broadcast."""
        if not isinstance(self.factor, BlockFactor):
            return super().entries(rows, columns)
        S, size = self.factor.blocks(), self.factor.block  # [count, size, size]
        left, right = S[rows // size, rows % size], S[columns // size, columns % size]
        return (left * right).sum(-1) * (rows // size == columns // size)

    def set_scale_(self, scale: float) -> None:
        """Set Q = scale · I."""
        self.factor.eye_()
        self.factor.scale_(scale**0.5)

    def natural_step_(self, H: Tensor, gamma: float, eta: float, mask: Tensor | None = None) -> None:
        """Take one inverse-free step towards (F+γI)⁻¹ from samples H [g, *shape]."""
        with torch.no_grad():
            H = H.reshape(len(H), self.n)
            precision = torch.full_like(H[0], gamma)
            if mask is not None:
                H = H * mask.flatten()
                precision = torch.where(mask.flatten(), precision, 1 / self.diag().flatten())
            curvature = self.factor.moment(self.factor.apply_transpose(H / len(H) ** 0.5))
            self.factor.natural_step_(add_moments(curvature, self.factor.noise_moment(precision)), eta)

    @property
    def can_remove(self) -> bool:
        """Whether `remove_` is available. It needs a full square factor."""
        return isinstance(self.factor, FullFactor) and not self.factor.triangular

    def remove_(self, removed: Tensor) -> None:
        """Turn Q = (F+γI)⁻¹ into (F_MM+γI)⁻¹ on the kept parameters M, exactly (Schur complement).

        S ← S − S Π, where Π is the projector on the rows S_P of the removed parameters P. The removed rows
        of S become an orthonormal basis of Π times the mean row length. Then Q has no entries between kept
        and removed parameters and stays invertible.

        Args:
            removed: Boolean, True = removed, [*shape].

        Raises:
            NotImplementedError: The factor is not a full square matrix.
        """
        if not isinstance(self.factor, FullFactor) or self.factor.triangular:
            raise NotImplementedError("the exact downdate needs a full square factor")
        with torch.no_grad():
            S, P = self.factor.matrix, removed.flatten()
            scale = S.square().sum(-1).mean().sqrt()
            S_P = S[P]
            basis = torch.linalg.solve_triangular(torch.linalg.cholesky(S_P @ S_P.mT), S_P, upper=False)
            S.sub_((S @ basis.mT) @ basis)
            S[P] = scale * basis
