"""The part of the learning of one layer's Q that needs no Adam: the warm start and natural steps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from fishleg.inverse.operators import Kronecker, Operator
from fishleg.options import AuxiliaryOptions


class WarmStart:
    """The warm start and the natural steps of one layer.

    - D(L⊗R)E²(L⊗R)ᵀD: the eigenvectors of second moments become L and R, as in EKFAC. From then on E² is a
      running average, while Adam refines the rest.
    - Other Kronecker forms: natural steps with η = 4/(t+8), then Adam.
    - Diagonal, block-diagonal and full Q: natural steps only. Their fixed point is the minimum of the
      auxiliary loss.

    Args:
        operator: The operator of the layer, without its mask.
        options: The options of the learning.

    Attributes:
        has_inner: Whether the operator has the diagonal E².
        natural_only: Whether the operator only takes natural steps and never a step of Adam.
        count: The number of steps taken.
    """

    def __init__(self, operator: Operator, options: AuxiliaryOptions) -> None:
        self.operator = operator
        self.set_options(options)
        self.has_inner = isinstance(operator, Kronecker) and operator.log_e is not None
        self.natural_only = operator.has_natural_step and not isinstance(operator, Kronecker)
        self.count = 0
        self._moments: list[Tensor] | None = None  # sums over the samples, of L and then of R
        self._samples = 0

    @property
    def averages_eigenvalues(self) -> bool:
        """Whether E² is a running average in every step, while Adam refines the rest."""
        return self.has_inner and self.options.estimator == "auto"

    @property
    def basis_steps(self) -> int:
        """The number of first steps that collect second moments for the eigenbases."""
        return self._length if self.averages_eigenvalues else 0

    @property
    def done(self) -> bool:
        """Whether the warm start is over."""
        return not self.operator.has_natural_step or self.count >= self._length

    def set_options(self, options: AuxiliaryOptions) -> None:
        """Continue with other options.

        Args:
            options: The options of the learning.
        """
        self.options = options
        length = options.resolved().warm_start
        assert length is not None
        self._length = length

    def step(self, H: Tensor, gamma: float, mask: Tensor | None) -> None:
        """Take one step.

        Args:
            H: Samples h with E[hhᵀ] = F, [g, *shape].
            gamma: The damping γ.
            mask: Boolean, True = kept, [*shape]; None keeps all parameters.
        """
        if self.count == 0 and not self.options.eta_floor:
            self._rescale(H, gamma, mask)
        if self.count < self.basis_steps:
            assert isinstance(self.operator, Kronecker)
            self._basis_step(self.operator, H if mask is None else H * mask, gamma)
        else:
            self.operator.natural_step_(H, gamma, self._eta(), mask)
        self.count += 1

    def _eta(self) -> float:
        t = self.count - self.basis_steps
        if self.has_inner:  # the first eigenvalues, from the second moments, count as a few samples
            eta = 1 / (t + 4)
        elif isinstance(self.operator, Kronecker):
            eta = 4 / (t + 8)
        else:
            eta = 1.5 / (t + 6)
        return min(1.0, max(eta, self.options.eta_floor))

    def _rescale(self, H: Tensor, gamma: float, mask: Tensor | None) -> None:
        """Set Q to the multiple of I with Tr(QF_γ) = n. The initial scale then has no influence."""
        kept = self.operator.n if mask is None else int(mask.sum())
        trace = float((H if mask is None else H * mask).double().square().sum()) / len(H)
        self.operator.set_scale_(1 / (trace / max(kept, 1) + gamma))

    def _basis_step(self, operator: Kronecker, H: Tensor, gamma: float) -> None:
        """Add samples to the second moments; in the last of these steps, compute the eigenbases."""
        n_out, n_in = operator.shape
        left = operator.L.moment(H.mT.reshape(-1, n_out))
        right = operator.R.moment(H.reshape(-1, n_in))
        new = [*left, *right]
        self._samples += len(H)
        self._moments = (
            new if self._moments is None else [a + b for a, b in zip(self._moments, new, strict=True)]
        )
        if self.count + 1 == self.basis_steps:
            mean = [moment / self._samples for moment in self._moments]
            operator.eigenbasis_(tuple(mean[: len(left)]), tuple(mean[len(left) :]), gamma)
            self._moments = None

    def state_dict(self) -> dict[str, Any]:
        """Return everything that the next step depends on, apart from the operator and the options.

        Returns:
            The state.
        """
        return {"count": self.count, "samples": self._samples, "moments": self._moments}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned.

        Args:
            state: The state.
        """
        self.count, self._samples = state["count"], state["samples"]
        device = next((p.device for p in self.operator.parameters()), None)
        moments = state["moments"]
        self._moments = None if moments is None else [moment.to(device) for moment in moments]
