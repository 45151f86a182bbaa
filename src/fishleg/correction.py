"""One Newton step of the kept weights towards the outputs of the dense model: no labels, no training loop.

Compensation makes up for what a pruning step removes under a quadratic model of the loss around the present
weights. What that model got wrong adds up over stages. Here the gradient g of KL(dense ‖ model) is measured
where the model is now, and the same Q answers it: δ = −(Q − Q E_P Q_PP⁻¹ E_Pᵀ Q) g, the minimum of
g·δ + ½ δᵀQ⁻¹δ with the removed weights P held at zero. Q ignores the coupling between layers, so the length
of the step is found by trying.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fishleg.batches import Forward, default_forward, targets_of
from fishleg.fisher import frozen_statistics, trainable
from fishleg.inverse import InverseFisher
from fishleg.likelihoods import Likelihood
from fishleg.obs import solve_removed

LENGTHS = (1.0, 0.5, 0.25, 0.125)


@dataclass(frozen=True)
class Correction:
    """KL(dense ‖ model) before and after the step, and the length that was best (0: none helped)."""

    before: float
    after: float
    length: float


def correct(
    model: nn.Module,
    dense: nn.Module,
    batches: Sequence[Any],
    likelihood: Likelihood,
    q: InverseFisher,
    masks: Mapping[str, Tensor],
    *,
    forward: Forward = default_forward,
    trials: int = 4,
) -> Correction:
    """Move the model one step; its length is the best of `LENGTHS`, or 0, on the first `trials` batches."""
    with torch.no_grad(), frozen_statistics(dense):
        references = [forward(dense, batch) for batch in batches]
    with frozen_statistics(model):
        g = _gradient(model, batches, references, likelihood, forward)
        step = newton_step(q, g, masks)
        start = {name: model.get_parameter(name).detach().clone() for name in step}

        def divergence(length: float) -> float:
            with torch.no_grad():
                for name, value in start.items():
                    model.get_parameter(name).copy_(value + length * step[name])
                kl = [
                    _divergence(model, batch, reference, likelihood, forward)
                    for batch, reference in zip(batches[:trials], references[:trials], strict=True)
                ]
            return float(torch.stack(kl).mean())

        before = divergence(0.0)
        best, after = 0.0, before
        for length in LENGTHS:
            value = divergence(length)
            if value < after:
                best, after = length, value
            elif best:  # shorter steps only get worse from here
                break
        divergence(best)
    return Correction(before, after, best)


@torch.no_grad()
def newton_step(
    q: InverseFisher, gradient: Mapping[str, Tensor], masks: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """δ = −(F_MM + γI)⁻¹ g on the kept weights and 0 on the removed ones, from a Q of all weights."""
    step: dict[str, Tensor] = {}
    for name, g in q.pack(gradient).items():
        operator, layer = q.unmasked(name), q.layers[name]
        Qg = operator.matvec(g)
        if any(part in masks for part in layer.names):
            parts = {p: masks.get(p, torch.ones_like(gradient[p], dtype=torch.bool)) for p in layer.names}
            removed = ~layer.pack(parts)
            x = solve_removed(operator, removed, torch.where(removed, Qg, torch.zeros_like(Qg)))
            Qg = torch.where(removed, torch.zeros_like(Qg), Qg - operator.matvec(x))
        step.update(layer.unpack(-Qg))
    return {name: value.to(gradient[name].dtype) for name, value in step.items()}


def _gradient(
    model: nn.Module,
    batches: Sequence[Any],
    references: Sequence[Tensor],
    likelihood: Likelihood,
    forward: Forward,
) -> dict[str, Tensor]:
    parameters = trainable(model)
    total = {name: torch.zeros_like(p) for name, p in parameters.items()}
    for batch, reference in zip(batches, references, strict=True):
        with torch.enable_grad():
            kl = _divergence(model, batch, reference, likelihood, forward)
            gradients = torch.autograd.grad(kl, list(parameters.values()), allow_unused=True)
        for value, g in zip(total.values(), gradients, strict=True):
            if g is not None:
                value.add_(g, alpha=1 / len(batches))
    return total


def _divergence(
    model: nn.Module, batch: Any, reference: Tensor, likelihood: Likelihood, forward: Forward
) -> Tensor:
    f = forward(model, batch)
    return likelihood.divergence(f, reference, likelihood.valid(f, targets_of(batch)))
