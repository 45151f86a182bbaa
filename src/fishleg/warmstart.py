"""How each layer's Q is learned: the options, and the part of the learning that needs no Adam."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fishleg.operators import Kronecker, Operator

ESTIMATORS = ("auto", "natural", "trace", "probe")
Probe = Callable[[torch.Generator], dict[str, Tensor]]


@dataclass(frozen=True, kw_only=True)
class AuxiliaryOptions:
    """How Q is learned. The defaults need no tuning; the rest reproduces the paper and its variants."""

    estimator: str = "auto"
    lr: float = 3e-3  # Adam's, for `trace` and `probe`
    betas: tuple[float, float] = (0.9, 0.99)
    groups: int = 1  # independent h's per batch
    sub_batch: int | None = None  # examples of each batch to use; None = all
    warm_start: int = 60  # steps of the warm start (`auto`)
    refine_every: int = 1  # layers take turns with Adam: L, R, D every so many steps, E² always
    eta_floor: float = 0.0  # smallest natural step, > 0 to follow a moving Fisher
    probe: str | Probe = "isotropic"  # or "gradient", or a function that draws u
    precondition: bool = False  # P = Q instead of P = I (`probe`)
    exact_products: bool = True  # exact F·v rather than sampled (`probe`)
    vectorize: bool = False  # all groups in one vmapped pass
    batch_statistics: bool = False  # BatchNorm by the batch, as in training, instead of running statistics
    smoothing: float = 0.9

    def __post_init__(self) -> None:
        if self.estimator not in ESTIMATORS:
            raise ValueError(f"estimator must be one of {', '.join(ESTIMATORS)}, got {self.estimator!r}")
        if not self.lr > 0:
            raise ValueError(f"lr must be > 0, got {self.lr}")
        if self.groups < 1:
            raise ValueError(f"groups must be >= 1, got {self.groups}")
        if self.sub_batch is not None and self.sub_batch < self.groups:
            raise ValueError(f"sub_batch must be >= groups = {self.groups}, got {self.sub_batch}")
        if self.warm_start < 2:
            raise ValueError(f"warm_start must be >= 2, got {self.warm_start}")
        if self.refine_every < 1:
            raise ValueError(f"refine_every must be >= 1, got {self.refine_every}")
        if not 0 <= self.eta_floor <= 1:
            raise ValueError(f"eta_floor must be in [0, 1], got {self.eta_floor}")
        if isinstance(self.probe, str) and self.probe not in ("isotropic", "gradient"):
            raise ValueError(f"probe must be 'isotropic', 'gradient' or a function, got {self.probe!r}")
        if not 0 <= self.smoothing < 1:
            raise ValueError(f"smoothing must be in [0, 1), got {self.smoothing}")


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
