"""How to prune, and how Q is learned for it."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fishleg.options.declaration import OptionError, check_fields, option
from fishleg.options.names import (
    COMPENSATIONS,
    EMPIRICAL_METHODS,
    ESTIMATORS,
    MASK_SEARCHES,
    METHODS,
    STRUCTURES,
)

if TYPE_CHECKING:
    from fishleg.curvature.layers import Layer
    from fishleg.inverse.operators import Operator
    from fishleg.pruning.patterns import Pattern

# γ in units of the mean diagonal of F: in general; with a mask search in a model that is not trained
# (`python -m reproduction bench damping` compares); and for whole rows (`... bench resnet20-rows`).
DAMPING, MASK_SEARCH_DAMPING, ROW_DAMPING = 0.1, 0.01, 0.3
_SEARCH_ROUNDS = 12
_SEARCHING_METHODS = ("fishleg", "alps")  # whose masks are searched by default


@dataclass(frozen=True, kw_only=True)
class AuxiliaryOptions:
    """How Q is learned. The defaults need no tuning; the rest reproduces the paper and its variants."""

    estimator: str = option("auto", "Estimator of the gradient of the auxiliary loss.", choices=ESTIMATORS)
    lr: float = option(3e-3, "Adam's learning rate, for the estimators trace and probe.", rule="> 0")
    betas: tuple[float, float] = option((0.9, 0.99), "Adam's decay rates.", rule="[0, 1)")
    groups: int | None = option(
        None, "Samples h that one batch gives; default: 4 for an estimate of Q, else 1.", rule=">= 1"
    )
    sub_batch: int | None = option(None, "Examples of each batch to use; default: all.", rule=">= 1")
    warm_start: int | None = option(
        None,
        "Steps of the warm start (estimator auto); default: half of the steps of an estimate, else 60.",
        rule=">= 2",
    )
    refine_every: int = option(
        1, "Steps between two Adam updates of the same layer; E² is updated in every step.", rule=">= 1"
    )
    eta_floor: float = option(
        0.0, "Smallest natural step; a value above 0 lets Q follow a changing F.", rule="[0, 1]"
    )
    probe: str | Callable[[Any], Any] = option(
        "isotropic",
        "Distribution of the probe u (estimator probe).",
        choices=("isotropic", "gradient"),
        accepts=callable,
    )
    precondition: bool = option(False, "Precondition the residual by P = Q (estimator probe).")
    exact_products: bool = option(True, "Exact products F·v instead of sampled ones (estimator probe).")
    vectorize: bool = option(False, "Compute all groups in one vectorised pass.")
    batch_statistics: bool = option(
        False, "Compute F with BatchNorm in training mode (statistics of the batch)."
    )
    smoothing: float = option(0.9, "Decay of the running mean of the gauge.", rule="[0, 1)")

    def __post_init__(self) -> None:
        check_fields(self)
        if self.vectorize and self.batch_statistics:
            raise OptionError("vectorize = true and batch_statistics = true exclude each other")
        if self.sub_batch is not None and self.sub_batch < (self.groups or 1):
            raise OptionError(f"sub_batch must be >= groups = {self.groups}, got {self.sub_batch}")

    def resolved(self, *, groups: int = 1, warm_start: int = 60) -> AuxiliaryOptions:
        """Return a copy in which the automatic values are filled in.

        Args:
            groups: The number of groups where the option is None.
            warm_start: The steps of the warm start where the option is None.

        Returns:
            Options without automatic values.
        """
        most = groups if self.sub_batch is None else min(groups, self.sub_batch)
        return dataclasses.replace(
            self,
            groups=most if self.groups is None else self.groups,
            warm_start=warm_start if self.warm_start is None else self.warm_start,
        )


@dataclass(frozen=True, kw_only=True)
class PruningOptions:
    """How to prune: which weights, by which Q, with which compensation. The defaults need no search."""

    method: str = option(
        "fishleg",
        "How Q, the inverse Fisher matrix that scores and compensates, is estimated.",
        choices=METHODS,
    )
    pattern: Pattern | str = option(
        "global",
        "What is removed together: global, layer, N:M (2:4), block:SIZE or rows.",
        accepts=lambda value: hasattr(value, "select"),
    )
    include: Sequence[str] = option(
        (), "Prune only this parameter, module or regular expression; may be repeated."
    )
    exclude: Sequence[str] = option(
        (), "Do not prune this parameter, module or regular expression; may be repeated."
    )
    floor: float = option(
        0.2,
        "Every weight tensor keeps at least this fraction of the mean share of kept weights.",
        rule="[0, 1)",
        share=True,
    )
    compensation: str = option(
        "joint", "How the kept weights make up for the removed ones.", choices=COMPENSATIONS
    )
    mask_search: str | None = option(
        None,
        "How masks are improved: swap exchanges kept and removed weights, admm finds weights and masks "
        "together; default: admm for alps, else swap.",
        choices=MASK_SEARCHES,
    )
    mask_search_rounds: int | None = option(
        None,
        "Rounds of the search by swaps; 0: no search of either kind; default: 12 for fishleg, alps and where "
        "mask_search is given, else 0, as published.",
        rule=">= 0",
    )
    mask_search_across_layers: bool = option(
        True, "Let the mask search change the number of weights that each layer keeps; false with max_flops."
    )
    cuts: int | None = option(
        None,
        "Parts of each pruning step, Q updated between them; default: 3 with fine-tuning, else 1.",
        rule=">= 1",
    )
    refine_steps: int | None = option(
        None,
        "Auxiliary steps that refine Q before a cut; default: 24 while the model is trained, else samples/8.",
        rule=">= 0",
    )
    gamma: float | None = option(
        None, "Damping γ; default: relative_damping x mean diagonal of F.", rule="> 0"
    )
    relative_damping: float | None = option(
        None,
        "γ over the mean diagonal of F; default: 0.3 for rows, 0.01 for mask search without training, "
        "else 0.1.",
        rule="> 0",
    )
    samples: int = option(256, "Samples h (random gradients) per estimate of Q.", rule=">= 1")
    sub_batch: int = option(16, "Examples per gradient.", rule=">= 1")
    empirical: bool = option(
        False, "Use the data's labels (empirical Fisher); methods diagonal, obert and mfac only."
    )
    block_size: int = option(50, "Block size of method obert and of the structure block.", rule=">= 1")
    structure: str | Callable[[Layer], Operator] = option(
        "eigen-kronecker", "Structure of a learned Q.", choices=STRUCTURES, accepts=callable
    )
    max_factor_dim: int = option(
        2048, "A larger factor of Q is split, cut into blocks or made diagonal.", rule=">= 1"
    )
    scale: float | None = option(
        None, "Q starts as scale x I; matters to the estimators probe and trace only.", rule="> 0"
    )
    batchnorm_batches: int = option(
        20, "Batches that refresh BatchNorm's statistics after pruning; 0: never.", rule=">= 0"
    )
    batch_statistics: bool | None = option(
        None,
        "Compute F with BatchNorm in training mode (statistics of the batch); default: for a learned Q only.",
    )
    measure_batches: int = option(
        2, "Batches on which the loss increase of each step is measured; 0: never.", rule=">= 0"
    )
    auxiliary: AuxiliaryOptions | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        for name in ("include", "exclude"):
            for expression in getattr(self, name):
                try:
                    re.compile(expression)
                except re.error as error:
                    raise OptionError(f"{name}: {expression!r} is no regular expression: {error}") from None
        if self.auxiliary is not None and not isinstance(self.auxiliary, AuxiliaryOptions):
            raise OptionError(f"auxiliary must be AuxiliaryOptions, got {type(self.auxiliary).__name__}")
        if self.empirical and self.method not in EMPIRICAL_METHODS:
            known = ", ".join(EMPIRICAL_METHODS)
            raise OptionError(f"empirical = true needs one of the methods {known}, got {self.method!r}")
        if self.batch_statistics and (self.method == "exact" or not self.batchnorm_batches):
            raise OptionError(
                "batch_statistics = true needs batchnorm_batches >= 1 and a method other than exact, "
                f"got {self.batchnorm_batches} and {self.method!r}"
            )
        if self.batch_statistics and self.auxiliary is not None and self.auxiliary.vectorize:
            raise OptionError("batch_statistics = true and vectorize = true exclude each other")
        if self.cuts is not None and self.cuts > 1 and self.refine_steps == 0:
            raise OptionError(
                f"cuts > 1 needs refine_steps >= 1, got cuts = {self.cuts} and refine_steps = 0"
            )

    @property
    def search_rounds(self) -> int:
        """The rounds of the mask search, with the default filled in; it needs joint compensation."""
        if self.compensation != "joint":
            return 0
        if self.mask_search_rounds is not None:
            return self.mask_search_rounds
        searches = self.mask_search is not None or self.method in _SEARCHING_METHODS
        return _SEARCH_ROUNDS if searches else 0

    @property
    def mask_search_kind(self) -> str:
        """How masks are searched, with the default filled in."""
        return self.mask_search or ("admm" if self.method == "alps" else "swap")

    @property
    def learns_by_batch(self) -> bool:
        """Whether a learned Q is that of the network whose BatchNorms normalise by the batch.

        After a pruning step the statistics of BatchNorm are refreshed, which undoes part of its harm: a
        filter that has become shorter, or a mean that has moved. With running statistics F charges for
        that, too; with the statistics of the batch it does not.
        """
        return bool(self.batchnorm_batches) if self.batch_statistics is None else self.batch_statistics
