"""The initialisation figure: Q₀ = I against Q₀ = I/γ, for gradient descent and for the estimators in use.

Paper: fig. aux_illustration; n = 100, ξ_i = 1/i², γ = 10⁻³, the learning rate tuned for each case.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fishleg import AuxiliaryOptions
from fishleg.inverse.operators import FullFactor, Gram
from fishleg.inverse.warm_start import WarmStart
from reproduction.figures.problems import DTYPE, Ensemble, Problem, our_options, paper_options
from reproduction.harness import Progress, Results, Unit, band, mean, mean_sem, run_figure, spaced, steps_to

NAME = "init"
FORMS = ("Q itself", "triangular", "square", "aligned")
MEAN = "I n/Tr(F_γ)"
WORDS = {
    "Q itself": "Q itself",
    "triangular": "its triangular factor",
    "square": "its square factor",
    "aligned": "its factor, F diagonal",
}
STARTS = ("I", "I/γ")
SNAPSHOTS = 6
TIMES_LONGER = 4
LONGER = ", longer"


def run(out: Path, *, smoke: bool = False, progress: Progress = print) -> Results:
    """Gradient descent on Q and its factors from both starts; natural steps; learning from minibatches."""
    settings: dict[str, Any] = {
        "n": 20 if smoke else 100,
        "gamma": 1e-3,
        "steps": 30 if smoke else 2000,
        "seeds": 2 if smoke else 3,
        "octaves": [-12, -10] if smoke else list(range(-12, 3, 2)),  # learning rates 2^k, refined later
        "probe steps": 10 if smoke else 1000,
        "probe seeds": 1 if smoke else 3,
        "probe rates": [0.03] if smoke else [0.01, 0.03, 0.1, 0.3, 1.0],
        "batch": 20 if smoke else 100,
        "version": 1,
    }
    units = [
        Unit(f"{form} from {start}", _descent(settings, form, start), cost=1.0 if "Q" in form else 4.0)
        for form in FORMS
        for start in STARTS
    ]
    units += [Unit(f"natural steps from {start}", _natural(settings, start), cost=0.3) for start in STARTS]
    units += [
        Unit(f"Adam, {form}, from {start}", _probes(settings, form, start), cost=6.0)
        for form in ("triangular", "square")
        for start in (*STARTS, MEAN)
    ]
    units += [
        Unit(f"Adam, {form}, from {start}{LONGER}", _longer(settings, form, start), cost=14.0)
        for form in ("triangular", "square")
        for start in (*STARTS, MEAN)
    ]
    units.append(Unit("ours, minibatches", _minibatches(settings), cost=3.0))
    return run_figure(
        out / f"{NAME}.json",
        settings,
        units,
        summary=lambda results: _summary(settings, results),
        draw=lambda record: {"": _draw(settings, record["units"])},
        smoke=smoke,
        progress=progress,
    )


def _problem(settings: dict[str, Any], seed: int, *, aligned: bool = False) -> Problem:
    values = torch.arange(1, settings["n"] + 1, dtype=DTYPE) ** -2.0
    basis = torch.eye(settings["n"], dtype=DTYPE) if aligned else None
    return Problem(values, settings["gamma"], seed, basis=basis)


def _scale(settings: dict[str, Any], start: str) -> float:
    if start == "I":
        return 1.0
    if start == "I/γ":
        return float(1 / settings["gamma"])
    return float(settings["n"] / _problem(settings, 0).F_gamma.trace())


def _descent(settings: dict[str, Any], form: str, start: str) -> Callable[[Results], Any]:
    """Gradient descent without noise, at the rate that ends best over all bases."""

    def compute(_: Results) -> Any:
        # aligned: F is diagonal, and so the factor stays diagonal; all bases give the same
        seeds = range(1 if form == "aligned" else settings["seeds"])
        problems = [_problem(settings, seed, aligned=form == "aligned") for seed in seeds]
        scale = _scale(settings, start)

        def descend(rate: float, some: list[Problem]) -> list[tuple[list[float], list[list[float]]]]:
            return [_descend(settings, problem, form, scale, rate) for problem in some]

        def slowness(runs: list[tuple[list[float], list[list[float]]]]) -> tuple[float, float]:
            times = [steps_to(0.01, gaps, _checkpoints(settings["steps"])) for gaps, _ in runs]
            return mean(times), mean(gaps[-1] for gaps, _ in runs)

        coarse = {2.0**k: slowness(descend(2.0**k, problems[:1])) for k in settings["octaves"]}
        best = min(coarse, key=lambda rate: coarse[rate])
        # the best rate is close to the largest stable one, which differs a little between bases: continue
        # until a rate larger by the root of 2 was tried and was worse
        fine = {best: descend(best, problems)}
        tried = {best: slowness(fine[best])}
        while untried := [best * 2.0**shift for shift in (-0.5, 0.5) if not _has(tried, best * 2.0**shift)]:
            for rate in untried:
                fine[rate] = descend(rate, problems)
                tried[rate] = slowness(fine[rate])
            best = min(tried, key=lambda rate: tried[rate])
        return {
            "rate": best,
            "steps to 1 %, final gap": {**coarse, **tried},
            "gap": [gaps for gaps, _ in fine[best]],
            "eigenvalues": fine[best][0][1],
        }

    return compute


def _has(rates: Iterable[float], rate: float) -> bool:
    return any(math.isclose(rate, other) for other in rates)


def _descend(
    settings: dict[str, Any], problem: Problem, form: str, scale: float, rate: float
) -> tuple[list[float], list[list[float]]]:
    """The relative gap of the loss at the checkpoints, and the spectrum of Q at a few of them."""
    steps, n = settings["steps"], problem.n
    at, shown = _checkpoints(steps), _snapshots(steps)
    operator = Gram((n,), FullFactor(n, triangular=form == "triangular")).to(DTYPE)
    operator.set_scale_(scale)
    Q = scale * torch.eye(n, dtype=DTYPE)
    rows = (problem.basis * (problem.values + problem.gamma).sqrt()).mT.contiguous()  # Σ vvᵀ = F_γ
    optimizer = torch.optim.SGD(operator.parameters(), lr=rate)
    gaps: list[float] = []
    spectra: list[list[float]] = []
    for t in range(steps + 1):
        if t in at or t in shown:
            now = Q if form == "Q itself" else operator.dense().detach()
            gap = problem.gap(now)
            if not (math.isfinite(gap) and gap < 1e6):
                return [math.inf] * len(at), []
            if t in at:
                gaps.append(gap)
            if t in shown:
                spectra.append(torch.linalg.eigvalsh(now).tolist())
        if form == "Q itself":
            Q = Q - rate * (problem.F_gamma @ Q - torch.eye(n, dtype=DTYPE))
        else:
            quad, trace = operator.loss_terms(rows)
            optimizer.zero_grad()
            (0.5 * quad - trace).backward()
            optimizer.step()
    return gaps, spectra


def _natural(settings: dict[str, Any], start: str) -> Callable[[Results], Any]:
    """The library's default on the same problem, without noise. Nothing is tuned."""

    def compute(_: Results) -> Any:
        return {"gap": [one(_problem(settings, seed)) for seed in range(settings["seeds"])]}

    def one(problem: Problem) -> list[float]:
        n, at = problem.n, _checkpoints(settings["steps"])
        operator = Gram((n,), FullFactor(n)).to(DTYPE)
        operator.set_scale_(_scale(settings, start))
        warm = WarmStart(operator, AuxiliaryOptions())
        samples = problem.root.mT * n**0.5  # their second moment is F exactly
        gaps = [problem.gap(operator.dense().detach())]
        for t in range(1, settings["steps"] + 1):
            warm.step(samples, problem.gamma, None)
            if t in at:
                gaps.append(problem.gap(operator.dense().detach()))
        return gaps

    return compute


def _probes(settings: dict[str, Any], form: str, start: str) -> Callable[[Results], Any]:
    """The paper's estimator with Adam and minibatches; its rate is tuned and decays to zero."""
    return lambda _: _tuned(settings, form, start, settings["probe rates"], settings["probe steps"])


def _longer(settings: dict[str, Any], form: str, start: str) -> Callable[[Results], Any]:
    """The same for more minibatches, with the rate that was best, one above and two below."""

    def compute(results: Results) -> Any:
        rates = settings["probe rates"]
        best = rates.index(results[f"Adam, {form}, from {start}"]["rate"])
        rates = rates[max(best - 2, 0) : best + 2]
        return _tuned(settings, form, start, rates, TIMES_LONGER * settings["probe steps"])

    return compute


def _tuned(settings: dict[str, Any], form: str, start: str, rates: list[float], steps: int) -> Results:
    structure = "triangular" if form == "triangular" else "full"
    tried: dict[float, float] = {}
    best: list[list[float]] = []
    for rate in rates:
        try:
            gaps = _learned(settings, structure, _scale(settings, start), paper_options(rate), steps)
            tried[rate] = mean(row[-1] for row in gaps)
        except ValueError:  # raised by the library for gradients that are not finite
            tried[rate] = math.inf
            continue
        if tried[rate] == min(tried.values()):
            best = gaps
    return {"rate": min(tried, key=lambda r: tried[r]), "tried": tried, "gap": best}


def _minibatches(settings: dict[str, Any]) -> Callable[[Results], Any]:
    options = our_options(settings["batch"])
    return lambda _: {"gap": _learned(settings, "full", 1.0, options, settings["probe steps"])}


def _learned(
    settings: dict[str, Any], structure: str, scale: float, options: AuxiliaryOptions, steps: int
) -> list[list[float]]:
    """The gaps of a Q that is learned from minibatches by the library."""
    problems = [_problem(settings, seed) for seed in range(settings["probe seeds"])]
    ensemble = Ensemble(problems, 1000, batch=settings["batch"])
    inverse = ensemble.inverse(structure, scale)
    gaps: list[list[float]] = [[] for _ in problems]

    def watch(_: int) -> None:
        for problem, Q, row in zip(problems, ensemble.dense(inverse), gaps, strict=True):
            row.append(problem.gap(Q))

    ensemble.learn(inverse, options, steps, watch=watch, at=spaced(steps, 12))
    return gaps


def _checkpoints(steps: int) -> list[int]:
    return [0, *spaced(steps, 90)]


def _snapshots(steps: int) -> list[int]:
    return [round(steps * i / (SNAPSHOTS - 1)) for i in range(SNAPSHOTS)]


def _summary(settings: dict[str, Any], results: Results) -> Results:
    """Final gaps, and the steps to 1 % of the optimum (None: not reached)."""
    summary: Results = {}
    for key, unit in results.items():
        summary[key] = {"final gap": mean_sem(row[-1] for row in unit["gap"])}
        if "rate" in unit:
            summary[key]["rate"] = unit["rate"]
        if not key.startswith(("Adam", "ours")):
            times = [steps_to(0.01, row, _checkpoints(settings["steps"])) for row in unit["gap"]]
            summary[key]["steps to 1 %"] = mean(times)
    return summary


def _draw(settings: dict[str, Any], results: Results) -> Any:
    from matplotlib.figure import Figure

    at, steps = _checkpoints(settings["steps"]), settings["steps"]
    figure = Figure(figsize=(14, 13), layout="constrained")
    axes = figure.subplots(4, 3)
    colours = {"I": "black", "I/γ": "tab:red", MEAN: "tab:blue"}
    target: Tensor = 1 / (_problem(settings, 0).values + settings["gamma"])
    for row, form in enumerate(FORMS):
        left = axes[row][0]
        for start in STARTS:
            unit = results[f"{form} from {start}"]
            label = f"$Q_0$ = {start}, rate {unit['rate']:.2g}"
            band(left, [t + 1 for t in at], unit["gap"], label, color=colours[start])
        if form in ("triangular", "square"):
            natural = results["natural steps from I"]
            band(
                left, [t + 1 for t in at], natural["gap"], "ours: natural steps, any $Q_0$", color="tab:green"
            )
        left.set(xscale="log", yscale="log", xlabel="step + 1", ylabel="loss above its minimum, relative",
                 title=f"gradient descent on {WORDS[form]}", ylim=(1e-7, 1e4))  # fmt: skip
        left.legend(frameon=False, fontsize=8)
        if form == "aligned":
            continue
        for axis, start in zip(axes[row][1:], STARTS, strict=True):
            spectra = results[f"{form} from {start}"]["eigenvalues"]
            for i, spectrum in enumerate(spectra):
                axis.plot(target.tolist(), spectrum, ".", markersize=4, color=_shade(i),
                          label=f"step {_snapshots(steps)[i]}")  # fmt: skip
            axis.plot(target.tolist(), target.tolist(), "--", color="grey", linewidth=1)
            axis.set(xscale="log", yscale="log", xlabel="target 1/(ξ$_i$ + γ)", ylabel="eigenvalue of Q",
                     title=f"{WORDS[form]}, $Q_0$ = {start}")  # fmt: skip
            axis.legend(frameon=False, fontsize=7)
    minibatches = spaced(settings["probe steps"], 12)
    for axis, form in zip(axes[3][1:], ("triangular", "square"), strict=True):
        for start, colour in colours.items():
            unit = results[f"Adam, {form}, from {start}"]
            name = "I n/Tr($F_γ$)" if start == MEAN else start
            label = f"probes, Adam, $Q_0$ = {name}, rate {unit['rate']:.2g}"
            band(axis, minibatches, unit["gap"], label, color=colour)
            longer = results[f"Adam, {form}, from {start}{LONGER}"]
            at = spaced(TIMES_LONGER * settings["probe steps"], 12)
            band(axis, at, longer["gap"], f"longer, rate {longer['rate']:.2g}", color=colour, linestyle="--")
        ours = results["ours, minibatches"]
        band(axis, minibatches, ours["gap"], "ours, any $Q_0$", color="tab:green")
        axis.set(xscale="log", yscale="log", xlabel="minibatches", ylabel="loss above its minimum, relative",
                 title=f"from minibatches: {form} factor", ylim=(1e-4, 1e2))  # fmt: skip
        axis.legend(frameon=False, fontsize=8)
    return figure


def _shade(i: int) -> tuple[float, float, float]:
    """From light to dark blue with time."""
    fade = 0.85 * (1 - i / (SNAPSHOTS - 1))
    return fade, 0.25 + 0.65 * fade, 0.55 + 0.4 * fade
