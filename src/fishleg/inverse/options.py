"""TODO."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

METHODS = ("fishleg", "magnitude", "diagonal", "obert", "mfac", "kfac", "ekfac", "exact")
EMPIRICAL = ("diagonal", "obert", "mfac")
# γ over the mean diagonal of F: in general, for a learned Q with exchanges and without training
# (benchmarks/damping.py compares), and for whole rows (benchmarks/resnet20_rows.py)
DAMPING, MASK_SEARCH_DAMPING, ROW_DAMPING = 0.1, 0.01, 0.3
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
