"""Q blocks from m stored gradients, by the Woodbury identity: the form of M-FAC."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from fishleg.inverse.operators.base import Operator


class LowRank(Operator):
    """Q = (γI + GᵀG/m)⁻¹ = (I − Gᵀ (mγI + GGᵀ)⁻¹ G)/γ for m gradients G.

    Args:
        shape: The shape of one tensor that Q acts on.
        samples: The gradients G, [m, *shape].
        gamma: The damping γ, > 0.

    Raises:
        ValueError: `gamma` is not positive, or the samples do not have the shape.
    """

    def __init__(self, shape: Sequence[int], samples: Tensor, gamma: float) -> None:
        super().__init__()
        self.shape = tuple(shape)
        if gamma <= 0:
            raise ValueError(f"gamma must be > 0, got {gamma}")
        self.gamma = gamma
        self.samples = nn.Parameter(self._flatten(samples).clone())
        self._cache: tuple[tuple[int, int], Tensor] | None = None

    def dense(self) -> Tensor:
        """Return Q, [n, n]."""
        G = self.samples
        eye = torch.eye(self.n, dtype=G.dtype, device=G.device)
        inverse: Tensor = torch.linalg.inv(self.gamma * eye + G.mT @ G / len(G))
        return inverse

    def _cholesky(self) -> Tensor:
        """Return the Cholesky factor C of mγI + GGᵀ. Calls without gradients reuse the last one."""
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
        """Return Q v for each v of V [..., *shape]."""
        v = self._flatten(V).reshape(-1, self.n)
        correction = torch.cholesky_solve(self.samples @ v.mT, self._cholesky())
        return ((v - correction.mT @ self.samples) / self.gamma).reshape(V.shape)

    def solve(self, V: Tensor) -> Tensor:
        """Return Q⁻¹ v for each v of V [..., *shape]."""
        v, G = self._flatten(V).reshape(-1, self.n), self.samples
        return (self.gamma * v + (v @ G.mT) @ G / len(G)).reshape(V.shape)

    def _whitened_samples(self) -> Tensor:
        """Return C⁻¹G with CCᵀ = mγI + GGᵀ. Then Q = (I − (C⁻¹G)ᵀ(C⁻¹G))/γ."""
        whitened: Tensor = torch.linalg.solve_triangular(self._cholesky(), self.samples, upper=False)
        return whitened

    def diag(self) -> Tensor:
        """Return the diagonal of Q, [*shape]."""
        return ((1 - self._whitened_samples().square().sum(0)) / self.gamma).reshape(self.shape)

    def inverse_diag(self) -> Tensor:
        """Return diag(Q⁻¹), [*shape]."""
        return (self.gamma + self.samples.square().mean(0)).reshape(self.shape)

    def entries(self, rows: Tensor, columns: Tensor) -> Tensor:
        """Return Q[rows, columns] for flat indices of shapes that broadcast."""
        G_w = self._whitened_samples()
        rows, columns = torch.broadcast_tensors(rows, columns)
        inner = (G_w[:, rows] * G_w[:, columns]).sum(0)
        return ((rows == columns).to(G_w.dtype) - inner) / self.gamma
