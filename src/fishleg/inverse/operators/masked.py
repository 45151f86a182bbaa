"""M Q M: a Q restricted to the parameters that are kept."""

from __future__ import annotations

import torch
from torch import Tensor

from fishleg.inverse.operators.base import Operator


class Masked(Operator):
    """M Q M with M = diag(mask), mask True where a parameter is kept.

    Positive definite on the kept parameters and exactly zero elsewhere. Masking alone does not turn
    (F+γI)⁻¹ into (F_MM+γI)⁻¹; minimising the auxiliary loss over M Q M does.
    """

    mask: Tensor

    def __init__(self, inner: Operator, mask: Tensor) -> None:
        super().__init__()
        if tuple(mask.shape) != inner.shape or mask.dtype != torch.bool:
            raise ValueError(
                f"mask must be boolean of shape {inner.shape}, got {mask.dtype} of shape {tuple(mask.shape)}"
            )
        self.shape = inner.shape
        self.inner = inner
        self.register_buffer("mask", mask.clone())

    @property
    def has_natural_step(self) -> bool:  # type: ignore[override]
        return self.inner.has_natural_step

    def dense(self) -> Tensor:
        keep = self.mask.flatten()
        return self.inner.dense() * keep[:, None] * keep[None, :]

    def matvec(self, V: Tensor) -> Tensor:
        return self.mask * self.inner.matvec(self.mask * V)

    def damped_matvec(self, V: Tensor, extra: float) -> Tensor:
        return self.mask * self.inner.damped_matvec(self.mask * V, extra)

    def solve(self, V: Tensor) -> Tensor:
        """The inverse on the kept parameters, where M Q M has one, and zero elsewhere."""
        keep, flat = self.mask.flatten(), self._flatten(V)
        kept = self.inner.dense()[keep][:, keep]
        solved = torch.linalg.solve(kept, flat[..., keep].unsqueeze(-1)).squeeze(-1)
        out = torch.zeros_like(flat).masked_scatter(keep.expand_as(flat), solved)
        return out.reshape(V.shape)

    def diag(self) -> Tensor:
        return self.mask * self.inner.diag()

    def inverse_diag(self) -> Tensor:
        """That of the inverse on the kept parameters; zero elsewhere."""
        keep = self.mask.flatten()
        kept: Tensor = torch.linalg.inv(self.inner.dense()[keep][:, keep])
        out = torch.zeros(self.n, dtype=kept.dtype, device=kept.device)
        return out.masked_scatter(keep, kept.diagonal()).reshape(self.shape)

    def entries(self, rows: Tensor, columns: Tensor) -> Tensor:
        keep = self.mask.flatten()
        return keep[rows] * keep[columns] * self.inner.entries(rows, columns)

    def set_scale_(self, scale: float) -> None:
        self.inner.set_scale_(scale)

    def natural_step_(self, H: Tensor, gamma: float, eta: float, mask: Tensor | None = None) -> None:
        self.inner.natural_step_(H, gamma, eta, self.mask if mask is None else mask & self.mask)
