"""Errors of Q, and the least errors that a structure can have: optima on the true F, without noise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fishleg.inverse.inverse_fisher import InverseFisher
from fishleg.inverse.operators import Operator
from reproduction.figures.problems import (
    Ensemble,
    Problem,
    approximate_then_invert,
    problems_of,
)
from reproduction.harness import Results

KINDS = ("aimed error", "isotropic error", "aimed gap", "isotropic gap")


def errors_of(problem: Problem, Q: Tensor) -> tuple[float, ...]:
    """Errors of Qu, and the auxiliary loss above the full optimum, for both distributions of u."""
    errors = [problem.action_error(Q, aimed=aimed) for aimed in (True, False)]
    return (*errors, *(problem.gap(Q, aimed=aimed) for aimed in (True, False)))


def split_errors(rows: list[list[Any]]) -> dict[str, list[list[float]]]:
    return {kind: [[scores[i] for scores in row] for row in rows] for i, kind in enumerate(KINDS)}


def exact(settings: dict[str, Any], problem: Problem, structure: str) -> Tensor:
    left, right = settings["kronecker"]
    return approximate_then_invert(
        problem.F_gamma, structure, block_size=settings["block size"], shape=(left, right)
    )


def limits(settings: dict[str, Any], structure: str) -> Callable[[Results], Any]:
    """Without noise: approximate-then-invert on the true F, and the optima of the structure."""

    def compute(_: Results) -> Any:
        found: dict[str, list[list[tuple[float, ...]]]] = {"invert": [], **{name: [] for name in OPTIMA}}
        for problem in problems_of(settings):
            inverted = exact(settings, problem, structure)
            found["invert"].append([errors_of(problem, inverted)])
            scale = float(inverted.trace()) / problem.n
            for name, objective in OPTIMA.items():
                best = _optimum(settings, problem, structure, scale, objective)
                found[name].append([errors_of(problem, best)])
        return {name: split_errors(rows) for name, rows in found.items()}

    return compute


def _isotropic_loss(problem: Problem, Q: Tensor) -> Tensor:
    return (0.5 * (Q * (problem.F_gamma @ Q)).sum() - Q.trace()) / problem.inverse.trace()


def _aimed_loss(problem: Problem, Q: Tensor) -> Tensor:
    QR, IR = Q @ problem.inverse_root, problem.inverse @ problem.inverse_root
    loss = 0.5 * (QR * (problem.F_gamma @ QR)).sum() - (QR * problem.inverse_root).sum()
    return loss / (IR * problem.inverse_root).sum()


def _aimed_error(problem: Problem, Q: Tensor) -> Tensor:
    target = problem.inverse @ problem.inverse_root
    return (Q @ problem.inverse_root - target).square().sum() / target.square().sum()


OPTIMA: dict[str, Callable[[Problem, Tensor], Tensor]] = {
    "isotropic optimum": _isotropic_loss,
    "aimed optimum": _aimed_loss,
    "least aimed error": _aimed_error,
}


def _optimum(
    settings: dict[str, Any],
    problem: Problem,
    structure: str,
    scale: float,
    objective: Callable[[Problem, Tensor], Tensor],
) -> Tensor:
    """The Q of the structure that minimises the objective, by quasi-Newton steps."""
    shape = tuple(settings["kronecker"]) if structure == "kronecker" else (1, settings["n"])
    ensemble = Ensemble([problem], 0, shape=shape)
    inverse: InverseFisher = ensemble.inverse(structure, scale, block_size=settings["block size"])
    operator: Operator = inverse.operator(ensemble.names[0])
    solver = torch.optim.LBFGS(
        operator.parameters(), max_iter=120, history_size=20, line_search_fn="strong_wolfe"
    )

    def closure() -> Tensor:
        solver.zero_grad()
        loss = objective(problem, operator.dense())
        loss.backward()
        return loss

    solver.step(closure)
    return operator.dense().detach()
