"""The estimation figure: Q learned from minibatches against the true inverse, full (A) and structured (B–D).

Paper: fig. estimation; n = 100, random basis, eigenvalues e^{−i/30}, γ = 0.01, 20 seeds.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fishleg.inverse.inverse_fisher import InverseFisher
from fishleg.inverse.operators import Operator
from fishleg.inverse.options import AuxiliaryOptions
from reproduction.paper.harness import (
    Progress,
    Results,
    Unit,
    band,
    finish,
    mean,
    mean_sem,
    need_matplotlib,
    run_units,
    save_picture,
    spaced,
)
from reproduction.paper.problems import (
    DTYPE,
    Ensemble,
    Problem,
    approximate_then_invert,
    best_rate,
    blocks_only,
    exponential,
    nearest_kronecker,
    our_options,
    paper_options,
)

NAME = "estimation"
PANELS = ("diagonal", "block", "kronecker")
PAPER = "paper, triangular from I/γ"
PAPER_BEST = "paper, square from I n/Tr(F_γ)"
FULL = (PAPER, PAPER_BEST, "ours")
ISOTROPIC, AIMED = "paper, isotropic u", "paper, u ~ N(0, F⁻¹)"
OURS, OURS_AIMED = "ours, isotropic", "ours, then u ~ N(0, F⁻¹)"
BASELINE = "approximate, average, invert"


def run(out: Path, *, smoke: bool = False, progress: Progress = print) -> Results:
    """Panel A: Riemannian distance of a full Q. Panels B–D: error of Q u for three structures."""
    need_matplotlib()
    settings: dict[str, Any] = {
        "n": 20 if smoke else 100,
        "decay length": 30,
        "gamma": 0.01,
        "batch": 20 if smoke else 100,
        "seeds": 2 if smoke else 20,
        "full steps": 12 if smoke else 1000,
        "structured steps": 12 if smoke else 1000,
        "natural steps": 4 if smoke else 100,  # of "ours", before the aimed probes
        "block size": 4 if smoke else 20,
        "kronecker": [4, 5] if smoke else [5, 20],
        "rates": {
            PAPER: [0.1] if smoke else [0.03, 0.1, 0.2],
            PAPER_BEST: [0.003] if smoke else [0.001, 0.003, 0.01],
            ISOTROPIC: [0.03] if smoke else [0.03, 0.1, 0.3],
            AIMED: [0.03] if smoke else [0.03, 0.1, 0.3],
            OURS_AIMED: [0.01] if smoke else [0.003, 0.01, 0.03],
        },
        "version": 1,
    }
    units: list[Unit] = []
    for arm in FULL:
        if arm in settings["rates"] and len(settings["rates"][arm]) > 1:
            units.append(Unit(f"tune A: {arm}", _tune(settings, "full", arm), cost=15))
        units.append(Unit(f"A: {arm}", _full(settings, arm), cost=15 if arm in (PAPER, PAPER_BEST) else 35))
    units.append(Unit("A: average of inverses", _averages(settings, invert_each=True), cost=25))
    units.append(Unit("A: inverse of the average", _averages(settings, invert_each=False), cost=5))
    for structure in PANELS:
        for arm in (ISOTROPIC, AIMED, OURS, OURS_AIMED):
            if arm != OURS:
                units.append(Unit(f"tune {structure}: {arm}", _tune(settings, structure, arm), cost=8))
            units.append(Unit(f"{structure}: {arm}", _structured(settings, structure, arm), cost=7))
        units.append(Unit(f"{structure}: {BASELINE}", _baseline(settings, structure), cost=8))
        units.append(Unit(f"{structure}: limits", _limits(settings, structure), cost=8))
    path = out / f"{NAME}.json"
    results = run_units(path, settings, units, progress)
    record = finish(path, settings, results, _summary(settings, results))
    save_picture(_draw(settings, results), out / f"{NAME}.png", smoke=smoke)
    return record


def _problems(settings: dict[str, Any]) -> list[Problem]:
    return [_problem(settings, seed) for seed in range(settings["seeds"])]


def _problem(settings: dict[str, Any], seed: int) -> Problem:
    return Problem(exponential(settings["n"], settings["decay length"]), settings["gamma"], seed)


def _learn(
    settings: dict[str, Any],
    problems: list[Problem],
    structure: str,
    arm: str,
    rate: float,
    score: Callable[[Problem, Tensor], Any],
) -> list[list[Any]]:
    """Learn Q as the arm says; the score of every problem at every checkpoint."""
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
    """What the rate of an arm is tuned for: structured, the loss that it minimises.

    Not the error of Qu: a Q on its way down from I/γ can have a smaller one than where it is going.
    """
    if structure == "full":
        return lambda problem, Q: problem.distance(Q)
    return lambda problem, Q: problem.gap(Q, aimed=arm in (AIMED, OURS_AIMED))


def _tune(settings: dict[str, Any], structure: str, arm: str) -> Callable[[Results], Any]:
    """The final score for each rate, on a problem that is not among the seeds."""

    def compute(_: Results) -> Any:
        found = {}
        for rate in settings["rates"][arm]:
            try:
                rows = _learn(
                    settings, [_problem(settings, 999)], structure, arm, rate, _score(structure, arm)
                )
                found[rate] = rows[0][-1]
            except ValueError:  # the library refuses to go on with gradients that are not finite
                found[rate] = math.inf
        return found

    return compute


def _rate(settings: dict[str, Any], results: Results, key: str, arm: str) -> float:
    rates = settings["rates"].get(arm, [1.0])
    return best_rate(results[key]) if key in results else float(rates[0])


def _full(settings: dict[str, Any], arm: str) -> Callable[[Results], Any]:
    def compute(results: Results) -> Any:
        rate = _rate(settings, results, f"tune A: {arm}", arm)
        rows = _learn(settings, _problems(settings), "full", arm, rate, lambda p, Q: p.distance(Q))
        return {"rate": rate, "distance": rows}

    return compute


def _averages(settings: dict[str, Any], *, invert_each: bool) -> Callable[[Results], Any]:
    """Without learning: invert each minibatch's estimate and average, or average and then invert."""

    def compute(_: Results) -> Any:
        problems, n, steps = _problems(settings), settings["n"], settings["full steps"]
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


KINDS = ("aimed error", "isotropic error", "aimed gap", "isotropic gap")


def _errors(problem: Problem, Q: Tensor) -> tuple[float, ...]:
    """Errors of Qu, and the auxiliary loss above the full optimum, for both distributions of u."""
    errors = [problem.action_error(Q, aimed=aimed) for aimed in (True, False)]
    return (*errors, *(problem.gap(Q, aimed=aimed) for aimed in (True, False)))


def _split(rows: list[list[Any]]) -> dict[str, list[list[float]]]:
    return {kind: [[scores[i] for scores in row] for row in rows] for i, kind in enumerate(KINDS)}


def _structured(settings: dict[str, Any], structure: str, arm: str) -> Callable[[Results], Any]:
    def compute(results: Results) -> Any:
        rate = _rate(settings, results, f"tune {structure}: {arm}", arm)
        problems, last = _problems(settings), {}

        def score(problem: Problem, Q: Tensor) -> tuple[float, ...]:
            last[id(problem)] = Q
            return _errors(problem, Q)

        rows = _learn(settings, problems, structure, arm, rate, score)
        exact = [_exact(settings, problem, structure) for problem in problems]
        away = [
            float((last[id(p)] - Q).norm() / Q.norm()) for p, Q in zip(problems, exact, strict=True)
        ]  # from approximate-then-invert on the true F
        return {"rate": rate, "from approximate-then-invert": away, **_split(rows)}

    return compute


def _exact(settings: dict[str, Any], problem: Problem, structure: str) -> Tensor:
    left, right = settings["kronecker"]
    return approximate_then_invert(
        problem.F_gamma, structure, block_size=settings["block size"], shape=(left, right)
    )


def _baseline(settings: dict[str, Any], structure: str) -> Callable[[Results], Any]:
    """F_γ in structured form on each minibatch, averaged (Kronecker: factor by factor), inverted."""

    def compute(_: Results) -> Any:
        problems, n, steps = _problems(settings), settings["n"], settings["structured steps"]
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
                    row.append(_errors(problem, torch.linalg.inv(F)))
        return _split(rows)

    return compute


def _limits(settings: dict[str, Any], structure: str) -> Callable[[Results], Any]:
    """Without noise: approximate-then-invert on the true F, and what the structure can reach at best."""

    def compute(_: Results) -> Any:
        found: dict[str, list[list[tuple[float, ...]]]] = {"invert": [], **{name: [] for name in OPTIMA}}
        for problem in _problems(settings):
            exact = _exact(settings, problem, structure)
            found["invert"].append([_errors(problem, exact)])
            scale = float(exact.trace()) / problem.n
            for name, objective in OPTIMA.items():
                best = _optimum(settings, problem, structure, scale, objective)
                found[name].append([_errors(problem, best)])
        return {name: _split(rows) for name, rows in found.items()}

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


def _summary(settings: dict[str, Any], results: Results) -> Results:
    at = spaced(settings["full steps"], 14)
    wanted = {t: i for i, t in enumerate(at)}
    summary: Results = {
        "A": {
            key.removeprefix("A: "): {
                f"distance after {t}": mean_sem(row[i] for row in unit["distance"])
                for t, i in wanted.items()
                if i in (len(at) - 1, len(at) - 3, len(at) - 5)
            }
            for key, unit in results.items()
            if key.startswith("A: ")
        }
    }
    for structure in PANELS:
        panel: Results = {}
        for arm in (BASELINE, ISOTROPIC, OURS, AIMED, OURS_AIMED):
            unit = results[f"{structure}: {arm}"]
            panel[arm] = {name: mean_sem(row[-1] for row in unit[name]) for name in KINDS}
            if "from approximate-then-invert" in unit:
                panel[arm]["from approximate-then-invert"] = mean_sem(unit["from approximate-then-invert"])
        for name, unit in results[f"{structure}: limits"].items():
            panel[f"limit: {name}"] = {kind: mean_sem(row[-1] for row in rows) for kind, rows in unit.items()}
        for arm in (ISOTROPIC, OURS, AIMED, OURS_AIMED):
            panel[arm]["aimed error / baseline"] = mean(
                row[-1] / base[-1]
                for row, base in zip(
                    results[f"{structure}: {arm}"]["aimed error"],
                    results[f"{structure}: {BASELINE}"]["aimed error"],
                    strict=True,
                )
            )
        summary[structure] = panel
    return summary


def _draw(settings: dict[str, Any], results: Results) -> Any:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 9), layout="constrained")
    axes = figure.subplots(2, 2).flatten()
    at = spaced(settings["full steps"], 14)
    labels = {
        PAPER: "paper's estimator, triangular, $Q_0$ = I/γ",
        PAPER_BEST: "paper's estimator, square, $Q_0$ = I n/Tr($F_γ$)",
        "ours": "ours (natural steps)",
        "average of inverses": "average of inverses (biased)",
        "inverse of the average": "inverse of the average",
    }
    colours = ["tab:red", "tab:orange", "tab:green", "grey", "black"]
    for (key, label), colour in zip(labels.items(), colours, strict=True):
        style = "--" if key == "inverse of the average" else "-"
        band(axes[0], at, results[f"A: {key}"]["distance"], label, color=colour, linestyle=style)
    axes[0].set(xscale="log", yscale="log", xlabel="minibatches",
                ylabel="Riemannian distance to $F_γ^{-1}$", title="A   full Q")  # fmt: skip
    axes[0].legend(frameon=False, fontsize=8)
    at = spaced(settings["structured steps"], 14)
    arms = {
        BASELINE: ("approximate, average, invert", "black", "-"),
        ISOTROPIC: ("paper's estimator, isotropic u", "tab:orange", "-"),
        AIMED: ("paper's estimator, u ~ N(0, F$^{-1}$)", "tab:red", "-"),
        OURS: ("ours, isotropic", "tab:green", "--"),
        OURS_AIMED: ("ours, then u ~ N(0, F$^{-1}$)", "tab:blue", "-"),
    }
    left, right = settings["kronecker"]
    titles = {
        "diagonal": "B   diagonal",
        "block": f"C   {settings['n'] // settings['block size']} blocks",
        "kronecker": f"D   Kronecker, {left}×{left} ⊗ {right}×{right}",
    }
    for axis, structure in zip(axes[1:], PANELS, strict=True):
        for arm, (label, colour, style) in arms.items():
            rows = results[f"{structure}: {arm}"]["aimed error"]
            band(axis, at, rows, label, color=colour, linestyle=style)
        limits = results[f"{structure}: limits"]["aimed optimum"]["aimed error"]
        axis.axhline(mean(row[0] for row in limits), color="tab:blue", linestyle=":", linewidth=1,
                     label="optimum of the structure, u ~ N(0, F$^{-1}$)")  # fmt: skip
        axis.set(xscale="log", yscale="log", xlabel="minibatches", title=titles[structure],
                 ylabel="error of Qu, u ~ N(0, F$^{-1}$), relative", ylim=(0.15, 30))  # fmt: skip
        axis.legend(frameon=False, fontsize=8)
    return figure
