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

from fishleg.batches import Forward, default_forward, targets_of
from fishleg.fisher import can_use_batch_statistics, frozen_statistics, uncompiled
from fishleg.layers import Layer
from fishleg.likelihoods import Likelihood

Factors = dict[str, tuple[Tensor, Tensor]]


def kfac_factors(
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
    weights = {layer.name: layer.weight for layer in layers if layer.is_matrix}
    modules = dict(model.named_modules())
    supported = {x.name: modules[x.name] for x in layers if x.is_matrix and _supported(modules.get(x.name))}
    inputs: dict[str, Tensor] = {}
    outputs: dict[str, Tensor] = {}

    def remember(name: str) -> Any:
        def hook(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
            inputs[name] = args[0].detach()
            outputs[name] = output

        return hook

    handles = [module.register_forward_hook(remember(name)) for name, module in supported.items()]
    totals: dict[str, list[Tensor]] = {}
    count = 0
    try:
        for batch in batches:
            by_batch = batch_statistics and can_use_batch_statistics(model, batch)
            with uncompiled(), frozen_statistics(model, batch_statistics=by_batch), torch.enable_grad():
                f = forward(model, batch)
                likelihood.check(f, targets_of(batch))
                valid = likelihood.valid(f, targets_of(batch))
                if valid is not None and not bool(valid.any()):
                    continue
                count += 1
                c, units = likelihood.cotangent(f, generator), likelihood.units(f)
                if valid is not None:  # ignored positions have no curvature
                    c = c * valid.unsqueeze(getattr(likelihood, "class_dim", -1))
                    units = int(valid.sum())
                names = [name for name in supported if name in outputs]
                gradients = torch.autograd.grad(f, [outputs[n] for n in names], c, allow_unused=True)
                examples, tokens = len(f), units / len(f)
                for name, g in zip(names, gradients, strict=True):
                    if g is not None:
                        dead = (gone or {}).get(weights[name])
                        if dead is not None:
                            channels = 1 if isinstance(supported[name], nn.Conv2d) else g.dim() - 1
                            g = g.index_fill(channels, dead.nonzero().squeeze(1), 0)
                        bias = len(next(x for x in layers if x.name == name).names) == 2
                        sides = _sides(supported[name], inputs[name], g / tokens**0.5, bias, examples)
                        old = totals.get(name)
                        totals[name] = (
                            sides if old is None else [a + b for a, b in zip(old, sides, strict=True)]
                        )
                inputs.clear()
                outputs.clear()
    finally:
        for handle in handles:
            handle.remove()
    return {name: (sides[0] / count, sides[1] / count) for name, sides in totals.items()}


def widened(tensor: Tensor) -> Tensor:
    """In float32 at least: sums of squares, and their inverses, need more than half precision has."""
    return tensor if tensor.dtype in (torch.float32, torch.float64) else tensor.float()


def _supported(module: nn.Module | None) -> bool:
    if isinstance(module, nn.Linear):
        return True
    if not isinstance(module, nn.Conv2d) or module.groups != 1:
        return False
    return isinstance(module.padding, tuple) and module.padding_mode == "zeros"


def _sides(module: nn.Module, a: Tensor, g: Tensor, bias: bool, examples: int) -> list[Tensor]:
    """[mean over positions of ggᵀ, sum over positions of aaᵀ], both averaged over the examples."""
    if isinstance(module, nn.Conv2d):
        padding = module.padding if isinstance(module.padding, tuple) else (0, 0)
        a = functional.unfold(a, module.kernel_size, module.dilation, padding, module.stride).mT
        g = g.flatten(2).mT
    a, g = widened(a.reshape(-1, a.shape[-1])), widened(g.reshape(-1, g.shape[-1]))
    if bias:
        a = torch.cat([a, torch.ones_like(a[:, :1])], dim=1)
    positions = len(g) / examples
    return [g.mT @ g / (examples * positions), a.mT @ a / examples]
