"""Turn a budget into sparsities: a number of parameters, of multiply-adds, or a drop of the metric."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fishleg.options.run import amount
from fishleg.pruning import Surgeon, plan_schedule
from fishleg.runs.errors import ToolError
from fishleg.runs.macs import kept_macs
from fishleg.runs.plan import Plan
from fishleg.runs.recipe import Recipe

_LARGEST = 0.995  # no search goes beyond this sparsity


def make_plan(recipe: Recipe, surgeon: Surgeon, macs: Mapping[str, int], measured: str = "accuracy") -> Plan:
    """Return the plan for a recipe.

    Args:
        recipe: All options of the run.
        surgeon: The surgeon of the run. A budget of multiply-adds needs its Q, which is estimated if needed.
        macs: Multiply-adds by weight name.
        measured: The name of the metric.

    Returns:
        The sparsities of the stages, or a search for the largest sparsity.

    Raises:
        ToolError: The budget cannot be met, or it does not fit the metric or the mode.
    """
    how = (surgeon.pattern, recipe.schedule.mode, recipe.schedule.stages, recipe.schedule.schedule)
    if recipe.schedule.sparsities:
        return Plan(list(recipe.schedule.sparsities))
    if recipe.schedule.max_drop is not None:
        if measured == "divergence":
            raise ToolError(
                "max_drop needs labels or a metric of your own: without them the divergence from the dense "
                "model is measured, which starts at 0, so that no drop relative to the start exists"
            )
        if recipe.schedule.mode == "one-shot":
            raise ToolError(
                "max_drop is a search in stages: use mode = 'staged' or 'gradual', not 'one-shot'"
            )
        targets = plan_schedule(_largest_sparsity(surgeon), *how, start=surgeon.weights.share_of_zeros)
        return Plan(targets, amount("max_drop", recipe.schedule.max_drop)[0])
    sparsity = recipe.schedule.sparsity
    if recipe.schedule.max_params is not None:
        sparsity = _sparsity_for_params(surgeon, recipe.schedule.max_params)
    elif recipe.schedule.max_flops is not None:
        sparsity = sparsity_for_macs(surgeon, macs, recipe.schedule.max_flops)
    return Plan(plan_schedule(sparsity, *how, start=surgeon.weights.share_of_zeros))


def _largest_sparsity(surgeon: Surgeon) -> float:
    """Return about the largest sparsity that pattern and floor allow, 0.995 at most."""
    sparsity = min(surgeon.pattern.limit, _LARGEST)
    while sparsity > 0.5:
        try:
            check_reachable(surgeon, sparsity)
            break
        except ValueError:
            sparsity = 1 - 1.5 * (1 - sparsity)
    return sparsity


def check_reachable(surgeon: Surgeon, sparsity: float, only: Sequence[str] | None = None) -> None:
    """Raise an error if pattern and floor do not allow a sparsity. This needs no Q and is fast.

    Args:
        surgeon: The surgeon of the run.
        sparsity: The sparsity.
        only: The names of the weights that it refers to; default: all.

    Raises:
        ValueError: The sparsity cannot be reached.
    """
    surgeon.weights.check_reachable(sparsity, surgeon.options.floor, only)


def _sparsity_for_params(surgeon: Surgeon, most: int) -> float:
    total = sum(p.numel() for p in surgeon.model.parameters())
    prunable = sum(surgeon.model.get_parameter(name).numel() for name in surgeon.weights.names)
    if most >= total:
        raise ToolError(
            f"max_params is {most:,}, but the model has only {total:,}: nothing needs to be removed"
        )
    if most <= total - prunable:
        raise ToolError(
            f"max_params is {most:,}, but {total - prunable:,} parameters (biases, norms, excluded ones) are "
            "not pruned"
        )
    if surgeon.pattern.whole_rows:
        raise ToolError("max_params does not work with pattern = 'rows': use sparsity or max_flops")
    # half a weight more is removed, so that rounding the count cannot exceed the budget
    return min((total - most + 0.5) / prunable, 1 - 0.5 / prunable)


def macs_budget(surgeon: Surgeon, macs: Mapping[str, int], most: str | float) -> float:
    """Return a budget in multiply-adds per example.

    Args:
        surgeon: The surgeon of the run.
        macs: Multiply-adds by weight name.
        most: The budget: a number, or a percentage of the dense model such as "40%".

    Returns:
        The number of multiply-adds.

    Raises:
        ToolError: The budget cannot be met, or the dense model is within it already.
    """
    total = sum(macs.values())
    number, relative = amount("max_flops", most)
    budget = number * total if relative else number
    fixed = sum(m for name, m in macs.items() if name not in surgeon.weights.names)
    if budget >= total:
        raise ToolError(
            f"max_flops is {budget:,.0f}, but the model needs only {total:,}: nothing needs to be removed"
        )
    if budget <= fixed:
        raise ToolError(f"max_flops is {budget:,.0f}, but layers that are not pruned need {fixed:,}")
    least = fixed + (1 - surgeon.pattern.limit) * (total - fixed)
    if budget < least:
        raise ToolError(f"max_flops is {budget:,.0f}, but the pattern keeps at least {least:,.0f}")
    return budget


def sparsity_for_macs(surgeon: Surgeon, macs: Mapping[str, int], most: str | float) -> float:
    """Return the smallest sparsity that is within a budget of multiply-adds.

    It is found by bisection on the masks that Q's scores select; no weight is changed. With such a budget
    the mask search does not change the number of weights of a layer, and so keeps its multiply-adds.

    Args:
        surgeon: The surgeon of the run; its Q is estimated if needed.
        macs: Multiply-adds by weight name.
        most: The budget: a number, or a percentage of the dense model such as "40%".

    Returns:
        The sparsity.

    Raises:
        ToolError: The budget cannot be met, or the dense model is within it already.
    """
    budget = macs_budget(surgeon, macs, most)
    if kept_macs(macs, surgeon.masks) <= budget:
        return surgeon.sparsity
    inverse = surgeon.curvature.latest(surgeon.masks)
    low, high = surgeon.sparsity, _largest_sparsity(surgeon)
    if kept_macs(macs, surgeon.pruner.select(inverse, high, surgeon.masks)) > budget:
        raise ToolError(f"max_flops is {budget:,.0f}, but pattern and floor do not allow so few")
    for _ in range(20):
        middle = (low + high) / 2
        if kept_macs(macs, surgeon.pruner.select(inverse, middle, surgeon.masks)) > budget:
            low = middle
        else:
            high = middle
    return high
