"""M Q M: a Q block restricted to the kept parameters."""

from __future__ import annotations

import torch
from torch import Tensor

from fishleg.inverse.operators.base import Operator


class Masked(Operator):
    """M Q M with M = diag(mask), mask True where a parameter is kept.

    The operator is positive definite on the kept parameters and exactly zero elsewhere. Masking alone does
    not turn (F+γI)⁻¹ into (F_MM+γI)⁻¹. Minimising the auxiliary loss over M Q M does.

    Args:
        inner: The operator Q before the restriction.
        mask: Boolean, [*shape].

    Raises:
        ValueError: The mask is not boolean or does not have the shape of `inner`.
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
        """Whether the inner operator has a natural step."""
        return self.inner.has_natural_step

    def dense(self) -> Tensor:
        """Return Q, [n, n]."""
        keep = self.mask.flatten()
        return self.inner.dense() * keep[:, None] * keep[None, :]

    def matvec(self, V: Tensor) -> Tensor:
        """Return Q v for each v of V [..., *shape]."""
        return self.mask * self.inner.matvec(self.mask * V)

    def damped_matvec(self, V: Tensor, extra_damping: float) -> Tensor:
        """Return (Q⁻¹ + extra_damping·I)⁻¹ v for each v of V [..., *shape]."""
        return self.mask * self.inner.damped_matvec(self.mask * V, extra_damping)

    def solve(self, V: Tensor) -> Tensor:
        """Return the inverse on the kept parameters times v, and zero elsewhere."""
        keep, flat = self.mask.flatten(), self._flatten(V)
        kept = self.inner.dense()[keep][:, keep]
        solved = torch.linalg.solve(kept, flat[..., keep].unsqueeze(-1)).squeeze(-1)
        out = torch.zeros_like(flat).masked_scatter(keep.expand_as(flat), solved)
        return out.reshape(V.shape)

    def diag(self) -> Tensor:
        """Return the diagonal of Q, [*shape]."""
        return self.mask * self.inner.diag()

    def inverse_diag(self) -> Tensor:
        """Return the diagonal of the inverse on the kept parameters, and zero elsewhere."""
        keep = self.mask.flatten()
        kept: Tensor = torch.linalg.inv(self.inner.dense()[keep][:, keep])
        out = torch.zeros(self.n, dtype=kept.dtype, device=kept.device)
        return out.masked_scatter(keep, kept.diagonal()).reshape(self.shape)

    def entries(self, rows: Tensor, columns: Tensor) -> Tensor:
        """Return Q[rows, columns] for flat indices of shapes that broadcast."""
        keep = self.mask.flatten()
        return keep[rows] * keep[columns] * self.inner.entries(rows, columns)

    def set_scale_(self, scale: float) -> None:
        """Set Q = scale · I."""
        self.inner.set_scale_(scale)

    def natural_step_(self, H: Tensor, gamma: float, eta: float, mask: Tensor | None = None) -> None:
        """Take one inverse-free step towards (F+γI)⁻¹ from samples H [g, *shape]."""
        self.inner.natural_step_(H, gamma, eta, self.mask if mask is None else mask & self.mask)
