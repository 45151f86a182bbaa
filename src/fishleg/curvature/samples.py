"""The true Fisher matrix F of a model: vectors h with E[hhᵀ] = F, and products F·v.

F = mean over units of Jᵀ Λ J, J = ∂f/∂w and Λ the Fisher matrix of p(y|f): labels come from the model,
never from the data. Everything here runs in eval mode (on request with BatchNorm by the batch), so that F
belongs to one fixed function, and no buffer of the model is touched.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from fishleg.curvature.likelihoods import Likelihood
from fishleg.curvature.outputs import AllIgnoredError, check_finite, counted_units
from fishleg.runtime.batches import (
    Forward,
    batch_size,
    check_parts,
    default_forward,
    is_ambiguous,
    map_tensors,
    slice_batch,
    targets_of,
)
from fishleg.runtime.models import call_with, trainable_parameters
from fishleg.runtime.modes import differentiable_attention, evaluation_mode
from fishleg.runtime.tensors import Tensors


def sample_h(
    model: nn.Module,
    batch: Any,
    likelihood: Likelihood,
    *,
    groups: int = 1,
    names: Sequence[str] | None = None,
    generator: torch.Generator | None = None,
    forward: Forward = default_forward,
    vectorize: bool = False,
    batch_statistics: bool = False,
) -> Tensors:
    """Independent vectors h, one per group of the batch, each with E[hhᵀ] = F: {name: [groups, *shape]}.

    h = Jᵀc/√units with a random cotangent c whose covariance is the output Fisher: one backward each.
    `vectorize` computes all groups in one vmapped pass (small models, many groups); `batch_statistics`
    normalises by the batch where a BatchNorm is in training mode, without touching its running statistics.
    """
    parameters = trainable_parameters(model)
    if names is not None:
        parameters = {name: parameters[name] for name in names}
    size = batch_size(batch)
    if not 1 <= groups <= size:
        raise ValueError(f"groups must be between 1 and the batch size {size}, got {groups}")
    if vectorize and batch_statistics:
        raise ValueError("vectorize and batch_statistics exclude each other")
    with evaluation_mode(model, batch_statistics=batch_statistics):
        if vectorize:
            samples = _vectorized_h(model, batch, likelihood, parameters, groups, generator, forward)
        else:
            bounds = list(pairwise(size * i // groups for i in range(groups + 1)))
            drawn = [
                _one_h(model, slice_batch(batch, a, b), likelihood, parameters, generator, forward)
                for a, b in bounds
            ]
            parts, shapes = [h for h, _ in drawn], [shape for _, shape in drawn]
            rows = [shape[0] for shape in shapes]
            if groups > 1 and is_ambiguous(batch) and rows != [b - a for a, b in bounds]:
                with torch.no_grad():
                    check_parts(batch, forward(model, batch).shape, shapes)
            samples = {name: torch.stack([part[name] for part in parts]) for name in parameters}
    check_finite(samples)
    return samples


def _one_h(
    model: nn.Module,
    batch: Any,
    likelihood: Likelihood,
    parameters: Mapping[str, nn.Parameter],
    generator: torch.Generator | None,
    forward: Forward,
) -> tuple[Tensors, torch.Size]:
    """One h, and the shape of the outputs that it comes from."""
    with torch.enable_grad():
        f = forward(model, batch)
        valid, units = counted_units(likelihood, f, batch)
        c = likelihood.cotangent(f, generator) * (1 if valid is None else valid)
        gradients = torch.autograd.grad(
            f, list(parameters.values()), grad_outputs=c / units**0.5, allow_unused=True
        )
    h = {name: dense_gradient(p, g) for (name, p), g in zip(parameters.items(), gradients, strict=True)}
    return h, f.shape


def dense_gradient(p: Tensor, g: Tensor | None) -> Tensor:
    """A gradient that may be missing, or sparse as an embedding's can be."""
    if g is None:
        return torch.zeros_like(p)
    return g.to_dense() if g.is_sparse else g


def _vectorized_h(
    model: nn.Module,
    batch: Any,
    likelihood: Likelihood,
    parameters: Mapping[str, nn.Parameter],
    groups: int,
    generator: torch.Generator | None,
    forward: Forward,
) -> Tensors:
    size = batch_size(batch)
    if size % groups:
        raise ValueError(f"vectorize needs a batch size divisible by groups, got {size} and {groups}")
    with torch.no_grad():
        f = forward(model, batch)
        valid, units = counted_units(likelihood, f, batch)
        c = likelihood.cotangent(f, generator)
    if valid is not None:
        raise ValueError("vectorize does not support ignored positions; use vectorize=False")
    per_group = units / groups

    def fold(t: Tensor) -> Tensor:
        return (
            t.unflatten(0, (groups, size // groups))
            if t.dim() and len(t) == size
            else t.expand(groups, *t.shape)
        )

    frozen = {name: p.detach() for name, p in model.named_parameters() if name not in parameters}
    buffers = dict(model.named_buffers())

    def projected(values: Tensors, part: Any, cotangent: Tensor) -> Tensor:
        outputs = call_with(model, {**frozen, **buffers, **values}, forward, part)
        projection: Tensor = (outputs * cotangent).sum() / per_group**0.5
        return projection

    values = {name: p.detach() for name, p in parameters.items()}
    per_group_gradient = torch.func.vmap(torch.func.grad(projected), in_dims=(None, 0, 0))
    with differentiable_attention():
        gradients: Tensors = per_group_gradient(values, map_tensors(batch, fold), fold(c))
    return gradients


def mean_diagonal(samples: Mapping[str, Tensor]) -> float:
    """The mean of diag(F) over all parameters, estimated from vectors h."""
    total = sum(float(h.double().square().sum()) / len(h) for h in samples.values())
    return total / sum(h[0].numel() for h in samples.values())


def empirical_h(
    model: nn.Module, batch: Any, likelihood: Likelihood, forward: Forward, batch_statistics: bool
) -> dict[str, Tensor]:
    """√units · ∇ mean nll at the data's labels: the empirical Fisher of the published baselines."""
    targets = targets_of(batch)
    if targets is None:
        raise ValueError("the empirical Fisher needs labels: the loader must yield (inputs, targets)")
    parameters = trainable_parameters(model)
    with evaluation_mode(model, batch_statistics=batch_statistics), torch.enable_grad():
        f = forward(model, batch)
        likelihood.check(f, targets)
        valid = likelihood.valid(f, targets)
        if valid is not None and not bool(valid.any()):
            raise AllIgnoredError("every position of the batch is ignored (targets are all ignore_index)")
        units = likelihood.units(f) if valid is None else int(valid.sum())
        loss = likelihood.nll(f, targets) * units**0.5
        gradients = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
    return {
        name: dense_gradient(p, g).unsqueeze(0)
        for (name, p), g in zip(parameters.items(), gradients, strict=True)
    }
