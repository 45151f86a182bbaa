"""The true Fisher matrix F of a model: vectors h with E[hhᵀ] = F, and products F·v.

F = mean over units of Jᵀ Λ J, J = ∂f/∂w and Λ the Fisher matrix of p(y|f): labels come from the model,
never from the data. Everything here runs in eval mode (on request with BatchNorm by the batch), so that F
belongs to one fixed function, and no buffer of the model is touched.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.modules.batchnorm import _BatchNorm

from fishleg.batches import (
    Forward,
    batch_size,
    check_parts,
    default_forward,
    is_ambiguous,
    map_tensors,
    slice_batch,
    targets_of,
)
from fishleg.likelihoods import Likelihood

Tensors = dict[str, Tensor]


@contextmanager
def frozen_statistics(model: nn.Module, *, batch_statistics: bool = False) -> Iterator[None]:
    """Eval mode inside, the old mode of every module after.

    Recurrent layers stay in training mode, without which cuDNN has no gradient, but lose their dropout.

    With `batch_statistics`, BatchNorm normalises by the batch, as it does in training, but its running
    statistics stay untouched all the same.
    """
    modes = {module: module.training for module in model.modules()}
    norms = [m for m in modes if isinstance(m, _BatchNorm) and m.training] if batch_statistics else []
    tracked = [norm.track_running_stats for norm in norms]
    dropouts = {m: m.dropout for m in modes if isinstance(m, nn.RNNBase)}
    try:
        model.eval()
        for recurrent in dropouts:
            recurrent.training, recurrent.dropout = modes[recurrent], 0.0
        for norm in norms:
            norm.training, norm.track_running_stats = True, False  # no buffer is written, not even by NaN
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode
        for recurrent, dropout in dropouts.items():
            recurrent.dropout = dropout
        for norm, track in zip(norms, tracked, strict=True):
            norm.track_running_stats = track


@contextmanager
def undisturbed() -> Iterator[None]:
    """Gradients on and autocast off inside, whatever the caller has around it; inference mode is an error.

    (Autocast keeps low-precision copies of weights and would go on with those from before a pruning. To run
    the model under it, put it into `forward`.)
    """
    if torch.is_inference_mode_enabled():
        raise ValueError(
            "Q is learned from gradients, which torch.inference_mode() rules out: call it outside"
        )
    with ExitStack() as stack:
        for device in ("cpu", "cuda"):
            if torch.is_autocast_enabled(device):
                stack.callback(torch.clear_autocast_cache)
                stack.enter_context(torch.autocast(device, enabled=False))
        stack.enter_context(torch.enable_grad())
        yield


def widened(tensor: Tensor) -> Tensor:
    """In float32 at least: sums of squares, their inverses and KLs need more than half precision has."""
    return tensor if tensor.dtype in (torch.float32, torch.float64) else tensor.float()


def can_use_batch_statistics(model: nn.Module, batch: Any) -> bool:
    """Whether a BatchNorm would use them, and has them: a single example has none."""
    norms = (m for m in model.modules() if isinstance(m, _BatchNorm) and m.training)
    return batch_size(batch) > 1 and any(norms)


@contextmanager
def _plain_attention() -> Iterator[None]:
    """Attention by differentiable operations inside: torch's fused kernels have neither jvp nor vmap."""
    fast = torch.backends.mha.get_fastpath_enabled()
    try:
        torch.backends.mha.set_fastpath_enabled(False)
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)


class AllIgnoredError(ValueError):
    """A batch without a single position that counts: there is nothing to learn from it."""


def trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    """The trainable parameters by name, shared ones once."""
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if not parameters:
        raise ValueError("the model has no trainable parameters (requires_grad is False for all of them)")
    return parameters


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
    parameters = trainable(model)
    if names is not None:
        parameters = {name: parameters[name] for name in names}
    size = batch_size(batch)
    if not 1 <= groups <= size:
        raise ValueError(f"groups must be between 1 and the batch size {size}, got {groups}")
    if vectorize and batch_statistics:
        raise ValueError("vectorize and batch_statistics exclude each other")
    with frozen_statistics(model, batch_statistics=batch_statistics):
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
    _check_finite(samples)
    return samples


def counted(likelihood: Likelihood, f: Tensor, batch: Any) -> tuple[Tensor | None, int]:
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
        valid, units = counted(likelihood, f, batch)
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


@contextmanager
def uncompiled() -> Iterator[None]:
    """Inside, compiled models run as they were written: their graphs know nothing of hooks."""
    stance = getattr(torch.compiler, "set_stance", None)  # torch 2.6
    with nullcontext() if stance is None else stance("force_eager"):
        yield


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
        valid, units = counted(likelihood, f, batch)
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
        outputs = _called_with(model, {**frozen, **buffers, **values}, forward, part)
        projection: Tensor = (outputs * cotangent).sum() / per_group**0.5
        return projection

    values = {name: p.detach() for name, p in parameters.items()}
    per_group_gradient = torch.func.vmap(torch.func.grad(projected), in_dims=(None, 0, 0))
    with _plain_attention():
        gradients: Tensors = per_group_gradient(values, map_tensors(batch, fold), fold(c))
    return gradients


def fisher_product(
    model: nn.Module,
    batch: Any,
    likelihood: Likelihood,
    v: Mapping[str, Tensor],
    *,
    forward: Forward = default_forward,
) -> Tensors:
    """F·v on one batch, exactly: Jᵀ Λ J v / units by one forward-mode and one reverse-mode pass."""
    parameters = {name: p.detach() for name, p in trainable(model).items() if name in v}
    fixed = {name: p.detach() for name, p in model.named_parameters() if name not in parameters}
    fixed.update(model.named_buffers())

    def outputs(values: Tensors) -> Tensor:
        return _called_with(model, {**fixed, **values}, forward, batch)

    with frozen_statistics(model), _plain_attention():
        tangents = ({name: v[name] for name in parameters},)
        f, f_v, *_ = torch.func.jvp(outputs, (parameters,), tangents)
        valid, units = counted(likelihood, f, batch)
        t = likelihood.output_fisher(f, f_v) * (1 if valid is None else valid)
        product: Tensors = torch.func.vjp(outputs, parameters)[1](t / units)[0]
    _check_finite(product)
    return product


def sampled_product(samples: Mapping[str, Tensor], v: Mapping[str, Tensor]) -> Tensors:
    """F̂·v = mean_g h_g (h_g·v) from vectors of `sample_h`, whole model: an unbiased, rank-g product."""
    along = sum((h.flatten(1) @ v[name].flatten() for name, h in samples.items()), start=torch.zeros(()))
    return {name: torch.einsum("g,g...->...", along, h) / len(h) for name, h in samples.items()}


def mean_diagonal(samples: Mapping[str, Tensor]) -> float:
    """The mean of diag(F) over all parameters, estimated from vectors h."""
    total = sum(float(h.double().square().sum()) / len(h) for h in samples.values())
    return total / sum(h[0].numel() for h in samples.values())


def first_non_finite(tensors: Mapping[str, Tensor]) -> str | None:
    """The name of the first tensor with a NaN or Inf, or None; one fused pass over all of them."""
    if not tensors:
        return None
    norms = torch._foreach_norm([tensor.detach() for tensor in tensors.values()])
    for name, finite in zip(tensors, torch.stack(list(norms)).isfinite().tolist(), strict=True):
        if not finite:
            return name
    return None


def _check_finite(tensors: Mapping[str, Tensor]) -> None:
    name = first_non_finite(tensors)
    if name is not None:
        raise ValueError(f"non-finite curvature for parameter {name!r}: NaN or Inf in the backward pass")


class _Call(nn.Module):
    """A user-given forward as a module, so that its model's parameters can be exchanged for others."""

    def __init__(self, model: nn.Module, forward: Forward) -> None:
        super().__init__()
        self.model, self.how = model, forward

    def forward(self, batch: Any) -> Tensor:
        return self.how(self.model, batch)


def _called_with(model: nn.Module, values: Tensors, forward: Forward, batch: Any) -> Tensor:
    """The outputs with these parameters and buffers, whatever part of the model the forward calls."""
    outputs: Tensor = functional_call(
        _Call(model, forward), {f"model.{name}": value for name, value in values.items()}, (batch,)
    )
    return outputs
