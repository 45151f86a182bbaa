"""Q learned from minibatches, full and structured, and estimates without learning."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fishleg import AuxiliaryOptions
from reproduction.figures.estimation.arms import (
    AIMED,
    ISOTROPIC,
    OURS_AIMED,
    PAPER,
    PAPER_BEST,
)
from reproduction.figures.estimation.limits import errors_of, exact, split_errors
from reproduction.figures.problems import (
    DTYPE,
    Ensemble,
    Problem,
    best_rate,
    blocks_only,
    nearest_kronecker,
    our_options,
    paper_options,
    problem_of,
    problems_of,
    tried_rates,
)
from reproduction.harness import Results, spaced


def learn(
    settings: dict[str, Any],
    problems: list[Problem],
    structure: str,
    arm: str,
    rate: float,
    score: Callable[[Problem, Tensor], Any],
) -> list[list[Any]]:
    """Learn Q by the method of the arm; returns the score of every problem at every checkpoint."""
    steps = settings["full steps" if structure == "full" else "structured steps"]
    shape = tuple(settings["kronecker"]) if structure == "kronecker" else (1, settings["n"])
    ensemble = Ensemble(problems, 1000 + len(problems), shape=shape, batch=settings["batch"])
    mean_scale = settings["n"] / float(problems[0].F_gamma.trace())
    if arm == PAPER:
        structure = "triangular"  # the Cholesky factor of the paper's own illustration
    scale = mean_scale if arm == PAPER_BEST else 1 / settings["gamma"]
    inverse = ensemble.inverse(structure, scale, block_size=settings["block size"])
    rows: list[list[Any]] = [[] for _ in problems]

    def watch(_: int) -> None:
        for problem, Q, row in zip(problems, ensemble.dense(inverse), rows, strict=True):
            row.append(score(problem, Q))

    at = spaced(steps, 14)
    if arm == OURS_AIMED:
        natural = settings["natural steps"]
        options = our_options(settings["batch"])
        ensemble.learn(inverse, options, natural, watch=watch, at=[t for t in at if t <= natural])
        options = paper_options(rate, probe=ensemble.aimed)
        later = [t - natural for t in at if t > natural]
        ensemble.learn(inverse, options, steps - natural, watch=watch, at=later)
    else:
        ensemble.learn(inverse, _options(settings, ensemble, arm, rate), steps, watch=watch, at=at)
    return rows


def _options(settings: dict[str, Any], ensemble: Ensemble, arm: str, rate: float) -> AuxiliaryOptions:
    if arm in (PAPER, PAPER_BEST, ISOTROPIC):
        return paper_options(rate)
    if arm == AIMED:
        return paper_options(rate, probe=ensemble.aimed)
    return our_options(settings["batch"])


def _score(structure: str, arm: str) -> Callable[[Problem, Tensor], float]:
    """The score for which the rate of an arm is tuned. For structured Q it is the loss that is minimised.

    It is not the error of Qu: a Q that comes down from I/γ can have a smaller error than its limit.
    """
    if structure == "full":
        return lambda problem, Q: problem.distance(Q)
    return lambda problem, Q: problem.gap(Q, aimed=arm in (AIMED, OURS_AIMED))


def tune(settings: dict[str, Any], structure: str, arm: str) -> Callable[[Results], Any]:
    """The final score for each rate, on a problem that is not among the seeds."""

    def compute(_: Results) -> Any:
        def final(rate: float) -> Any:
            problems, score = [problem_of(settings, 999)], _score(structure, arm)
            return learn(settings, problems, structure, arm, rate, score)[0][-1]

        return tried_rates(settings["rates"][arm], final)

    return compute


def _rate(settings: dict[str, Any], results: Results, key: str, arm: str) -> float:
    rates = settings["rates"].get(arm, [1.0])
    return best_rate(results[key]) if key in results else float(rates[0])


def full(settings: dict[str, Any], arm: str) -> Callable[[Results], Any]:
    def compute(results: Results) -> Any:
        rate = _rate(settings, results, f"tune A: {arm}", arm)
        rows = learn(settings, problems_of(settings), "full", arm, rate, lambda p, Q: p.distance(Q))
        return {"rate": rate, "distance": rows}

    return compute


def averages(settings: dict[str, Any], *, invert_each: bool) -> Callable[[Results], Any]:
    """Without learning: invert each minibatch's estimate and average, or average and then invert."""

    def compute(_: Results) -> Any:
        problems, n, steps = problems_of(settings), settings["n"], settings["full steps"]
        ensemble = Ensemble(problems, 2000, batch=settings["batch"])
        damping = settings["gamma"] * torch.eye(n, dtype=DTYPE)
        total = torch.zeros(len(problems), n, n, dtype=DTYPE)
        rows: list[list[float]] = [[] for _ in problems]
        at = set(spaced(steps, 14))
        for t in range(1, steps + 1):
            x = ensemble.batch().transpose(0, 1)
            estimate = x.mT @ x / settings["batch"] + damping
            total += torch.linalg.inv(estimate) if invert_each else estimate
            if t in at:
                Qs = total / t if invert_each else torch.linalg.inv(total / t)
                for problem, Q, row in zip(problems, Qs, rows, strict=True):
                    row.append(problem.distance(Q))
        return {"distance": rows}

    return compute


def structured(settings: dict[str, Any], structure: str, arm: str) -> Callable[[Results], Any]:
    def compute(results: Results) -> Any:
        rate = _rate(settings, results, f"tune {structure}: {arm}", arm)
        problems, last = problems_of(settings), {}

        def score(problem: Problem, Q: Tensor) -> tuple[float, ...]:
            last[id(problem)] = Q
            return errors_of(problem, Q)

        rows = learn(settings, problems, structure, arm, rate, score)
        inverted = [exact(settings, problem, structure) for problem in problems]
        away = [
            float((last[id(p)] - Q).norm() / Q.norm()) for p, Q in zip(problems, inverted, strict=True)
        ]  # from approximate-then-invert on the true F
        return {"rate": rate, "from approximate-then-invert": away, **split_errors(rows)}

    return compute


def baseline(settings: dict[str, Any], structure: str) -> Callable[[Results], Any]:
    """F_γ in structured form on each minibatch, averaged (Kronecker: factor by factor), inverted."""

    def compute(_: Results) -> Any:
        problems, n, steps = problems_of(settings), settings["n"], settings["structured steps"]
        ensemble = Ensemble(problems, 3000, batch=settings["batch"])
        damping = settings["gamma"] * torch.eye(n, dtype=DTYPE)
        left, right = settings["kronecker"]
        totals: list[Tensor] = []
        rows: list[list[tuple[float, ...]]] = [[] for _ in problems]
        at = set(spaced(steps, 14))
        for t in range(1, steps + 1):
            x = ensemble.batch().transpose(0, 1)
            estimate = x.mT @ x / settings["batch"] + damping
            if structure == "kronecker":
                parts = list(nearest_kronecker(estimate, left, right))
            elif structure == "block":
                parts = [torch.stack([blocks_only(F, settings["block size"]) for F in estimate])]
            else:
                parts = [torch.diag_embed(estimate.diagonal(dim1=-2, dim2=-1))]
            totals = [a + b for a, b in zip(totals, parts, strict=True)] if totals else parts
            if t in at:
                for i, (problem, row) in enumerate(zip(problems, rows, strict=True)):
                    averages = [total[i] / t for total in totals]
                    F = torch.kron(*averages) if structure == "kronecker" else averages[0]
                    row.append(errors_of(problem, torch.linalg.inv(F)))
        return split_errors(rows)

    return compute
