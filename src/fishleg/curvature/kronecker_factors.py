"""KFAC's statistics: second moments of a layer's inputs and of its output gradients, by hooks.

For a linear layer F ≈ E[ggᵀ] ⊗ E[aaᵀ] (Martens and Grosse); for a convolution a runs over the patches, and
the input side is summed over positions (Grosse and Martens).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from fishleg.curvature.layers import Layer
from fishleg.curvature.likelihoods import Likelihood
from fishleg.curvature.outputs import AllIgnoredError, counted_units
from fishleg.runtime.batches import Forward, default_forward
from fishleg.runtime.batchnorm import can_use_batch_statistics
from fishleg.runtime.modes import eager_mode, evaluation_mode
from fishleg.runtime.tensors import at_least_float32

Factors = dict[str, tuple[Tensor, Tensor]]


def kronecker_factors(
    model: nn.Module,
    layers: list[Layer],
    batches: Iterable[Any],
    likelihood: Likelihood,
    *,
    forward: Forward = default_forward,
    generator: torch.Generator | None = None,
    batch_statistics: bool = False,
    gone: Mapping[str, Tensor] | None = None,
) -> Factors:
    """{layer: (output side E[ggᵀ], input side E[aaᵀ])} for Linear and Conv2d layers (true Fisher).

    Rows of a weight that are `gone` have no part in the output side.
    """
    named = {layer.name: layer for layer in layers if layer.is_matrix}
    supported = _modules_of(model, named.values())
    calls: dict[str, list[tuple[Tensor, Tensor]]] = {}  # inputs and outputs of each, in this forward pass

    def remember(name: str) -> Any:
        def hook(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
            # copies: what comes next may write into either of them, as ReLU(inplace=True) does
            calls.setdefault(name, []).append((args[0].detach().clone(), output))
            return output.clone()

        return hook

    handles = [
        module.register_forward_hook(remember(name)) for name, found in supported.items() for module in found
    ]
    totals: dict[str, list[Tensor]] = {}
    count = 0
    try:
        for batch in batches:
            by_batch = batch_statistics and can_use_batch_statistics(model, batch)
            with eager_mode(), evaluation_mode(model, batch_statistics=by_batch), torch.enable_grad():
                calls.clear()
                f = forward(model, batch)
                try:
                    valid, units = counted_units(likelihood, f, batch)
                except AllIgnoredError:
                    continue
                count += 1
                c = likelihood.cotangent(f, generator)
                if valid is not None:  # ignored positions have no curvature
                    c = c * valid
                outputs = [output for found in calls.values() for _, output in found]
                examples, tokens = len(f), units / len(f)
                drawn = iter(torch.autograd.grad(f, outputs, c, allow_unused=True) if outputs else ())
                for name, found in calls.items():
                    pairs = [(a, g) for (a, _), g in zip(found, drawn, strict=False) if g is not None]
                    if not pairs:
                        continue
                    module, layer = supported[name][0], named[name]
                    dead = (gone or {}).get(layer.weight)
                    rows = [_rows(module, a, g / tokens**0.5, dead) for a, g in pairs]
                    sides = _sides(rows, layer.bias is not None, examples)
                    old = totals.get(name)
                    totals[name] = sides if old is None else [x + y for x, y in zip(old, sides, strict=True)]
    finally:
        for handle in handles:
            handle.remove()
    return {name: (sides[0] / count, sides[1] / count) for name, sides in totals.items()}


def _modules_of(model: nn.Module, layers: Iterable[Layer]) -> dict[str, list[nn.Module]]:
    """The modules that use each layer's weight, where all of them are of a kind with known statistics."""
    found: dict[str, list[nn.Module]] = {}
    for layer in layers:
        weight = model.get_parameter(layer.weight)
        users = [m for m in model.modules() if any(p is weight for p in m.parameters(recurse=False))]
        if users and all(map(_supported, users)):
            found[layer.name] = users
    return found


def _supported(module: nn.Module) -> bool:
    if isinstance(module, nn.Linear):
        return True
    if not isinstance(module, nn.Conv2d) or module.groups != 1:
        return False
    return module.padding_mode == "zeros"


def _rows(module: nn.Module, a: Tensor, g: Tensor, dead: Tensor | None) -> tuple[Tensor, Tensor]:
    """Of one call: inputs (of a convolution, patches) and output gradients, a row for each position."""
    if isinstance(module, nn.Conv2d):
        if isinstance(module.padding, str):  # "same" may want one more on the far sides; "valid" wants none
            sizes = zip(reversed(module.kernel_size), reversed(module.dilation), strict=True)
            spans = [(k - 1) * d if module.padding == "same" else 0 for k, d in sizes]
            a = functional.pad(a, [side for span in spans for side in (span // 2, span - span // 2)])
        padding = module.padding if isinstance(module.padding, tuple) else (0, 0)
        if a.dim() == 3:  # without a batch
            a, g = a.unsqueeze(0), g.unsqueeze(0)
        a = functional.unfold(a, module.kernel_size, module.dilation, padding, module.stride).mT
        g = g.flatten(2).mT
    if dead is not None:
        g = g.index_fill(-1, dead.nonzero().squeeze(1), 0)
    return at_least_float32(a.reshape(-1, a.shape[-1])), at_least_float32(g.reshape(-1, g.shape[-1]))


def _sides(rows: list[tuple[Tensor, Tensor]], bias: bool, examples: int) -> list[Tensor]:
    """[mean over positions of ggᵀ, sum over positions of aaᵀ], both averaged over the examples.

    The calls of a module that is called several times are as many more positions.
    """
    a, g = (torch.cat(parts) for parts in zip(*rows, strict=True))
    if bias:
        a = torch.cat([a, torch.ones_like(a[:, :1])], dim=1)
    return [g.mT @ g / len(g), a.mT @ a / examples]
