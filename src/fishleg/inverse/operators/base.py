"""The interface of a Q block: a symmetric positive-definite operator on the parameters of one layer.

An operator acts on tensors whose trailing dimensions are `shape`. Leading dimensions are a batch.
`dense()` defines the operator. The base class derives every other method from `dense()`, slowly, so that a
new structure needs nothing else. The subclasses override the methods that their structure makes cheap. The
tests compare the values and gradients of each override with the derived form.

A learned operator can also have an inverse-free natural step (`natural_step_`): one step on
½ Tr(Q F_γ) − ½ log det Q, in coordinates where the Hessian of this objective is the identity.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor, nn

_COLUMNS_AT_A_TIME = 256  # of Q in `frobenius_sq`: bounds the memory of the derived form
_MAX_CONJUGATE_GRADIENT_STEPS = 300


class Operator(nn.Module, ABC):
    """A symmetric positive-definite matrix Q on tensors of `shape`, with n = prod(shape) parameters.

    Attributes:
        shape: The shape of one tensor that Q acts on.
        has_natural_step: Whether `natural_step_` is available.
        note: How the structure was simplified to respect the size limits; empty where it was not.
    """

    shape: tuple[int, ...]
    has_natural_step = False
    note: str = ""

    @abstractmethod
    def dense(self) -> Tensor:
        """Form Q as a dense matrix. This is the definition of the operator.

        Returns:
            Q, [n, n].
        """

    @property
    def n(self) -> int:
        """The number of parameters that Q acts on."""
        return int(torch.Size(self.shape).numel())

    def matvec(self, V: Tensor) -> Tensor:
        """Compute Q v for each v of a batch.

        Args:
            V: The vectors v, [..., *shape].

        Returns:
            Q v, [..., *shape].
        """
        flat = self._flatten(V)
        return (flat @ self.dense()).reshape(V.shape)

    def damped_matvec(self, V: Tensor, extra_damping: float) -> Tensor:
        """Compute (Q⁻¹ + extra_damping·I)⁻¹ v for each v of a batch: Q with additional damping.

        The base class solves Q (I + extra_damping·Q)⁻¹ v by conjugate gradients and never forms a matrix.

        Args:
            V: The vectors v, [..., *shape].
            extra_damping: The additional damping, ≥ 0.

        Returns:
            The products, [..., *shape].
        """
        x = torch.zeros_like(V)
        residual = direction = V
        residual_sq = residual.square().sum()
        tolerance = torch.finfo(V.dtype).eps ** 2 * residual_sq
        for _ in range(_MAX_CONJUGATE_GRADIENT_STEPS):
            if not bool(residual_sq > tolerance):
                break
            product = direction + extra_damping * self.matvec(direction)
            step = residual_sq / (direction * product).sum()
            x = x + step * direction
            residual = residual - step * product
            residual_sq, previous = residual.square().sum(), residual_sq
            direction = residual + (residual_sq / previous) * direction
        return self.matvec(x)

    def solve(self, V: Tensor) -> Tensor:
        """Compute Q⁻¹ v for each v of a batch. If Q is exact, this is F_γ v.

        Args:
            V: The vectors v, [..., *shape].

        Returns:
            Q⁻¹ v, [..., *shape].
        """
        flat = self._flatten(V)
        solved: Tensor = torch.linalg.solve(self.dense(), flat.unsqueeze(-1)).squeeze(-1)
        return solved.reshape(V.shape)

    def diag(self) -> Tensor:
        """Compute the diagonal of Q.

        Returns:
            The diagonal, [*shape].
        """
        return self.dense().diagonal().reshape(self.shape)

    def inverse_diag(self) -> Tensor:
        """Compute diag(Q⁻¹). If Q is exact, this is the diagonal of F_γ.

        It is not meant for training: an implementation may return a result without gradients.

        Returns:
            The diagonal, [*shape].
        """
        inverse: Tensor = torch.linalg.inv(self.dense())
        return inverse.diagonal().reshape(self.shape)

    def trace(self) -> Tensor:
        """Compute Tr(Q).

        Returns:
            The trace, a scalar tensor.
        """
        return self.diag().sum()

    def loss_terms(self, V: Tensor) -> tuple[Tensor, Tensor]:
        """Compute Σ‖Q v‖² over a batch and Tr(Q), the two terms of the auxiliary loss.

        One method computes both, because most structures can share work between them.

        Args:
            V: The vectors v, [..., *shape].

        Returns:
            Σ‖Q v‖² and Tr(Q), scalar tensors.
        """
        return self.matvec(V).square().sum(), self.trace()

    def frobenius_sq(self) -> Tensor:
        """Compute ‖Q‖_F² = Σ_i ‖Q e_i‖², in groups of columns unless the structure has a closed form.

        Returns:
            The squared Frobenius norm, a scalar tensor.
        """
        reference = self.diag()
        total = torch.zeros((), dtype=reference.dtype, device=reference.device)
        for start in range(0, self.n, _COLUMNS_AT_A_TIME):
            index = torch.arange(start, min(start + _COLUMNS_AT_A_TIME, self.n), device=reference.device)
            columns = nn.functional.one_hot(index, self.n).to(reference.dtype)
            total = total + self.matvec(columns.reshape(-1, *self.shape)).square().sum()
        return total

    def entries(self, rows: Tensor, columns: Tensor) -> Tensor:
        """Compute the entries Q[rows, columns].

        Args:
            rows: Flat row indices, of any shape.
            columns: Flat column indices, of a shape that broadcasts with `rows`.

        Returns:
            The entries, in the broadcast shape.
        """
        return self.dense()[rows, columns]

    def blocks(self, groups: Tensor) -> Tensor:
        """Compute the principal blocks Q[g, g] for groups g of parameters.

        Args:
            groups: Flat indices, one group per row, [G, k].

        Returns:
            The blocks, [G, k, k].
        """
        return self.entries(groups.unsqueeze(-1), groups.unsqueeze(-2))

    def set_scale_(self, scale: float) -> None:
        """Set Q = scale · I, the initialisation of the paper.

        Paper: section (subsec:qinit).

        Args:
            scale: The multiple of the identity, > 0.

        Raises:
            NotImplementedError: The structure cannot represent a multiple of the identity.
        """
        raise NotImplementedError(f"{type(self).__name__} has no scaled-identity initialisation")

    def natural_step_(self, H: Tensor, gamma: float, eta: float, mask: Tensor | None = None) -> None:
        """Take one inverse-free step towards (F+γI)⁻¹.

        With a mask the target is (F_MM + γI)⁻¹ on the kept parameters. The removed parameters then
        enter with their current precision 1/Q_ii, so that they do not change the shared factors.

        Args:
            H: Samples h with E[hhᵀ] = F, [g, *shape].
            gamma: The damping γ.
            eta: The step size η in (0, 1].
            mask: Boolean, True = kept, [*shape]; None keeps all parameters.

        Raises:
            NotImplementedError: The structure has no natural step.
        """
        raise NotImplementedError(f"{type(self).__name__} has no natural step")

    def _flatten(self, V: Tensor) -> Tensor:
        batch = V.shape[: V.dim() - len(self.shape)]
        if V.shape[len(batch) :] != self.shape:
            raise ValueError(f"expected a tensor ending in shape {self.shape}, got {tuple(V.shape)}")
        return V.reshape(*batch, self.n)
