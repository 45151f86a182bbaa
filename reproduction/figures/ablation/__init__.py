"""The ablation figure: preconditioning (A), structures (B), one-shot pruning (C), blocks against oBERT (D).

Paper: fig. simple; a linear layer of n inputs with covariance F (eigenvalues e^{−i/10} in a random basis) and
one output, weights N(0, 1/n), γ = 0.01, batches of 100; n = 100 in A–C and 500 in D.
"""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import torch

from reproduction.figures.ablation import blocks, preconditioning, pruning
from reproduction.figures.ablation.figure import draw as _draw
from reproduction.figures.ablation.pruning import stages
from reproduction.figures.ablation.shared import BLOCK_ARMS, FACTORS, SCHEDULES
from reproduction.figures.problems import DTYPE, problems_of
from reproduction.harness import (
    Progress,
    Results,
    Unit,
    mean,
    mean_sem,
    rank_correlation,
    run_figure,
    spaced,
    steps_to,
)

NAME = "ablation"


def run(out: Path, *, smoke: bool = False, progress: Progress = print) -> Results:
    """Panels A to D; see the module."""
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
            "triangular": [0.1] if smoke else [0.01, 0.03, 0.1, 0.3],
            "diagonal": [0.03] if smoke else [0.03, 0.1, 0.3, 1.0],
            "block": [0.1] if smoke else [0.02, 0.05, 0.1, 0.2, 0.5, 1.0],
        },
        "stage rate": 0.1,  # of Adam's, while pruning
        "A": {
            "seeds": 2 if smoke else 3,
            "steps": 10 if smoke else 2000,
            "rates": {
                "triangular": [0.1] if smoke else [0.01, 0.03, 0.1, 0.3],
                "square": [0.003] if smoke else [0.001, 0.003, 0.01, 0.03],
            },
            "noise-free steps": 10 if smoke else 1500,
            "noise-free rates": [0.03] if smoke else [0.003, 0.01, 0.03, 0.1, 0.3],
        },
        "D": {
            "n": 30 if smoke else 500,
            "seeds": 2 if smoke else 4,
            "steps": 5 if smoke else 400,
            "per stage": 10 if smoke else 50,
            "gradients": 32 if smoke else 512,
            "repeats": 1 if smoke else 7,
        },
        "version": 2,
    }
    units = [
        Unit("A: flow", preconditioning.flow(settings), cost=8),
        Unit("A: descent on the factor", preconditioning.factor_descent(settings), cost=40),
    ]
    for factor in FACTORS:
        units += [
            Unit(f"A: {factor}, noise-free, P={P}", preconditioning.noise_free(settings, factor, P), cost=14)
            for P in "IQ"
        ]
        for schedule in SCHEDULES:
            for P in "IQ":
                key = f"{factor}, {schedule}, P={P}"
                units.append(
                    Unit(f"tune A: {key}", preconditioning.tune(settings, factor, schedule, P), cost=30)
                )
                units.append(
                    Unit(f"A: {key}", preconditioning.precondition(settings, factor, schedule, P), cost=10)
                )
    structures = ["full", "diagonal", *(f"block {size}" for size in settings["blocks"])]
    for structure in structures:
        units.append(Unit(f"tune B: {structure}", pruning.tune(settings, structure), cost=13))
        units += [
            Unit(f"B, C: {structure}, {who}", pruning.structure_unit(settings, structure, who), cost=14)
            for who in ("paper", "ours")
        ]
    units += [  # whether the rate between stages matters
        Unit(
            f"C: full, paper, {share:g} × the rate between stages",
            pruning.structure_unit({**settings, "stage rate": share}, "full", "paper"),
            cost=14,
        )
        for share in (0.3, 1.0)
    ]
    units += [
        Unit(f"C: {name}", pruning.rival(settings, name), cost=0.5)
        for name in ("magnitude", "M-FAC, sum", "M-FAC, joint", "exact, sum", "exact, joint")
    ]
    for size in settings["blocks"]:
        units.append(Unit(f"tune D: block {size}", blocks.tune(settings, size), cost=22))
        units += [
            Unit(f"D: block {size}, {arm}", blocks.block_unit(settings, size, arm), cost=11)
            for arm in BLOCK_ARMS
        ]
        units.append(Unit(f"D: block {size}, time", blocks.time_unit(settings, size), cost=9))
    return run_figure(
        out / f"{NAME}.json",
        settings,
        units,
        summary=lambda results: _summary(settings, structures, results),
        draw=lambda record: _draw(settings, structures, record["units"]),
        smoke=smoke,
        progress=progress,
    )


def _summary(settings: dict[str, Any], structures: list[str], results: Results) -> Results:
    A = {
        key.removeprefix("A: "): {
            "rate": unit["rate"],
            "final gap": mean_sem(row[-1] for row in unit["gap"]),
            "half-way gap": mean_sem(row[len(row) - 3] for row in unit["gap"]),
        }
        for key, unit in results.items()
        if key.startswith("A: ") and "gap" in unit
    }
    flow = {
        key: {"rate": unit["rate"], "steps to 1e-6": unit["steps to 1e-6"]}
        for key, unit in results["A: flow"].items()
    }
    times = spaced(settings["A"]["noise-free steps"], 60)
    descent = {
        key: {
            "rate": unit["rate"],
            **{
                f"steps to {goal:g}": mean(steps_to(goal, row, times) for row in unit["gap"])
                for goal in (0.01, 1e-6)
            },
        }
        for key, unit in results["A: descent on the factor"].items()
    }
    B = {
        f"{structure}, {who}": {
            "gap": mean_sem(results[f"B, C: {structure}, {who}"]["gap"]),
            "limit": mean_sem(results[f"B, C: {structure}, {who}"]["limit"]),
        }
        for structure in structures
        for who in ("paper", "ours")
    }
    nothing = mean(problem.mse(torch.zeros(problem.n, dtype=DTYPE)) for problem in problems_of(settings))
    C: Results = {"all weights removed": nothing}
    for key, unit in results.items():
        if "C: " in key:
            C[key.partition("C: ")[2]] = {
                f"{percent} %": mean_sem(row[_stage_at(settings, percent)] for row in unit["mse"])
                for percent in (30, 50, 70, 90)
            }
    correlation = {
        who: {
            f"{percent} %": rank_correlation(
                torch.tensor([B[f"{structure}, {who}"]["gap"]["mean"] for structure in structures]),
                torch.tensor([C[f"{structure}, {who}"][f"{percent} %"]["mean"] for structure in structures]),
            )
            for percent in (30, 50, 70, 90)
        }
        for who in ("paper", "ours")
    }
    D: Results = {}
    for size in settings["blocks"]:
        for arm in BLOCK_ARMS:
            unit = results[f"D: block {size}, {arm}"]
            stages = len(unit["mse"][0])
            D[f"block {size}, {arm}"] = {
                "rate": unit["rate"],
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
    A_more = {"A: flow": flow, "A: descent on the factor": descent}
    return {"A": A, **A_more, "B": B, "C": C, "B against C, rank correlation": correlation, "D": D}


def _stage_at(settings: dict[str, Any], percent: int) -> int:
    """The index of the stage after which about `percent` of the weights are removed."""
    count = len(stages(settings["n"], settings["per stage"]))
    wanted = round(percent / 100 * settings["n"] / settings["per stage"])
    return int(min(count, max(1, wanted))) - 1
