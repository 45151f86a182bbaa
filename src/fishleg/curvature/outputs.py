"""Which outputs of a batch count for the Fisher matrix F, and checks that results are finite."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from fishleg.curvature.likelihoods import Likelihood
from fishleg.runtime.batches import targets_of
from fishleg.runtime.tensors import first_non_finite


class AllIgnoredError(ValueError):
    """Every position of a batch is ignored, so that it contributes nothing to the Fisher matrix."""


def counted_units(likelihood: Likelihood, f: Tensor, batch: Any) -> tuple[Tensor | None, int]:
    """Check model outputs, and find the units that count.

    The true Fisher matrix needs no labels. The labels of the batch only mark the ignored positions.

    Args:
        likelihood: The likelihood.
        f: Model outputs [..., outputs].
        batch: The batch from which f was computed.

    Returns:
        A factor that is 1 for units that count and 0 for others, and broadcasts to f (None if all count);
        and the number of units that count.

    Raises:
        ValueError: If f does not fit the likelihood, or is not finite.
        AllIgnoredError: If no unit counts.
    """
    likelihood.check(f, None)
    if not likelihood.finite(f):
        raise ValueError("the model's outputs are not finite: NaN or Inf in the forward pass")
    valid = likelihood.valid(f, targets_of(batch))
    if valid is None:
        return None, likelihood.units(f)
    if not bool(valid.any()):
        raise AllIgnoredError("every position of the batch is ignored (targets are all ignore_index)")
    return valid.unsqueeze(getattr(likelihood, "class_dim", -1)).to(f.dtype), int(valid.sum())


def check_finite(tensors: Mapping[str, Tensor]) -> None:
    """Check that curvature vectors hold no NaN and no infinity.

    Args:
        tensors: Tensors by parameter name.

    Raises:
        ValueError: If one of them is not finite.
    """
    name = first_non_finite(tensors)
    if name is not None:
        raise ValueError(f"non-finite curvature for parameter {name!r}: NaN or Inf in the backward pass")
