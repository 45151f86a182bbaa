"""Samples of curvature: random vectors h with E[hhᵀ] = F, the Fisher matrix of a model.

The true Fisher matrix is F = mean over units of Jᵀ Λ J, with J = ∂f/∂w and Λ the Fisher matrix of p(y|f)
with respect to the outputs f. Labels are drawn from the model, not taken from the data. The model is in
evaluation mode, optionally with BatchNorm by the batch, so that F belongs to one fixed function. No buffer
of the model is changed.
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
    has_ambiguous_size,
    map_tensors,
    slice_batch,
    targets_of,
)
from fishleg.runtime.models import functional_forward, trainable_parameters
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
    """Draw independent vectors h = Jᵀc/√units with E[hhᵀ] = F, one for each group of examples.

    c is a random cotangent with covariance Λ, the Fisher matrix of p(y|f) with respect to f. Each h costs one
    backward pass over its group.

    Args:
        model: The model.
        batch: A batch of any format, on the model's device.
        likelihood: The likelihood.
        groups: The number of groups into which the batch is split.
        names: The parameters to use; None for all trainable ones.
        generator: The random generator of the cotangents; None for the global one.
        forward: `forward(model, batch) -> outputs`.
        vectorize: Whether to compute all groups in one pass with `torch.func.vmap`. This is faster for small
            models with many groups.
        batch_statistics: Whether each BatchNorm in training mode normalises by the batch. Running statistics
            are not changed.

    Returns:
        Vectors h [groups, *shape] by parameter name.

    Raises:
        ValueError: If `groups` does not fit the batch, `vectorize` is not possible, the outputs do not fit
            the likelihood, or the result is not finite.
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
            samples = _sample_vectorized(model, batch, likelihood, parameters, groups, generator, forward)
        else:
            bounds = list(pairwise(size * i // groups for i in range(groups + 1)))
            drawn = [
                _sample_one(model, slice_batch(batch, a, b), likelihood, parameters, generator, forward)
                for a, b in bounds
            ]
            vectors, shapes = [h for h, _ in drawn], [shape for _, shape in drawn]
            rows = [shape[0] for shape in shapes]
            if groups > 1 and has_ambiguous_size(batch) and rows != [b - a for a, b in bounds]:
                with torch.no_grad():
                    check_parts(batch, forward(model, batch).shape, shapes)
            samples = {name: torch.stack([h[name] for h in vectors]) for name in parameters}
    check_finite(samples)
    return samples


def _sample_one(
    model: nn.Module,
    batch: Any,
    likelihood: Likelihood,
    parameters: Mapping[str, nn.Parameter],
    generator: torch.Generator | None,
    forward: Forward,
) -> tuple[Tensors, torch.Size]:
    """Return one h of a batch, and the shape of the outputs."""
    with torch.enable_grad():
        f = forward(model, batch)
        valid, units = counted_units(likelihood, f, batch)
        c = likelihood.cotangent(f, generator) * (1 if valid is None else valid)
        gradients = torch.autograd.grad(
            f, list(parameters.values()), grad_outputs=c / units**0.5, allow_unused=True
        )
    h = {name: _dense_gradient(p, g) for (name, p), g in zip(parameters.items(), gradients, strict=True)}
    return h, f.shape


def _dense_gradient(p: Tensor, g: Tensor | None) -> Tensor:
    """Return a gradient as a dense tensor; it may be missing, or sparse (of an embedding)."""
    if g is None:
        return torch.zeros_like(p)
    return g.to_dense() if g.is_sparse else g


def _sample_vectorized(
    model: nn.Module,
    batch: Any,
    likelihood: Likelihood,
    parameters: Mapping[str, nn.Parameter],
    groups: int,
    generator: torch.Generator | None,
    forward: Forward,
) -> Tensors:
    """Return all h of a batch, [groups, *shape] by parameter name, computed with `torch.func.vmap`.

    Raises:
        ValueError: If the batch cannot be split into equal groups, or has ignored positions.
    """
    size = batch_size(batch)
    if size % groups:
        raise ValueError(f"vectorize needs a batch size divisible by groups, got {size} and {groups}")
    with torch.no_grad():
        f = forward(model, batch)
        valid, units = counted_units(likelihood, f, batch)
        c = likelihood.cotangent(f, generator)
    if valid is not None:
        raise ValueError("vectorize does not support ignored positions; use vectorize=False")
    units_per_group = units / groups

    def grouped(t: Tensor) -> Tensor:
        if t.dim() and len(t) == size:
            folded: Tensor = t.unflatten(0, (groups, size // groups))
            return folded
        return t.expand(groups, *t.shape)

    frozen = {name: p.detach() for name, p in model.named_parameters() if name not in parameters}
    buffers = dict(model.named_buffers())

    def projected(values: Tensors, part: Any, cotangent: Tensor) -> Tensor:
        outputs = functional_forward(model, {**frozen, **buffers, **values}, forward, part)
        projection: Tensor = (outputs * cotangent).sum() / units_per_group**0.5
        return projection

    values = {name: p.detach() for name, p in parameters.items()}
    per_group_gradient = torch.func.vmap(torch.func.grad(projected), in_dims=(None, 0, 0))
    with differentiable_attention():
        gradients: Tensors = per_group_gradient(values, map_tensors(batch, grouped), grouped(c))
    return gradients


def mean_diagonal(samples: Mapping[str, Tensor]) -> float:
    """Estimate the mean of diag(F) over all parameters.

    Args:
        samples: The result of `sample_h`: by parameter name, vectors h [groups, *shape].

    Returns:
        The mean of h² over groups and parameters.
    """
    total = sum(float(h.double().square().sum()) / len(h) for h in samples.values())
    return total / sum(h[0].numel() for h in samples.values())


def empirical_h(
    model: nn.Module, batch: Any, likelihood: Likelihood, forward: Forward, batch_statistics: bool
) -> dict[str, Tensor]:
    """Compute h = √units · ∇ mean nll at the labels of the data, with E[hhᵀ] = the empirical Fisher matrix.

    The published baselines (WoodFisher, oBERT, M-FAC) use the empirical Fisher matrix.

    Args:
        model: The model.
        batch: A batch with targets, on the model's device.
        likelihood: The likelihood.
        forward: `forward(model, batch) -> outputs`.
        batch_statistics: Whether each BatchNorm in training mode normalises by the batch.

    Returns:
        One vector h [1, *shape] by parameter name.

    Raises:
        ValueError: If the batch has no targets, they do not fit the outputs, or the result is not finite.
        AllIgnoredError: If every position is ignored.
    """
    targets = targets_of(batch)
    if targets is None:
        raise ValueError("the empirical Fisher needs labels: the loader must yield (inputs, targets)")
    parameters = trainable_parameters(model)
    with evaluation_mode(model, batch_statistics=batch_statistics), torch.enable_grad():
        f = forward(model, batch)
        likelihood.check(f, targets)
        if not likelihood.finite(f):
            raise ValueError("the model's outputs are not finite: NaN or Inf in the forward pass")
        valid = likelihood.valid(f, targets)
        if valid is not None and not bool(valid.any()):
            raise AllIgnoredError("every position of the batch is ignored (targets are all ignore_index)")
        units = likelihood.units(f) if valid is None else int(valid.sum())
        loss = likelihood.nll(f, targets) * units**0.5
        gradients = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
    samples = {
        name: _dense_gradient(p, g).unsqueeze(0)
        for (name, p), g in zip(parameters.items(), gradients, strict=True)
    }
    check_finite(samples)
    return samples
