"""How each layer's Q is learned: the options, and the part of the learning that needs no Adam."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from fishleg.inverse.operators import Kronecker, Operator
from fishleg.inverse.options import AuxiliaryOptions


class WarmStart:
    """The Adam-free part of one layer's learning.

    - D(L⊗R)E²(L⊗R)ᵀD: second moments give the eigenbases (EKFAC's start); from then on E² is averaged for
      good while Adam refines the rest.
    - other Kronecker forms: natural steps with η = 4/(t+8).
    - diagonal, block and full Q: natural steps for good; their optimum is the auxiliary loss's own.
    """

    def __init__(self, operator: Operator, options: AuxiliaryOptions) -> None:
        self.operator, self.options = operator, options
        self.has_inner = isinstance(operator, Kronecker) and operator.log_e is not None
        self.natural_forever = operator.has_natural_step and not isinstance(operator, Kronecker)
        self.count = 0
        self.moments: list[Tensor] | None = None
        self.samples = 0

    @property
    def follows(self) -> bool:
        """Whether E² is averaged for good, and Adam refines the rest."""
        return self.has_inner and self.options.estimator == "auto"

    @property
    def basis_steps(self) -> int:
        return self.options.warm_start if self.has_inner and self.options.estimator == "auto" else 0

    @property
    def done(self) -> bool:
        return not self.operator.has_natural_step or self.count >= self.options.warm_start

    def step(self, H: Tensor, gamma: float, mask: Tensor | None) -> None:
        """One step from samples H [g, *shape]."""
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
        if self.has_inner:  # the eigenvalues that the bases suggest count as a few samples
            eta = 1 / (t + 4)
        elif isinstance(self.operator, Kronecker):
            eta = 4 / (t + 8)
        else:
            eta = 1.5 / (t + 6)
        return min(1.0, max(eta, self.options.eta_floor))

    def _rescale(self, H: Tensor, gamma: float, mask: Tensor | None) -> None:
        """Start from the multiple of I with Tr(QF_γ) = n, whatever the initial scale was."""
        kept = self.operator.n if mask is None else int(mask.sum())
        energy = float((H if mask is None else H * mask).double().square().sum()) / len(H)
        self.operator.set_scale_(1 / (energy / max(kept, 1) + gamma))

    def _basis_step(self, operator: Kronecker, H: Tensor, gamma: float) -> None:
        n_out, n_in = operator.shape
        left = operator.L.moment(H.mT.reshape(-1, n_out))
        right = operator.R.moment(H.reshape(-1, n_in))
        new = [*left, *right]
        self.samples += len(H)
        self.moments = (
            new if self.moments is None else [a + b for a, b in zip(self.moments, new, strict=True)]
        )
        if self.count + 1 == self.basis_steps:
            mean = [moment / self.samples for moment in self.moments]
            operator.eigenbasis_(tuple(mean[: len(left)]), tuple(mean[len(left) :]), gamma)
            self.moments = None

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count, "samples": self.samples, "moments": self.moments}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.count, self.samples = state["count"], state["samples"]
        device = next((p.device for p in self.operator.parameters()), None)
        moments = state["moments"]
        self.moments = None if moments is None else [moment.to(device) for moment in moments]
