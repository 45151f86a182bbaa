"""TODO."""

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
from fishleg.runtime.models import call_with, trainable_parameters
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
    """F·v on one batch, exactly: Jᵀ Λ J v / units by one forward-mode and one reverse-mode pass."""
    parameters = {name: p.detach() for name, p in trainable_parameters(model).items() if name in v}
    fixed = {name: p.detach() for name, p in model.named_parameters() if name not in parameters}
    fixed.update(model.named_buffers())

    def outputs(values: Tensors) -> Tensor:
        return call_with(model, {**fixed, **values}, forward, batch)

    with evaluation_mode(model), differentiable_attention():
        tangents = ({name: v[name] for name in parameters},)
        f, f_v, *_ = torch.func.jvp(outputs, (parameters,), tangents)
        valid, units = counted_units(likelihood, f, batch)
        t = likelihood.output_fisher(f, f_v) * (1 if valid is None else valid)
        product: Tensors = torch.func.vjp(outputs, parameters)[1](t / units)[0]
    check_finite(product)
    return product


def sampled_product(samples: Mapping[str, Tensor], v: Mapping[str, Tensor]) -> Tensors:
    """F̂·v = mean_g h_g (h_g·v) from vectors of `sample_h`, whole model: an unbiased, rank-g product."""
    along = sum((h.flatten(1) @ v[name].flatten() for name, h in samples.items()), start=torch.zeros(()))
    return {name: torch.einsum("g,g...->...", along, h) / len(h) for name, h in samples.items()}
