"""The trust region of FishLeg: it shortens a step whose predicted KL divergence would exceed a bound.

A step δ = −ηQg has the predicted KL divergence ½ δᵀF_γδ ≈ ½ η² gᵀQg. With momentum β, steps of size η add up
to η/(1−β). The trust region bounds this sum, for the largest η so far. Then a schedule that lowers η really
shortens the steps. A schedule that raises η again finds no momentum that is too long for it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor


def shortening(decrease: float, reach: float, max_kl: float) -> float:
    """Compute the factor t ≤ 1 with ½ (t · reach)² gᵀQg ≤ max_kl.

    Args:
        decrease: gᵀQg.
        reach: The step size η/(1−β) that steps with momentum add up to.
        max_kl: The largest predicted KL divergence.

    Returns:
        The factor of the step.
    """
    kl = 0.5 * reach**2 * max(decrease, 0.0)
    return min(1.0, math.sqrt(max_kl / kl)) if kl > 0 else 1.0


def largest_reach(groups: Sequence[Mapping[str, Any]]) -> float:
    """Compute the largest η/(1−β) over parameter groups, with the largest η so far.

    Args:
        groups: Parameter groups that `record_learning_rates_` has seen.

    Returns:
        The largest reach.
    """
    return max(float(group["largest_lr"] / (1 - group["momentum"])) for group in groups)


def record_learning_rates_(
    groups: Sequence[dict[str, Any]], state: Mapping[Tensor, Mapping[str, Any]]
) -> None:
    """Record the largest learning rate of each parameter group so far, under `largest_lr`.

    If a learning rate rises above it, the momentum of the group is scaled down in proportion: it was short
    enough only for the lower rate.

    Args:
        groups: The parameter groups of the optimizer.
        state: The state of the optimizer, with `momentum` by parameter.
    """
    for group in groups:
        largest = group.get("largest_lr", 0.0)
        if group["lr"] > largest:
            momenta = [state[p]["momentum"] for p in group["params"] if "momentum" in state[p]]
            if momenta:
                torch._foreach_mul_(momenta, largest / group["lr"])
        group["largest_lr"] = max(group["lr"], largest)
