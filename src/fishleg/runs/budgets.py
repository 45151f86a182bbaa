"""What to prune to: a sparsity, a schedule, so many parameters or multiply-adds, or a drop of the metric."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from fishleg.pruning.schedules import plan_schedule
from fishleg.pruning.surgeon import Surgeon
from fishleg.runs.errors import ToolError
from fishleg.runs.recipe import Recipe, amount
from fishleg.runtime.batches import Forward, batch_size, move_batch
from fishleg.runtime.modes import evaluation_mode

_MOST_TRIALS = 12  # rejected ones, in a search
_MOST = 0.995  # where a search for the largest sparsity ends


@torch.no_grad()
def count_macs(model: nn.Module, batch: Any, forward: Forward) -> dict[str, int]:
    """Multiply-adds per example of each weight matrix that takes part in a forward pass, by parameter name.

    Each entry of a weight is used once per output position: positions × size.
    """
    names = {id(p): name for name, p in model.named_parameters()}
    found: dict[str, int] = {}
    size = batch_size(batch)

    def add(weight: Any, positions: int) -> None:
        if torch.is_tensor(weight) and id(weight) in names:
            name = names[id(weight)]
            found[name] = found.get(name, 0) + positions * weight.numel()

    def count(module: nn.Module, _: Any, output: Any) -> None:
        if isinstance(module, nn.MultiheadAttention):  # it uses its weights itself, out_proj's included
            positions = output[0].numel() // (size * module.embed_dim)
            for name in ("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight"):
                add(getattr(module, name, None), positions)
            add(module.out_proj.weight, positions)
            return
        weight = getattr(module, "weight", None)
        if (
            not torch.is_tensor(weight)
            or weight.dim() < 2
            or id(weight) not in names
            or not torch.is_tensor(output)
        ):
            return
        if isinstance(module, nn.Embedding):
            return
        # convolutions have their channels second, everything else last
        channels = output.shape[1] if weight.dim() > 2 else output.shape[-1]
        add(weight, output.numel() // (size * max(channels, 1)))

    handles = [module.register_forward_hook(count) for module in model.modules()]
    try:
        with evaluation_mode(model):
            forward(model, move_batch(batch, next(model.parameters()).device))
    finally:
        for handle in handles:
            handle.remove()
    return found


def kept_macs(macs: Mapping[str, int], masks: Mapping[str, Tensor]) -> int:
    """Multiply-adds that remain under the masks."""
    return sum(round(m * float(masks[n].float().mean())) if n in masks else m for n, m in macs.items())


@dataclass
class Plan:
    """Which sparsity comes next. A fixed list, or for `max_drop` a search that learns from each result.

    Search: stages go up the usual schedule until one drops too much. Between the last good sparsity and that
    one, Q's predicted losses say where the limit should be; that sparsity is tried and the interval shrinks
    until it is narrower than `precision`. What a long step could not reach, a short one may: the rejected
    sparsity is then tried once more from there, and if it is good now, stages go up again.
    """

    targets: list[float]
    max_drop: float | None = None
    precision: float = 0.005
    done: int = 0  # stages that were accepted
    good: float = 0.0  # the last accepted sparsity
    bad: float | None = None  # the least one that was rejected
    trials: int = 0
    finished: bool = False
    drops: list[tuple[float, float]] = field(default_factory=list)  # (sparsity, drop) of every result

    @property
    def stages(self) -> int | None:
        """How many there will be; nobody knows in a search."""
        return len(self.targets) if self.max_drop is None else None

    @property
    def fraction(self) -> float:
        """How much is done, roughly."""
        return self.done / max(len(self.targets), self.done + 1)

    def next(self, predict: Callable[[float], float]) -> float | None:
        """The sparsity to go to from the last accepted one; None when all is done.

        `predict(sparsity)` is Q's loss increase from the model as it is now, at the last accepted sparsity.
        """
        if self.finished:
            return None
        if self.bad is None:
            return next((target for target in self.targets if target > self.good), None)
        return self.bad if self.bad - self.good <= self.precision else self._guess(predict)

    def _guess(self, predict: Callable[[float], float]) -> float:
        """Where the drop should reach the limit if it grows in step with Q's predicted loss."""
        assert self.max_drop is not None
        assert self.bad is not None
        drops = dict(self.drops)
        start, end = drops.get(self.good, 0.0), drops[self.bad]
        share = (self.max_drop - start) / max(end - start, 1e-12)
        # the metric is noisy: never trust the guess to the very end of the interval
        wanted = min(max(share, 0.15), 0.85) * predict(self.bad)
        low, high = self.good, self.bad
        for _ in range(8):
            middle = (low + high) / 2
            low, high = (middle, high) if predict(middle) < wanted else (low, middle)
        edge = 0.1 * (self.bad - self.good)
        return min(max(low, self.good + edge), self.bad - edge)

    def result(self, sparsity: float, drop: float) -> bool:
        """Take note of what a stage cost; whether it is accepted."""
        self.drops.append((sparsity, drop))
        if self.max_drop is not None and not drop <= self.max_drop + 1e-9:  # NaN is no success
            last_chance = self.bad is not None and sparsity >= self.bad
            self.bad, self.trials = sparsity, self.trials + 1
            self.finished = last_chance or self.trials >= _MOST_TRIALS
            return False
        if self.bad is not None and sparsity >= self.bad:
            self.bad = None
        self.good, self.done = sparsity, self.done + 1
        return True

    def state_dict(self) -> dict[str, Any]:
        """Plain values."""
        return copy.deepcopy(vars(self))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        for name, value in state.items():
            setattr(self, name, copy.deepcopy(value))


def make_plan(recipe: Recipe, surgeon: Surgeon, macs: Mapping[str, int], measured: str = "accuracy") -> Plan:
    """The plan for a recipe; budgets that cannot be met are errors."""
    limit = surgeon.pattern.limit
    how = (surgeon.pattern, recipe.mode, recipe.stages, recipe.schedule)
    if recipe.sparsities:
        return Plan(list(recipe.sparsities))
    if recipe.max_drop is not None:
        if measured == "divergence":
            raise ToolError(
                "max_drop needs labels, or a metric of your own: without them the divergence from the dense "
                "model is measured, which is 0 to begin with, and no drop is relative to that"
            )
        if recipe.mode == "one-shot":
            raise ToolError("max_drop is a search in stages: use mode = 'staged' or 'gradual'")
        targets = plan_schedule(largest_sparsity(surgeon), *how, start=surgeon.share_of_zeros)
        return Plan(targets, amount("max_drop", recipe.max_drop)[0])
    sparsity = recipe.sparsity
    if recipe.max_params is not None:
        sparsity = _for_params(surgeon, recipe.max_params)
    elif recipe.max_flops is not None:
        sparsity = sparsity_for_macs(surgeon, macs, recipe.max_flops)
    if sparsity is None:
        sparsity = 0.9 if limit == 1 else limit
    return Plan(plan_schedule(sparsity, *how, start=surgeon.share_of_zeros))


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
    scores = {name: s for name, s in magnitudes(surgeon).items() if only is None or name in only}
    surgeon.pattern.select(scores, sparsity, surgeon.options.floor * (1 - sparsity))


def magnitudes(surgeon: Surgeon) -> dict[str, Tensor]:
    """The simplest scores, in the shapes that the surgeon's pattern selects on."""
    scores = {}
    for name in surgeon.prunable:
        weight = surgeon.model.get_parameter(name).detach().abs()
        if surgeon.pattern.whole_rows:
            weight = weight.flatten(1).sum(1)
        elif surgeon.pattern.group_size:
            weight = surgeon.pruner.grouped(weight).sum(1)
        scores[name] = weight
    return scores


def _for_params(surgeon: Surgeon, most: int) -> float:
    total = sum(p.numel() for p in surgeon.model.parameters())
    prunable = sum(surgeon.model.get_parameter(name).numel() for name in surgeon.prunable)
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
    fixed = sum(m for name, m in macs.items() if name not in surgeon.prunable)
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

    With such a budget exchanges leave every layer its number of weights, and thereby the multiply-adds.
    """
    budget = macs_budget(surgeon, macs, most)
    if kept_macs(macs, surgeon.masks) <= budget:
        return surgeon.sparsity
    inverse = surgeon.inverse or surgeon.estimate()
    low, high = surgeon.sparsity, largest_sparsity(surgeon)
    if kept_macs(macs, surgeon.select(inverse, high)) > budget:
        raise ToolError(f"max_flops is {budget:,.0f}, which pattern and floor do not allow")
    for _ in range(20):
        middle = (low + high) / 2
        if kept_macs(macs, surgeon.select(inverse, middle)) > budget:
            low = middle
        else:
            high = middle
    return high
