"""Panels B and C: the structures of Q, and one-shot pruning with each and with other methods."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fishleg.inverse.inverse_fisher import InverseFisher
from fishleg.inverse.operators import FullFactor, Gram, Identity, LowRank, Masked
from fishleg.pruning.compensation import compensate
from fishleg.pruning.saliency import saliency
from reproduction.figures.ablation.shared import Qs
from reproduction.figures.problems import (
    DTYPE,
    Ensemble,
    Problem,
    approximate_then_invert,
    best_rate,
    our_options,
    paper_options,
    problem_of,
    problems_of,
    tried_rates,
)
from reproduction.harness import Results


def pretrained(
    settings: dict[str, Any], ensemble: Ensemble, structure: str, who: str, rate: float, steps: int
) -> tuple[InverseFisher, Any]:
    """Q learned on all weights by the paper's estimator or ours, and the object that learns it."""
    kind, _, size = structure.partition(" ")
    if who == "paper":
        kind, options = "triangular" if kind == "full" else kind, paper_options(rate)
    else:
        options = our_options(settings["batch"])
    inverse = ensemble.inverse(kind, 1 / settings["gamma"], block_size=int(size or 1))
    return inverse, ensemble.learn(inverse, options, steps)


def tune(settings: dict[str, Any], structure: str) -> Callable[[Results], Any]:
    """The final loss of each rate of the paper's estimator, on a problem outside the seeds."""
    kind = structure.partition(" ")[0]

    def final(rate: float) -> float:
        problem = problem_of(settings, 999)
        ensemble = Ensemble([problem], 999, batch=settings["batch"])
        inverse, _ = pretrained(settings, ensemble, structure, "paper", rate, settings["steps"])
        return problem.gap(ensemble.dense(inverse)[0])

    rates = settings["rates"]["triangular" if kind == "full" else kind]
    return lambda _: tried_rates(rates, final)


def structure_unit(settings: dict[str, Any], structure: str, who: str) -> Callable[[Results], Any]:
    """The loss that a structure reaches (B), and the errors on the way to high sparsity (C)."""

    def compute(results: Results) -> Any:
        problems = problems_of(settings)
        ensemble = Ensemble(problems, 1000, batch=settings["batch"])
        rate = best_rate(results[f"tune B: {structure}"])
        inverse, auxiliary = pretrained(settings, ensemble, structure, who, rate, settings["steps"])
        gaps = [p.gap(Q) for p, Q in zip(problems, ensemble.dense(inverse), strict=True)]
        limit = [p.gap(_best_of_structure(p, structure)) for p in problems]

        def learned(kept: list[Tensor]) -> Qs:
            return refined(settings, ensemble, inverse, auxiliary, kept, who)

        errors = prune_in_stages(
            problems, settings["per stage"], learned, "sum" if who == "paper" else "joint"
        )
        return {"rate": rate, "gap": gaps, "limit": limit, "mse": errors}

    return compute


def _best_of_structure(problem: Problem, structure: str) -> Tensor:
    kind, _, size = structure.partition(" ")
    return approximate_then_invert(problem.F_gamma, kind, block_size=int(size or 1))


def refined(
    settings: dict[str, Any],
    ensemble: Ensemble,
    inverse: InverseFisher,
    auxiliary: Any,
    kept: list[Tensor],
    who: str,
) -> Qs:
    """Some auxiliary steps, and Q for the weights that are left.

    paper: the loss is minimised over the masked Q. ours: Q goes on learning the Fisher matrix of all weights,
    and is conditioned on the removed ones being zero, exactly.
    """
    shape = ensemble.shape
    if who == "paper":
        masks = {f"{name}.weight": keep.view(shape) for name, keep in zip(ensemble.names, kept, strict=True)}
        inverse.restrict(masks)
    for _ in range(settings["stage steps"]):
        auxiliary.step(ensemble.batch(), lr_factor=settings["stage rate"])
    if who == "paper":
        return [inverse.operator(name) for name in ensemble.names]
    return [conditioned(Q, keep) for Q, keep in zip(ensemble.dense(inverse), kept, strict=True)]


def conditioned(Q: Tensor, keep: Tensor) -> Masked:
    """((Q⁻¹)_MM)⁻¹ on the kept weights: Q conditioned on the others being zero."""
    n = len(Q)
    operator = Gram((1, n), FullFactor(n)).to(DTYPE)
    with torch.no_grad():
        assert isinstance(operator.factor, FullFactor)
        operator.factor.matrix.copy_(torch.linalg.cholesky(Q))
    if not bool(keep.all()):
        operator.remove_(~keep)
    return Masked(operator, keep.view(1, n))


def rival(settings: dict[str, Any], name: str) -> Callable[[Results], Any]:
    """Pruning with a Q that is not learned: magnitude, M-FAC, or the exact inverse."""
    kind, _, compensation = name.partition(", ")

    def compute(_: Results) -> Any:
        problems, shape = problems_of(settings), (1, settings["n"])
        ensemble = Ensemble(problems, 4000, batch=settings["batch"])

        def made(kept: list[Tensor]) -> Qs:
            if kind == "magnitude":
                return [Masked(Identity(shape).to(DTYPE), keep.view(shape)) for keep in kept]
            if kind == "exact":
                return [conditioned(p.inverse, keep) for p, keep in zip(problems, kept, strict=True)]
            samples = ensemble.gradients(ensemble.batch(), groups=settings["m"])
            return [
                LowRank(shape, (h * keep).unsqueeze(1), settings["gamma"])
                for h, keep in zip(samples, kept, strict=True)
            ]

        return {"mse": prune_in_stages(problems, settings["per stage"], made, compensation or "none")}

    return compute


def prune_in_stages(
    problems: Sequence[Problem],
    per_stage: int,
    make: Callable[[list[Tensor]], Qs],
    compensation: str,
    inspect: Callable[[int, list[Tensor], Qs], None] | None = None,
) -> list[list[float]]:
    """Test errors by problem and stage: remove the weights of least saliency, compensate, repeat."""
    n = problems[0].n
    weights = [problem.w.clone().view(1, n) for problem in problems]
    kept = [torch.ones(n, dtype=torch.bool) for _ in problems]
    errors: list[list[float]] = [[] for _ in problems]
    for stage in stages(n, per_stage):
        operators = make(kept)
        if inspect is not None:
            inspect(stage, kept, operators)
        for i, (problem, q) in enumerate(zip(problems, operators, strict=True)):
            with torch.no_grad():
                scores = saliency(weights[i], q).flatten()
                scores[~kept[i]] = math.inf  # removed before
                removed = torch.zeros(n, dtype=torch.bool)
                removed[scores.argsort()[:per_stage]] = True
                change = compensate(weights[i], q, removed.view(1, n), compensation, iterations=200)
                weights[i] = weights[i] + change.delta
            kept[i] = kept[i] & ~removed
            errors[i].append(problem.mse(weights[i]))
    return errors


def stages(n: int, per_stage: int) -> range:
    """The stages; some weights are left after the last one."""
    return range(1, (n - 1) // per_stage + 1)
