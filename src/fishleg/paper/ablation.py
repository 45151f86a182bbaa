"""The ablation figure: preconditioning (A), structures (B), one-shot pruning (C), blocks against oBERT (D).

Paper: fig. simple; a linear layer of n inputs with covariance F (eigenvalues e^{−i/10} in a random basis) and
one output, weights N(0, 1/n), γ = 0.01, batches of 100; n = 100 in A–C and 500 in D.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fishleg.fisher import sample_h
from fishleg.inverse import InverseFisher
from fishleg.likelihoods import Gaussian
from fishleg.obs import compensate, saliency
from fishleg.operators import BlockFactor, FullFactor, Gram, Identity, LowRank, Masked, Operator
from fishleg.paper.harness import (
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
from fishleg.paper.problems import (
    DTYPE,
    Ensemble,
    Problem,
    approximate_then_invert,
    best_rate,
    blocks_only,
    exponential,
    our_options,
    paper_options,
    riemannian,
)

NAME = "ablation"
# the factors that the figure on initialisation compares, each with the initial scale that suits it
FACTORS = {"triangular": "1/γ", "square": "n/Tr(F_γ)"}
SCHEDULES = ("constant", "decayed")
OBERT, OBERT_MORE = "oBERT, 512 gradients", "oBERT, as many gradients as FLS"
FLS, OURS, UNTRAINED = "FLS, paper", "FLS, ours", "Q = I/γ, not trained"
LOOK = 2  # stages between two looks at the distances, which cost more than the stages
Qs = list[Operator]


def run(out: Path, *, smoke: bool = False, progress: Progress = print) -> Results:
    """Panels A to D; see the module."""
    need_matplotlib()
    settings: dict[str, Any] = {
        "n": 20 if smoke else 100,
        "decay length": 2 if smoke else 10,
        "gamma": 0.01,
        "batch": 20 if smoke else 100,
        "seeds": 2 if smoke else 6,
        "steps": 10 if smoke else 600,
        "stage steps": 2 if smoke else 20,
        "per stage": 5,  # weights
        "blocks": [5] if smoke else [5, 10, 20, 50],
        "m": 4 if smoke else 10,
        "rates": {
            "triangular": [0.1] if smoke else [0.03, 0.1, 0.3],
            "diagonal": [0.03] if smoke else [0.03, 0.1, 0.3],
            "block": [0.1] if smoke else [0.1, 0.2, 0.5],
        },
        "stage rate": 0.1,  # of Adam's, while pruning
        "A": {
            "seeds": 2 if smoke else 3,
            "steps": 10 if smoke else 2000,
            "rates": {
                "triangular": [0.1] if smoke else [0.03, 0.1],
                "square": [0.003] if smoke else [0.003, 0.01],
            },
            "noise-free steps": 10 if smoke else 1500,
            "noise-free rates": [0.03] if smoke else [0.01, 0.03, 0.1, 0.3],
        },
        "D": {
            "n": 30 if smoke else 500,
            "seeds": 2 if smoke else 4,
            "steps": 5 if smoke else 400,
            "per stage": 10 if smoke else 50,
            "gradients": 32 if smoke else 512,
            "repeats": 1 if smoke else 7,
        },
        "version": 1,
    }
    units = [Unit("A: flow", _flow(settings))]
    for factor in FACTORS:
        units += [
            Unit(f"A: {factor}, noise-free, P={P}", _noise_free(settings, factor, P), cost=8) for P in "IQ"
        ]
        for schedule in SCHEDULES:
            for P in "IQ":
                key = f"{factor}, {schedule}, P={P}"
                units.append(Unit(f"tune A: {key}", _tune_a(settings, factor, schedule, P), cost=9))
                units.append(Unit(f"A: {key}", _precondition(settings, factor, schedule, P), cost=7))
    structures = ["full", "diagonal", *(f"block {size}" for size in settings["blocks"])]
    for structure in structures:
        units.append(Unit(f"tune B: {structure}", _tune_b(settings, structure), cost=8))
        units += [
            Unit(f"B, C: {structure}, {who}", _structure(settings, structure, who), cost=14)
            for who in ("paper", "ours")
        ]
    units += [
        Unit(f"C: {name}", _rival(settings, name), cost=3)
        for name in ("magnitude", "M-FAC, sum", "M-FAC, joint", "exact, sum", "exact, joint")
    ]
    for size in settings["blocks"]:
        units.append(Unit(f"tune D: block {size}", _tune_d(settings, size), cost=5))
        units += [
            Unit(f"D: block {size}, {arm}", _blocks(settings, size, arm), cost=8)
            for arm in (OBERT, OBERT_MORE, FLS, OURS, UNTRAINED)
        ]
        units.append(Unit(f"D: block {size}, time", _time(settings, size), cost=5))
    path = out / f"{NAME}.json"
    results = run_units(path, settings, units, progress)
    record = finish(path, settings, results, _summary(settings, structures, results))
    save_picture(_draw(settings, structures, results), out / f"{NAME}.png", smoke=smoke)
    return record


def _problem(settings: dict[str, Any], seed: int, n: int | None = None) -> Problem:
    return Problem(exponential(n or settings["n"], settings["decay length"]), settings["gamma"], seed)


def _problems(settings: dict[str, Any]) -> list[Problem]:
    return [_problem(settings, seed) for seed in range(settings["seeds"])]


# --- A: preconditioning -------------------------------------------------------------------------------------


def _flow(settings: dict[str, Any]) -> Callable[[Results], Any]:
    """The analysis of the paper's appendix: Q ← Q − ηP(F_γQ − I) without noise, eigenvalue by eigenvalue."""
    steps = settings["A"]["noise-free steps"]

    def descend(start: float, P: str, rate: float) -> list[float]:
        """The gap after each step; infinite from where an eigenvalue stops being positive."""
        target = 1 / (exponential(settings["n"], settings["decay length"]) + settings["gamma"])
        beta, gaps = torch.full_like(target, start), []
        for _ in range(steps):
            beta = beta - rate * (beta if P == "Q" else 1.0) * (beta / target - 1)
            if not bool((beta > 0).all()):
                return [math.inf] * steps
            gaps.append(float((beta - target).square().div(target).sum() / target.sum()))
        return gaps

    def reached(gaps: list[float]) -> float:
        return next((float(t) for t, gap in enumerate(gaps, 1) if gap <= 1e-6), math.inf)

    def compute(_: Results) -> Any:
        found = {}
        for label, start in (("I", 1.0), ("I/γ", 1 / settings["gamma"])):
            for P in "IQ":
                runs = {2.0 ** (k / 4): descend(start, P, 2.0 ** (k / 4)) for k in range(-40, 5)}
                best = min(runs, key=lambda rate: (reached(runs[rate]), runs[rate][-1]))
                found[f"{label}, P={P}"] = {
                    "rate": best,
                    "steps to 1e-6": reached(runs[best]),
                    "gap": [[runs[best][t - 1] for t in spaced(steps, 60)]],
                }
        return found

    return compute


def _noise_free(settings: dict[str, Any], factor: str, P: str) -> Callable[[Results], Any]:
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
            rate: descend(_problem(settings, 999), rate)[-1] for rate in settings["A"]["noise-free rates"]
        }
        best = min(tried, key=lambda rate: tried[rate])
        seeds = range(settings["A"]["seeds"])
        return {"rate": best, "tried": tried, "gap": [descend(_problem(settings, s), best) for s in seeds]}

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
    if FACTORS.get(factor) == "n/Tr(F_γ)":
        return float(settings["n"] / _problem(settings, 0).F_gamma.trace())
    return float(1 / settings["gamma"])


def _tried(rates: Sequence[float], final: Callable[[float], float]) -> dict[float, float]:
    found = {}
    for rate in rates:
        try:
            found[rate] = final(rate)
        except ValueError:  # the library refuses to go on with gradients that are not finite
            found[rate] = math.inf
    return found


def _tune_a(settings: dict[str, Any], factor: str, schedule: str, P: str) -> Callable[[Results], Any]:
    def compute(_: Results) -> Any:
        problems = [_problem(settings, 999)]
        return _tried(
            settings["A"]["rates"][factor],
            lambda rate: _gaps(settings, problems, factor, schedule, P, rate)[0][-1],
        )

    return compute


def _precondition(settings: dict[str, Any], factor: str, schedule: str, P: str) -> Callable[[Results], Any]:
    def compute(results: Results) -> Any:
        rate = best_rate(results[f"tune A: {factor}, {schedule}, P={P}"])
        problems = [_problem(settings, seed) for seed in range(settings["A"]["seeds"])]
        return {"rate": rate, "gap": _gaps(settings, problems, factor, schedule, P, rate)}

    return compute


# --- B and C: structures, and pruning with them -------------------------------------------------------------


def _pretrained(
    settings: dict[str, Any], ensemble: Ensemble, structure: str, who: str, rate: float, steps: int
) -> tuple[InverseFisher, Any]:
    """Q learned on all weights by the paper's estimator or ours, and the learning, to go on with."""
    kind, _, size = structure.partition(" ")
    if who == "paper":
        kind, options = "triangular" if kind == "full" else kind, paper_options(rate)
    else:
        options = our_options(settings["batch"])
    inverse = ensemble.inverse(kind, 1 / settings["gamma"], block_size=int(size or 1))
    return inverse, ensemble.learn(inverse, options, steps)


def _tune_b(settings: dict[str, Any], structure: str) -> Callable[[Results], Any]:
    kind = structure.partition(" ")[0]

    def final(rate: float) -> float:
        problem = _problem(settings, 999)
        ensemble = Ensemble([problem], 999, batch=settings["batch"])
        inverse, _ = _pretrained(settings, ensemble, structure, "paper", rate, settings["steps"])
        return problem.gap(ensemble.dense(inverse)[0])

    rates = settings["rates"]["triangular" if kind == "full" else kind]
    return lambda _: _tried(rates, final)


def _structure(settings: dict[str, Any], structure: str, who: str) -> Callable[[Results], Any]:
    """The loss that a structure reaches (B), and the errors on the way to high sparsity (C)."""

    def compute(results: Results) -> Any:
        problems = _problems(settings)
        ensemble = Ensemble(problems, 1000, batch=settings["batch"])
        rate = best_rate(results[f"tune B: {structure}"])
        inverse, auxiliary = _pretrained(settings, ensemble, structure, who, rate, settings["steps"])
        gaps = [p.gap(Q) for p, Q in zip(problems, ensemble.dense(inverse), strict=True)]
        limit = [p.gap(_best_of_structure(p, structure)) for p in problems]

        def learned(kept: list[Tensor]) -> Qs:
            return _refined(settings, ensemble, inverse, auxiliary, kept, who)

        errors = _prune(problems, settings["per stage"], learned, "sum" if who == "paper" else "joint")
        return {"rate": rate, "gap": gaps, "limit": limit, "mse": errors}

    return compute


def _best_of_structure(problem: Problem, structure: str) -> Tensor:
    kind, _, size = structure.partition(" ")
    return approximate_then_invert(problem.F_gamma, kind, block_size=int(size or 1))


def _refined(
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
    """((Q⁻¹)_MM)⁻¹ on the kept weights: what Q says once the others are zero."""
    n = len(Q)
    operator = Gram((1, n), FullFactor(n)).to(DTYPE)
    with torch.no_grad():
        assert isinstance(operator.factor, FullFactor)
        operator.factor.matrix.copy_(torch.linalg.cholesky(Q))
    if not bool(keep.all()):
        operator.remove_(~keep)
    return Masked(operator, keep.view(1, n))


def _rival(settings: dict[str, Any], name: str) -> Callable[[Results], Any]:
    """Pruning with a Q that is not learned: magnitude, M-FAC, or the exact inverse."""
    kind, _, compensation = name.partition(", ")

    def compute(_: Results) -> Any:
        problems, shape = _problems(settings), (1, settings["n"])
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

        return {"mse": _prune(problems, settings["per stage"], made, compensation or "none")}

    return compute


def _prune(
    problems: Sequence[Problem],
    per_stage: int,
    make: Callable[[list[Tensor]], Qs],
    compensation: str,
    inspect: Callable[[int, list[Tensor], Qs], None] | None = None,
) -> list[list[float]]:
    """Test errors by problem and stage: remove the weights of least saliency, compensate, look again."""
    n = problems[0].n
    weights = [problem.w.clone().view(1, n) for problem in problems]
    kept = [torch.ones(n, dtype=torch.bool) for _ in problems]
    errors: list[list[float]] = [[] for _ in problems]
    for stage in _stages(n, per_stage):
        operators = make(kept)
        if inspect is not None:
            inspect(stage, kept, operators)
        for i, (problem, q) in enumerate(zip(problems, operators, strict=True)):
            with torch.no_grad():
                scores = saliency(weights[i], q).flatten()
                scores[~kept[i]] = math.inf  # gone already
                removed = torch.zeros(n, dtype=torch.bool)
                removed[scores.argsort()[:per_stage]] = True
                change = compensate(weights[i], q, removed.view(1, n), compensation, iterations=200)
                weights[i] = weights[i] + change.delta
            kept[i] = kept[i] & ~removed
            errors[i].append(problem.mse(weights[i]))
    return errors


def _stages(n: int, per_stage: int) -> range:
    """One short of removing everything."""
    return range(1, (n - 1) // per_stage + 1)


# --- D: blocks against oBERT --------------------------------------------------------------------------------


def _d_problems(settings: dict[str, Any]) -> list[Problem]:
    return [_problem(settings, seed, settings["D"]["n"]) for seed in range(settings["D"]["seeds"])]


def _tune_d(settings: dict[str, Any], size: int) -> Callable[[Results], Any]:
    def final(rate: float) -> float:
        problem = _problem(settings, 999, settings["D"]["n"])
        ensemble = Ensemble([problem], 999, batch=settings["batch"])
        inverse, _ = _pretrained(settings, ensemble, f"block {size}", "paper", rate, settings["D"]["steps"])
        return problem.gap(ensemble.dense(inverse)[0])

    return lambda _: _tried(settings["rates"]["block"], final)


def _blocks(settings: dict[str, Any], size: int, arm: str) -> Callable[[Results], Any]:
    """Errors, and distances of the masked Q to the full and to the block-diagonal inverse, by stage."""

    def compute(results: Results) -> Any:
        problems, D = _d_problems(settings), settings["D"]
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

        if arm in (FLS, OURS):
            who = "paper" if arm == FLS else "ours"
            rate = best_rate(results[f"tune D: block {size}"])
            inverse, auxiliary = _pretrained(settings, ensemble, f"block {size}", who, rate, D["steps"])

        def made(kept: list[Tensor]) -> Qs:
            if arm in (FLS, OURS):
                return _refined(settings, ensemble, inverse, auxiliary, kept, who)
            if arm == UNTRAINED:
                return [Masked(Identity((1, n), 1 / settings["gamma"]).to(DTYPE), k.view(1, n)) for k in kept]
            count = D["gradients"] if arm == OBERT else settings["stage steps"] * settings["batch"]
            samples = ensemble.gradients(ensemble.batch(count))
            return [
                obert(h * keep, size, settings["gamma"])  # what is removed is apart from the rest
                for h, keep in zip(samples, kept, strict=True)
            ]

        compensation = {OURS: "joint", UNTRAINED: "none"}.get(arm, "sum")
        errors = _prune(problems, D["per stage"], made, compensation, inspect)
        return {"mse": errors, "distance to full": full, "distance to blocks": block}

    return compute


def obert(samples: Tensor, size: int, gamma: float) -> Gram:
    """(γI + mean ggᵀ)⁻¹ within each block: what the recursion of oBERT arrives at, in one go."""
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


def _time(settings: dict[str, Any], size: int) -> Callable[[Results], Any]:
    """Seconds of one update of Q between two stages, the methods taking turns in one process."""

    def compute(results: Results) -> Any:
        D, gamma = settings["D"], settings["gamma"]
        n, count = D["n"], D["gradients"]
        ensemble = Ensemble([_problem(settings, 0, n)], 6000, batch=settings["batch"])
        likelihood, generator = Gaussian(), ensemble.generator
        rate = best_rate(results[f"tune D: block {size}"])
        learners = {}
        for arm, options in ((FLS, paper_options(rate)), (OURS, our_options(settings["batch"]))):
            inverse = ensemble.inverse("block", 1 / gamma, block_size=size)
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
            OURS: lambda: steps(OURS),
        }
        seconds: dict[str, list[float]] = {name: [] for name in work}
        for turn in range(D["repeats"] + 1):
            for name, call in work.items():
                start = time.perf_counter()
                call()
                if turn:  # the first is a rehearsal
                    seconds[name].append(time.perf_counter() - start)
        return seconds

    return compute


# --- summary and picture ------------------------------------------------------------------------------------


def _summary(settings: dict[str, Any], structures: list[str], results: Results) -> Results:
    A = {
        key.removeprefix("A: "): {
            "rate": unit["rate"],
            "final gap": mean_sem(row[-1] for row in unit["gap"]),
            "half-way gap": mean_sem(row[len(row) - 3] for row in unit["gap"]),
        }
        for key, unit in results.items()
        if key.startswith("A: ") and key != "A: flow"
    }
    flow = {
        key: {"rate": unit["rate"], "steps to 1e-6": unit["steps to 1e-6"]}
        for key, unit in results["A: flow"].items()
    }
    B = {
        f"{structure}, {who}": {
            "gap": mean_sem(results[f"B, C: {structure}, {who}"]["gap"]),
            "limit": mean_sem(results[f"B, C: {structure}, {who}"]["limit"]),
        }
        for structure in structures
        for who in ("paper", "ours")
    }
    nothing = mean(problem.mse(torch.zeros(problem.n, dtype=DTYPE)) for problem in _problems(settings))
    C: Results = {"all weights removed": nothing}
    for key, unit in results.items():
        if "C: " in key:
            C[key.partition("C: ")[2]] = {
                f"{percent} %": mean_sem(row[_stage_at(settings, percent)] for row in unit["mse"])
                for percent in (30, 50, 70, 90)
            }
    correlation = {
        who: {
            f"{percent} %": _rank_correlation(
                [B[f"{structure}, {who}"]["gap"]["mean"] for structure in structures],
                [C[f"{structure}, {who}"][f"{percent} %"]["mean"] for structure in structures],
            )
            for percent in (30, 50, 70, 90)
        }
        for who in ("paper", "ours")
    }
    D: Results = {}
    for size in settings["blocks"]:
        for arm in (OBERT, OBERT_MORE, FLS, OURS, UNTRAINED):
            unit = results[f"D: block {size}, {arm}"]
            stages = len(unit["mse"][0])
            D[f"block {size}, {arm}"] = {
                "mse at 50 %": mean_sem(row[stages // 2] for row in unit["mse"]),
                "mse, mean over stages": mean_sem(map(mean, unit["mse"])),
                "distance to full, mean over stages": mean_sem(map(mean, unit["distance to full"])),
                "distance to blocks, mean over stages": mean_sem(map(mean, unit["distance to blocks"])),
            }
        seconds = results[f"D: block {size}, time"]
        D[f"block {size}, time relative to oBERT's recursion"] = {
            name: statistics.median(a / b for a, b in zip(values, seconds["oBERT, recursion"], strict=True))
            for name, values in seconds.items()
        }
    return {"A": A, "A: flow": flow, "B": B, "C": C, "B against C, rank correlation": correlation, "D": D}


def _stage_at(settings: dict[str, Any], percent: int) -> int:
    """The index of the stage after which about so many per cent are gone."""
    count = len(_stages(settings["n"], settings["per stage"]))
    wanted = round(percent / 100 * settings["n"] / settings["per stage"])
    return int(min(count, max(1, wanted))) - 1


def _rank_correlation(a: Sequence[float], b: Sequence[float]) -> float:
    def ranks(values: Sequence[float]) -> list[float]:
        return [float(sorted(values).index(value)) for value in values]

    x, y = ranks(a), ranks(b)
    centred = [(p - mean(x), q - mean(y)) for p, q in zip(x, y, strict=True)]
    spread = math.sqrt(sum(p * p for p, _ in centred) * sum(q * q for _, q in centred))
    return sum(p * q for p, q in centred) / spread if spread else 0.0


def _draw(settings: dict[str, Any], structures: list[str], results: Results) -> Any:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(20, 19), layout="constrained")
    parts: Any = figure.subfigures(2, 1, height_ratios=[1.9, 3])
    top, bottom = parts
    axes = top.subplots(2, 4)
    _draw_noise_free(settings, results, axes[0][:2])
    at = spaced(settings["A"]["steps"], 14)
    for axis, factor in zip(axes[0][2:], FACTORS, strict=True):
        for schedule, style in zip(SCHEDULES, ("-", "--"), strict=True):
            for P, colour in (("I", "black"), ("Q", "tab:orange")):
                unit = results.get(f"A: {factor}, {schedule}, P={P}")
                if unit is None:  # a record that is not complete can be drawn too
                    continue
                label = f"P = {P}, {schedule} rate {unit['rate']:g}"
                band(axis, at, unit["gap"], label, color=colour, linestyle=style)
        axis.set(xscale="log", yscale="log", xlabel="auxiliary step",
                 ylabel="loss above its minimum, relative",
                 title=f"A   minibatches, {factor} factor, $Q_0$ = I·{FACTORS[factor]}")  # fmt: skip
        if axis.lines:
            axis.legend(frameon=False, fontsize=9)
        else:
            axis.text(0.5, 0.5, "not run yet", transform=axis.transAxes, ha="center")
    palette = {"full": "tab:orange", "diagonal": "tab:purple"}
    blues = ["#9ecae1", "#6baed6", "#3182bd", "#08519c"]
    palette.update({f"block {size}": blues[i % 4] for i, size in enumerate(settings["blocks"])})
    axis = axes[1][0]
    for j, who in enumerate(("paper", "ours")):
        for i, structure in enumerate(structures):
            gaps = results[f"B, C: {structure}, {who}"]["gap"]
            axis.bar(i + 0.4 * j - 0.2, mean(gaps), width=0.38, color=palette[structure],
                     hatch="" if who == "paper" else "//", edgecolor="white")  # fmt: skip
    limits = [mean(results[f"B, C: {structure}, ours"]["limit"]) for structure in structures]
    axis.plot(range(1, len(structures)), limits[1:], "k_", markersize=22, label="the structure's optimum")
    axis.bar(0, 0, color="grey", label="paper's estimator")
    axis.bar(0, 0, color="grey", hatch="//", edgecolor="white", label="ours")
    axis.set_xticks(range(len(structures)), structures, rotation=20)
    axis.set(yscale="log", ylabel="loss above the full optimum, relative", title="B   loss by structure of Q",
             ylim=(1e-4, 100))  # fmt: skip
    axis.legend(frameon=False, fontsize=9, loc="upper right")
    per = settings["per stage"] / settings["n"] * 100
    sparsity = [per * stage for stage in _stages(settings["n"], settings["per stage"])]
    rivals = {
        "paper": {"M-FAC, sum": "tab:green", "exact, sum": "tab:red"},
        "ours": {"M-FAC, joint": "tab:green", "exact, joint": "tab:red"},
    }
    for axis, who in zip(axes[1][1:3], ("paper", "ours"), strict=True):
        band(axis, sparsity, results["C: magnitude"]["mse"], "magnitude", color="black")
        for structure in structures:
            rows = results[f"B, C: {structure}, {who}"]["mse"]
            band(axis, sparsity, rows, structure, color=palette[structure])
        for name, colour in rivals[who].items():
            style = "--" if name.startswith("exact") else "-"
            band(axis, sparsity, results[f"C: {name}"]["mse"], name, color=colour, linestyle=style)
        how = "paper's estimator, sum of single updates" if who == "paper" else "ours, joint compensation"
        axis.set(yscale="log", ylim=(1e-5, 1), xlabel="sparsity, %", ylabel="test MSE", title=f"C   {how}")
        axis.legend(frameon=False, fontsize=8, ncols=2)
    axis = axes[1][3]
    for i, size in enumerate(settings["blocks"]):
        seconds = results[f"D: block {size}, time"]
        for j, (name, values) in enumerate(seconds.items()):
            ratios = [a / b for a, b in zip(values, seconds["oBERT, recursion"], strict=True)]
            axis.bar(i + 0.2 * j - 0.3, statistics.median(ratios), width=0.18, color=f"C{j}",
                     label=f"{name}" if i == 0 else None)  # fmt: skip
    axis.set_xticks(range(len(settings["blocks"])), [f"block {size}" for size in settings["blocks"]])
    axis.set(yscale="log", ylabel="time of one update of Q / oBERT's recursion", title="D   wall-clock",
             ylim=(0.02, 10))  # fmt: skip
    axis.legend(frameon=False, fontsize=9, ncols=2, loc="upper center")
    _draw_blocks(settings, results, bottom)
    return figure


def _draw_noise_free(settings: dict[str, Any], results: Results, axes: Any) -> None:
    steps = settings["A"]["noise-free steps"]
    colours = {"I": "black", "Q": "tab:orange"}
    for start, style in (("I", "-"), ("I/γ", "--")):
        for P, colour in colours.items():
            unit = results["A: flow"][f"{start}, P={P}"]
            label = f"P = {P}, $Q_0$ = {start}, rate {unit['rate']:.2g}"
            band(axes[0], spaced(steps, 60), unit["gap"], label, color=colour, linestyle=style)
    axes[0].set(title="A   without noise: gradient descent on Q")
    for factor, style in zip(FACTORS, ("-", "--"), strict=True):
        for P, colour in colours.items():
            unit = results.get(f"A: {factor}, noise-free, P={P}")
            if unit is None:
                continue
            label = f"P = {P}, {factor}, rate {unit['rate']:g}"
            band(axes[1], spaced(steps, 14), unit["gap"], label, color=colour, linestyle=style)
    axes[1].set(title="A   without noise: Adam on the factor")
    for axis in axes:
        axis.set(xscale="log", yscale="log", xlabel="step", ylim=(1e-8, 100))
        axis.set_ylabel("loss above its minimum, relative")
        axis.legend(frameon=False, fontsize=9)


def _draw_blocks(settings: dict[str, Any], results: Results, figure: Any) -> None:
    D, sizes = settings["D"], settings["blocks"]
    axes = figure.subplots(3, len(sizes), sharey="row", squeeze=False)
    stages = list(_stages(D["n"], D["per stage"]))
    per = D["per stage"] / D["n"] * 100
    colours = {
        OBERT: "tab:blue",
        OBERT_MORE: "tab:cyan",
        FLS: "tab:red",
        OURS: "tab:green",
        UNTRAINED: "grey",
    }
    looks = [per * (stage - 1) for stage in stages if (stage - 1) % LOOK == 0]
    rows = (
        ("mse", "test MSE", [per * stage for stage in stages]),
        ("distance to full", "distance to the full inverse", looks),
        ("distance to blocks", "distance to the block inverse", looks),
    )
    for i, (name, label, x) in enumerate(rows):
        for axis, size in zip(axes[i], sizes, strict=True):
            for arm, colour in colours.items():
                style = ":" if arm == UNTRAINED else "-"
                band(axis, x, results[f"D: block {size}, {arm}"][name], arm, color=colour, linestyle=style)
            axis.set(xlabel="sparsity, %", title=f"D   blocks of {size}" if i == 0 else "")
            if i == 0:
                axis.set(yscale="log", ylim=(1e-5, 0.1))
            elif name == "distance to blocks":
                axis.set(yscale="log", ylim=(0.03, 300))
        axes[i][0].set_ylabel(label)
        axes[i][0].legend(frameon=False, fontsize=8)
