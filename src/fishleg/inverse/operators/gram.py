"""Q blocks without Kronecker structure: identity, diagonal, and S Sᵀ for any factor S."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fishleg.inverse.operators.base import Operator
from fishleg.inverse.operators.factors import Factor, FullFactor, add_moments


class Gram(Operator):
    """Q = S Sᵀ on the flattened parameters, S any factor: full, triangular, or block-diagonal."""

    has_natural_step = True

    def __init__(self, shape: Sequence[int], factor: Factor) -> None:
        super().__init__()
        self.shape = tuple(shape)
        if factor.dim != self.n:
            raise ValueError(f"factor of size {factor.dim} does not fit shape {self.shape} (n = {self.n})")
        self.factor = factor

    def dense(self) -> Tensor:
        S = self.factor.dense()
        return S @ S.mT

    def matvec(self, V: Tensor) -> Tensor:
        return self.factor.apply_matrix(self.factor.apply_transpose(self._flatten(V))).reshape(V.shape)

    def solve(self, V: Tensor) -> Tensor:
        return self.factor.solve_transpose(self.factor.solve_matrix(self._flatten(V))).reshape(V.shape)

    def diag(self) -> Tensor:
        return self.factor.gram_diag().reshape(self.shape)

    def inverse_diag(self) -> Tensor:
        return self.factor.inverse_transpose().gram_diag().reshape(self.shape)

    def set_scale_(self, scale: float) -> None:
        self.factor.eye_()
        self.factor.scale_(scale**0.5)

    def natural_step_(self, H: Tensor, gamma: float, eta: float, mask: Tensor | None = None) -> None:
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
        """Whether `remove_` is available: a full square factor."""
        return isinstance(self.factor, FullFactor) and not self.factor.triangular

    def remove_(self, removed: Tensor) -> None:
        """Exact downdate to the inverse of F_γ without the removed parameters (Schur complement).

        L ← L − L Π with Π the projector on the rows of L_P; then Q_MM = (F_MM+γI)⁻¹. The removed rows become
        an orthonormal basis of Π times the mean scale, so that Q decouples them and stays invertible.
        """
        if not isinstance(self.factor, FullFactor) or self.factor.triangular:
            raise NotImplementedError("the exact downdate needs a full square factor")
        with torch.no_grad():
            L, P = self.factor.matrix, removed.flatten()
            scale = L.square().sum(-1).mean().sqrt()
            L_P = L[P]
            basis = torch.linalg.solve_triangular(torch.linalg.cholesky(L_P @ L_P.mT), L_P, upper=False)
            L.sub_((L @ basis.mT) @ basis)
            L[P] = scale * basis
