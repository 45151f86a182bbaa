"""Which outputs of a batch count for F, and checks of what was computed from them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from fishleg.curvature.likelihoods import Likelihood
from fishleg.runtime.batches import targets_of
from fishleg.runtime.tensors import first_non_finite


class AllIgnoredError(ValueError):
    """A batch without a single position that counts: there is nothing to learn from it."""


def counted_units(likelihood: Likelihood, f: Tensor, batch: Any) -> tuple[Tensor | None, int]:
    """Check f; 0/1 over f's units (None: all count), and how many count.

    The true Fisher needs no labels. Those of the batch tell which positions are ignored, where they fit f.
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
    name = first_non_finite(tensors)
    if name is not None:
        raise ValueError(f"non-finite curvature for parameter {name!r}: NaN or Inf in the backward pass")
