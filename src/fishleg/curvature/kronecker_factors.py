"""Kronecker factors (KFAC): second moments of the inputs and output gradients of each layer.

For a linear layer F ≈ E[ggᵀ] ⊗ E[aaᵀ], with inputs a and output gradients g (Martens and Grosse, 2015). For
a convolution a runs over the patches, and the input side is summed over positions (Grosse and Martens, 2016).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
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

MAX_POSITIONS = 64
"""Positions of an image at which the input side of a convolution is sampled, at least."""

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
    max_positions: int | None = MAX_POSITIONS,
) -> Factors:
    """Compute the output side E[ggᵀ] and the input side E[aaᵀ] of each layer, for the true Fisher matrix.

    The patches of a convolution cost more than the rest of the pass together, and neighbouring patches say
    nearly the same. So only those on a grid are used, whose offset is drawn anew for every batch: each
    position has the same chance, and the mean over offsets is the sum over all positions.

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
        max_positions: A convolution with at least four times as many positions per image uses every second
            row and column of them, with sixteen times as many every fourth, and so on; None: all of them.

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
                    bias, module = matrices[name].bias is not None, modules[name][0]
                    g_rows = [_gradient_rows(module, g / scale, removed) for _, g in pairs]
                    a_rows = [
                        _input_rows(module, a, bias, _grid(module, g, max_positions, generator))
                        for a, g in pairs
                    ]
                    found[name] = _second_moments(g_rows, a_rows, len(f))
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
                    bias = matrices[name].bias is not None
                    a = torch.cat([_input_rows(modules[name][0], a, bias, _ALL) for a, _ in pairs])
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


@dataclass(frozen=True)
class _Grid:
    """Every `step`-th position in each direction of an image, from an offset on."""

    step: int = 1
    offset: tuple[int, int] = (0, 0)


_ALL = _Grid()


def _grid(module: nn.Module, g: Tensor, most: int | None, generator: torch.Generator | None) -> _Grid:
    """Return the positions at which the inputs of a convolution with output gradients g are used."""
    if most is None or not isinstance(module, nn.Conv2d):
        return _ALL
    height, width = g.shape[-2:]
    step = 1
    while height * width >= 4 * step**2 * most and 2 * step <= min(height, width):
        step *= 2
    if step == 1:
        return _ALL
    device = "cpu" if generator is None else generator.device
    drawn = torch.randint(step, (2,), generator=generator, device=device).tolist()
    return _Grid(step, (drawn[0], drawn[1]))


def _input_rows(module: nn.Module, a: Tensor, bias: bool, grid: _Grid) -> Tensor:
    """Return the inputs (or patches) of a call, a row for each position, with a last column for a bias.

    Rows on a grid are scaled, so that their squares add up to those of all positions.
    """
    if isinstance(module, nn.Conv2d):
        a = a if a.dim() == 4 else a.unsqueeze(0)
        a = functional.pad(a, _padding(module))
        stride = module.stride
        a = a[..., grid.offset[0] * stride[0] :, grid.offset[1] * stride[1] :]
        a = functional.unfold(
            a, module.kernel_size, module.dilation, 0, (grid.step * stride[0], grid.step * stride[1])
        ).mT
    a = at_least_float32(a.reshape(-1, a.shape[-1]))
    a = torch.cat([a, torch.ones_like(a[:, :1])], dim=1) if bias else a
    return a if grid.step == 1 else a * grid.step


def _padding(module: nn.Conv2d) -> list[int]:
    """Return the zeros that a convolution puts around an image: left, right, top, bottom."""
    if isinstance(module.padding, str):  # "same" pads an odd total by one more at the end; "valid" by 0
        sizes = zip(reversed(module.kernel_size), reversed(module.dilation), strict=True)
        spans = [(k - 1) * d if module.padding == "same" else 0 for k, d in sizes]
        return [side for span in spans for side in (span // 2, span - span // 2)]
    return [side for side in reversed(module.padding) for _ in range(2)]


def _gradient_rows(module: nn.Module, g: Tensor, removed: Tensor | None) -> Tensor:
    """Return the output gradients of a call, with one row for each position."""
    if isinstance(module, nn.Conv2d):
        g = (g if g.dim() == 4 else g.unsqueeze(0)).flatten(2).mT
    if removed is not None:
        g = g.index_fill(-1, removed.nonzero().squeeze(1), 0)
    return at_least_float32(g.reshape(-1, g.shape[-1]))


def _second_moments(g_rows: list[Tensor], a_rows: list[Tensor], examples: int) -> list[Tensor]:
    """Return [mean of ggᵀ over positions, Σ aaᵀ over positions / examples].

    If a module is called several times, the positions of all calls are used.
    """
    g, a = torch.cat(g_rows), torch.cat(a_rows)
    return [g.mT @ g / len(g), a.mT @ a / examples]
