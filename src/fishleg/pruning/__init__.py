"""Pruning: patterns, schedules, saliency, compensation, masks that last, and the session that drives it."""

from __future__ import annotations

from fishleg.pruning.accumulated_change import TotalChange
from fishleg.pruning.attach import AttachedPruning, attach
from fishleg.pruning.events import (
    Event,
    Finished,
    InverseUpdated,
    Pruned,
    PruneStep,
    StageDone,
    StageStarted,
    TrainingStep,
)
from fishleg.pruning.fine_tuning import FineTuner
from fishleg.pruning.keep_zeros import keep_zeros
from fishleg.pruning.masks import apply_masks, masks_of
from fishleg.pruning.patterns import Masks, Pattern, as_pattern, register_pattern
from fishleg.pruning.prune import prune
from fishleg.pruning.schedules import default_sparsity, plan_schedule, schedule
from fishleg.pruning.session import PruningSession
from fishleg.pruning.surgeon import Surgeon

__all__ = [
    "AttachedPruning",
    "Event",
    "FineTuner",
    "Finished",
    "InverseUpdated",
    "Masks",
    "Pattern",
    "PruneStep",
    "Pruned",
    "PruningSession",
    "StageDone",
    "StageStarted",
    "Surgeon",
    "TotalChange",
    "TrainingStep",
    "apply_masks",
    "as_pattern",
    "attach",
    "default_sparsity",
    "keep_zeros",
    "masks_of",
    "plan_schedule",
    "prune",
    "register_pattern",
    "schedule",
]
