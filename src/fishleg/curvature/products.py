"""Products F·v of the true Fisher matrix with a vector: exact, or from samples of h."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fishleg.curvature.likelihoods import Likelihood
from fishleg.curvature.outputs import check_finite, counted_units
from fishleg.runtime.batches import (
    Forward,
    default_forward,
)
from fishleg.runtime.models import functional_forward, trainable_parameters
from fishleg.runtime.modes import differentiable_attention, evaluation_mode
from fishleg.runtime.tensors import Tensors


def fisher_product(
    model: nn.Module,
    batch: Any,
    likelihood: Likelihood,
    v: Mapping[str, Tensor],
    *,
    forward: Forward = default_forward,
) -> Tensors:
    """Compute F·v = Jᵀ Λ J v / units exactly on one batch.

    J = ∂f/∂w is the Jacobian of the outputs, and Λ the Fisher matrix of p(y|f) with respect to f. The cost is
    one forward-mode and one reverse-mode pass. The model is in evaluation mode. Such products appear in the
    auxiliary loss. Paper: eq. (aux).

    Outputs that do not fit the likelihood, and a result that is not finite, raise a ValueError.

    Args:
        model: The model.
        batch: A batch of any format, on the model's device.
        likelihood: A likelihood with a closed form of `output_fisher`.
        v: Vectors by parameter name, each of the parameter's shape. F is restricted to these parameters.
        forward: `forward(model, batch) -> outputs`.

    Returns:
        F·v by parameter name.
    """
    parameters = {name: p.detach() for name, p in trainable_parameters(model).items() if name in v}
    fixed = {name: p.detach() for name, p in model.named_parameters() if name not in parameters}
    fixed.update(model.named_buffers())

    def outputs(values: Tensors) -> Tensor:
        return functional_forward(model, {**fixed, **values}, forward, batch)

    with evaluation_mode(model), differentiable_attention():
        tangents = ({name: v[name] for name in parameters},)
        f, f_v, *_ = torch.func.jvp(outputs, (parameters,), tangents)
        valid, units = counted_units(likelihood, f, batch)
        t = likelihood.output_fisher(f, f_v) * (1 if valid is None else valid)
        product: Tensors = torch.func.vjp(outputs, parameters)[1](t / units)[0]
    check_finite(product)
    return product


def sampled_product(samples: Mapping[str, Tensor], v: Mapping[str, Tensor]) -> Tensors:
    """Estimate F·v by F̂·v = mean over g of h_g (h_g·v), which is unbiased and of rank g.

    Args:
        samples: The result of `sample_h`: by parameter name, vectors h [groups, *shape].
        v: Vectors by parameter name, each of the parameter's shape.

    Returns:
        F̂·v by parameter name.
    """
    along = sum((h.flatten(1) @ v[name].flatten() for name, h in samples.items()), start=torch.zeros(()))
    return {name: torch.einsum("g,g...->...", along, h) / len(h) for name, h in samples.items()}
