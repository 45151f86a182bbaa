"""Why a Fisher matrix is zero, in words: gamma cannot be chosen relative to it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fishleg.curvature.likelihoods import Bernoulli, Categorical, Likelihood
from fishleg.runtime.batches import Forward
from fishleg.runtime.modes import evaluation_mode
from fishleg.runtime.tensors import at_least_float32

SMALLEST_DIAGONAL = torch.finfo(torch.float32).tiny  # the inverse of less overflows
_SATURATED = 1e-6  # nats per prediction: its largest probability is about 1 - 1e-7


def check_fisher_not_zero(
    mean: float, model: nn.Module, batch: Any, likelihood: Likelihood, forward: Forward
) -> None:
    """Check that F is not zero, so that γ can be chosen relative to it.

    Args:
        mean: The mean of diag(F) over all parameters.
        model: The model.
        batch: The batch, or one of the batches, on which F was taken.
        likelihood: The likelihood.
        forward: `forward(model, batch) -> outputs`.

    Raises:
        ValueError: F is zero or almost zero. The message says what the outputs are like, and what to try.
    """
    if mean > SMALLEST_DIAGONAL:
        return
    with evaluation_mode(model), torch.no_grad():
        f = at_least_float32(forward(model, batch))
    found = "zero" if mean == 0 else "almost zero"
    raise ValueError(
        f"cannot choose gamma: the Fisher matrix is {found} on the first batches (the mean of its diagonal "
        f"is {mean:.3g}). The outputs lie between {float(f.min()):.4g} and {float(f.max()):.4g}. "
        f"{_explain(f, likelihood)}"
    )


def _explain(f: Tensor, likelihood: Likelihood) -> str:
    """Return what the outputs say about the reason, and what to try."""
    else_try = "take other batches or more samples, or pass gamma="
    if not isinstance(likelihood, (Bernoulli, Categorical)):
        return (
            "They do not depend on the weights there: look at the inputs, at dead activations, and for "
            f"no_grad or detach in forward; {else_try}"
        )
    largest, entropy = _confidence(f, likelihood)
    told = f"the largest probability is {largest:.7g} on average, the entropy {entropy:.3g} nats"
    if entropy > _SATURATED:
        return (
            f"They are not saturated ({told}). So they do not depend on the weights there: look at the "
            f"inputs (all zero?), at dead activations, and for no_grad or detach in forward; {else_try}"
        )
    return (
        f"They are saturated: {told}. Try a temperature (forward=lambda model, batch: model(batch[0]) / 10), "
        "logits where the outputs are something else, or another likelihood ('gaussian' for regression); "
        f"{else_try}"
    )


def _confidence(f: Tensor, likelihood: Likelihood) -> tuple[float, float]:
    """Return the mean of the largest probability of each prediction, and the mean entropy."""
    f = f.double()
    if isinstance(likelihood, Categorical):
        p, class_dim = f.softmax(likelihood.class_dim), likelihood.class_dim
        largest, entropy = p.amax(class_dim), torch.special.entr(p).sum(class_dim)
    else:
        p = f.sigmoid()
        largest = torch.maximum(p, 1 - p)
        entropy = torch.special.entr(p) + torch.special.entr(1 - p)
    return float(largest.mean()), float(entropy.mean())
