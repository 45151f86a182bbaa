"""Claims of the paper's text that have no figure: losses, probes, the start of Q, and costs.

The toy problem is that of the ablation figure; structures of Q are compared in `layer`.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fishleg import AuxiliaryOptions
from fishleg.inverse.auxiliary import Auxiliary
from fishleg.inverse.inverse_fisher import InverseFisher
from reproduction.figures.ablation.pruning import conditioned, prune_in_stages
from reproduction.figures.problems import (
    DTYPE,
    Ensemble,
    Problem,
    best_rate,
    paper_options,
    problem_of,
    problems_of,
    tried_rates,
)
from reproduction.harness import Progress, Results, Unit, mean_sem, run_figure
from reproduction.workloads.networks import ResNet18

NAME = "claims"
AUXILIARY_LOSS, SQUARED = "auxiliary loss", "‖QF̂u − u‖² or ‖F̂Qu − u‖²"
OBERT_BLOCK = 50


def run(out: Path, *, smoke: bool = False, progress: Progress = print) -> Results:
    """One unit for each claim."""
    settings: dict[str, Any] = {
        "n": 12 if smoke else 100,
        "decay length": 10,
        "gamma": 0.01,
        "batch": 12 if smoke else 100,
        "batches": [12, 48] if smoke else [10, 30, 100, 300, 1000],  # sizes, for the bias
        "draws": 20 if smoke else 2000,  # of minibatches, for the bias
        "seeds": 2 if smoke else 6,
        "steps": 6 if smoke else 600,
        "per stage": 2 if smoke else 5,
        "starts": [1.0, 100.0] if smoke else [0.1, 1.0, 10.0, 100.0],  # αI; the last is I/γ
        "rates": [0.03] if smoke else [0.003, 0.01, 0.03, 0.1, 0.3],
        "width": 4 if smoke else 64,  # of the ResNet18 whose memory is counted
        "timed": 2 if smoke else 30,
        "version": 2,
    }
    units = [Unit("bias", _bias(settings), 4), Unit("no half", _no_half(settings), 0)]
    for alpha in settings["starts"]:
        units.append(Unit(f"start {alpha:g}", _learned(settings, alpha, "isotropic"), 10))
        units.append(Unit(f"gradient, start {alpha:g}", _learned(settings, alpha, "gradient"), 10))
    units += [Unit("memory", _memory(settings), 1), Unit("time", _time(settings), 2)]
    return run_figure(
        out / f"{NAME}.json",
        settings,
        units,
        summary=lambda results: _summary(settings, results),
        draw=lambda record: {"": _draw(settings, record["summary"])},
        smoke=smoke,
        progress=progress,
    )


def _bias(settings: dict[str, Any]) -> Callable[[Results], Any]:
    """Distance to F_γ⁻¹ of the Q at which each loss is minimal, on average over minibatches.

    F̂ is a minibatch's, damped. The auxiliary loss is linear in it, so its minimum is at E[F̂]⁻¹; both squared
    losses are quadratic, with their minimum at E[F̂] E[F̂²]⁻¹ (F and E[F̂²] commute for Gaussian inputs).
    """

    def compute(_: Results) -> Any:
        found: Results = {}
        for size in settings["batches"]:
            rows: dict[str, list[float]] = {AUXILIARY_LOSS: [], SQUARED: [], "by sampling": []}
            for problem in problems_of(settings):
                rows[AUXILIARY_LOSS].append(problem.distance(torch.linalg.inv(problem.F_gamma)))
                rows[SQUARED].append(problem.distance(squared_loss_optimum(problem, size)))
            first = problem_of(settings, 0)
            sampled = sampled_squared_loss_optimum(first, size, settings["draws"])
            rows["by sampling"].append(first.distance(sampled))
            found[str(size)] = rows
        return found

    return compute


def squared_loss_optimum(problem: Problem, size: int) -> Tensor:
    """E[F̂] E[F̂²]⁻¹ for the mean F̂ of `size` outer products xxᵀ, x ~ N(0, F), and γI."""
    F, F_gamma = problem.F, problem.F_gamma
    second = F_gamma @ F_gamma + (F @ F + F.trace() * F) / size
    optimum: Tensor = torch.linalg.solve(second, F_gamma)
    return (optimum + optimum.mT) / 2


def sampled_squared_loss_optimum(problem: Problem, size: int, draws: int) -> Tensor:
    """The same from minibatches, with the symmetric part of the product."""
    generator = torch.Generator().manual_seed(2000)
    first = second = torch.zeros(problem.n, problem.n, dtype=DTYPE)
    for _ in range(draws):
        x = torch.randn(size, problem.n, generator=generator, dtype=DTYPE) @ problem.root.mT
        F = x.mT @ x / size + problem.gamma * torch.eye(problem.n, dtype=DTYPE)
        first, second = first + F / draws, second + F @ F / draws
    # the minimum over symmetric Q of Tr(Q S Q) − 2Tr(QF) solves SQ + QS = 2F
    values, vectors = torch.linalg.eigh(second)
    inner = vectors.mT @ (2 * first) @ vectors / (values[:, None] + values[None, :])
    optimum: Tensor = vectors @ inner @ vectors.mT
    return optimum


def _no_half(settings: dict[str, Any]) -> Callable[[Results], Any]:
    """Tr(QF_γQ) − Tr(Q), per parameter, at F_γ⁻¹ and at the multiple of I for which it is zero too."""

    def compute(_: Results) -> Any:
        rows: dict[str, list[float]] = {"at the inverse": [], "at a multiple of I": [], "its distance": []}
        for problem in problems_of(settings):
            n, F = problem.n, problem.F_gamma
            flat = torch.eye(n, dtype=DTYPE) * (n / F.trace())
            for name, Q in (("at the inverse", problem.inverse), ("at a multiple of I", flat)):
                rows[name].append(float((Q @ F @ Q).trace() - Q.trace()) / n)
            rows["its distance"].append(problem.distance(flat))
        return rows

    return compute


def _learned(settings: dict[str, Any], alpha: float, probe: str) -> Callable[[Results], Any]:
    """A full Q by the paper's estimator from αI, with the best of the rates, and its pruning error."""

    def learn(problems: list[Problem], rate: float, seed: int) -> list[Tensor]:
        ensemble = Ensemble(problems, seed, batch=settings["batch"])
        inverse = ensemble.inverse("triangular", alpha)
        ensemble.learn(inverse, paper_options(rate, probe=probe), settings["steps"])
        return ensemble.dense(inverse)

    def score(problem: Problem, Q: Tensor) -> float:
        """The error after half of the weights are pruned; a rate is chosen by it."""
        try:
            return pruned(settings, [problem], [Q])[0]
        except RuntimeError:  # of a Cholesky factor: Q is numerically singular, and counts as diverged
            return math.inf

    def compute(_: Results) -> Any:
        tuning = problem_of(settings, 999)
        tried = tried_rates(settings["rates"], lambda r: score(tuning, learn([tuning], r, 999)[0]))
        rate = best_rate({str(key): value for key, value in tried.items()})
        problems = problems_of(settings)
        Qs = learn(problems, rate, 1000)
        return {
            "rate": rate,
            "mse": [score(problem, Q) for problem, Q in zip(problems, Qs, strict=True)],
            "distance": [p.distance(Q) for p, Q in zip(problems, Qs, strict=True)],
        }

    return compute


def pruned(settings: dict[str, Any], problems: list[Problem], Qs: list[Tensor]) -> list[float]:
    """Test error of each problem without half of its weights; Q is conditioned on that, not learned again."""
    errors = prune_in_stages(
        problems,
        settings["per stage"],
        lambda kept: [conditioned(Q, keep) for Q, keep in zip(Qs, kept, strict=True)],
        "joint",
    )
    middle = settings["n"] // (2 * settings["per stage"]) - 1
    return [row[middle] for row in errors]


def _memory(settings: dict[str, Any]) -> Callable[[Results], Any]:
    """Numbers that describe the inverse of a ResNet18, per weight: the paper's Q, and oBERT's blocks."""

    def compute(_: Results) -> Any:
        with torch.device("meta"):
            model = ResNet18(10, settings["width"])
        weights = [p.shape for p in model.parameters() if p.dim() > 1]
        total = sum(shape.numel() for shape in weights)
        kronecker = sum(s[0] ** 2 + s[1:].numel() ** 2 + s.numel() for s in weights)
        return {"weights": total, "D(LLᵀ⊗RRᵀ)D": kronecker / total, "blocks of 50": float(OBERT_BLOCK)}

    return compute


def _time(settings: dict[str, Any]) -> Callable[[Results], Any]:
    """An auxiliary step with P = Q against one with P = I, taking turns."""

    def compute(_: Results) -> Any:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = ResNet18(10, min(settings["width"], 16), 2).eval()
            x = torch.randn(32, 3, 32, 32)
        learners = {
            precondition: Auxiliary(
                model, InverseFisher.from_model(model, "scaled-kronecker"), "categorical", gamma=1e-3,
                options=AuxiliaryOptions(estimator="probe", precondition=precondition),
            )
            for precondition in (False, True)
        }  # fmt: skip
        seconds: dict[bool, list[float]] = {False: [], True: []}
        for turn in range(settings["timed"] + 1):
            for precondition, learner in learners.items():
                start = time.perf_counter()
                learner.step(x)
                if turn:  # the first is slower
                    seconds[precondition].append(time.perf_counter() - start)
        return {"P = Q / P = I": statistics.median(seconds[True]) / statistics.median(seconds[False])}

    return compute


def _summary(settings: dict[str, Any], results: Results) -> Results:
    keys = [f"{alpha:g}" for alpha in settings["starts"]]
    isotropic = {key: results[f"start {key}"] for key in keys}
    gradient = {key: results[f"gradient, start {key}"] for key in keys}

    def means(found: Results) -> Results:
        kinds = ("mse", "distance")
        return {
            k: {"rate": v["rate"], **{kind: mean_sem(v[kind]) for kind in kinds}} for k, v in found.items()
        }

    return {
        "bias": {
            size: {name: mean_sem(values) for name, values in rows.items()}
            for size, rows in results["bias"].items()
        },
        "no half": {name: mean_sem(values) for name, values in results["no half"].items()},
        "isotropic": means(isotropic),
        "gradient": means(gradient),
        "exact": mean_sem(
            pruned(settings, problems_of(settings), [p.inverse for p in problems_of(settings)])
        ),
        "memory": results["memory"],
        "time": results["time"],
    }


def _draw(settings: dict[str, Any], found: Results) -> Any:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 3.8), layout="constrained")
    bias, starts = figure.subplots(1, 2)
    sizes = settings["batches"]
    rows = [found["bias"][str(size)] for size in sizes]
    bias.plot(sizes, [row[SQUARED]["mean"] for row in rows], marker="o", label=SQUARED)
    bias.plot(
        sizes, [row["by sampling"]["mean"] for row in rows], "x", color="black", label="the same, sampled"
    )
    bias.plot(sizes, [row[AUXILIARY_LOSS]["mean"] for row in rows], marker="o", label=AUXILIARY_LOSS)
    bias.set(
        xscale="log",
        xlabel="examples in a minibatch",
        ylabel="distance to F_γ⁻¹",
        title="optima of the losses",
    )
    bias.legend(frameon=False, fontsize=8)
    for probe, label in (("isotropic", "isotropic u"), ("gradient", "gradients as u")):
        # where Q has diverged there is no mean
        values = [(at, v["mse"]) for at, v in zip(settings["starts"], found[probe].values(), strict=True)]
        points = [(at, mse["mean"], mse["sem"]) for at, mse in values if mse["mean"] is not None]
        starts.errorbar(*zip(*points, strict=True), marker="o", label=label)
    starts.axhline(found["exact"]["mean"], color="grey", linewidth=0.8, label="exact inverse")
    starts.set(
        xscale="log", yscale="log", xlabel="α, Q₀ = αI", ylabel="test MSE at 50 %", title="start and probes"
    )
    starts.legend(frameon=False, fontsize=8)
    return figure
