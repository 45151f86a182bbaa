"""Panel A: gradient flow, noise-free Adam and minibatches, with P = I and P = Q."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from fishleg.inverse.operators import FullFactor, Gram
from reproduction.figures.ablation.shared import FACTORS
from reproduction.figures.problems import (
    DTYPE,
    Ensemble,
    Problem,
    best_rate,
    exponential,
    paper_options,
    problem_of,
    tried_rates,
)
from reproduction.harness import Results, spaced, steps_to


def flow(settings: dict[str, Any]) -> Callable[[Results], Any]:
    """The analysis of the paper's appendix: Q ← Q − ηP(F_γQ − I) without noise, eigenvalue by eigenvalue."""
    steps = settings["A"]["noise-free steps"]

    def descend(start: float, P: str, rate: float) -> list[float]:
        """The gap after each step; infinite once an eigenvalue is not positive."""
        target = 1 / (exponential(settings["n"], settings["decay length"]) + settings["gamma"])
        beta, gaps = torch.full_like(target, start), []
        for _ in range(steps):
            beta = beta - rate * (beta if P == "Q" else 1.0) * (beta / target - 1)
            if not bool((beta > 0).all()):
                return [math.inf] * steps
            gaps.append(float((beta - target).square().div(target).sum() / target.sum()))
        return gaps

    def compute(_: Results) -> Any:
        found = {}
        for label, start in (("I", 1.0), ("I/γ", 1 / settings["gamma"])):
            for P in "IQ":
                runs = {2.0 ** (k / 4): descend(start, P, 2.0 ** (k / 4)) for k in range(-40, 5)}
                best = min(runs, key=lambda rate: (steps_to(1e-6, runs[rate]), runs[rate][-1]))
                found[f"{label}, P={P}"] = {
                    "rate": best,
                    "steps to 1e-6": steps_to(1e-6, runs[best]),
                    "gap": [[runs[best][t - 1] for t in spaced(steps, 60)]],
                }
        return found

    return compute


def factor_descent(settings: dict[str, Any]) -> Callable[[Results], Any]:
    """Gradient descent on L, Q = LLᵀ, without noise: L ← L − η(PR + (PR)ᵀ)L with R = F_γQ − I.

    An eigenvalue β of Q, whose target is β*, then moves by −4ηβ(β/β* − 1), and by β times that with P = Q:
    the factor brings along the Q that makes all time constants alike, and P = Q is one too many.
    """
    steps = settings["A"]["noise-free steps"]

    def descend(problem: Problem, factor: str, start: float, P: str, rate: float) -> list[float]:
        identity, at = torch.eye(problem.n, dtype=DTYPE), set(spaced(steps, 60))
        L, gaps = math.sqrt(start) * identity, []
        for t in range(1, steps + 1):
            Q = L @ L.mT
            residual = problem.F_gamma @ Q - identity
            residual = Q @ residual if P == "Q" else residual
            gradient = (residual + residual.mT) @ L
            L = L - rate * (gradient.tril() if factor == "triangular" else gradient)
            if t in at:
                gaps.append(problem.gap(L @ L.mT))
                if not gaps[-1] < 1e6:
                    return [math.inf] * len(at)
        return gaps

    def slowness(gaps: list[float]) -> tuple[float, float]:
        return steps_to(1e-6, gaps, spaced(steps, 60)), gaps[-1]

    def compute(_: Results) -> Any:
        found = {}
        problem = problem_of(settings, 999)
        starts = {
            "I": 1.0,
            "I n/Tr(F_γ)": float(settings["n"] / problem.F_gamma.trace()),
            "I/γ": 1 / settings["gamma"],
        }
        for factor in FACTORS:
            for label, start in starts.items():
                for P in "IQ":
                    tried: dict[float, tuple[float, float]] = {}
                    for octave in range(-16, 1):  # a rate above one that diverges diverges too
                        gaps = descend(problem, factor, start, P, 2.0**octave)
                        if not math.isfinite(gaps[-1]):
                            break
                        tried[2.0**octave] = slowness(gaps)
                    best = min(tried, key=lambda rate: tried[rate])
                    runs = [
                        descend(problem_of(settings, seed), factor, start, P, best)
                        for seed in range(settings["A"]["seeds"])
                    ]
                    found[f"{factor}, {label}, P={P}"] = {"rate": best, "tried": tried, "gap": runs}
        return found

    return compute


def noise_free(settings: dict[str, Any], factor: str, P: str) -> Callable[[Results], Any]:
    """Adam on the factor with the expectation over u and data taken exactly; the best constant rate."""
    steps = settings["A"]["noise-free steps"]

    def descend(problem: Problem, rate: float) -> list[float]:
        n, at = problem.n, set(spaced(steps, 14))
        operator = Gram((n,), FullFactor(n, triangular=factor == "triangular")).to(DTYPE)
        operator.set_scale_(_scale(settings, factor))
        adam = torch.optim.Adam(operator.parameters(), lr=rate)
        gaps = []
        for t in range(1, steps + 1):
            Q = operator.dense()
            with torch.no_grad():
                residual = problem.F_gamma @ Q - torch.eye(n, dtype=DTYPE)
                residual = Q @ residual if P == "Q" else residual
            adam.zero_grad()
            (Q * residual).sum().backward()
            adam.step()
            if t in at:
                gaps.append(problem.gap(operator.dense().detach()))
        return gaps

    def compute(_: Results) -> Any:
        tried = {
            rate: descend(problem_of(settings, 999), rate)[-1] for rate in settings["A"]["noise-free rates"]
        }
        best = min(tried, key=lambda rate: tried[rate])
        seeds = range(settings["A"]["seeds"])
        return {"rate": best, "tried": tried, "gap": [descend(problem_of(settings, s), best) for s in seeds]}

    return compute


def _gaps(
    settings: dict[str, Any], problems: list[Problem], factor: str, schedule: str, P: str, rate: float
) -> list[list[float]]:
    ensemble = Ensemble(problems, 1000, batch=settings["batch"])
    structure = "triangular" if factor == "triangular" else "full"
    inverse = ensemble.inverse(structure, _scale(settings, factor))
    rows: list[list[float]] = [[] for _ in problems]

    def watch(_: int) -> None:
        for problem, Q, row in zip(problems, ensemble.dense(inverse), rows, strict=True):
            row.append(problem.gap(Q))

    ensemble.learn(
        inverse,
        paper_options(rate, precondition=P == "Q"),
        settings["A"]["steps"],
        decay=schedule == "decayed",
        watch=watch,
        at=spaced(settings["A"]["steps"], 14),
    )
    return rows


def _scale(settings: dict[str, Any], factor: str) -> float:
    if FACTORS.get(factor) == "I n/Tr(F_γ)":
        return float(settings["n"] / problem_of(settings, 0).F_gamma.trace())
    return float(1 / settings["gamma"])


def tune(settings: dict[str, Any], factor: str, schedule: str, P: str) -> Callable[[Results], Any]:
    """The final loss of each rate, on a problem outside the seeds."""

    def compute(_: Results) -> Any:
        problems = [problem_of(settings, 999)]
        return tried_rates(
            settings["A"]["rates"][factor],
            lambda rate: _gaps(settings, problems, factor, schedule, P, rate)[0][-1],
        )

    return compute


def precondition(settings: dict[str, Any], factor: str, schedule: str, P: str) -> Callable[[Results], Any]:
    """The gaps of all seeds at the rate that `tune` found best."""

    def compute(results: Results) -> Any:
        rate = best_rate(results[f"tune A: {factor}, {schedule}, P={P}"])
        problems = [problem_of(settings, seed) for seed in range(settings["A"]["seeds"])]
        return {"rate": rate, "gap": _gaps(settings, problems, factor, schedule, P, rate)}

    return compute
