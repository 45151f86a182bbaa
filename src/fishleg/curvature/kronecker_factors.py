"""Kronecker factors (KFAC): second moments of the inputs and output gradients of each layer.

For a linear layer F ≈ E[ggᵀ] ⊗ E[aaᵀ], with inputs a and output gradients g (Martens and Grosse, 2015). For
a convolution a runs over the patches, and the input side is summed over positions (Grosse and Martens, 2016).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from fishleg.curvature.layers import Layer
from fishleg.curvature.likelihoods import Likelihood
from fishleg.curvature.outputs import AllIgnoredError, check_finite, counted_units
from fishleg.runtime.batch_errors import naming_the_batch
from fishleg.runtime.batches import Forward, default_forward
from fishleg.runtime.batchnorm import can_use_batch_statistics
from fishleg.runtime.modes import eager_mode, evaluation_mode
from fishleg.runtime.tensors import at_least_float32, first_non_finite

Factors = dict[str, tuple[Tensor, Tensor]]
"""By layer name: the output side [n_out, n_out] and the input side [n_in (+1), n_in (+1)]."""

_Calls = dict[str, list[tuple[Tensor, Tensor]]]  # by layer: the input and output of each call


def kronecker_factors(
    model: nn.Module,
    layers: list[Layer],
    batches: Iterable[Any],
    likelihood: Likelihood,
    *,
    forward: Forward = default_forward,
    generator: torch.Generator | None = None,
    batch_statistics: bool = False,
    removed_rows: Mapping[str, Tensor] | None = None,
) -> Factors:
    """Compute the output side E[ggᵀ] and the input side E[aaᵀ] of each layer, for the true Fisher matrix.

    Linear layers and ungrouped Conv2d layers with zero padding are supported; all others are left out. A
    batch whose positions are all ignored is skipped. Outputs that do not fit the likelihood, or are not
    finite, raise a ValueError.

    Args:
        model: The model.
        layers: The layers of the model, as `find_layers` returns them.
        batches: Batches of any format, on the model's device.
        likelihood: The likelihood.
        forward: `forward(model, batch) -> outputs`.
        generator: The random generator of the cotangents; None for the global one.
        batch_statistics: Whether each BatchNorm in training mode normalises by the batch.
        removed_rows: By weight, a boolean mask [n_out] of removed rows (`layers.removed_rows`). Their
            gradients are set to zero on the output side.

    Returns:
        (output side, input side) by layer name. With a bias, the input side has a last row and column for it.
    """
    matrices = {layer.name: layer for layer in layers if layer.is_matrix}
    modules = _supported_modules(model, matrices.values())
    totals: dict[str, list[Tensor]] = {}
    count = 0
    with _recorded_calls(modules) as calls:
        for number, batch in enumerate(batches, 1):
            with naming_the_batch(getattr(batches, "place", f"batch {number}")):
                by_batch = batch_statistics and can_use_batch_statistics(model, batch)
                with eager_mode(), evaluation_mode(model, batch_statistics=by_batch), torch.enable_grad():
                    calls.clear()
                    f = forward(model, batch)
                    try:
                        gradients, units = _output_gradients(f, calls, likelihood, batch, generator)
                    except AllIgnoredError:
                        continue
                count += 1
                found: dict[str, list[Tensor]] = {}
                for name, pairs in gradients.items():
                    removed = (removed_rows or {}).get(matrices[name].weight)
                    scale = (units / len(f)) ** 0.5
                    rows = [_as_rows(modules[name][0], a, g / scale, removed) for a, g in pairs]
                    found[name] = _second_moments(rows, matrices[name].bias is not None, len(f))
                _check_sides(found, matrices)
                for name, sides in found.items():
                    old = totals.get(name)
                    totals[name] = sides if old is None else [x + y for x, y in zip(old, sides, strict=True)]
    return {name: (sides[0] / count, sides[1] / count) for name, sides in totals.items()}


def _check_sides(found: Mapping[str, list[Tensor]], layers: Mapping[str, Layer]) -> None:
    """Check that all second moments are finite, in one pass over all layers.

    Raises:
        ValueError: They are not.
    """
    check_finite({layers[name].weight: sides[0] for name, sides in found.items()})
    _check_inputs({name: sides[1] for name, sides in found.items()})


def _check_inputs(sides: Mapping[str, Tensor]) -> None:
    """Check that the second moments of all layers' inputs are finite.

    Raises:
        ValueError: They are not.
    """
    bad = first_non_finite(sides)
    if bad is not None:
        raise ValueError(f"the inputs of {bad!r} hold NaN or Inf, or their squares overflow")


@torch.no_grad()
def input_factors(
    model: nn.Module,
    layers: list[Layer],
    batches: Iterable[Any],
    *,
    forward: Forward = default_forward,
    batch_statistics: bool = False,
) -> dict[str, Tensor]:
    """Compute the input side E[aaᵀ] of each layer alone, which needs no backward pass and no likelihood.

    ½ tr(ΔW A ΔWᵀ), with A = E[aaᵀ], is half the mean squared change of the layer's outputs under a change ΔW
    of its weights: the loss of layer-wise methods such as Wanda and SparseGPT. Every position counts, also
    one whose label is ignored.

    Args:
        model: The model.
        layers: The layers of the model, as `find_layers` returns them.
        batches: Batches of any format, on the model's device.
        forward: `forward(model, batch) -> outputs`.
        batch_statistics: Whether each BatchNorm in training mode normalises by the batch.

    Returns:
        By layer name, the input side [n_in (+1), n_in (+1)], summed over positions, a mean over examples.
        Layers that `kronecker_factors` does not support are left out.
    """
    matrices = {layer.name: layer for layer in layers if layer.is_matrix}
    modules = _supported_modules(model, matrices.values())
    totals: dict[str, Tensor] = {}
    examples = 0
    with _recorded_calls(modules) as calls:
        for number, batch in enumerate(batches, 1):
            with naming_the_batch(getattr(batches, "place", f"batch {number}")):
                by_batch = batch_statistics and can_use_batch_statistics(model, batch)
                with eager_mode(), evaluation_mode(model, batch_statistics=by_batch):
                    calls.clear()
                    examples += len(forward(model, batch))
                sides = {}
                for name, pairs in calls.items():
                    rows = [_as_rows(modules[name][0], a, output, None)[0] for a, output in pairs]
                    a = _with_ones(torch.cat(rows), matrices[name].bias is not None)
                    sides[name] = a.mT @ a
                _check_inputs(sides)
                for name, side in sides.items():
                    totals[name] = totals[name] + side if name in totals else side
    return {name: side / examples for name, side in totals.items()}


def _supported_modules(model: nn.Module, layers: Iterable[Layer]) -> dict[str, list[nn.Module]]:
    """Return the modules that use each layer's weight, for layers whose modules are all supported."""
    found: dict[str, list[nn.Module]] = {}
    for layer in layers:
        weight = model.get_parameter(layer.weight)
        users = [m for m in model.modules() if any(p is weight for p in m.parameters(recurse=False))]
        if users and all(map(_is_supported, users)):
            found[layer.name] = users
    return found


def _is_supported(module: nn.Module) -> bool:
    """Return whether the statistics of a module are known."""
    if isinstance(module, nn.Linear):
        return True
    if not isinstance(module, nn.Conv2d) or module.groups != 1:
        return False
    return module.padding_mode == "zeros"


@contextmanager
def _recorded_calls(modules: Mapping[str, list[nn.Module]]) -> Iterator[_Calls]:
    """Record the calls of modules by hooks.

    Yields:
        By layer name, the input and output of each call. It is filled while the model runs.
    """
    calls: _Calls = {}

    def recorder(name: str) -> Callable[..., Tensor]:
        def hook(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
            # Copies are recorded: the next module may overwrite either tensor, as ReLU(inplace=True) does.
            calls.setdefault(name, []).append((args[0].detach().clone(), output))
            return output.clone()

        return hook

    handles = [
        module.register_forward_hook(recorder(name)) for name, users in modules.items() for module in users
    ]
    try:
        yield calls
    finally:
        for handle in handles:
            handle.remove()


def _output_gradients(
    f: Tensor, calls: _Calls, likelihood: Likelihood, batch: Any, generator: torch.Generator | None
) -> tuple[_Calls, int]:
    """Return the inputs and sampled output gradients of each layer's calls, and the number of units."""
    valid, units = counted_units(likelihood, f, batch)
    c = likelihood.cotangent(f, generator)
    if valid is not None:  # ignored positions have no curvature
        c = c * valid
    outputs = [output for found in calls.values() for _, output in found]
    gradients = iter(torch.autograd.grad(f, outputs, c, allow_unused=True) if outputs else ())
    pairs = {
        name: [(a, g) for (a, _), g in zip(found, gradients, strict=False) if g is not None]
        for name, found in calls.items()
    }
    return {name: found for name, found in pairs.items() if found}, units


def _as_rows(module: nn.Module, a: Tensor, g: Tensor, removed: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the inputs (or patches) and output gradients of a call, with one row for each position."""
    if isinstance(module, nn.Conv2d):
        if isinstance(module.padding, str):  # "same" pads an odd total by one more at the end; "valid" by 0
            sizes = zip(reversed(module.kernel_size), reversed(module.dilation), strict=True)
            spans = [(k - 1) * d if module.padding == "same" else 0 for k, d in sizes]
            a = functional.pad(a, [side for span in spans for side in (span // 2, span - span // 2)])
        padding = module.padding if isinstance(module.padding, tuple) else (0, 0)
        if a.dim() == 3:  # no batch dimension
            a, g = a.unsqueeze(0), g.unsqueeze(0)
        a = functional.unfold(a, module.kernel_size, module.dilation, padding, module.stride).mT
        g = g.flatten(2).mT
    if removed is not None:
        g = g.index_fill(-1, removed.nonzero().squeeze(1), 0)
    return at_least_float32(a.reshape(-1, a.shape[-1])), at_least_float32(g.reshape(-1, g.shape[-1]))


def _second_moments(rows: list[tuple[Tensor, Tensor]], bias: bool, examples: int) -> list[Tensor]:
    """Return [mean of ggᵀ over positions, Σ aaᵀ over positions / examples].

    If a module is called several times, the positions of all calls are used.
    """
    a, g = (torch.cat(parts) for parts in zip(*rows, strict=True))
    a = _with_ones(a, bias)
    return [g.mT @ g / len(g), a.mT @ a / examples]


def _with_ones(a: Tensor, bias: bool) -> Tensor:
    """Return inputs with a last column of ones where the layer has a bias."""
    return torch.cat([a, torch.ones_like(a[:, :1])], dim=1) if bias else a
