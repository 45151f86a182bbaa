"""The gradients of an optimizer step, checked and completed to whole layers."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping

import torch
from torch import Tensor, nn

from fishleg.inverse.inverse_fisher import InverseFisher


def collect_gradients(
    parameters: Iterable[tuple[str, nn.Parameter]], covered: Collection[str]
) -> tuple[dict[str, Tensor], float]:
    """Collect the gradients of parameters. A parameter without a gradient is left out.

    Args:
        parameters: Names and parameters.
        covered: The names of the parameters that Q covers.

    Returns:
        The gradients by parameter name, and their largest absolute entry.

    Raises:
        ValueError: A gradient is sparse, not finite or not covered by Q, or there is none at all.
    """
    gradients = {}
    for name, p in parameters:
        if p.grad is None or not p.requires_grad:
            continue
        if name not in covered:
            raise ValueError(f"Q does not cover parameter {name!r}: it was frozen when Q was built")
        if p.grad.is_sparse:
            raise ValueError(f"parameter {name!r} has a sparse gradient; FishLeg needs dense ones")
        gradients[name] = p.grad
    if not gradients:
        raise ValueError("no parameter has a gradient: call loss.backward() before step()")
    norms = torch.stack(list(torch._foreach_norm(list(gradients.values()), math.inf))).tolist()
    for name, norm in zip(gradients, norms, strict=True):
        if not math.isfinite(norm):
            raise ValueError(f"non-finite gradient for parameter {name!r}; nothing was changed")
    return gradients, max(norms)


def complete_layers(inverse: InverseFisher, gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Add zeros for parameters without a gradient, in layers where another parameter has one.

    Q acts on whole layers: on a weight together with its bias.

    Args:
        inverse: Q.
        gradients: The gradients by parameter name.

    Returns:
        The gradients and the added zeros by parameter name.
    """
    completed = dict(gradients)
    for layer in inverse.layers.values():
        if not any(part in gradients for part in layer.names):
            continue
        for part in layer.names:
            if part not in completed:
                like = layer.unpack(inverse.unmasked(layer.name).diag())
                completed[part] = torch.zeros_like(like[part])
    return completed
