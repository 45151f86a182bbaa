"""From a budget to sparsities: parameters, multiply-adds, or a drop of the metric."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fishleg.options.run import amount
from fishleg.pruning import Surgeon, plan_schedule
from fishleg.runs.errors import ToolError
from fishleg.runs.macs import kept_macs
from fishleg.runs.plan import Plan
from fishleg.runs.recipe import Recipe

_MOST = 0.995  # where a search for the largest sparsity ends


def make_plan(recipe: Recipe, surgeon: Surgeon, macs: Mapping[str, int], measured: str = "accuracy") -> Plan:
    """The plan for a recipe; budgets that cannot be met are errors."""
    how = (surgeon.pattern, recipe.schedule.mode, recipe.schedule.stages, recipe.schedule.schedule)
    if recipe.schedule.sparsities:
        return Plan(list(recipe.schedule.sparsities))
    if recipe.schedule.max_drop is not None:
        if measured == "divergence":
            raise ToolError(
                "max_drop needs labels, or a metric of your own: without them the divergence from the dense "
                "model is measured, which is 0 to begin with, and no drop is relative to that"
            )
        if recipe.schedule.mode == "one-shot":
            raise ToolError("max_drop is a search in stages: use mode = 'staged' or 'gradual'")
        targets = plan_schedule(largest_sparsity(surgeon), *how, start=surgeon.weights.share_of_zeros)
        return Plan(targets, amount("max_drop", recipe.schedule.max_drop)[0])
    sparsity = recipe.schedule.sparsity
    if recipe.schedule.max_params is not None:
        sparsity = _for_params(surgeon, recipe.schedule.max_params)
    elif recipe.schedule.max_flops is not None:
        sparsity = sparsity_for_macs(surgeon, macs, recipe.schedule.max_flops)
    return Plan(plan_schedule(sparsity, *how, start=surgeon.weights.share_of_zeros))


def largest_sparsity(surgeon: Surgeon) -> float:
    """The most that the pattern and the floor allow, and never everything of a layer."""
    sparsity = min(surgeon.pattern.limit, _MOST)
    while sparsity > 0.5:
        try:
            check_reachable(surgeon, sparsity)
            break
        except ValueError:
            sparsity = 1 - 1.5 * (1 - sparsity)
    return sparsity


def check_reachable(surgeon: Surgeon, sparsity: float, only: Sequence[str] | None = None) -> None:
    """Raise if pattern and floor do not allow this sparsity (of some weights), before any long work."""
    surgeon.weights.check_reachable(sparsity, surgeon.options.floor, only)


def _for_params(surgeon: Surgeon, most: int) -> float:
    total = sum(p.numel() for p in surgeon.model.parameters())
    prunable = sum(surgeon.model.get_parameter(name).numel() for name in surgeon.weights.names)
    if most >= total:
        raise ToolError(f"max_params is {most:,}, and the model has only {total:,}: there is nothing to do")
    if most <= total - prunable:
        raise ToolError(
            f"max_params is {most:,}, but {total - prunable:,} parameters (biases, norms, excluded ones) stay"
        )
    if surgeon.pattern.whole_rows:
        raise ToolError("max_params cannot tell how many rows to remove: use sparsity or max_flops with rows")
    # one weight of room, so that rounding the count cannot end above the budget
    return min((total - most + 0.5) / prunable, 1 - 0.5 / prunable)


def macs_budget(surgeon: Surgeon, macs: Mapping[str, int], most: str | float) -> float:
    """The budget in multiply-adds; one that cannot be met, or is met already, is an error."""
    total = sum(macs.values())
    number, relative = amount("max_flops", most)
    budget = number * total if relative else number
    fixed = sum(m for name, m in macs.items() if name not in surgeon.weights.names)
    if budget >= total:
        raise ToolError(
            f"max_flops is {budget:,.0f}, and the model needs only {total:,}: there is nothing to do"
        )
    if budget <= fixed:
        raise ToolError(f"max_flops is {budget:,.0f}, but layers that are not pruned need {fixed:,}")
    least = fixed + (1 - surgeon.pattern.limit) * (total - fixed)
    if budget < least:
        raise ToolError(f"max_flops is {budget:,.0f}, and the pattern keeps {least:,.0f} at least")
    return budget


def sparsity_for_macs(surgeon: Surgeon, macs: Mapping[str, int], most: str | float) -> float:
    """By bisection on the masks that Q's scores select; no weight is changed.

    With such a budget the mask search leaves every layer its number of weights, and so its multiply-adds.
    """
    budget = macs_budget(surgeon, macs, most)
    if kept_macs(macs, surgeon.masks) <= budget:
        return surgeon.sparsity
    inverse = surgeon.curvature.latest(surgeon.masks)
    low, high = surgeon.sparsity, largest_sparsity(surgeon)
    if kept_macs(macs, surgeon.pruner.select(inverse, high, surgeon.masks)) > budget:
        raise ToolError(f"max_flops is {budget:,.0f}, which pattern and floor do not allow")
    for _ in range(20):
        middle = (low + high) / 2
        if kept_macs(macs, surgeon.pruner.select(inverse, middle, surgeon.masks)) > budget:
            low = middle
        else:
            high = middle
    return high
