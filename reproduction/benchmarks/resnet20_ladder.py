"""ResNet20 without training: one ingredient after another, the same ones for every method.

Every choice is made on validation images: the last 5,000 training images, which calibration does not use (the
dense model was trained on them, as on all training images). Every arm has the same trials, one per damping,
and keeps the damping with the best mean accuracy over the sparsities. The test images are read once, by
`--final`, for the chosen dampings and three seeds. Rows of another version of the code are not read.

Each row of the ladder adds one ingredient to the row before. The arms "+ all" give all of them to other Q.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

import fishleg
from fishleg import PruningOptions, Surgeon
from fishleg.workloads.digits import Batches
from reproduction.benchmarks.one_estimate import OneEstimate
from reproduction.benchmarks.resnet20_oneshot import Watch
from reproduction.harness import mean, run_benchmark
from reproduction.workloads.datasets import accuracy, cifar10
from reproduction.workloads.resnet20 import trained_resnet20

SPARSITIES = (0.8, 0.9, 0.95)
DAMPINGS = (0.01, 0.1, 1.0)
SEEDS = (0, 1, 2)
VALIDATION = 5000
ROUNDS = 12
ALL = {"compensation": "joint", "batch_statistics": True, "mask_search_rounds": ROUNDS}
PLAIN = {"compensation": "none", "batch_statistics": False, "mask_search_rounds": 0}
ARMS: dict[str, dict[str, Any]] = {
    "magnitude": {"method": "magnitude", **PLAIN},
    "diagonal": {"method": "diagonal", **PLAIN},
    "KFAC": {"method": "kfac", **PLAIN},
    "EKFAC": {"method": "ekfac", **PLAIN},
    "EKFAC + joint": {"method": "ekfac", **PLAIN, "compensation": "joint"},
    "EKFAC + joint + BatchNorm by batch": {"method": "ekfac", **ALL, "mask_search_rounds": 0},
    "EKFAC + all": {"method": "ekfac", **ALL},
    "learned + all": {"method": "fishleg", **ALL},
    "EKFAC + all, masks by ADMM": {"method": "ekfac", **ALL, "mask_search": "admm"},
    "learned + all, masks by ADMM": {"method": "fishleg", **ALL, "mask_search": "admm"},
    "KFAC + all, masks by ADMM": {"method": "kfac", **ALL, "mask_search": "admm"},
    "learned": {"method": "fishleg", **PLAIN},
    "learned + joint": {"method": "fishleg", **PLAIN, "compensation": "joint"},
    "KFAC + all": {"method": "kfac", **ALL},
    "oBERT + all": {"method": "obert", **ALL},
    "M-FAC + all": {"method": "mfac", **ALL},
    "diagonal + all": {"method": "diagonal", **ALL},
}


def units(final: dict[str, float] | None = None) -> list[dict[str, Any]]:
    """The trials on validation images, or with the chosen dampings those on test images."""
    common = {"version": fishleg.__version__, "split": "validation" if final is None else "test"}
    if final is None:
        return [
            {**common, "arm": arm, "damping": damping, "seed": 0}
            for damping in DAMPINGS
            for arm in ARMS
            if arm != "magnitude" or damping == DAMPINGS[0]  # it has none
        ]
    return [{**common, "arm": arm, "damping": final[arm], "seed": seed} for seed in SEEDS for arm in ARMS]


def run(unit: dict[str, Any]) -> dict[str, Any]:
    """Accuracy at each sparsity in one shot, and the CPU seconds of it."""
    images, labels = cifar10("train")
    loader = Batches(images[:-VALIDATION], labels[:-VALIDATION], 128, seed=100 + unit["seed"], augmented=True)
    batches = [x for _, (x, _) in zip(range(100), loader, strict=False)]  # inputs only
    options = PruningOptions(relative_damping=unit["damping"], **ARMS[unit["arm"]])
    generator = torch.Generator().manual_seed(unit["seed"])
    surgeon = Surgeon(trained_resnet20(), batches, options=options, generator=generator)
    watch, rows = Watch(), {}
    judged = (
        (images[-VALIDATION:], labels[-VALIDATION:]) if unit["split"] == "validation" else cifar10("test")
    )
    with watch:
        estimate = OneEstimate(surgeon)
    for sparsity in SPARSITIES:
        with watch:
            estimate.prune(sparsity)
        rows[f"{sparsity:g}"] = accuracy(surgeon.model, *judged)
    return {"accuracy": rows, "pruning_cpu_seconds": round(watch.cpu_seconds, 1)}


def choose(results: list[dict[str, Any]]) -> dict[str, float]:
    """By arm, the damping with the best mean validation accuracy."""
    found: dict[str, tuple[float, float]] = {}
    for row in results:
        score = mean(list(row["accuracy"].values()))
        if row["arm"] not in found or score > found[row["arm"]][0]:
            found[row["arm"]] = score, row["damping"]
    return {arm: damping for arm, (_, damping) in found.items()}


def table(results: list[dict[str, Any]], chosen: dict[str, float]) -> str:
    """A line for each arm, at its chosen damping: mean over seeds at each sparsity."""
    lines = [f"{'arm':<38}{'damping':>8}" + "".join(f"{s:>9.0%}" for s in SPARSITIES) + f"{'CPU s':>8}"]
    for arm, damping in chosen.items():
        rows = [r for r in results if r["arm"] == arm and r["damping"] == damping]
        cells = "".join(f"{mean([r['accuracy'][f'{s:g}'] for r in rows]):>9.2f}" for s in SPARSITIES)
        cost = mean([r["pruning_cpu_seconds"] for r in rows])
        lines.append(f"{arm:<38}{damping:>8g}{cells}{cost:>8.0f}")
    return "\n".join(lines)


def main(out: Path, *, again: bool = False, final: bool = False) -> None:
    """Do the trials on validation images; with `final`, then read the test images, once."""
    trials = run_benchmark(out / "resnet20_ladder.json", units(), run, again=again)
    chosen = choose(trials)
    print("validation images, seed 0\n" + table(trials, chosen))
    if final:
        tests = run_benchmark(out / "resnet20_ladder_test.json", units(chosen), run, again=again)
        print("\ntest images, mean of three seeds\n" + table(tests, chosen))
