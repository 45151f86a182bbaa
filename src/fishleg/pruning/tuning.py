"""How to train between two prunings, checked."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from fishleg.pruning.options import check_whole

OPTIMIZERS = {"fishleg": 0.1, "sgd": 0.02, "adam": 1e-3}  # and their default learning rates
LR_SCHEDULES = ("cosine", "constant")


@dataclass(frozen=True, kw_only=True)
class FineTuningOptions:
    """How to train after each pruning step."""

    optimizer: str = "fishleg"  # or "sgd" (with momentum), "adam"
    epochs: float = 1.0  # per pruning step
    steps: int | None = None  # the same in steps; overrides epochs
    lr: float | None = None  # None: the optimizer's default
    lr_schedule: str = "cosine"  # the rate falls to zero after each pruning step; or "constant"
    momentum: float = 0.9
    weight_decay: float = 0.0
    # FishLeg's trust region while a loss of 1 can be regained, it shrinks with it (see `_pace`); inf: the
    # paper's plain steps
    max_kl: float = 0.012
    step_damping: float = 10.0  # likewise its damping, in multiples of γ; it rises as that falls
    # both are taken for a loss of at least so much: rougher training, worse now and better after more pruning
    regain: float = 0.0
    update_every: int = 10  # auxiliary steps, one every so many training steps
    refine: int = 24  # and so many in a row before each pruning step
    cuts: int = 3  # which removes its weights in so many cuts, refining Q as often (a learned Q only)
    distill: bool = False  # learn from the dense model's outputs (no labels needed)
    temperature: float = 2.0  # at which these are compared, where they are logits; 1: as they are

    def __post_init__(self) -> None:
        for name, known in (("optimizer", OPTIMIZERS), ("lr_schedule", LR_SCHEDULES)):
            if getattr(self, name) not in known:
                raise ValueError(f"{name} must be one of {', '.join(known)}, got {getattr(self, name)!r}")
        if not (self.epochs > 0 and math.isfinite(self.epochs)):
            raise ValueError(f"epochs must be > 0 and finite, got {self.epochs}")
        check_whole(self, 1, *["steps"] * (self.steps is not None), "update_every", "cuts")
        check_whole(self, 0, "refine")
        if self.lr is not None and not (self.lr > 0 and math.isfinite(self.lr)):
            raise ValueError(f"lr must be > 0 and finite, got {self.lr}")
        if not 0 <= self.momentum < 1 or not self.weight_decay >= 0 or not self.max_kl > 0:
            raise ValueError(
                "momentum must be in [0, 1), weight_decay >= 0 and max_kl > 0, "
                f"got {self.momentum}, {self.weight_decay} and {self.max_kl}"
            )
        if not 0 <= self.regain < 1:
            raise ValueError(f"regain must be in [0, 1), got {self.regain}")
        if not 0 < self.temperature < math.inf:
            raise ValueError(f"temperature must be > 0 and finite, got {self.temperature}")
        if not 1 <= self.step_damping < math.inf:
            raise ValueError(f"step_damping must be >= 1 and finite, got {self.step_damping}")

    @property
    def paced(self) -> bool:
        """Whether FishLeg's steps follow the loss."""
        return self.optimizer == "fishleg" and self.max_kl < math.inf

    def steps_for(self, loader: Any) -> int:
        """Training steps after each pruning step."""
        if self.steps is not None:
            return self.steps
        try:
            return max(1, round(self.epochs * len(loader)))
        except TypeError:
            raise ValueError("epochs need a loader with a length; give steps instead") from None
