"""Panel D: block-diagonal Q against oBERT: pruning error, distances, time."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from fishleg.curvature.likelihoods import Gaussian
from fishleg.curvature.samples import sample_h
from fishleg.inverse.operators import BlockFactor, Gram, Identity, Masked
from reproduction.figures.ablation.pruning import pretrained, prune_in_stages, refined
from reproduction.figures.ablation.shared import FLS, FLS_80, FLS_NEAR, LOOK, OBERT, OURS, UNTRAINED, Qs
from reproduction.figures.problems import (
    DTYPE,
    Ensemble,
    Problem,
    best_rate,
    blocks_only,
    our_options,
    paper_options,
    problem_of,
    riemannian,
    tried_rates,
)
from reproduction.harness import Results


def d_problems(settings: dict[str, Any]) -> list[Problem]:
    """The problems of panel D, which are larger."""
    return [problem_of(settings, seed, settings["D"]["n"]) for seed in range(settings["D"]["seeds"])]


def tune(settings: dict[str, Any], size: int) -> Callable[[Results], Any]:
    """The result of each rate of the paper's estimator, on a problem outside the seeds.

    The loss, and the distance to the full inverse, which the paper plots.
    """
    distances: dict[float, float] = {}

    def final(rate: float) -> float:
        problem = problem_of(settings, 999, settings["D"]["n"])
        ensemble = Ensemble([problem], 999, batch=settings["batch"])
        inverse, _ = pretrained(settings, ensemble, f"block {size}", "paper", rate, settings["D"]["steps"])
        Q = ensemble.dense(inverse)[0]
        distances[rate] = problem.distance(Q)
        return problem.gap(Q)

    return lambda _: {"gap": tried_rates(settings["rates"]["block"], final), "distance": distances}


def _rate(results: Results, size: int, kind: str = "gap") -> float:
    return best_rate(results[f"tune D: block {size}"][kind])


def block_unit(settings: dict[str, Any], size: int, arm: str) -> Callable[[Results], Any]:
    """Errors, and distances of the masked Q to the full and to the block-diagonal inverse, by stage."""

    def compute(results: Results) -> Any:
        problems, D = d_problems(settings), settings["D"]
        n = D["n"]
        ensemble = Ensemble(problems, 5000, batch=settings["batch"])
        full: list[list[float]] = [[] for _ in problems]
        block: list[list[float]] = [[] for _ in problems]

        def inspect(stage: int, kept: list[Tensor], operators: Qs) -> None:
            if (stage - 1) % LOOK:
                return
            for i, (problem, keep, q) in enumerate(zip(problems, kept, operators, strict=True)):
                Q = q.dense().detach()[keep][:, keep]
                full[i].append(riemannian(Q, problem.F_gamma[keep][:, keep]))
                block[i].append(riemannian(Q, blocks_only(problem.F_gamma, size)[keep][:, keep]))

        learned, rate = arm in (FLS, FLS_NEAR, OURS), None
        if learned:
            who = "ours" if arm == OURS else "paper"
            rate = _rate(results, size, "distance" if arm == FLS_NEAR else "gap")
            inverse, auxiliary = pretrained(settings, ensemble, f"block {size}", who, rate, D["steps"])

        def made(kept: list[Tensor]) -> Qs:
            if learned:
                return refined(settings, ensemble, inverse, auxiliary, kept, who)
            if arm == UNTRAINED:
                return [Masked(Identity((1, n), 1 / settings["gamma"]).to(DTYPE), k.view(1, n)) for k in kept]
            count = D["gradients"] if arm == OBERT else settings["stage steps"] * settings["batch"]
            samples = ensemble.gradients(ensemble.batch(count))
            return [
                obert(h * keep, size, settings["gamma"])  # removed weights do not interact with the others
                for h, keep in zip(samples, kept, strict=True)
            ]

        compensation = {OURS: "joint", UNTRAINED: "none"}.get(arm, "sum")
        errors = prune_in_stages(problems, D["per stage"], made, compensation, inspect)
        rate = None if arm == OURS else rate
        return {"rate": rate, "mse": errors, "distance to full": full, "distance to blocks": block}

    return compute


def obert(samples: Tensor, size: int, gamma: float) -> Gram:
    """(γI + mean ggᵀ)⁻¹ within each block: the result of oBERT's recursion, computed at once."""
    factor = BlockFactor(samples.shape[1], size).to(DTYPE)
    (moment,) = factor.moment(samples / len(samples) ** 0.5)
    moment.diagonal(dim1=-2, dim2=-1).add_(gamma)
    with torch.no_grad():
        factor.matrix.copy_(torch.linalg.cholesky(torch.linalg.inv(moment)))
    return Gram((1, samples.shape[1]), factor)


def obert_recursion(samples: Iterator[Tensor], count: int, n: int, size: int, gamma: float) -> Tensor:
    """The same as blocks [n/size, size, size], gradient by gradient with the Sherman–Morrison formula."""
    inverse = torch.eye(size, dtype=DTYPE).repeat(n // size, 1, 1) / gamma
    for sample in samples:
        g = sample.view(-1, size, 1)
        product = inverse @ g
        inverse -= product @ product.mT / (count + g.mT @ product)
    return inverse


def time_unit(settings: dict[str, Any], size: int) -> Callable[[Results], Any]:
    """Seconds of one update of Q between two stages, the methods taking turns in one process."""

    def compute(results: Results) -> Any:
        D, gamma = settings["D"], settings["gamma"]
        n, count = D["n"], D["gradients"]
        ensemble = Ensemble([problem_of(settings, 0, n)], 6000, batch=settings["batch"])
        likelihood, generator = Gaussian(), ensemble.generator
        learners, theirs = {}, paper_options(_rate(results, size))
        for arm, options in ((FLS, theirs), (FLS_80, theirs), (OURS, our_options(settings["batch"]))):
            inverse = ensemble.inverse("block", 1 / gamma, block_size=size)
            if arm == FLS_80:
                keep = torch.arange(n).view(ensemble.shape) % 5 == 0
                inverse.restrict({f"{ensemble.names[0]}.weight": keep})
            learners[arm] = ensemble.auxiliary(inverse, options)

        def one_by_one() -> Iterator[Tensor]:
            x = ensemble.batch(count)
            for i in range(count):
                h = sample_h(ensemble.model, x[i : i + 1], likelihood, generator=generator)
                yield h["layers.0.weight"].flatten()

        def steps(arm: str) -> None:
            for _ in range(settings["stage steps"]):
                learners[arm].step(ensemble.batch(), lr_factor=settings["stage rate"])

        work: dict[str, Callable[[], object]] = {
            "oBERT, recursion": lambda: obert_recursion(one_by_one(), count, n, size, gamma),
            "oBERT, vectorised": lambda: obert(ensemble.gradients(ensemble.batch(count))[0], size, gamma),
            FLS: lambda: steps(FLS),
            FLS_80: lambda: steps(FLS_80),
            OURS: lambda: steps(OURS),
        }
        seconds: dict[str, list[float]] = {name: [] for name in work}
        for turn in range(D["repeats"] + 1):
            for name, call in work.items():
                start = time.perf_counter()
                call()
                if turn:  # the first turn is slower
                    seconds[name].append(time.perf_counter() - start)
        return seconds

    return compute
