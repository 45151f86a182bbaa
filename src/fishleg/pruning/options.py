"""How to prune: the options of the surgeon, checked when they are given."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from fishleg.inverse.options import EMPIRICAL, METHODS, AuxiliaryOptions
from fishleg.inverse.structures import DEFAULT_STRUCTURE, Structure
from fishleg.pruning.compensation import COMPENSATIONS
from fishleg.pruning.patterns import Pattern, as_pattern


def check_whole(options: object, least: int, *names: str) -> None:
    """These fields are whole numbers, and none is below `least`."""
    for name in names:
        value = getattr(options, name)
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise ValueError(f"{name} must be >= {least} and whole, got {value!r}")


@dataclass(frozen=True, kw_only=True)
class PruningOptions:
    """How to prune. The defaults need no search."""

    method: str = "fishleg"
    pattern: Pattern | str = "global"
    compensation: str = "joint"
    include: Sequence[str] = ()  # parameters, modules or regular expressions; empty = every matrix
    exclude: Sequence[str] = ()
    exchanges: int = 12  # rounds that swap kept weights for removed ones worth more (FLS, joint); 0 = never
    mask_search_across_layers: bool = (
        True  # False: every layer keeps the number of weights that scores gave it
    )
    floor: float = 0.2  # each weight keeps at least this share of the mean density: no layer is emptied
    gamma: float | None = None  # damping; None = relative_damping × mean diag(F)
    relative_damping: float | None = None  # None: 0.01 with exchanges in a model at rest, else 0.1
    samples: int = 256  # gradients per estimate of Q
    sub_batch: int = 16  # examples per gradient
    empirical: bool = False
    block_size: int = 50
    structure: Structure = DEFAULT_STRUCTURE
    scale: float | None = None  # Q₀ = scale · I; matters to the estimators `probe` and `trace` only
    batchnorm_batches: int = 20  # refresh of BatchNorm statistics after pruning; 0 = never
    # F of the network that normalises by the batch, as it does once that is done; None: so for a learned Q,
    # with the running statistics, as published, for the others
    batch_statistics: bool | None = None
    measure_batches: int = 2  # batches on which the loss increase of each step is measured; 0 = never
    auxiliary: AuxiliaryOptions | None = None

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise ValueError(f"method must be one of {', '.join(METHODS)}, got {self.method!r}")
        if self.compensation not in COMPENSATIONS:
            raise ValueError(
                f"compensation must be one of {', '.join(COMPENSATIONS)}, got {self.compensation!r}"
            )
        if not 0 <= self.floor < 1:
            raise ValueError(f"floor must be in [0, 1), got {self.floor}")
        if self.gamma is not None and not self.gamma > 0:
            raise ValueError(f"gamma must be > 0, got {self.gamma}")
        if self.relative_damping is not None and not self.relative_damping > 0:
            raise ValueError(f"relative_damping must be > 0, got {self.relative_damping}")
        for name in ("include", "exclude"):
            if isinstance(getattr(self, name), str):
                raise ValueError(f"{name} must be a list of regular expressions, got {getattr(self, name)!r}")
            for expression in getattr(self, name):
                try:
                    re.compile(expression)
                except re.error as error:
                    raise ValueError(f"{name}: {expression!r} is no regular expression: {error}") from None
        check_whole(self, 1, "samples", "sub_batch", "block_size")
        check_whole(self, 0, "exchanges", "batchnorm_batches", "measure_batches")
        if self.empirical and self.method not in EMPIRICAL:
            raise ValueError(f"empirical=True needs one of {', '.join(EMPIRICAL)}, got {self.method!r}")
        if self.batch_statistics and (self.method == "exact" or not self.batchnorm_batches):
            raise ValueError(
                "batch_statistics=True needs batchnorm_batches >= 1, and a method other than exact, "
                f"got {self.batchnorm_batches} and {self.method!r}"
            )
        if self.batch_statistics and self.auxiliary is not None and self.auxiliary.vectorize:
            raise ValueError("batch_statistics=True and AuxiliaryOptions(vectorize=True) exclude each other")
        as_pattern(self.pattern)
