"""(γI + GᵀG/m)⁻¹ from m stored gradients, by the Woodbury identity: M-FAC's form."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from fishleg.inverse.operators.base import Operator


class LowRank(Operator):
    """Q = (γI + GᵀG/m)⁻¹ = (I − Gᵀ (mγI + GGᵀ)⁻¹ G)/γ for G [m, *shape]."""

    def __init__(self, shape: Sequence[int], samples: Tensor, gamma: float) -> None:
        super().__init__()
        self.shape = tuple(shape)
        if gamma <= 0:
            raise ValueError(f"gamma must be > 0, got {gamma}")
        self.gamma = gamma
        self.samples = nn.Parameter(self._flatten(samples).clone())
        self._cache: tuple[tuple[int, int], Tensor] | None = None

    def dense(self) -> Tensor:
        G = self.samples
        eye = torch.eye(self.n, dtype=G.dtype, device=G.device)
        inverse: Tensor = torch.linalg.inv(self.gamma * eye + G.mT @ G / len(G))
        return inverse

    def _cholesky(self) -> Tensor:
        """The Cholesky factor of mγI + GGᵀ, kept between calls that need no gradient."""
        G = self.samples
        key = (G._version, G.data_ptr())
        if not torch.is_grad_enabled() and self._cache is not None and self._cache[0] == key:
            return self._cache[1]
        inner = G @ G.mT + len(G) * self.gamma * torch.eye(len(G), dtype=G.dtype, device=G.device)
        factor: Tensor = torch.linalg.cholesky(inner)
        if not torch.is_grad_enabled():
            self._cache = (key, factor)
        return factor

    def matvec(self, V: Tensor) -> Tensor:
        v = self._flatten(V).reshape(-1, self.n)
        correction = torch.cholesky_solve(self.samples @ v.mT, self._cholesky())
        return ((v - correction.mT @ self.samples) / self.gamma).reshape(V.shape)

    def solve(self, V: Tensor) -> Tensor:
        v, G = self._flatten(V).reshape(-1, self.n), self.samples
        return (self.gamma * v + (v @ G.mT) @ G / len(G)).reshape(V.shape)

    def _half(self) -> Tensor:
        """C⁻¹G with CCᵀ = mγI + GGᵀ, so that Q = (I − (C⁻¹G)ᵀ(C⁻¹G))/γ."""
        half: Tensor = torch.linalg.solve_triangular(self._cholesky(), self.samples, upper=False)
        return half

    def diag(self) -> Tensor:
        return ((1 - self._half().square().sum(0)) / self.gamma).reshape(self.shape)

    def inverse_diag(self) -> Tensor:
        return (self.gamma + self.samples.square().mean(0)).reshape(self.shape)

    def entries(self, rows: Tensor, columns: Tensor) -> Tensor:
        half = self._half()
        rows, columns = torch.broadcast_tensors(rows, columns)
        inner = (half[:, rows] * half[:, columns]).sum(0)
        return ((rows == columns).to(half.dtype) - inner) / self.gamma
