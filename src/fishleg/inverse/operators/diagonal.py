"""Q blocks that are diagonal: a multiple of the identity, and any positive diagonal."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from fishleg.inverse.operators.base import Operator


class Identity(Operator):
    """Q = scale · I. It is not learned. With scale 1 the OBS score w²/2Q_ii is that of magnitude pruning.

    Args:
        shape: The shape of one tensor that Q acts on.
        scale: The multiple of the identity, > 0.
    """

    scale: Tensor

    def __init__(self, shape: Sequence[int], scale: float = 1.0) -> None:
        super().__init__()
        self.shape = tuple(shape)
        self.register_buffer("scale", torch.tensor(float(scale)))

    def dense(self) -> Tensor:
        """Return Q, [n, n]."""
        return self.scale * torch.eye(self.n, dtype=self.scale.dtype, device=self.scale.device)

    def matvec(self, V: Tensor) -> Tensor:
        """Return Q v for each v of V [..., *shape]."""
        return self.scale * V

    def solve(self, V: Tensor) -> Tensor:
        """Return Q⁻¹ v for each v of V [..., *shape]."""
        return V / self.scale

    def diag(self) -> Tensor:
        """Return the diagonal of Q, [*shape]."""
        return self.scale.expand(self.shape)

    def inverse_diag(self) -> Tensor:
        """Return diag(Q⁻¹), [*shape]."""
        return 1 / self.diag()

    def frobenius_sq(self) -> Tensor:
        """Return ‖Q‖_F²."""
        return self.scale.square() * self.n

    def entries(self, rows: Tensor, columns: Tensor) -> Tensor:
        """Return Q[rows, columns] for flat indices of shapes that broadcast."""
        return (rows == columns) * self.scale

    def set_scale_(self, scale: float) -> None:
        """Set Q = scale · I."""
        self.scale.fill_(scale)


class Diagonal(Operator):
    """Q = diag(exp(log_q)), for normalisation layers, biases and other parameters that form no matrix.

    Args:
        shape: The shape of one tensor that Q acts on.
    """

    has_natural_step = True

    def __init__(self, shape: Sequence[int]) -> None:
        super().__init__()
        self.shape = tuple(shape)
        self.log_q = nn.Parameter(torch.zeros(self.shape))

    def dense(self) -> Tensor:
        """Return Q, [n, n]."""
        return torch.diag(self.log_q.exp().flatten())

    def matvec(self, V: Tensor) -> Tensor:
        """Return Q v for each v of V [..., *shape]."""
        return self.log_q.exp() * V

    def damped_matvec(self, V: Tensor, extra_damping: float) -> Tensor:
        """Return (Q⁻¹ + extra_damping·I)⁻¹ v for each v of V [..., *shape]."""
        return V / ((-self.log_q).exp() + extra_damping)

    def solve(self, V: Tensor) -> Tensor:
        """Return Q⁻¹ v for each v of V [..., *shape]."""
        return V * (-self.log_q).exp()

    def diag(self) -> Tensor:
        """Return the diagonal of Q, [*shape]."""
        return self.log_q.exp()

    def inverse_diag(self) -> Tensor:
        """Return diag(Q⁻¹), [*shape]."""
        return (-self.log_q).exp()

    def frobenius_sq(self) -> Tensor:
        """Return ‖Q‖_F²."""
        return (2 * self.log_q).exp().sum()

    def entries(self, rows: Tensor, columns: Tensor) -> Tensor:
        """Return Q[rows, columns] for flat indices of shapes that broadcast."""
        return (rows == columns) * self.log_q.exp().flatten()[rows]

    def set_scale_(self, scale: float) -> None:
        """Set Q = scale · I."""
        with torch.no_grad():
            self.log_q.fill_(scale).log_()

    def natural_step_(self, H: Tensor, gamma: float, eta: float, mask: Tensor | None = None) -> None:
        """Set 1/q ← (1−η)/q + η (h² + γ), the exact running average of the precision."""
        with torch.no_grad():
            ratio = self.log_q.exp() * (H.square().mean(0) + gamma)  # 1 at the fixed point
            if mask is not None:
                ratio = torch.where(mask, ratio, 1.0)
            self.log_q.sub_(torch.log((1 - eta) + eta * ratio))
