"""Q blocks: symmetric positive-definite operators, one per layer of the model.

A Q acts on tensors whose trailing dimensions are `shape`; leading dimensions are a batch.
`dense()` defines an operator. The base class derives every other method from it, slowly, so that a
new structure needs nothing else; the subclasses here override with what their structure makes cheap,
and the tests compare each override, values and gradients, with the derived form.

Learned operators also know one inverse-free natural step (`natural_step_`): one step of
½ Tr(Q F_γ) − ½ log det Q in the coordinates where its Hessian is the identity.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor, nn


class Operator(nn.Module, ABC):
    """A symmetric positive-definite matrix Q on tensors of `shape`, n = prod(shape)."""

    shape: tuple[int, ...]
    has_natural_step = False

    @abstractmethod
    def dense(self) -> Tensor:
        """Q as an [n, n] matrix: the definition."""

    @property
    def n(self) -> int:
        """The number of parameters that Q acts on."""
        return int(torch.Size(self.shape).numel())

    def matvec(self, V: Tensor) -> Tensor:
        """Q v for each v of V [..., *shape]."""
        flat = self._flatten(V)
        return (flat @ self.dense()).reshape(V.shape)

    def damped_matvec(self, V: Tensor, extra: float) -> Tensor:
        """(Q⁻¹ + extra·I)⁻¹ v for each v of V: Q as if learned with so much more damping."""
        # = Q (I + extra·Q)⁻¹ v, by conjugate gradients: nothing is formed
        x = torch.zeros_like(V)
        residual = direction = V
        rr = residual.square().sum()
        limit = torch.finfo(V.dtype).eps ** 2 * rr
        for _ in range(300):
            if not bool(rr > limit):
                break
            product = direction + extra * self.matvec(direction)
            step = rr / (direction * product).sum()
            x = x + step * direction
            residual = residual - step * product
            rr, old = residual.square().sum(), rr
            direction = residual + (rr / old) * direction
        return self.matvec(x)

    def solve(self, V: Tensor) -> Tensor:
        """Q⁻¹ v for each v of V [..., *shape]: F_γ v where Q is exact."""
        flat = self._flatten(V)
        solved: Tensor = torch.linalg.solve(self.dense(), flat.unsqueeze(-1)).squeeze(-1)
        return solved.reshape(V.shape)

    def diag(self) -> Tensor:
        """diag(Q), [*shape]."""
        return self.dense().diagonal().reshape(self.shape)

    def inverse_diag(self) -> Tensor:
        """diag(Q⁻¹), [*shape]: the diagonal of F_γ where Q is exact. Not for training: gradients may lack."""
        inverse: Tensor = torch.linalg.inv(self.dense())
        return inverse.diagonal().reshape(self.shape)

    def trace(self) -> Tensor:
        """Tr(Q)."""
        return self.diag().sum()

    def loss_terms(self, V: Tensor) -> tuple[Tensor, Tensor]:
        """(Σ‖Q v‖² over the batch, Tr(Q)): what the auxiliary loss needs, sharing work where possible."""
        return self.matvec(V).square().sum(), self.trace()

    def frobenius_sq(self) -> Tensor:
        """‖Q‖_F² = Σ_i ‖Q e_i‖², column by column unless the structure has a closed form."""
        reference = self.diag()
        total = torch.zeros((), dtype=reference.dtype, device=reference.device)
        for start in range(0, self.n, 256):
            index = torch.arange(start, min(start + 256, self.n), device=reference.device)
            columns = nn.functional.one_hot(index, self.n).to(reference.dtype)
            total = total + self.matvec(columns.reshape(-1, *self.shape)).square().sum()
        return total

    def entries(self, rows: Tensor, columns: Tensor) -> Tensor:
        """Q[rows, columns] for flat indices of any (equal, or broadcastable) shape."""
        return self.dense()[rows, columns]

    def blocks(self, groups: Tensor) -> Tensor:
        """The principal blocks Q[g, g] for each row g of groups [G, k] of flat indices: [G, k, k]."""
        return self.entries(groups.unsqueeze(-1), groups.unsqueeze(-2))

    def set_scale_(self, scale: float) -> None:
        """Set Q = scale · I, the paper's initialisation."""
        raise NotImplementedError(f"{type(self).__name__} has no scaled-identity initialisation")

    def natural_step_(self, H: Tensor, gamma: float, eta: float, mask: Tensor | None = None) -> None:
        """One inverse-free step towards (F+γI)⁻¹ from samples H [g, *shape] with E[hhᵀ] = F.

        With a mask (True = kept), towards (F_MM + γI)⁻¹ on the kept parameters; the removed ones take
        part as if already exact, so that they neither pull nor push the shared factors.
        """
        raise NotImplementedError(f"{type(self).__name__} has no natural step")

    def _flatten(self, V: Tensor) -> Tensor:
        batch = V.shape[: V.dim() - len(self.shape)]
        if V.shape[len(batch) :] != self.shape:
            raise ValueError(f"expected a tensor ending in shape {self.shape}, got {tuple(V.shape)}")
        return V.reshape(*batch, self.n)
