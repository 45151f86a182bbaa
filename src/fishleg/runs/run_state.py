"""Checks of what a checkpoint holds: a content that cannot be that of the run is not loaded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fishleg.pruning.surgeon import Surgeon
from fishleg.runs.log import TIMED
from fishleg.runs.plan import Plan
from fishleg.runs.recipe import Recipe

_KINDS: dict[str, type | tuple[type, ...]] = {
    "model": dict, "session": dict, "plan": dict, "calibration": dict, "training": (dict, type(None)),
    "random": dict, "run_log": dict, "accepted": (str, type(None)), "sparse": (dict, type(None)),
}  # fmt: skip
_SAME = 1e-6  # of two sparsities


def check_state(state: Any, recipe: Recipe, plan: Plan | None) -> None:
    """Check the content of a checkpoint as far as the recipe says what it must be.

    Args:
        state: The content.
        recipe: All options of the run.
        plan: The plan that follows from the recipe; None: it depends on Q.

    Raises:
        ValueError: It is not that of a checkpoint of this run.
    """
    if not isinstance(state, dict) or state.keys() != _KINDS.keys():
        raise ValueError("it is not the state of a run")
    wrong = next((name for name, kind in _KINDS.items() if not isinstance(state[name], kind)), None)
    if wrong is not None:
        raise ValueError(f"its entry {wrong!r} is a {type(state[wrong]).__name__}")
    bad = _first_not_finite(state, "state")
    if bad is not None:
        raise ValueError(f"{bad} holds NaN or Inf")
    _check_times(state["run_log"])
    if plan is not None and state["plan"].get("targets") != plan.targets:
        raise ValueError("its sparsities are not those of the recipe")
    surgeon, tuner = state["session"]["surgeon"], state["session"]["fine_tuner"]
    if recipe.trains is not None and surgeon["history"] and (tuner is None or tuner["optimizer"] is None):
        raise ValueError("the state of the training is missing")


def check_history(surgeon: Surgeon) -> None:
    """Check that the masks that were loaded are those of the last pruning step.

    Args:
        surgeon: The surgeon, after its state was loaded.

    Raises:
        ValueError: They are not.
    """
    reached = surgeon.history[-1].sparsity if surgeon.history else 0.0
    if abs(surgeon.sparsity - reached) > _SAME:
        raise ValueError(
            f"its masks have the sparsity {surgeon.sparsity:.4f}, the last step had {reached:.4f}"
        )


def _check_times(log: Mapping[str, Any]) -> None:
    timing = log.get("timing")
    if not isinstance(timing, dict) or timing.keys() != set(TIMED):
        raise ValueError("its times are not those of a run")
    if not all(isinstance(value, float) for value in (*timing.values(), log.get("seconds"))):
        raise ValueError("its times are not numbers")


def _first_not_finite(value: Any, place: str) -> str | None:
    """Return where a nested state has a tensor that is not finite; None: nowhere."""
    if isinstance(value, Tensor):
        fine = not value.is_floating_point() or bool(torch.isfinite(value).all())
        return None if fine else place
    items = (
        value.items()
        if isinstance(value, Mapping)
        else enumerate(value)
        if isinstance(value, (list, tuple))
        else ()
    )
    return next((found for key, item in items if (found := _first_not_finite(item, f"{place}.{key}"))), None)
